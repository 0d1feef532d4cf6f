"""Two passes over a chunk of logits for a loss that depends on them through log q(label) alone.

The first says what a loss and its statistics need of each row, the second writes the slopes, in 16 or in 8
bits. Both are operators of torch, opaque to the compiler: compiled and captured steps on a GPU run the Triton
kernels of `logit_kernels` (`execution.runs_kernels`). On a CPU they are plain operations.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

LOG2_E = math.log2(math.e)


class LabelScores(NamedTuple):
    """What the logits of N rows say of their labels, [N] each."""

    log_label: Tensor
    """Log-probability of the label, float32."""
    hits: Tensor
    """Whether the label is the first of the greatest logits, bool."""
    bases: Tensor
    """The greatest logit times log2(e), float32."""
    totals: Tensor
    """The sum of 2^(logit log2(e) - base), float32."""


def score_labels(logits: Tensor, labels: Tensor) -> LabelScores:
    """Read `logits` [N, V] once; `labels` [N] int64."""
    return LabelScores(*_scan(logits, labels))


def slopes(
    logits: Tensor, labels: Tensor, scores: LabelScores, weights: Tensor, dtype: torch.dtype
) -> Tensor:
    """weight * (probability - onehot), [N, V] in `dtype`: the slope of -sum(weights * log_label)."""
    written: Tensor = _slopes(logits, labels, scores.bases, scores.totals, weights, dtype)
    return written


@torch.library.custom_op(
    "dflashctl::scan_logits",
    mutates_args=(),
    schema="(Tensor logits, Tensor labels) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _scan(logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    if not logits.is_cuda:
        return _plain_scan(logits, labels)
    from remote_payload.train import logit_kernels

    made = _room(labels)
    logit_kernels.scan(logits.contiguous(), labels.contiguous(), *made)
    return made


@_scan.register_fake
def _(logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    return _room(labels)


def _room(labels: Tensor) -> tuple[Tensor, ...]:
    numbers, bits = torch.float32, torch.bool
    return tuple(labels.new_empty(labels.shape, dtype=dtype) for dtype in (numbers, bits, numbers, numbers))


def _plain_scan(logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    wide = logits.float()
    bases = wide.amax(-1) * LOG2_E
    totals = torch.exp2(wide * LOG2_E - bases[:, None]).sum(-1)
    log_label = torch.log_softmax(wide, -1).gather(-1, labels[:, None])[:, 0]
    return log_label, wide.argmax(-1) == labels, bases, totals


@torch.library.custom_op(
    "dflashctl::logit_slopes",
    mutates_args=(),
    schema="(Tensor logits, Tensor labels, Tensor bases, Tensor totals, Tensor weights, ScalarType dtype)"
    " -> Tensor",
)
def _slopes(
    logits: Tensor, labels: Tensor, bases: Tensor, totals: Tensor, weights: Tensor, dtype: torch.dtype
) -> Tensor:
    if not logits.is_cuda:
        odds = torch.exp2(logits.float() * LOG2_E - bases[:, None])
        made = odds * (weights / totals)[:, None]
        return made.scatter_add(-1, labels[:, None], -weights[:, None]).to(dtype)
    from remote_payload.train import logit_kernels

    made = torch.empty_like(logits, dtype=dtype, memory_format=torch.contiguous_format)
    logit_kernels.slopes(
        logits.contiguous(), labels.contiguous(), bases, totals, weights.float().contiguous(), made
    )
    return made


@_slopes.register_fake
def _(
    logits: Tensor, labels: Tensor, bases: Tensor, totals: Tensor, weights: Tensor, dtype: torch.dtype
) -> Tensor:
    return torch.empty_like(logits, dtype=dtype, memory_format=torch.contiguous_format)
