"""A curve of bounded size: however long a run is, a series holds at most `LIMIT` points of it.

Points are uniform over the whole run, not only its end: when a series is full, neighbours are merged in
pairs and from then on twice as many raw values make one point. A value that is not finite is a gap
(`None`) and stays one through merging, because a NaN that averaging hid is the thing to be seen.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

LIMIT = 1024
"""Most points of one series; a wide terminal draws fewer than 400."""

Point = tuple[float, float | None]
"""x (a step, or Unix seconds) and y; `None` is a gap."""


@dataclasses.dataclass(frozen=True, slots=True)
class Series:
    """An immutable, bounded curve. `stride` raw values make one point; `pending` are not yet one."""

    points: tuple[Point, ...] = ()
    stride: int = 1
    pending: tuple[Point, ...] = ()
    last: float | None = None
    """The newest raw value; None when there is none or it is a gap."""

    def extended(self, new: Iterable[Point]) -> Series:
        """This series with `new` points behind it.

        x must rise; where it falls back (a run resumed from its checkpoint), the points from there on
        are those of the attempt before and are dropped.
        """
        points, stride, pending = list(self.points), self.stride, list(self.pending)
        last = self.last
        for x, y in new:
            if not math.isfinite(x):
                continue
            if pending and x <= pending[-1][0]:
                pending = [p for p in pending if p[0] < x]
            if points and x <= points[-1][0]:
                points = [p for p in points if p[0] < x]
            last = y if y is not None and math.isfinite(y) else None
            pending.append((x, last))
            if len(pending) < stride:
                continue
            points.append(pending[0] if stride == 1 else _merged(pending))
            pending.clear()
            if len(points) >= LIMIT:
                points = [_merged(points[i : i + 2]) for i in range(0, len(points), 2)]
                stride *= 2
        return Series(tuple(points), stride, tuple(pending), last)

    @property
    def all_points(self) -> tuple[Point, ...]:
        """The points, and one more for the raw values that do not yet fill a stride."""
        return (*self.points, _merged(self.pending)) if self.pending else self.points


def segments(points: Iterable[Point]) -> list[list[tuple[float, float]]]:
    """The runs of finite points between gaps, for a plot that must not draw across a NaN."""
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if y is not None:
            runs[-1].append((x, y))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _merged(points: Iterable[Point]) -> Point:
    points = list(points)
    ys = [y for _, y in points if y is not None]
    return points[-1][0], sum(ys) / len(ys) if len(ys) == len(points) else None


@dataclasses.dataclass(frozen=True, slots=True)
class Ema:
    """A debiased exponential moving average (Adam's correction: Kingma and Ba 2014, section 3).

    `decay` is of one step; a value that stands for several steps counts for as many, so the trainer's own
    average (`loss_ema` of progress.json, 1/e after 50 steps) and this one are the same curve.
    """

    decay: float = 1 - 1 / 50
    total: float = 0.0
    weight: float = 0.0

    def updated(self, value: float | None, steps: float = 1) -> Ema:
        """The average after one more value, the mean of `steps` steps; a gap changes nothing."""
        if value is None or not math.isfinite(value):
            return self
        keep = self.decay ** max(1.0, steps)
        return Ema(self.decay, keep * self.total + (1 - keep) * value, keep * self.weight + (1 - keep))

    @property
    def value(self) -> float | None:
        """The average, or None before the first value."""
        return self.total / self.weight if self.weight else None
