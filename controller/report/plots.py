"""Curves as inline SVG: the same as in the terminal, with values under the pointer where scripts may run.

Every finite run between gaps is a line of its own; a gap in the loss is a mark on the axis, since a value
that is no number is the thing to be seen. The numbers under the pointer travel in the picture itself.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence

from controller import figures
from controller.gpu_state import gpu_role
from controller.plots import PLOTS, Look, Plot, decoded, promised, step_window, time_window
from controller.report.markup import Markup, el
from controller.run_state import RunState
from controller.series import Point, Series, segments

WIDTH, HEIGHT = 560, 210
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 8, 22
MOST_POINTS = 600
"""Points of a curve in the page: more than it has pixels says nothing."""

AVERAGES = 100
"""Means of a noisy curve."""

RAW = ", raw"
_FEW = ("second", "main", "good", "third")
"""Styles of few GPUs, one each; of many, targets and drafters have one."""


CLASSES = {
    "loss": "raw", "loss_ema": "main", "tau": "good", "tau_estimate": "second", "tokens_per_s": "second",
    "gradient_norm": "third", "learning_rate": "main", "queue_batches": "second", "queue_features": "main",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """One curve: points, its style's class, its label, and the text of its values."""

    points: Sequence[Point]
    style: str
    label: str
    shown: Callable[[float | None], str]
    marks: bool = False


def plots(state: RunState) -> list[Markup]:
    """A figure for every plot of the terminal that has values."""
    found = []
    for plot in PLOTS:
        figure = _gpu_figure(state, plot) if plot.source in ("busy", "memory") else None
        if plot.source == "acceptance":
            figure = _acceptance(state, plot)
        elif not plot.source:
            figure = _step_figure(state, plot)
        if figure is not None:
            found.append(figure)
    return found


def _step_figure(state: RunState, plot: Plot) -> Markup | None:
    window = step_window(state, plot, Look())
    curves = [
        (name, label, state.curves[name]) for name, label in plot.curves if state.curves[name].all_points
    ]
    if window is None or not curves:
        return None
    drawn = []
    for name, label, one in curves:
        points: Sequence[Point] = one.all_points
        style = CLASSES.get(name, "second")
        if plot.smooth and len(points) > 2 * AVERAGES:
            drawn.append(Line(points, "raw", f"{label or plot.title}{RAW}", plot.text))
            points = _averaged(points)
        drawn.append(Line(points, style, label or plot.title, plot.text, marks=name == "tau"))
    gaps = [x for name, _, one in curves if name != "loss_ema" for x, y in one.all_points if y is None]
    whole = step_window(state, dataclasses.replace(plot, falls=False), Look())
    note = ""
    if whole is not None and whole.start < window.start:
        note = f"from step {figures.count(window.start)}; the first steps lie far above"
    return _figure(plot, drawn, (window.start, window.end), lambda x: f"step {figures.count(x)}",
                   _step_ticks(window.start, window.end), gaps=gaps, note=note)  # fmt: skip


def _gpu_figure(state: RunState, plot: Plot) -> Markup | None:
    window = time_window(state, Look())
    series = state.gpu_table.busy if plot.source == "busy" else state.gpu_table.memory
    if window is None:
        return None
    drawn: list[Line] = []
    for gpu in state.gpus:
        points = series.get(gpu.uuid, Series()).all_points
        if not any(y is not None for _, y in points):
            continue
        role = gpu_role(gpu)
        few = len(state.gpus) <= len(_FEW)
        style = _FEW[len(drawn)] if few else {"T": "second", "D": "main"}.get(role, "raw")
        number = "?" if gpu.index is None else f"{gpu.index}"
        drawn.append(Line(points, f"{style} thin", f"{number} {role}".strip(), figures.share))
    if not drawn:
        return None

    span = window.end - window.start

    def at(x: float) -> str:
        return figures.clock(state.here(x), "%d %b %H:%M:%S")

    length = 8 if span < 1200 else 5
    ticks = [
        (window.start + share * span, at(window.start + share * span)[7 : 7 + length])
        for share in (0, 0.25, 0.5, 0.75, 1)
    ]
    return _figure(plot, drawn, (window.start, window.end), at, ticks, y_range=(0.0, 1.0))


def _figure(
    plot: Plot, drawn: Sequence[Line], x_range: tuple[float, float], at: Callable[[float], str],
    x_ticks: Sequence[tuple[float, str]], *, gaps: Sequence[float] = (), note: str = "",
    y_range: tuple[float, float] | None = None,
) -> Markup:  # fmt: skip
    first, last = x_range
    inside = [[p for p in one.points if first <= p[0] <= last] for one in drawn]
    ys = [y for points in inside for _, y in points if y is not None]
    low, high = y_range or (min(ys, default=0.0), max(ys, default=1.0))
    if plot.linear:
        low = min(low, 0.0)
    if high - low < 1e-12:
        low, high = low - abs(low) * 0.05 - 1e-9, high + abs(high) * 0.05 + 1e-9
    y_ticks = _nice(low, high) if y_range is None else [0.0, 0.25, 0.5, 0.75, 1.0]
    low, high = min(low, y_ticks[0]), max(high, y_ticks[-1])
    y_labels = {figures.share(tick) if y_range else drawn[0].shown(tick): tick for tick in y_ticks}

    def x_at(x: float) -> float:
        return round(LEFT + (x - first) / max(1e-9, last - first) * (WIDTH - LEFT - RIGHT), 1)

    def y_at(y: float) -> float:
        return round(TOP + (high - y) / (high - low) * (HEIGHT - TOP - BOTTOM), 1)

    parts: list[Markup] = []
    for label, tick in y_labels.items():
        parts.append(el("line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=y_at(tick), y2=y_at(tick)))
        parts.append(el("text", label, class_="tick", x=LEFT - 6, y=y_at(tick) + 3.5, text_anchor="end"))
    for number, (tick, label) in enumerate(x_ticks):
        anchor = "start" if not number else "end" if number == len(x_ticks) - 1 else "middle"
        parts.append(el("text", label, class_="tick", x=x_at(tick), y=HEIGHT - 6, text_anchor=anchor))
    for x in [x for x in gaps if first <= x <= last][:200]:
        parts.append(
            el("path", el("title", f"not a number, {at(x)}"), class_="gap",
               d=f"M{x_at(x) - 3} {HEIGHT - BOTTOM - 6}l6 6m-6 0l6 -6")
        )  # fmt: skip
    data = []
    for one, points in zip(drawn, inside, strict=True):
        thin = _thinned(points)
        for segment in segments(thin):
            path = " ".join(f"{x_at(x)},{y_at(y)}" for x, y in segment)
            if len(segment) == 1 or (one.marks and len(thin) < 60):
                for x, y in segment:
                    parts.append(_mark(x_at(x), y_at(y), one.style))
            if len(segment) > 1:
                parts.append(el("polyline", class_=f"curve {one.style}", points=path))
        data.append(
            {
                "label": one.label,
                "at": [[x_at(x), at(x), "not a number" if y is None else one.shown(y)] for x, y in thin],
            }
        )
    return _wrapped(plot, drawn, parts, note, json.dumps(data, separators=(",", ":"), ensure_ascii=False))


def _wrapped(plot: Plot, drawn: Sequence[Line], parts: Sequence[Markup], note: str, data: str) -> Markup:
    legend: list[Markup] = []
    named = [one for one in drawn if not one.label.endswith(RAW)]
    few = len(named) <= len(_FEW)
    for one in named if few else ():
        value = next((y for _, y in reversed(one.points)), None)
        legend.append(
            el("span", el("i", class_=f"key {one.style}"), f" {one.label} ", el("b", one.shown(value)))
        )
    if not few:
        legend = [el("span", el("i", class_=f"key {style}"), f" {word}")
                  for style, word in (("second", "target"), ("main", "drafter"))
                  if any(one.style.startswith(style) for one in drawn)]  # fmt: skip
    return el(
        "figure",
        el("figcaption", el("b", plot.title), el("span", *legend, class_="legend")),
        el(
            "svg",
            el("title", f"{plot.title}: {plot.help}"),
            *parts,
            el("line", class_="cursor", y1=TOP, y2=HEIGHT - BOTTOM),
            viewBox=f"0 0 {WIDTH} {HEIGHT}",
            role="img",
            data_lines=data,
        ),
        el("p", el("span", class_="values"), el("span", note or plot.help, class_="help")),
    )  # fmt: skip


def _mark(x: float, y: float, style: str) -> Markup:
    return el("path", class_=f"mark {style}", d=f"M{x} {y - 4}l4 4l-4 4l-4 -4z")


def _acceptance(state: RunState, plot: Plot) -> Markup | None:
    bars, promise = decoded(state), promised(state.history.conditional_accuracy)
    count = max(len(bars), len(promise))
    if not count:
        return None
    cell = (WIDTH - LEFT - RIGHT) / count
    floor = HEIGHT - BOTTOM
    parts = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = TOP + (1 - share) * (floor - TOP)
        parts.append(el("line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y))
        parts.append(
            el("text", figures.share(share), class_="tick", x=LEFT - 6, y=y + 3.5, text_anchor="end")
        )
    for k in range(count):
        x = LEFT + k * cell
        if k < len(bars):
            height = min(1.0, max(0.0, bars[k])) * (floor - TOP)
            title = el("title", f"k = {k + 1}: decoded {figures.share(bars[k], 1)}")
            place = {"x": x + 0.15 * cell, "y": floor - height, "width": 0.7 * cell, "height": height}
            parts.append(el("rect", title, class_="bar good", **place))
        if k < len(promise):
            y = floor - min(1.0, max(0.0, promise[k])) * (floor - TOP)
            title = el("title", f"k = {k + 1}: estimated {figures.share(promise[k], 1)}")
            ends = {"x1": x + 0.05 * cell, "x2": x + 0.95 * cell, "y1": y, "y2": y}
            parts.append(el("line", title, class_="curve second", **ends))
        if count <= 16 or k % 2 == 0:
            parts.append(
                el("text", f"{k + 1}", class_="tick", x=x + cell / 2, y=HEIGHT - 6, text_anchor="middle")
            )
    legend = []
    for style, label, shares in (("good", "decoded", bars), ("second", "estimated", promise)):
        if shares:
            legend.append(
                el(
                    "span",
                    el("i", class_=f"key {style}"),
                    f" {label} ",
                    el("b", figures.share(shares[0])),
                    " at k=1",
                )
            )
    return el(
        "figure",
        el("figcaption", el("b", plot.title), el("span", *legend, class_="legend")),
        el("svg", el("title", plot.help), *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img"),
        el("p", el("span", plot.help, class_="help")),
    )


def _thinned(points: Sequence[Point]) -> list[Point]:
    """At most `MOST_POINTS`: the lowest and the highest of each part, and every gap's first point."""
    if len(points) <= MOST_POINTS:
        return list(points)
    kept: list[Point] = []
    parts = MOST_POINTS // 2
    for n in range(parts):
        part = points[n * len(points) // parts : (n + 1) * len(points) // parts]
        finite = [p for p in part if p[1] is not None]
        chosen = {min(finite, key=_y), max(finite, key=_y)} if finite else set()
        if len(finite) < len(part):
            chosen.add(next(p for p in part if p[1] is None))
        kept += sorted(chosen, key=lambda p: p[0])
    return kept


def _averaged(points: Sequence[Point]) -> list[Point]:
    """`AVERAGES` means of what lies beside one another; one with a gap in it is a gap."""
    means: list[Point] = []
    for n in range(AVERAGES):
        part = points[n * len(points) // AVERAGES : (n + 1) * len(points) // AVERAGES]
        ys = [y for _, y in part if y is not None]
        means.append((part[len(part) // 2][0], sum(ys) / len(ys) if len(ys) == len(part) else None))
    return means


def _y(point: Point) -> float:
    return point[1] if point[1] is not None else 0.0


def _nice(low: float, high: float) -> list[float]:
    """About five round values that enclose both."""
    step = 10 ** math.floor(math.log10((high - low) / 4))
    step = next(step * factor for factor in (1, 2, 2.5, 5, 10) if (high - low) / (step * factor) <= 5)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(n * step, 12) for n in range(first, last + 1)]


def _step_ticks(first: float, last: float) -> list[tuple[float, str]]:
    if last <= first:
        return [(first, figures.count(first))]
    inner = [tick for tick in _nice(first, last) if first < tick < last]
    span = last - first
    near = [tick for tick in inner if 0.12 * span < tick - first and 0.12 * span < last - tick]
    return [(x, figures.count(x)) for x in (first, *near, last)]
