"""Curves as lines of text: braille, two dots wide and four high a cell. Pure; no widget, no numpy.

What a plot has more of than it has dots is reduced to the lowest and the highest of each dot column, so a
spike stays a spike. A value that is not finite (`None`) breaks the line, and is marked on the axis. On a
logarithmic scale what is not positive is a gap as well.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from rich.style import Style
from rich.text import Text

from controller import figures
from controller.plots import Window
from controller.series import Point
from controller.tui.palette import BAD, FAINT, LABEL, RULE_STYLE, VALUE

LABEL_COLUMNS = 7
"""Columns left of the curves: the labels of the vertical axis, and the axis."""

LEAST_LOG = 1e-100
"""What is below is zero on a logarithmic scale, and so a gap."""

FAR = 1e6
"""Pictures away from this one: a line leaves it towards there. Shares of a tiny picture may be infinite."""

_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))


@dataclasses.dataclass(frozen=True, slots=True)
class Curve:
    """One curve: points with rising x, `None` is a gap. `marks`: drawn as ◆, each value for itself."""

    points: Sequence[Point]
    colour: str
    marks: bool = False
    smooth: bool = False
    """Drawn as the mean of each dot column: its noise says nothing."""


@dataclasses.dataclass(frozen=True, slots=True)
class Scale:
    """The vertical axis from `low` to `high`."""

    low: float
    high: float
    log: bool = False

    def share(self, y: float) -> float | None:
        """Where y lies, 0 (low) to 1 (high), but for what is far outside; None: it cannot be shown."""
        if not self.log:
            share = (y - self.low) / (self.high - self.low)
        elif y < LEAST_LOG:
            return None
        else:
            share = (math.log(y) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return min(FAR, max(-FAR, share))


def scale_of(curves: Sequence[Curve], window: Window, *, log: bool) -> Scale | None:
    """The scale on which all that is shown fits; None: there is nothing to show."""
    ys = [
        y
        for curve in curves
        for x, y in window.inside(curve.points)
        if y is not None and window.start <= x <= window.end and (y >= LEAST_LOG or not log)
    ]
    if not ys:
        return None
    low, high = min(ys), max(ys)
    if log:
        return Scale(low / 1.05, high * 1.05, log=True)
    margin = (high - low) * 0.04 or abs(high) * 0.05 or 1.0
    return Scale(low - margin, high + margin)


def plot_lines(
    curves: Sequence[Curve], width: int, height: int, window: Window | None, *, log: bool = False,
    cursor: float | None = None, dim: bool = False,
) -> list[Text]:  # fmt: skip
    """`height` lines of `width` columns: curves, vertical axis, and below them the horizontal one.

    `cursor` is a share of the width, 0 to 1. With little room there are fewer labels; never more lines.
    """
    columns, rows = width - LABEL_COLUMNS, height - 1
    scale = scale_of(curves, window, log=log) if window else None
    if columns < 4 or rows < 1 or scale is None or window is None:
        why = "" if scale or not log or not any(c.points for c in curves) else "no positive values"
        return _padded([Text(f"{why:^{max(0, width)}}", style=LABEL)], width, height)
    bits = [[0] * columns for _ in range(rows)]
    styles: list[list[Style | None]] = [[None] * columns for _ in range(rows)]
    marks: dict[tuple[int, int], tuple[str, Style]] = {}
    gaps: set[int] = set()
    for curve in curves:
        style = FAINT if dim else Style(color=curve.colour)
        own = [[0] * columns for _ in range(rows)]
        _draw(curve, style, window, scale, own, marks, gaps)
        for row, column in ((r, c) for r in range(rows) for c in range(columns) if own[r][c]):
            bits[row][column], styles[row][column] = own[row][column], style  # a cell has one colour
    at = None if cursor is None else min(columns - 1, max(0, int(cursor * columns)))
    ticks = _y_ticks(scale, rows)
    lines = []
    for row in range(rows):
        text = Text(f"{ticks.get(row, ''):>{LABEL_COLUMNS - 1}}", style=LABEL, no_wrap=True, end="")
        text.append("┤" if row in ticks else "│", style=RULE_STYLE)
        for column in range(columns):
            if (row, column) in marks:
                text.append(*marks[row, column])
            elif bits[row][column]:
                text.append(chr(0x2800 + bits[row][column]), style=styles[row][column] or "")
            elif column == at:
                text.append("│", style=VALUE)
            elif row == rows - 1 and column in gaps:
                text.append("×", style=BAD)
            else:
                text.append(" ")
        lines.append(text)
    lines.append(_x_axis(window, columns))
    return _padded(lines, width, height)


def _padded(lines: list[Text], width: int, height: int) -> list[Text]:
    lines = lines[: max(0, height)]
    lines += [Text() for _ in range(height - len(lines))]
    for text in lines:
        text.no_wrap, text.end = True, ""
        text.truncate(max(0, width))
        text.pad_right(max(0, width - text.cell_len))
    return lines


def _draw(
    curve: Curve, style: Style, window: Window, scale: Scale, bits: list[list[int]],
    marks: dict[tuple[int, int], tuple[str, Style]], gaps: set[int],
) -> None:  # fmt: skip
    rows, columns = len(bits), len(bits[0])
    wide, tall = 2 * columns, 4 * rows
    span = window.end - window.start

    def dot(column: int, level: int) -> None:
        if 0 <= column < wide and 0 <= level < tall:
            bits[rows - 1 - level // 4][column // 2] |= _DOTS[column % 2][3 - level % 4]

    last: tuple[int, int] | None = None
    for column, ys in _columns(window.inside(curve.points), window, span, wide):
        if ys is None:
            if 0 <= column < wide:
                gaps.add(column // 2)
            last = None
            continue
        if curve.smooth:
            ys = [sum(ys) / len(ys)]
        shares = [share for y in ys if (share := scale.share(y)) is not None]
        if not shares:
            last = None
            continue
        levels = [round(share * (tall - 1)) for share in shares]
        if curve.marks:
            if 0 <= column < wide:
                row = rows - 1 - min(tall - 1, max(0, levels[-1])) // 4
                marks[row, column // 2] = ("◆", style)
            continue
        if last is not None:
            _join(last, (column, levels[0]), dot)
        for level in range(max(0, min(levels)), min(tall - 1, max(levels)) + 1):
            dot(column, level)
        last = (column, levels[-1])


def _columns(
    points: Sequence[Point], window: Window, span: float, wide: int
) -> list[tuple[int, list[float] | None]]:
    """Dot columns from left to right with the values in each; None is a gap there."""
    found: list[tuple[int, list[float] | None]] = []
    for x, y in points:
        column = math.floor((x - window.start) / span * (wide - 1) + 0.5) if span else wide // 2
        if y is None:
            if not found or found[-1] != (column, None):
                found.append((column, None))
        elif found and found[-1][0] == column and found[-1][1] is not None:
            found[-1][1].append(y)
        else:
            found.append((column, [y]))
    return found


def _join(start: tuple[int, int], end: tuple[int, int], dot: Callable[[int, int], None]) -> None:
    """Dots between two points, one for each column; steep parts one for each level (Bresenham)."""
    (x0, y0), (x1, y1) = start, end
    steps = max(abs(x1 - x0), abs(y1 - y0))
    for step in range(1, min(steps, 4000)):
        dot(x0 + round((x1 - x0) * step / steps), y0 + round((y1 - y0) * step / steps))


def _y_ticks(scale: Scale, rows: int) -> dict[int, str]:
    """Labels by row, from the top."""
    most = max(2, min(6, rows // 2))
    values = log_ticks(scale.low, scale.high, most) if scale.log else ticks(scale.low, scale.high, most)
    found: dict[int, str] = {}
    for value in values:
        share = scale.share(value)
        if share is not None and 0 <= share <= 1:
            row = rows - 1 - min(4 * rows - 1, round(share * (4 * rows - 1))) // 4
            found.setdefault(row, figures.tick(value)[: LABEL_COLUMNS - 1])
    return found


def _x_axis(window: Window, columns: int) -> Text:
    text = Text(" " * LABEL_COLUMNS, no_wrap=True, end="")
    span = window.end - window.start
    end = 0
    for value in ticks(window.start, window.end, max(2, columns // 8)) if span else [window.start]:
        label = figures.tick(value)
        middle = round((value - window.start) / span * (columns - 1)) if span else columns // 2
        start = min(max(0, middle - len(label) // 2), columns - len(label))
        if start < end or start < 0:
            continue
        text.append(" " * (start - (text.cell_len - LABEL_COLUMNS)) + label, style=LABEL)
        end = start + len(label) + 1
    return text


def ticks(low: float, high: float, most: int) -> list[float]:
    """About `most` round numbers between, 1, 2 or 5 times a power of ten apart; more where that were none."""
    if not high > low:
        return [low]
    rough = (high - low) / max(1, most)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    found = [round(n * step, 12) for n in range(first, math.floor(high / step + 1e-9) + 1)]
    return found or ticks(low, high, 2 * most)


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """Powers of ten between, with 2 and 5 times them where there are few."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1,)):
        found = [f * 10.0**p for p in powers for f in factors if low <= f * 10.0**p <= high]
        if len(found) <= most:
            break
    if len(found) < 2:
        return ticks(low, high, most)
    step = max(1, -(-len(found) // most))
    return found[::step]


STRIP = " ▁▂▃▄▅▆▇"


def strip(points: Sequence[Point], columns: int, window: Window) -> str:
    """Shares (0 to 1) over time in one row of blocks, the mean of each column; a gap is `×`, no data ` `."""
    sums = [0.0] * columns
    counts = [0] * columns
    gaps = [False] * columns
    span = window.end - window.start
    for x, y in window.inside(points):
        share = (x - window.start) / span if span else 1.0
        column = min(columns - 1, int(share * columns))
        if not 0 <= share <= 1:
            continue
        if y is None:
            gaps[column] = True
        else:
            sums[column] += y
            counts[column] += 1
    cells = []
    level = None
    for column in range(columns):
        if counts[column]:
            level = sums[column] / counts[column]
        elif gaps[column]:
            level = None
            cells.append("×")
            continue
        # Between two samples of a slow source stands the older one.
        cells.append(" " if level is None else STRIP[1 + min(6, max(0, int(level * 7)))])
    return "".join(cells)
