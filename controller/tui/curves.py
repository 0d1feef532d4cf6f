"""Which curves there are, and each as a panel of lines: a heading that is its legend, and the plot below.

The horizontal axis is the step number, for GPUs the time. All panels share one `Look`: the zoomed part and
the cursor as shares of the whole, so that they stay beside one another. A run of a night changes a plot by a
dot in minutes, so a plot is drawn again only when a dot of it would be seen elsewhere (`Drawn`).
"""

from __future__ import annotations

from rich.text import Text

from controller import figures
from controller.gpu_state import gpu_role
from controller.plots import PLOTS, Look, Plot, first_useful, nearest, step_window, time_window
from controller.run_state import RunState
from controller.series import Series
from controller.tui.acceptance import acceptance_lines, acceptance_values
from controller.tui.gpu_panel import STALE_S as GPU_STALE_S
from controller.tui.lines import Part, fitted, line
from controller.tui.overview import age_mark, is_stale
from controller.tui.palette import (
    CURVE_COLOURS,
    FAINT,
    GOOD,
    GREY,
    HEADING,
    LABEL,
    PLAIN,
    ROLE_COLOURS,
    VALUE,
    WARN,
)
from controller.tui.plot import Curve, plot_lines, strip

CURVES_STALE_S = 30.0
"""Steps are told once a second, or once a step where a step takes longer."""

_STRIP_MARGIN = 7


class Drawn:
    """The lines of each panel as last drawn, and from what."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[object, list[Text]]] = {}

    def panel(
        self, state: RunState, plot: Plot, width: int, height: int, look: Look, *, chosen: bool = False
    ) -> list[Text]:
        """Heading and plot, `height` lines of `width` columns."""
        dim = is_stale(state)
        key = (width, height, look, dim, _seen(state, plot, 2 * width))
        kept = self._kept.get(plot.title)
        if kept is None or kept[0] != key:
            kept = self._kept[plot.title] = (key, _body(state, plot, width, height - 1, look, dim))
        return [_heading(state, plot, width, look, chosen), *kept[1]]


def _body(state: RunState, plot: Plot, width: int, height: int, look: Look, dim: bool) -> list[Text]:
    if plot.source == "acceptance":
        return acceptance_lines(state, width, height, dim=dim)
    if plot.source:
        return _strips(state, plot, width, height, look, dim)
    curves = [
        Curve(
            state.curves[name].all_points,
            CURVE_COLOURS[name],
            marks=name == "tau",
            smooth=plot.smooth,
        )
        for name, _ in plot.curves
    ]
    return plot_lines(
        curves,
        width,
        height,
        step_window(state, plot, look),
        log=look.log and not plot.linear,
        cursor=look.cursor,
        dim=dim,
    )


def _strips(state: RunState, plot: Plot, width: int, height: int, look: Look, dim: bool) -> list[Text]:
    """A row for each GPU: number, its share over time, the value at the cursor or the newest one."""
    series = state.gpu_table.busy if plot.source == "busy" else state.gpu_table.memory
    window = time_window(state, look)
    rows: list[Text] = []
    columns = width - _STRIP_MARGIN - 5
    if window is None or columns < 8:
        rows = [line(("  no samples yet", LABEL))]
        return [*rows, *(line() for _ in range(height - 1))][:height]
    at = None if look.cursor is None else window.at(look.cursor)
    shown = state.gpus if len(state.gpus) < height else state.gpus[: max(0, height - 2)]
    for gpu in shown:
        points = series.get(gpu.uuid, Series()).all_points
        value = nearest(points, at) if at is not None else (points[-1][1] if points else None)
        role = gpu_role(gpu)
        text = line((f"{figures.UNKNOWN if gpu.index is None else gpu.index:>3} {role:<2} ", LABEL))
        cells = strip(points, columns, window)
        text.append(cells, style=FAINT if dim else ROLE_COLOURS.get(role, GREY))
        if look.cursor is not None:
            place = _STRIP_MARGIN + min(columns - 1, int(look.cursor * columns))
            text.stylize("reverse", place, place + 1)
        text.append(f"{figures.share(value):>5}", style=FAINT if dim else VALUE)
        rows.append(text)
    if len(shown) < len(state.gpus):
        rows.append(line((f"       {len(state.gpus) - len(shown)} more: Enter gives room", LABEL)))
    if height > len(rows):
        ends = [figures.clock(t - state.clock_difference_s)[:5] for t in (window.start, window.end)]
        rows.append(line((" " * _STRIP_MARGIN + ends[0] + f"{ends[1]:>{max(0, columns - 5)}}", LABEL)))
    rows = [*rows, *(line() for _ in range(height - len(rows)))][:height]
    for text in rows:
        text.pad_right(max(0, width - text.cell_len))
    return rows


def _heading(state: RunState, plot: Plot, width: int, look: Look, chosen: bool) -> Text:
    """The title, the value of each curve (at the cursor, or the newest), and the age of the data."""
    title = line(("▸" if chosen else "", GOOD), (f"{plot.title} ", HEADING))
    parts: list[Part] = [(0, "", title)]
    age, stale = state.ages.events, CURVES_STALE_S
    if state.progress is not None and state.progress.phase != "training" and not state.health.word.no_news:
        stale = float("inf")  # nobody makes steps now, and the first line says what is done instead
    if plot.source == "acceptance":
        parts.append((1, "", acceptance_values(state)))
    elif plot.source:
        age, stale = state.ages.gpu, GPU_STALE_S
        window = time_window(state, look)
        if look.cursor is not None and window is not None:
            at = figures.clock(state.here(window.at(look.cursor)))
            parts.append((1, "", line((at, PLAIN))))
    else:
        parts += _values(state, plot, look)
    heading = fitted(parts, width, age_mark(state, age, stale))
    heading.pad_right(max(0, width - heading.cell_len))
    return heading


def _values(state: RunState, plot: Plot, look: Look) -> list[Part]:
    """With little room the last curve's value stays: the average before the raw one, the decoded tau."""
    if not any(state.curves[name].all_points for name, _ in plot.curves):
        return [(1, "", line(("being read" if state.unread_bytes else "no values yet", LABEL)))]
    parts: list[Part] = []
    window = step_window(state, plot, look)
    for number, (name, label) in enumerate(plot.curves):
        goes = 1 if number == len(plot.curves) - 1 else 3
        one = state.curves[name]
        value = one.last
        if look.cursor is not None and window is not None:
            value = nearest(one.all_points, window.at(look.cursor))
        shown = plot.text(value)
        parts.append((goes, " ", line((f"{label} {shown}" if label else shown, CURVE_COLOURS[name]))))
        gaps = sum(1 for _, y in one.points if y is None) if name != "loss_ema" else 0
        if gaps:
            parts.append((2, " ", line((f"{gaps} gap{'s' * (gaps != 1)} (NaN)", WARN))))
    if state.unread_bytes and state.total_bytes:
        parts.append((4, " ", line((f"{1 - state.unread_bytes / state.total_bytes:.0%} read", WARN))))
    if look.log and not plot.linear:
        parts.append((5, " ", line(("log", LABEL))))
    if plot.falls and look.whole and not look.log and window is not None:
        first = first_useful(state.curves[plot.curves[-1][0]])
        if first is not None:
            parts.append((6, " ", line((f"from step {figures.count(first)}", LABEL))))
    return parts


def _seen(state: RunState, plot: Plot, dots: int) -> object:
    """What of a panel's data can be seen on `dots` dots."""
    if plot.source == "acceptance":
        newest = state.history.evaluations[-1:] or ()
        return (newest, state.history.conditional_accuracy)
    if plot.source:
        return (state.gpu_table.t, len(state.gpus))
    return tuple(_looks(state.curves[name], dots) for name, _ in plot.curves)


def _looks(series: Series, dots: int) -> tuple[int, int, int, int]:
    """Of a series its gaps and where its first and last dot are."""
    points = series.all_points
    if not points:
        return 0, 0, 0, 0
    start, end = points[0][0], points[-1][0]
    dot = max(1e-9, (end - start) / dots) if len(points) > dots else 1e-9
    gaps = sum(1 for _, y in points if y is None)
    return gaps, int(start), int(end / dot), series.stride


def side_lines(state: RunState, drawn: Drawn, width: int, height: int, plots: int) -> list[Text]:
    """The first `plots` panels above one another, for beside the overview."""
    rows: list[Text] = []
    for number in range(plots):
        room = (number + 1) * height // plots - len(rows)
        rows += drawn.panel(state, PLOTS[number], width, room, Look())
    return rows
