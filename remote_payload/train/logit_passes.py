"""Passes over a chunk of logits: what a loss needs to know of each row, then the slopes of its logits.

Whatever the objective, its slopes are own q - of_label onehot - of_taught p - of_short (q where q < p), with
factors that are numbers of a row: q is the drafter's distribution, p the target's. So `scan` reads the logits
once for what the objective says of the row, and `slopes` once more to write them, in 16 or in 8 bits. Only an
objective that asks how much of q and p is the same (`overlap`) reads them in between, since both must be
normalised for that.

Each is an operator of torch, opaque to the compiler: compiled and captured steps on a GPU run the Triton
kernels of `logit_kernels`, where warm-up proved them (`logit_choice`). On a CPU they are plain operations.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

LOG2_E = math.log2(math.e)


class RowScores(NamedTuple):
    """What the logits of N rows say, [N] each; the last three where the target's are beside them."""

    log_label: Tensor
    """Log-probability of the label, float32."""
    hits: Tensor
    """Whether the label is the first of the greatest logits, bool."""
    bases: Tensor
    """The greatest logit times log2(e), float32."""
    totals: Tensor
    """The sum of 2^(logit log2(e) - base), float32."""
    kl: Tensor | None = None
    """KL(p || q) = sum_v p (log p - log q), float32."""
    taught_bases: Tensor | None = None
    taught_totals: Tensor | None = None
    """`bases` and `totals` of the target's logits."""


class Factors(NamedTuple):
    """Slopes as own q - of_label onehot - of_taught p - of_short (q where q < p); 0 or more, float32."""

    own: Tensor
    of_label: Tensor
    of_taught: Tensor | None = None
    of_short: Tensor | None = None

    def times(self, number: Tensor | float) -> Factors:
        """Of slopes that are `number` times as great."""
        return Factors(*(None if factor is None else factor * number for factor in self))  # type: ignore[arg-type]

    def bound(self) -> Tensor:
        """No slope is above it, scalar: q, p and what of q is short are each at most 1."""
        down = self.of_label
        for factor in (self.of_taught, self.of_short):
            down = down if factor is None else down + factor
        return torch.maximum(self.own, down).amax()


def scan(logits: Tensor, labels: Tensor, taught: Tensor | None = None) -> RowScores:
    """Read `logits` [N, V] once; `labels` [N] int64; `taught`: the target's logits, [N, V]."""
    return RowScores(*_scan(logits, labels, taught))


def overlap(logits: Tensor, taught: Tensor, scores: RowScores) -> tuple[Tensor, Tensor]:
    """The sum of min(p, q), and that of q where q < p: [N] float32 each."""
    accepted, short = _overlap(logits, taught, *_norms(scores))
    return accepted, short


def slopes(
    logits: Tensor,
    labels: Tensor,
    taught: Tensor | None,
    scores: RowScores,
    factors: Factors,
    dtype: torch.dtype,
) -> Tensor:
    """The slopes [N, V] of `factors`, N numbers each, in `dtype`; `scores` are what `scan` found."""
    given = [factor.flatten() for factor in factors if factor is not None]
    written: Tensor = _slopes(logits, labels, taught, _norms(scores), given, dtype)
    return written


def _norms(scores: RowScores) -> list[Tensor]:
    """Bases and totals, of the drafter's logits and then of the target's."""
    found = (scores.bases, scores.totals, scores.taught_bases, scores.taught_totals)
    return [each for each in found if each is not None]


@torch.library.custom_op(
    "dflashctl::scan_logits",
    mutates_args=(),
    schema="(Tensor logits, Tensor labels, Tensor? taught) -> Tensor[]",
)
def _scan(logits: Tensor, labels: Tensor, taught: Tensor | None) -> list[Tensor]:
    if not logits.is_cuda:
        return _plain_scan(logits, labels, taught)
    from remote_payload.train import logit_kernels

    made = _scores_like(logits, labels, taught)
    log_label, hits, bases, totals, *of_target = made
    given = logits.contiguous(), labels.contiguous(), log_label, hits, bases, totals
    logit_kernels.scan(*given, _contiguous(taught), *of_target)
    return made


def _scores_like(logits: Tensor, labels: Tensor, taught: Tensor | None) -> list[Tensor]:
    kinds = [torch.float32] * (4 if taught is None else 7)
    kinds[1] = torch.bool
    return [labels.new_empty(labels.shape, dtype=kind) for kind in kinds]


def _plain_scan(logits: Tensor, labels: Tensor, taught: Tensor | None) -> list[Tensor]:
    wide = logits.float()
    log_q = torch.log_softmax(wide, -1)
    made = [log_q.gather(-1, labels[:, None])[:, 0], wide.argmax(-1) == labels, *_plain_norm(wide)]
    if taught is not None:
        log_p = torch.log_softmax(taught.float(), -1)
        made += [(log_p.exp() * (log_p - log_q)).sum(-1), *_plain_norm(taught.float())]
    return made


def _plain_norm(wide: Tensor) -> tuple[Tensor, Tensor]:
    bases = wide.amax(-1) * LOG2_E
    return bases, _odds(wide, bases).sum(-1)


def _odds(logits: Tensor, bases: Tensor) -> Tensor:
    return torch.exp2(logits.float() * LOG2_E - bases[:, None])


@torch.library.custom_op(
    "dflashctl::logit_overlap",
    mutates_args=(),
    schema="(Tensor logits, Tensor taught, Tensor bases, Tensor totals, Tensor taught_bases,"
    " Tensor taught_totals) -> (Tensor, Tensor)",
)
def _overlap(
    logits: Tensor,
    taught: Tensor,
    bases: Tensor,
    totals: Tensor,
    taught_bases: Tensor,
    taught_totals: Tensor,
) -> tuple[Tensor, Tensor]:
    if not logits.is_cuda:
        q = _odds(logits, bases) / totals[:, None]
        p = _odds(taught, taught_bases) / taught_totals[:, None]
        return torch.minimum(q, p).sum(-1), torch.where(q < p, q, 0.0).sum(-1)
    from remote_payload.train import logit_kernels

    made = _two_like(logits, taught, bases, totals, taught_bases, taught_totals)
    of_target = taught.contiguous(), taught_bases, taught_totals
    logit_kernels.overlap(logits.contiguous(), bases, totals, *of_target, *made)
    return made


def _two_like(
    logits: Tensor,
    taught: Tensor,
    bases: Tensor,
    totals: Tensor,
    taught_bases: Tensor,
    taught_totals: Tensor,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(bases), torch.empty_like(bases)


@torch.library.custom_op(
    "dflashctl::logit_slopes",
    mutates_args=(),
    schema="(Tensor logits, Tensor labels, Tensor? taught, Tensor[] norms, Tensor[] factors,"
    " ScalarType dtype) -> Tensor",
)
def _slopes(
    logits: Tensor,
    labels: Tensor,
    taught: Tensor | None,
    norms: list[Tensor],
    factors: list[Tensor],
    dtype: torch.dtype,
) -> Tensor:
    if not logits.is_cuda:
        return _plain_slopes(logits, labels, taught, norms, factors).to(dtype)
    from remote_payload.train import logit_kernels

    made = _slopes_like(logits, labels, taught, norms, factors, dtype)
    bases, totals, *taught_norms = norms
    own, of_label, *of_target = (factor.contiguous() for factor in factors)
    given = logits.contiguous(), labels.contiguous(), bases, totals, own, of_label, made
    logit_kernels.slopes(*given, _contiguous(taught), *taught_norms, *of_target)
    return made


def _slopes_like(
    logits: Tensor,
    labels: Tensor,
    taught: Tensor | None,
    norms: list[Tensor],
    factors: list[Tensor],
    dtype: torch.dtype,
) -> Tensor:
    return torch.empty_like(logits, dtype=dtype, memory_format=torch.contiguous_format)


def _plain_slopes(
    logits: Tensor, labels: Tensor, taught: Tensor | None, norms: list[Tensor], factors: list[Tensor]
) -> Tensor:
    own, of_label, *of_target = (factor[:, None] for factor in factors)
    q = _odds(logits, norms[0]) / norms[1][:, None]
    made = own * q
    if taught is not None:
        p = _odds(taught, norms[2]) / norms[3][:, None]
        made = made - of_target[0] * p
        if len(of_target) > 1:
            made = made - torch.where(q < p, of_target[1] * q, 0.0)
    return made.scatter_add(-1, labels[:, None], -of_label)


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


_scan.register_fake(_scores_like)
_overlap.register_fake(_two_like)
_slopes.register_fake(_slopes_like)
