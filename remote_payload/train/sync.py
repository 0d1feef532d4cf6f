"""The reduction between replicas: every replica ends a step with the same summed gradient.

Replicas run in lockstep. Each publishes its flat gradient, its statistics and its loss weights; after a
barrier each adds up all of them in the same order on its own device, so that all hold the same numbers
and take the same decisions. A replica without a batch takes part with zeros (Model-Optimizer #2342: one
that stays away hangs the others).
"""

from __future__ import annotations

import dataclasses
import threading

import torch
from torch import Tensor

from remote_payload.train.run_control import Aborted, RunControl
from remote_payload.train.weights import FlatWeights


@dataclasses.dataclass(frozen=True, slots=True)
class Agreement:
    """What all replicas know after a reduction."""

    weight: float
    """Loss weights of all rows of the step."""
    stop: bool
    checkpoint: bool
    report: bool


@dataclasses.dataclass(slots=True)
class Contribution:
    """What one replica brings."""

    weights: FlatWeights
    statistics: Tensor
    weight: float
    stop: bool = False
    checkpoint: bool = False
    report: bool = False
    ready: torch.cuda.Event | None = None


class Reduction:
    """Sums gradients and statistics over `replicas` threads."""

    def __init__(self, replicas: int, control: RunControl) -> None:
        self._given: list[Contribution | None] = [None] * replicas
        self._read: list[torch.cuda.Event | None] = [None] * replicas
        self._barrier = threading.Barrier(replicas)
        control.on_abort(self._barrier.abort)

    def reduce(self, replica: int, mine: Contribution) -> tuple[Agreement, Tensor]:
        """Fill `mine.weights.total` with the sum over all replicas; returns the summed statistics too.

        Raises Aborted when another replica failed.
        """
        cuda = mine.statistics.device.type == "cuda"
        if cuda:
            mine.ready = torch.cuda.Event()
            mine.ready.record()
        self._given[replica] = mine
        self._wait()
        given = [contribution for contribution in self._given if contribution is not None]
        statistics = mine.statistics.clone() if len(given) == 1 else torch.zeros_like(mine.statistics)
        if len(given) > 1:
            self._sum(mine, given, statistics)
        agreement = Agreement(
            weight=sum(c.weight for c in given),
            stop=any(c.stop for c in given),
            checkpoint=any(c.checkpoint for c in given),
            report=any(c.report for c in given),
        )
        if cuda:
            self._read[replica] = event = torch.cuda.Event()
            event.record()
        self._wait()
        for event_of_reader in self._read:  # nobody overwrites a gradient that another device still reads
            if event_of_reader is not None:
                event_of_reader.wait()
        return agreement, statistics

    def _sum(self, mine: Contribution, given: list[Contribution], statistics: Tensor) -> None:
        total = mine.weights.total
        total.zero_()
        for other in given:
            if other.ready is not None:
                other.ready.wait()
            total.add_(other.weights.local.to(total.device, non_blocking=True))
            statistics.add_(other.statistics.to(total.device, non_blocking=True))

    def _wait(self) -> None:
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise Aborted from None
