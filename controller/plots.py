"""Which curves of a run are drawn, and over which part of their axis; for the screen and for the report.

The horizontal axis is the step number, for GPUs the time. Pure: no line of text and no picture is made here.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Sequence

from controller import figures
from controller.run_state import RunState
from controller.series import Point, Series

Shown = Callable[[float | None], str]


@dataclasses.dataclass(frozen=True, slots=True)
class Window:
    """The part of the horizontal axis that is shown."""

    start: float
    end: float

    def inside(self, points: Sequence[Point]) -> Sequence[Point]:
        """Of `points` those shown, and one more on either side, so that a line leaves the picture."""
        first = bisect.bisect_left(points, self.start, key=lambda p: p[0])
        last = bisect.bisect_right(points, self.end, key=lambda p: p[0])
        return points[max(0, first - 1) : last + 1]

    def at(self, share: float) -> float:
        """The x at a share of the width, 0 to 1."""
        return self.start + share * (self.end - self.start)


@dataclasses.dataclass(frozen=True, slots=True)
class Look:
    """What of the curves is shown: a part of the horizontal axis and the cursor, as shares of the whole."""

    start: float = 0.0
    end: float = 1.0
    cursor: float | None = None
    """As a share of the part that is shown."""
    log: bool = False

    @property
    def whole(self) -> bool:
        """Whether nothing is zoomed away."""
        return self.start == 0.0 and self.end == 1.0

    def zoomed(self, factor: float) -> Look:
        """Nearer (`factor` below 1) or farther, around the cursor or the newest values."""
        around = self.start + (1.0 if self.cursor is None else self.cursor) * (self.end - self.start)
        span = min(1.0, max(0.002, (self.end - self.start) * factor))
        share = 1.0 if self.cursor is None else self.cursor
        start = min(1.0 - span, max(0.0, around - share * span))
        return dataclasses.replace(self, start=start, end=start + span if span < 1.0 else 1.0)

    def moved(self, by: float) -> Look:
        """The cursor moved by a share of the width; at an edge the picture moves instead."""
        if self.cursor is None:
            return dataclasses.replace(self, cursor=1.0 if by < 0 else 0.0)
        cursor, span = self.cursor + by, self.end - self.start
        start = self.start
        if not 0.0 <= cursor <= 1.0:
            start = min(1.0 - span, max(0.0, start + by * span))
        return dataclasses.replace(
            self, cursor=min(1.0, max(0.0, cursor)), start=start, end=start + span if span < 1.0 else 1.0
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Plot:
    """What one panel shows: names of curves in `RunState.curves` with their labels, or `source`."""

    title: str
    help: str
    curves: tuple[tuple[str, str], ...] = ()
    text: Shown = figures.short
    smooth: bool = False
    falls: bool = False
    """Its first values are far above all others: they are left out once there are enough."""
    linear: bool = False
    """Never on a logarithmic scale."""
    source: str = ""
    """`busy` or `memory` of the GPUs, or `acceptance`."""


def _three(value: float | None) -> str:
    return figures.decimal(value, 3)


def _two(value: float | None) -> str:
    return figures.decimal(value, 2)


PLOTS = (
    Plot("loss", "the objective, and its debiased average over 50 steps",
         (("loss", "raw"), ("loss_ema", "ema")), _three, falls=True),
    Plot("tau", "tokens a round: ◆ by real decoding, and estimated on training blocks",
         (("tau_estimate", "est"), ("tau", "decoded")), _two, smooth=True),
    Plot("tok/s", "context tokens trained on a second", (("tokens_per_s", ""),), smooth=True),
    Plot("gradient norm", "of all parameters, before clipping", (("gradient_norm", ""),), _two),
    Plot("learning rate", "of AdamW", (("learning_rate", ""),), figures.scientific),
    Plot("queues", "rows that wait for a target, for a drafter",
         (("queue_batches", "batches"), ("queue_features", "features")), figures.count, linear=True),
    Plot("acceptance", "share of blocks that keep at least k drafted tokens, k from 1",
         source="acceptance", linear=True),
    Plot("GPU busy", "utilisation of each GPU over time, by nvidia-smi", source="busy", linear=True),
    Plot("GPU memory", "used part of each GPU's memory over time", source="memory", linear=True),
)  # fmt: skip


def step_window(state: RunState, plot: Plot, look: Look) -> Window | None:
    """The steps that are shown; None before the first."""
    ends = [one.all_points for one in state.curves.values() if one.points or one.pending]
    if not ends:
        return None
    start, end = min(points[0][0] for points in ends), max(points[-1][0] for points in ends)
    if look.whole and plot.falls and not look.log:
        start = first_useful(state.curves[plot.curves[-1][0]]) or start
    span = end - start
    return Window(start + look.start * span, start + look.end * span)


def time_window(state: RunState, look: Look) -> Window | None:
    """The part of the GPUs' time that is shown."""
    ends = [points for one in state.gpu_table.busy.values() if (points := one.all_points)]
    if not ends:
        return None
    start, end = min(points[0][0] for points in ends), max(points[-1][0] for points in ends)
    return Window(start + look.start * (end - start), start + look.end * (end - start))


def first_useful(series: Series) -> float | None:
    """The step from which a falling curve is drawn, so that its first hundred steps, far above all
    that follow, do not press the rest flat; None: draw all of it.
    """
    points = [(x, y) for x, y in series.points if y is not None]
    if len(points) < 50:
        return None
    values = sorted(y for _, y in points)
    low, most = values[0], values[int(0.85 * len(values))]
    limit = most + (most - low)
    if points[0][1] <= limit:
        return None
    return next(x for x, y in points if y <= limit)


def nearest(points: Sequence[Point], x: float) -> float | None:
    """The value of the point nearest to x; None: a gap, or no points."""
    if not points:
        return None
    place = bisect.bisect_left(points, x, key=lambda p: p[0])
    near = points[max(0, place - 1) : place + 1] or points[-1:]
    return min(near, key=lambda p: abs(p[0] - x))[1]


def promised(conditional: Sequence[float | None]) -> list[float]:
    """Share of blocks right up to each position, from accuracies given that all before were right."""
    known = list(itertools.takewhile(lambda share: share is not None, conditional))
    return list(itertools.accumulate((share or 0.0 for share in known), lambda a, b: a * b))


def decoded(state: RunState) -> list[float]:
    """Acceptance by position of the newest evaluation that has it."""
    for one in reversed(state.history.evaluations):
        if one.acceptance:
            return [share or 0.0 for share in one.acceptance]
    return []
