"""Which lines of a log match a pattern: where they begin, found a slice at a time from the log's end.

A slice is bounded, so that a thread can do other things between two of them; the newest text is looked
at first, since that is what a reader looks at. What is found is kept by its place in the file, which neither
new lines nor older bytes that arrive later can change. Half a line at a gap, and the unfinished last one,
are not looked at until they are whole.
"""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Callable
from typing import Final

from controller.extents import Extents
from controller.log_spans import LONGEST, Read
from controller.text import MAX_COLUMNS, newest_state, shown

SLICE: Final = 1 << 20
"""Bytes looked at in one step: about 15 ms."""

Matches = Callable[[str], object]
"""Whether the shown text of a line matches."""


class Containing:
    """Matches lines that contain `text`, whatever its case, and match `also`.

    In plain text such lines are found without cutting it into lines: a gigabyte takes a second.
    """

    def __init__(self, text: str, also: Matches | None = None) -> None:
        self.needle = text.lower()
        self.also = also

    def __call__(self, line: str) -> bool:
        """Whether the shown text of a line matches."""
        return self.needle in line.lower() and (self.also is None or bool(self.also(line)))


class LogScan:
    """The lines of one log for which `matches` is true."""

    def __init__(self, matches: Matches) -> None:
        self._matches = matches
        self._scanned = Extents()
        self.found = array("Q")
        """Where the matching lines begin, in order."""
        self.done = False
        """Whether every whole line that is here was looked at."""

    def restart(self) -> None:
        """Forget everything: the log is another one."""
        self._scanned = Extents()
        self.found = array("Q")
        self.done = False

    def step(self, read: Read, extents: Extents) -> bool:
        """Look at one slice more; False when there is nothing left to look at now."""
        for start, stop in reversed(list(extents)):
            for low, high in reversed(_without(self._scanned, start, stop)):
                # Only a place where a scan ended, or the file's beginning, is known to begin a line.
                if self._slice(read, low, high, begins_line=low > start or start == 0):
                    self.done = False
                    return True
        self.done = True
        return False

    def _slice(self, read: Read, low: int, high: int, *, begins_line: bool) -> bool:
        """Look at the last whole lines of `[low, high)`."""
        size = SLICE
        while True:
            begin = max(low, high - size)
            data = read(begin, high)
            if len(data) != high - begin:
                return False
            first = 0 if begin == low and begins_line else data.find(b"\n") + 1
            last = data.rfind(b"\n") + 1
            whole = last > first or (first == 0 and last > 0)
            if whole and (first or (begin == low and begins_line)):
                self._look(data[first:last], begin + first)
                self._scanned.add(begin + first, begin + last)
                return True
            if begin == low:
                return False
            if size >= LONGEST:
                self._scanned.add(begin, high)  # no line that anybody reads
                return True
            size *= 2

    def _look(self, data: bytes, offset: int) -> None:
        found = array("Q")
        for number in matching(data, self._matches):
            found.append(number + offset)
        at = bisect.bisect_left(self.found, offset)
        self.found[at:at] = found


def matching(data: bytes, matches: Matches) -> list[int]:
    """Offsets in `data`, whole lines, at which lines begin whose shown text matches."""
    plain = not data.translate(None, _PLAIN)
    if plain and isinstance(matches, Containing):
        return _containing(data, matches)
    lines = data.split(b"\n")
    texts = data.decode("utf-8", "replace").split("\n")
    if data.endswith(b"\n"):
        lines.pop()
    found = []
    offset = 0
    for line, text in zip(lines, texts, strict=False):
        if matches(text if plain and len(text) <= MAX_COLUMNS else shown(newest_state(text))):
            found.append(offset)
        offset += len(line) + 1
    return found


def _containing(data: bytes, matches: Containing) -> list[int]:
    """`matching` for plain ASCII."""
    if not matches.needle.isascii() or "\n" in matches.needle:  # no line of plain ASCII has either
        return []
    needle, lowered = matches.needle.encode(), data.lower()
    found = []
    at = lowered.find(needle)
    while at >= 0:
        start = data.rfind(b"\n", 0, at) + 1
        end = data.find(b"\n", at)
        end = len(data) if end < 0 else end
        sure = matches.also is None and end - start <= MAX_COLUMNS
        if sure or matches(shown(data[start:end].decode("ascii"))):
            found.append(start)
        at = lowered.find(needle, end + 1)
    return found


_PLAIN = bytes(range(0x20, 0x7F)) + b"\n"


def _without(scanned: Extents, start: int, stop: int) -> list[tuple[int, int]]:
    """The parts of `[start, stop)` that were not scanned."""
    parts = []
    while start < stop:
        known = scanned.run_from(start)
        if known is None or known[0] >= stop:
            parts.append((start, stop))
            break
        if known[0] > start:
            parts.append((start, known[0]))
        start = known[1]
    return parts
