"""Which bytes of a remote file the mirror has: sorted, disjoint, half-open ranges.

A log of 2 GB that is attached late has its tail long before its start. The ranges say which bytes of the
sparse local file are the remote's and which are only a hole.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import Any


class Extents:
    """A set of bytes as ranges `[start, stop)`; neighbours that touch are one."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._ranges: list[tuple[int, int]] = []
        for start, stop in ranges:
            self.add(start, stop)

    @classmethod
    def from_json(cls, value: Any) -> Extents:
        """The ranges in a record; what is no range is left out, since a byte too few is only sent again."""
        extents = cls()
        for pair in value if isinstance(value, list) else ():
            if (
                isinstance(pair, list)
                and len(pair) == 2
                and all(type(number) is int for number in pair)
                and 0 <= pair[0] < pair[1]
            ):
                extents.add(pair[0], pair[1])
        return extents

    def to_json(self) -> list[list[int]]:
        """The ranges as they stand in `mirror.json`."""
        return [[start, stop] for start, stop in self._ranges]

    def add(self, start: int, stop: int) -> None:
        """Add the bytes from `start` up to, not including, `stop`."""
        assert 0 <= start <= stop, (start, stop)
        if start == stop:
            return
        ranges = self._ranges
        if ranges and ranges[-1][0] <= start <= ranges[-1][1]:  # the usual case: more of the tail
            ranges[-1] = (ranges[-1][0], max(ranges[-1][1], stop))
            return
        first = bisect.bisect_left(ranges, start, key=lambda r: r[1])
        last = bisect.bisect_right(ranges, stop, key=lambda r: r[0])
        if first < last:
            start = min(start, ranges[first][0])
            stop = max(stop, ranges[last - 1][1])
        ranges[first:last] = [(start, stop)]

    def clip(self, size: int) -> None:
        """Forget every byte at `size` and behind it."""
        self._ranges = [(a, min(b, size)) for a, b in self._ranges if a < size]

    @property
    def end(self) -> int:
        """Where the last range ends; 0 without any."""
        return self._ranges[-1][1] if self._ranges else 0

    @property
    def prefix(self) -> int:
        """How many bytes there are from offset 0 without a hole."""
        return self._ranges[0][1] if self._ranges and self._ranges[0][0] == 0 else 0

    @property
    def last(self) -> tuple[int, int]:
        """The last range; empty without any."""
        return self._ranges[-1] if self._ranges else (0, 0)

    @property
    def missing(self) -> int:
        """How many bytes lie in holes before `end`."""
        return self.end - sum(stop - start for start, stop in self._ranges)

    def holes(self, stop: int | None = None) -> list[tuple[int, int]]:
        """The ranges of bytes that are missing before `end`, and before `stop`."""
        found = []
        position = 0
        for start, after in self._ranges:
            if position < start:
                found.append((position, start))
            position = after
        return found if stop is None else [(a, min(b, stop)) for a, b in found if a < stop]

    def run_from(self, offset: int) -> tuple[int, int] | None:
        """The first range of known bytes at or after `offset`, cut to start there; None without any."""
        for start, stop in self._ranges[bisect.bisect_right(self._ranges, offset, key=lambda r: r[1]) :]:
            return max(start, offset), stop
        return None

    def run_before(self, offset: int) -> tuple[int, int] | None:
        """The last range of known bytes before `offset`, cut to end there; None without any."""
        at = bisect.bisect_left(self._ranges, offset, key=lambda r: r[0])
        if not at:
            return None
        start, stop = self._ranges[at - 1]
        return start, min(stop, offset)

    def __iter__(self) -> Any:
        return iter(self._ranges)

    def __bool__(self) -> bool:
        return bool(self._ranges)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Extents) and self._ranges == other._ranges

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Extents({self._ranges})"
