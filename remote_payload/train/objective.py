"""The loss over a row's blocks: cross-entropy against the target's frozen head, with decaying weights.

The head is frozen, so the loss and the gradient of its input come out of one pass, a chunk of rows at a
time, and logits of the whole vocabulary never exist whole. The sum is not normalised here: a step divides
by the weights of all replicas together (SpecForge #731, NeMo #2572: normalised per replica, a short row
counts as much as a long one).

Shapes: N block tokens that predict something (A * (B-1)), D width, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ChunkLoss = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]

MOST_ROWS = 512
"""Most rows of logits alive at once: 512 x 151,936 in bfloat16 and float32 is under 0.5 GiB."""


def default_gamma(block_size: int) -> float:
    """The paper's decay by block size: 7 for 16, 5 for 10, 4 for 8 and smaller blocks."""
    return 7.0 if block_size > 10 else 5.0 if block_size > 8 else 4.0


def chunk_loss(
    hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted cross-entropy of a chunk, its gradient, and which rows were right.

    Args:
        hidden: [n, D]. head: [V, D]. labels: [n] int64. weights: [n] float32.

    Returns:
        The weighted sum (float32 scalar), its gradient by `hidden` [n, D], and hits [n] bool.
    """
    logits = F.linear(hidden, head).float()
    top, guess = logits.max(-1, keepdim=True)
    unnormalised = (logits - top).exp()
    total = unnormalised.sum(-1, keepdim=True)
    log_total = total.log() + top
    loss = ((log_total - logits.gather(-1, labels[:, None]))[:, 0] * weights).sum()
    slope = unnormalised / total * weights[:, None]
    # Subtracting the one-hot as a comparison and not by scatter keeps the chunk one fused pass.
    onehot = torch.arange(logits.shape[-1], device=labels.device)[None] == labels[:, None]
    slope = slope - torch.where(onehot, weights[:, None], 0.0)
    return loss, slope.to(hidden.dtype) @ head, guess[:, 0] == labels


class _FrozenHeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor, used: int, loss_of: ChunkLoss
    ) -> tuple[Tensor, Tensor]:
        gradient = torch.zeros_like(hidden)
        hits = torch.zeros(len(hidden), dtype=torch.bool, device=hidden.device)
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        size = chunk_size(len(hidden))
        for start in range(0, used, size):
            part = slice(start, start + size)
            value, gradient[part], hits[part] = loss_of(hidden[part], head, labels[part], weights[part])
            loss = loss + value
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(hits)
        return loss, hits

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0].to(gradient.dtype), None, None, None, None, None


@dataclasses.dataclass(slots=True)
class BlockScores:
    """What a row's blocks say of the drafter, all on its device."""

    loss: Tensor
    """Weighted sum of cross-entropies, scalar; differentiable."""
    hits: Tensor
    """Whether each label was the drafter's first choice, [A, B-1] bool."""


def block_loss(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    weights: Tensor,
    order: Tensor,
    used: int,
    loss_of: ChunkLoss,
) -> BlockScores:
    """The loss of a row.

    Args:
        hidden: final hidden states of the block tokens, [A, B, D]; those of the anchors predict nothing.
        head: the target's head, [V, D].
        labels: [A, B-1]. weights: [A, B-1], 0 where there is no label.
        order: a permutation of the A * (B-1) places with the weighted ones first, [N] int64.
        used: how many are weighted; known on the host, so that nothing waits for the device.
        loss_of: `chunk_loss`, as it is or compiled.
    """
    slots, block = labels.shape[0], labels.shape[1] + 1
    places = slots * (block - 1)
    flat = hidden.view(slots, block, -1)[:, 1:].reshape(places, -1)[order]
    spare = -places % chunk_size(places)  # every chunk has the same shape, so that one compiled one does
    loss, hits_in_order = _FrozenHeadLoss.apply(  # type: ignore[no-untyped-call]
        F.pad(flat, (0, 0, 0, spare)),
        head,
        F.pad(labels.flatten()[order], (0, spare)),
        F.pad(weights.flatten()[order], (0, spare)),
        used,
        loss_of,
    )
    hits = torch.zeros(places, dtype=torch.bool, device=hidden.device)
    hits.index_copy_(0, order, hits_in_order[:places])
    return BlockScores(loss=loss, hits=hits.view(slots, block - 1))


def chunk_size(rows: int) -> int:
    """Rows of one chunk when `rows` are cut into as few equal chunks as `MOST_ROWS` allows."""
    return -(-rows // -(-rows // MOST_ROWS))


def weighted_first(weights: Tensor) -> tuple[Tensor, int]:
    """The `order` and `used` of `block_loss` for a row's weights on the CPU, [A, B-1]."""
    flat = weights.flatten() > 0
    return flat.to(torch.int8).argsort(descending=True, stable=True), int(flat.sum())


def accepted(hits: Tensor, weights: Tensor) -> Tensor:
    """Labels that a block would have had accepted, [A]: the run of hits from its first label.

    1 + their mean over drawn anchors is training's estimate of tau. It reads the corpus and not the
    target's own decoding, and blocks at a document's end are cut short: real decoding has the last word.
    """
    return (hits & (weights > 0)).to(torch.int64).cumprod(-1).sum(-1)
