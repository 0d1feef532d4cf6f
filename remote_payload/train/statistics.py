"""What only the device knows of its rows (losses, hits), added up there in one small vector.

The vector travels with the gradient, so that it is summed over replicas, and is read at most once a second:
no step waits for the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from remote_payload.train.objective import BlockScores, accepted


@dataclasses.dataclass(frozen=True, slots=True)
class Statistics:
    """Layout of the vector of statistics that replicas sum with their gradients.

    Of P = B - 1 places and K buckets: the sum of decayed cross-entropies and of decay weights; by place hits,
    labels, labels accepted, labels whose block was accepted so far; by bucket the objective's sum and what it
    is divided by.
    """

    block_size: int
    buckets: int

    def zeros(self, device: torch.device) -> Tensor:
        """An empty vector."""
        return torch.zeros(sum(self._sizes), dtype=torch.float64, device=device)

    def add(self, vector: Tensor, scores: BlockScores, weights: Tensor, bucket: Tensor) -> None:
        """Add one row: its `scores`, label `weights` [A, B-1], and `bucket`, an int64 scalar on the device.

        Nothing waits for the device, and a number that is not finite stays in its own bucket.
        """
        sums, hits, counts, run, reached, losses, divisors = vector.split(self._sizes)
        counted = weights > 0
        taken = accepted(scores.hits, weights)
        sums += torch.stack([scores.ce.double(), weights.sum(dtype=torch.float64)])
        hits += (scores.hits & counted).sum(0)
        counts += counted.sum(0)
        run += taken.sum(0)
        reached[0] += counted[:, 0].sum()
        reached[1:] += (taken[:, :-1] & counted[:, 1:]).sum(0)
        mine = torch.arange(self.buckets, device=vector.device) == bucket
        losses += torch.where(mine, scores.loss.detach().double(), 0.0)
        divisors += torch.where(mine, scores.weight.double(), 0.0)

    def read(self, vector: Tensor) -> Reading:
        """The vector in words; waits for the device."""
        values = iter(vector.tolist())
        sums, hits, counts, run, reached, losses, divisors = (
            [next(values) for _ in range(size)] for size in self._sizes
        )
        return Reading(
            loss=quotient(sum(losses), sum(divisors)),
            ce=quotient(*sums),
            tau_estimate=1 + sum(run) / reached[0] if reached[0] else None,
            accuracy=_over_each(hits, counts),
            conditional_accuracy=_over_each(run, reached),
            bucket_loss=_over_each(losses, divisors),
        )

    @property
    def _sizes(self) -> list[int]:
        places = self.block_size - 1
        return [2, places, places, places, places, self.buckets, self.buckets]


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """Means over the steps since the last reading; None where there was nothing to measure."""

    loss: float | None
    """The objective."""
    ce: float | None
    """Cross-entropy with the decay weights, whatever the objective, so that curves can be compared."""
    tau_estimate: float | None
    accuracy: list[float | None]
    """By block position: the share of labels that were the drafter's first choice."""
    conditional_accuracy: list[float | None]
    """By block position: the same share of those labels before which all were."""
    bucket_loss: list[float | None]


def _over_each(parts: Sequence[float], wholes: Sequence[float]) -> list[float | None]:
    return [quotient(part, whole) for part, whole in zip(parts, wholes, strict=True)]


def quotient(part: float, whole: float) -> float | None:
    """`part / whole`, or None of nothing."""
    return part / whole if whole else None
