"""Objectives that compare the drafter's distribution q with the target's own, p, at every place.

p comes from the target's last hidden state through the same frozen head, a chunk at a time: the token at
block place k follows context index anchor + k - 1, so that is the index of its teacher. Both are normalised
by the sum of the decay weights of all labels, like cross-entropy.

Shapes: n blocks of a chunk, P = B - 1 places of a block, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def forward_kl(
    log_q: Tensor, log_p: Tensor, onehot: Tensor, weights: Tensor, share: float
) -> tuple[Tensor, Tensor]:
    """Forward KL to the target, mixed with cross-entropy: L = sum_k w_k (s KL(p || q) + (1 - s) CE)_k.

    KL(p || q) = sum_v p (log p - log q): the usual distillation loss at temperature 1. Its gradient by the
    logits is q - p, that of cross-entropy q - onehot, so the mixture costs nothing.

    Args:
        log_q: the drafter's log-probabilities, [n, P, V] float32. log_p: the target's.
        onehot: where the label is, [n, P, V] bool.
        weights: decay weight of each label, 0 where there is none, [n, P].
        share: s, from 0 to 1.

    Returns:
        The sum over the chunk, a float32 scalar, and its gradient by the logits, [n, P, V].
    """
    p = log_p.exp()
    kl = (p * (log_p - log_q)).sum(-1)
    cross_entropy = -torch.where(onehot, log_q, 0.0).sum(-1)
    wanted = share * p + (1 - share) * onehot
    loss = ((share * kl + (1 - share) * cross_entropy) * weights).sum()
    return loss, (log_q.exp() - wanted) * weights[..., None]


def lk(log_q: Tensor, log_p: Tensor, weights: Tensor, eta: float) -> tuple[Tensor, Tensor]:
    """Hybrid LK loss: L = sum_k w_k (m KL(p || q) + (1 - m) TV(p, q))_k with m = exp(-eta * a).

    a = sum_v min(p, q) = 1 - TV is the chance that a token drawn from q is accepted; in m it is detached. Far
    from the target the loss is KL, near it the acceptance itself. Source: arXiv 2602.23881, sections 4.2 and
    4.4 (eta = 3 its best). There m follows the mean acceptance of a draft depth over a batch; here each
    place has its own, so that nothing is averaged over rows and replicas. Arguments and result as in
    `forward_kl`.
    """
    p, q = log_p.exp(), log_q.exp()
    accepted = torch.minimum(p, q).sum(-1)
    mixed = torch.exp(-eta * accepted)
    kl = (p * (log_p - log_q)).sum(-1)
    loss = ((mixed * kl + (1 - mixed) * (1 - accepted)) * weights).sum()
    short = (q < p).to(q.dtype)  # where more of q would be accepted
    by_tv = q * ((short * q).sum(-1, keepdim=True) - short)
    part = mixed[..., None]
    return loss, (part * (q - p) + (1 - part) * by_tv) * weights[..., None]
