"""Curves over the step number, drawn in braille by textual-plot: four dots high, two wide a cell.

A value that is not finite is a gap: every finite run between gaps is a line of its own, because
textual-plot joins what is left of a NaN. What a plot has more of than it has columns is thinned to the
lowest and the highest of each column, so that a spike stays a spike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.reactive import reactive
from textual_hires_canvas import HiResMode
from textual_plot import NumericAxisFormatter, PlotWidget

from controller.run_state import RunState
from controller.series import Series
from controller.tui import figures
from controller.tui.lines import Lines, line
from controller.tui.palette import CURVE_COLOURS, HEADING, LABEL, WARN

Points = Sequence[tuple[float, float]]


@dataclasses.dataclass(frozen=True, slots=True)
class Plot:
    """What one plot shows: names of curves in `RunState.curves`, with their labels."""

    title: str
    curves: tuple[tuple[str, str], ...]
    places: int | None = None
    """Decimal places of the values in its heading; None: a short count."""
    smooth: bool = False
    """Drawn as averages: its noise says nothing."""
    falls: bool = False
    """Its first values are far above all others: they are left out once there are enough."""


PLOTS = (
    Plot("loss", (("loss", "raw"), ("loss_ema", "ema")), 3, falls=True),
    Plot("tau", (("tau_estimate", "train"), ("tau", "decoded")), 2),
    Plot("tok/s", (("tokens_per_s", ""),), smooth=True),
    Plot("gradient norm", (("gradient_norm", ""),), 2),
)


class _FewTicks(NumericAxisFormatter):
    """Ticks that fit; labels as short as they can be."""

    most = 4

    def get_ticks(self, min_: float, max_: float, max_ticks: int = 8) -> list[float]:
        return super().get_ticks(min_, max_, self.most)

    def get_labels_for_ticks(self, ticks: Sequence[float]) -> list[str]:
        if any(abs(tick) >= 1000 for tick in ticks):
            labels = [figures.short(tick) if tick else "0" for tick in ticks]
            if len(set(labels)) == len(labels):
                return labels
            return [f"{tick / 1000:.1f}k" for tick in ticks]
        return super().get_labels_for_ticks(ticks)


class _SmallPlot(PlotWidget):
    """A plot whose margins hold tick labels and nothing else: the heading says what it is."""

    margin_left = reactive(7)
    margin_top = reactive(0)
    margin_bottom = reactive(1)


class CurvePlot(Vertical):
    """One plot under a heading that is its legend and has the newest values."""

    DEFAULT_CSS = """
    CurvePlot { height: 1fr; width: 1fr; }
    CurvePlot PlotWidget { height: 1fr; }
    CurvePlot PlotWidget > .plot--axis { color: $panel-lighten-2; }
    CurvePlot PlotWidget > .plot--tick { color: $foreground-muted; text-style: none; }
    """

    def __init__(self, plot: Plot, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._plot = plot
        self._drawn: object = None
        self._state: RunState | None = None

    def on_resize(self) -> None:
        """Another size has room for other dots and ticks."""
        if self._state is not None:
            self.show(self._state)

    def compose(self) -> ComposeResult:
        """A heading and the plot."""
        yield Lines()
        yield _SmallPlot()

    def show(self, state: RunState) -> None:
        """Draw the curves of `state`, again only when a dot more of them would be seen."""
        self._state = state
        if not self.is_mounted:
            return
        series = [(name, label, state.curves[name]) for name, label in self._plot.curves]
        first = _first_useful(series[-1][2]) if self._plot.falls else None
        self.query_one(Lines).set_lines([self._heading(series, first)])
        columns = max(8, self.size.width - 9)
        drawn = (self.size, *(_looks(one, 2 * columns) for _, _, one in series))
        if drawn == self._drawn:
            return
        self._drawn = drawn
        widget = self.query_one(PlotWidget)
        rows = max(2, self.size.height - 4)
        x_ticks, y_ticks = _FewTicks(), _FewTicks()
        x_ticks.most, y_ticks.most = max(2, columns // 9), max(2, min(6, rows // 3))
        widget.set_x_formatter(x_ticks)
        widget.set_y_formatter(y_ticks)
        widget.clear()
        for name, _, one in series:
            colour = CURVE_COLOURS[name]
            for segment in one.segments:
                points = [p for p in segment if first is None or p[0] >= first]
                thin = (averaged if self._plot.smooth else thinned)(points, columns)
                xs, ys = [x for x, _ in thin], [y for _, y in thin]
                if name == "tau" and len(thin) < columns // 3:
                    widget.scatter(xs, ys, marker="◆", marker_style=colour)
                elif len(thin) == 1:
                    widget.scatter(xs, ys, marker="·", marker_style=colour)
                else:
                    widget.plot(xs, ys, line_style=colour, hires_mode=HiResMode.BRAILLE)

    def _heading(self, series: Sequence[tuple[str, str, Series]], first: float | None) -> Text:
        text = line((f"{self._plot.title} ", HEADING))
        for name, label, one in series:
            places = self._plot.places
            value = figures.short(one.last) if places is None else figures.decimal(one.last, places)
            text.append(f" {label} {value}" if label else f" {value}", style=CURVE_COLOURS[name])
            gaps = sum(1 for _, y in one.points if y is None) if name != "loss_ema" else 0
            if gaps:
                text.append(f" {gaps} gap{'s' * (gaps != 1)} (NaN)", style=WARN)
        if first is not None:
            text.append(f" from step {figures.count(first)}", style=LABEL)
        if not any(one.all_points for _, _, one in series):
            text.append(" no values yet", style=LABEL)
        return text


def _looks(series: Series, dots: int) -> tuple[int, int, int]:
    """What of a series can be seen on `dots` dots: its gaps, and where its first and last dot are.

    A plot of a night's run changes by a dot in minutes; drawing it every second took 3 % of a core.
    """
    points = series.all_points
    if not points:
        return 0, 0, 0
    start, end = points[0][0], points[-1][0]
    dot = max(1e-9, (end - start) / dots) if len(points) > dots else 1e-9
    return len(series.segments), int(start), int(end / dot)


def _first_useful(series: Series) -> float | None:
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


def thinned(points: Points, columns: int) -> list[tuple[float, float]]:
    """At most two of `points` a column: its lowest and its highest, in their order."""
    if len(points) <= 2 * columns:
        return list(points)
    kept = []
    for part in _parts(points, columns):
        low, high = min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])
        kept += sorted({low, high})
    return kept


def averaged(points: Points, columns: int) -> list[tuple[float, float]]:
    """At most one point for two columns: the mean of what lies there."""
    count = max(1, columns // 2)
    if len(points) <= count:
        return list(points)
    return [(part[len(part) // 2][0], sum(y for _, y in part) / len(part)) for part in _parts(points, count)]


def _parts(points: Points, count: int) -> list[Points]:
    size = len(points)
    return [points[n * size // count : (n + 1) * size // count] for n in range(count)]
