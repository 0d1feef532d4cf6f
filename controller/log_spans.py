"""Where the lines of a log are, found from any byte of it in either direction, without an index.

A view stands at a byte and not at a line's number: then a log of gigabytes opens at once at its end, nothing
moves when lines arrive below or older bytes arrive above, and what is held in memory is what is looked at.
The bytes that the mirror lacks are a span of their own, a gap. Spans tile the file: each begins where the
one before ends, a line has its newline at its end, and what lies before a gap may be half a line, as what
lies behind it. A stretch of `LONGEST` bytes without a newline is cut: it is no line that anybody reads.

Pure but for `read(start, stop)`, which gives the known bytes of that range, fewer when they cannot be read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final

from controller.extents import Extents
from controller.text import KEPT, newest_state, shown

Read = Callable[[int, int], bytes]

LONGEST: Final = 1 << 22
_BLOCK: Final = 1 << 14
_LARGEST_BLOCK: Final = 1 << 20
MOST_BYTES: Final = 1 << 23
"""Bytes that are looked at for one answer: where lines are huge, it has fewer of them."""

_HEAD: Final = 1 << 16
"""Bytes of a longer line that are looked at: of its beginning, or of its end for a bar that is drawn anew."""


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """The bytes `[start, stop)` of one line, or of what the mirror does not have."""

    start: int
    stop: int
    gap: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One line of a log as a view has it: `raw` is its newest state with its escape sequences."""

    start: int
    stop: int
    raw: str = ""
    more: int = 0
    """Bytes of the line that are not in `raw`."""
    gap: bool = False

    @property
    def text(self) -> str:
        """What is shown of it, without colours."""
        return shown(self.raw, self.more)


def spans_from(read: Read, extents: Extents, offset: int, most: int) -> list[Span]:
    """At most `most` spans from `offset` on, where one begins; fewer where they are long, but one."""
    spans: list[Span] = []
    begun, passed = offset, 0
    while len(spans) < most and offset - begun - passed < MOST_BYTES:
        known = extents.run_from(offset)
        if known is None:
            break
        start, stop = known
        if start > offset:
            spans.append(Span(offset, start, gap=True))
            passed += start - offset
            offset = start
            continue
        offset = _lines_from(read, start, stop, most, spans)
        if offset == start:
            break  # it cannot be read
    return spans


def _lines_from(read: Read, start: int, stop: int, most: int, spans: list[Span]) -> int:
    begin = position = start
    size = _BLOCK
    while position < stop:
        block = read(position, min(position + size, stop))
        if not block:
            break
        at = 0
        while (found := block.find(b"\n", at)) >= 0:
            at = found + 1
            spans.append(Span(begin, position + at))
            begin = position + at
            if len(spans) >= most:
                return begin
        position += len(block)
        if position - begin >= LONGEST:
            break
        size = min(2 * size, _LARGEST_BLOCK)
    if begin < position:
        spans.append(Span(begin, position))
    return position


def spans_before(read: Read, extents: Extents, offset: int, most: int) -> list[Span]:
    """At most `most` spans that end at `offset`, where one begins, in the order of the file."""
    spans: list[Span] = []
    begun, passed = offset, 0
    while offset > 0 and len(spans) < most and begun - offset - passed < MOST_BYTES:
        start, stop = extents.run_before(offset) or (0, 0)
        if stop < offset:
            spans.append(Span(stop, offset, gap=True))
            passed += offset - stop
            offset = stop
            continue
        before = offset
        offset = _lines_before(read, start, offset, most, spans)
        if offset == before:
            break
    return spans[::-1]


def _lines_before(read: Read, start: int, end: int, most: int, spans: list[Span]) -> int:
    position = end
    size = _BLOCK
    while position > start:
        begin = max(start, position - size)
        block = read(begin, position)
        if len(block) != position - begin:
            return end
        # The newline at `end - 1` ends the line that is looked for: it begins behind the one before.
        while (found := block.rfind(b"\n", 0, max(0, min(len(block), end - 1 - begin)))) >= 0:
            spans.append(Span(begin + found + 1, end))
            end = begin + found + 1
            if len(spans) >= most:
                return end
        position = begin
        if end - position >= LONGEST:
            break
        size = min(2 * size, _LARGEST_BLOCK)
    if position < end:
        spans.append(Span(position, end))
    return position


def span_start(read: Read, extents: Extents, offset: int) -> int:
    """Where the span begins that the byte at `offset` lies in; the end of all when it lies behind that."""
    if offset >= extents.end:
        return extents.end
    found = spans_before(read, extents, offset + 1, 1)
    return found[0].start if found else 0


def row_of(read: Read, span: Span) -> Row:
    """The line in `span`; of a very long one its beginning, or its newest state."""
    if span.gap:
        return Row(span.start, span.stop, gap=True)
    size = span.stop - span.start
    if size <= _HEAD:
        raw = newest_state(_decoded(read(span.start, span.stop)))
        return Row(span.start, span.stop, raw[:KEPT], max(0, len(raw) - KEPT))
    tail = read(span.stop - _HEAD, span.stop).rstrip(b"\r\n")
    if b"\r" in tail:
        return Row(span.start, span.stop, newest_state(_decoded(tail.partition(b"\r")[2]))[:KEPT])
    raw = _decoded(read(span.start, span.start + KEPT))
    return Row(span.start, span.stop, raw, size - KEPT)


def _decoded(data: bytes) -> str:
    return data.removesuffix(b"\n").decode("utf-8", "replace")
