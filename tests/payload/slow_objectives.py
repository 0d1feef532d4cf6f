"""The objectives in the words of their papers: whole logits, loops over blocks and places, autograd.

The oracle of `test_objective`; nothing here is shared with what it checks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from remote_payload.train.objective import Objective


def slow_loss(
    logits: Tensor, labels: Tensor, weights: Tensor, taught: Tensor | None, objective: Objective
) -> tuple[Tensor, float]:
    """The objective's sum over all blocks, and the number it is to be divided by.

    logits [A, P, V] of the drafter, taught [A, P, V] of the target; labels and weights [A, P].
    """
    total = logits.new_zeros(())
    blocks, mass = 0, 0.0
    for block in range(len(labels)):
        valid = [k for k in range(labels.shape[1]) if weights[block, k] > 0]
        blocks += bool(valid)
        mass += sum(float(weights[block, k]) for k in valid)
        log_q = [torch.log_softmax(logits[block, k], -1) for k in range(labels.shape[1])]
        own = {k: log_q[k][labels[block, k]] for k in valid}
        decayed = sum((-weights[block, k] * own[k] for k in valid), logits.new_zeros(()))
        if objective.name == "ce":
            total = total + decayed
        elif objective.name in ("forward_kl", "lk"):
            assert taught is not None
            for k in valid:
                p, q = torch.softmax(taught[block, k], -1), log_q[k].exp()
                kl = (p * (p.log() - q.log())).sum()
                if objective.name == "forward_kl":
                    share = objective.kl_share
                    total = total + weights[block, k] * (share * kl - (1 - share) * own[k])
                else:
                    overlap = torch.minimum(p, q).sum()
                    part = math.exp(-objective.lk_eta * float(overlap.detach()))
                    distance = 0.5 * (p - q).abs().sum()
                    total = total + weights[block, k] * (part * kl + (1 - part) * distance)
        elif objective.name == "dpace":
            alpha = objective.dpace_alpha
            smooth = {k: (1 - alpha) * math.exp(float(own[k].detach())) + alpha for k in valid}
            for j in valid:
                weight = sum(math.prod(smooth[i] for i in range(m + 1)) for m in valid if m >= j)
                total = total - weight * own[j]
        else:
            total = total + decayed / objective.whole_block
            missed = [k for k in valid if int(logits[block, k].argmax()) != int(labels[block, k])]
            if missed:
                total = total - objective.focal_weight * own[missed[0]]
            if objective.name == "chain" and valid:
                length = logits.new_zeros(())
                for k in valid:
                    reached = logits.new_ones(())
                    for j in range(k + 1):
                        reached = reached * own[j].exp()
                    length = length + reached
                total = total + objective.chain_weight * (1 - length / len(valid))
    return total, float(blocks) if objective.name in ("dpace", "focal", "chain") else mass
