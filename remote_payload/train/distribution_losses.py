"""Objectives that compare the drafter's distribution q with the target's own, p, at every place.

p comes from the target's last hidden state through the same frozen head, a chunk at a time: the token at
block place k follows context index anchor + k - 1, so that is the index of its teacher. Both are normalised
by the sum of the decay weights of all labels, like cross-entropy.

Sums over the vocabulary say all that they read of a place, and a few factors a place say all that backward
needs (`logit_passes.Factors`): the gradient by a place's logits is a combination of q, p and the label.

Shapes: n blocks of a chunk, P = B - 1 places of a block, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from remote_payload.train.logit_passes import Factors


def forward_kl(kl: Tensor, log_q: Tensor, weights: Tensor, share: float) -> tuple[Tensor, Factors]:
    """Forward KL to the target, mixed with cross-entropy: L = sum_k w_k (s KL(p || q) + (1 - s) CE)_k.

    KL(p || q) = sum_v p (log p - log q): the usual distillation loss at temperature 1. Its gradient by the
    logits is q - p, that of cross-entropy q - onehot, so the mixture costs nothing.

    Args:
        kl: KL(p || q) of each place, [n, P] float32.
        log_q: log-probability of each label, [n, P] float32.
        weights: decay weight of each label, 0 where there is none, [n, P].
        share: s, from 0 to 1.

    Returns:
        The sum over the chunk, a float32 scalar, and the factors of its gradient by the logits, [n, P].
    """
    loss = ((share * kl - (1 - share) * log_q) * weights).sum()
    return loss, Factors(weights, (1 - share) * weights, share * weights)


def lk(kl: Tensor, accepted: Tensor, short: Tensor, weights: Tensor, eta: float) -> tuple[Tensor, Factors]:
    """Hybrid LK loss: L = sum_k w_k (m KL(p || q) + (1 - m) TV(p, q))_k with m = exp(-eta * a).

    a = sum_v min(p, q) = 1 - TV is the chance that a token drawn from q is accepted; in m it is detached. Far
    from the target the loss is KL, near it the acceptance itself. Source: arXiv 2602.23881, sections 4.2 and
    4.4 (eta = 3 its best). There m follows the mean acceptance of a draft depth over a batch; here each
    place has its own, so that nothing is averaged over rows and replicas.

    The gradient of TV by the logits is q (S - [q < p]), S the sum of q where q < p: there more of q would be
    accepted.

    Args:
        accepted: a, [n, P]. short: S, [n, P]. All else, and the result, as in `forward_kl`.
    """
    mixed = torch.exp(-eta * accepted)
    loss = ((mixed * kl + (1 - mixed) * (1 - accepted)) * weights).sum()
    by_kl, by_tv = mixed * weights, (1 - mixed) * weights
    return loss, Factors(by_kl + by_tv * short, torch.zeros_like(weights), by_kl, by_tv)
