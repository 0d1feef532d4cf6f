"""What replicas bring to the end of a step, and what all of them know after it.

Decisions (stop, checkpoint, report) and loss weights are numbers of the host and travel with the gradient:
each is made of what all replicas brought to the same step, in the order of their numbers, so that nobody
decides otherwise. Whether a step is left out for a gradient that is not finite follows from the sum, which
is the same bits everywhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from remote_payload.train.weights import FlatWeights


@dataclasses.dataclass(slots=True)
class Contribution:
    """What one replica brings."""

    weights: FlatWeights
    statistics: Tensor
    """Written before the last row's gradient is collected: who waits for its marks may read them too."""
    weight: float
    stop: bool = False
    checkpoint: bool = False
    report: bool = False
    ready: torch.cuda.Event | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Agreement:
    """What all replicas know after a reduction."""

    weight: float
    """Loss weights of all rows of the step."""
    stop: bool
    checkpoint: bool
    report: bool

    @classmethod
    def of(cls, given: Sequence[Contribution]) -> Agreement:
        """What `given`, in the order of the replicas, comes to."""
        return cls(
            weight=sum(c.weight for c in given),
            stop=any(c.stop for c in given),
            checkpoint=any(c.checkpoint for c in given),
            report=any(c.report for c in given),
        )
