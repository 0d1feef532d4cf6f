"""Lines of a log on rows of a screen, one each or wrapped: pure arithmetic over a page's rows."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence

from rich.cells import cell_len, chop_cells

from controller.log_spans import Row

Place = tuple[int, int]
"""A line's number in the page, and which of its wrapped rows."""


def index_of(rows: Sequence[Row], start: int) -> int:
    """The number of the line in which the byte `start` lies, or of the next one; the last without any."""
    found = bisect.bisect_right(rows, start, key=lambda row: row.stop)
    return max(0, min(found, len(rows) - 1))


def pieces(text: str, columns: int) -> list[tuple[int, int]]:
    """The parts of `text`, from character to character, that fill a row of `columns` cells each."""
    if text.isascii():
        return [(at, at + columns) for at in range(0, len(text), columns)] or [(0, 0)]
    parts, at = [], 0
    for part in chop_cells(text, columns):
        parts.append((at, at + len(part)))
        at += len(part)
    if not parts or at < len(text):  # what takes no cell at a row's end is not among rich's parts
        parts[-1:] = [(parts[-1][0] if parts else 0, len(text))]
    return parts


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """`rows` on a screen; `columns` of it when long lines are wrapped, None when they are cut."""

    rows: Sequence[Row]
    columns: int | None

    def height(self, index: int) -> int:
        """How many rows of the screen a line takes."""
        if self.columns is None or self.rows[index].gap:
            return 1
        text = self.rows[index].text
        if cell_len(text) <= self.columns:
            return 1
        return len(pieces(text, self.columns))

    def first(self, place: Place, height: int) -> list[Place]:
        """What stands on `height` rows from `place` on."""
        shown: list[Place] = []
        index, sub = place
        if index < len(self.rows):
            sub = min(sub, self.height(index) - 1)
        while index < len(self.rows) and len(shown) < height:
            for one in range(sub, self.height(index)):
                shown.append((index, one))
            index, sub = index + 1, 0
        return shown[:height]

    def last(self, height: int) -> list[Place]:
        """What stands on `height` rows that end with the last line."""
        shown: list[Place] = []
        index = len(self.rows) - 1
        while index >= 0 and len(shown) < height:
            shown.extend((index, one) for one in reversed(range(self.height(index))))
            index -= 1
        return shown[:height][::-1]

    def moved(self, place: Place, by: int) -> Place:
        """The place `by` rows of the screen further down, or up; the first or last when there is none."""
        index, sub = place
        if not self.rows:
            return 0, 0
        sub = min(sub, self.height(index) - 1)
        while by > 0:
            left = self.height(index) - 1 - sub
            if by <= left:
                return index, sub + by
            if index + 1 >= len(self.rows):
                return index, self.height(index) - 1
            by -= left + 1
            index, sub = index + 1, 0
        while by < 0:
            if -by <= sub:
                return index, sub + by
            if index == 0:
                return 0, 0
            by += sub + 1
            index -= 1
            sub = self.height(index) - 1
        return index, sub
