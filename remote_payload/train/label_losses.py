"""Objectives that see the corpus token alone: each is a weighting of log q(label), place by place.

All of them depend on the logits only through l_k = log q_k, the drafter's log-probability of label k. So
one number a place says all that backward needs, c_k = -dL/dl_k, and the gradient of the logits is
c_k (q - onehot): fused cross-entropy with weights, whatever the objective. The weights of D-PACE, focal and
chain depend on the drafter's own probabilities within a block, which is why a chunk holds whole blocks.

The sums here are over blocks and not normalised. What they are divided by (`Objective.by_block`):
- ce: the sum of the decay weights of all labels.
- dpace: the number of blocks. Dividing by the sum of its own weights would cancel the credit that they carry
  (its author, SpecForge #828).
- focal, chain: the number of blocks too, so that their terms add up as published, with the cross-entropy of
  a block divided by the decay weights of a whole block, S. For whole blocks that is the published weighted
  mean; a short tail counts by what it has.

Shapes: n blocks of a chunk, P = B - 1 places of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor


def ce(log_q: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy with the paper's decay: L = sum_k w_k (-l_k), w_k = exp(-(k-1)/gamma).

    Source: DFlash, arXiv 2602.06036, eq. 4. Arguments and result as in `chain`.
    """
    return -(log_q * weights).sum(), weights


def dpace(log_q: Tensor, weights: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """D-PACE: L = sum_j w_j (-l_j), w_j = sum_{m >= j} prod_{i <= m} q'_i, q' = (1 - alpha) q + alpha.

    The weights are detached and take the place of the decay; places without a label end a block's sum.
    Source: arXiv 2605.18810, eq. 7 to 9. Arguments and result as in `chain`.
    """
    valid = (weights > 0).to(log_q.dtype)
    confidence = (1 - alpha) * log_q.exp() + alpha
    each = _sum_from_here(confidence.cumprod(-1) * valid) * valid
    return -(log_q * each).sum(), each


def focal(
    log_q: Tensor, weights: Tensor, hits: Tensor, whole_block: float, focal_weight: float
) -> tuple[Tensor, Tensor]:
    """First-error focal loss: L = CE / S + focal_weight * (-l_e), e the first place that is not a hit.

    A block without an error adds nothing; which place it is carries no gradient. Source: arXiv 2606.11552
    (0.3 is its weight, with decay; the text of the method was not at hand, its summaries were: the loss of
    "the position that breaks the accepted prefix within each block" beside the decayed cross-entropy).
    Arguments and result as in `chain`.
    """
    missed = ((weights > 0) & ~hits).to(log_q.dtype)
    first = missed * (missed.cumsum(-1) == 1)
    each = weights / whole_block + focal_weight * first
    return -(log_q * each).sum(), each


def chain(
    log_q: Tensor,
    weights: Tensor,
    hits: Tensor,
    whole_block: float,
    focal_weight: float,
    chain_weight: float,
) -> tuple[Tensor, Tensor]:
    """Focal loss and the chain term: L = focal + chain_weight * (1 - 1/J sum_{k <= J} prod_{j <= k} q_j).

    The sum is the expected accepted length of a block of J labels. The 1 changes no gradient and keeps the
    loss positive. Source: arXiv 2606.11552, section 5.5 (its three terms add up; 40 is its weight; taken
    from summaries as in `focal`, so J as the divisor is second-hand).

    Args:
        log_q: log-probability of each label, [n, P] float32.
        weights: decay weight of each label, 0 where there is none, [n, P].
        hits: whether each label was the drafter's first choice, [n, P] bool.
        whole_block: S, the decay weights of a block without a missing label, summed.
        focal_weight, chain_weight: of the two terms.

    Returns:
        The sum over the chunk's blocks, a float32 scalar, and c = -dL/dl, [n, P].
    """
    loss, each = focal(log_q, weights, hits, whole_block, focal_weight)
    valid = (weights > 0).to(log_q.dtype)
    labels = valid.sum(-1, keepdim=True)
    share = chain_weight / labels.clamp(min=1)
    reached = (log_q.cumsum(-1).exp() * valid) * share
    loss = loss + (chain_weight * (labels > 0)).sum() - reached.sum()
    return loss, each + _sum_from_here(reached) * valid


def _sum_from_here(values: Tensor) -> Tensor:
    """Sums of each place and those after it, [n, P]."""
    return torch.flip(torch.flip(values, (-1,)).cumsum(-1), (-1,))
