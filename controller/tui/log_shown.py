"""The lines of a log that its filter shows: those around a place, the next that matches, all for a file.

Without a filter that is every line. A search works through the log in slices, and gives its thread back after
each; what a filter hides it does not find.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from controller.figures import amount
from controller.log_file import LogFile
from controller.log_scan import SLICE, Containing, LogScan, Matches, matching
from controller.log_spans import Row, Span

SAVED_BYTES = 256 << 20
"""Most bytes that are saved to a file."""

Way = tuple[int, bool]
"""A place in the log, and whether to look backwards from there."""


class ShownLog:
    """The lines of `file`; of one thread."""

    def __init__(self, file: LogFile) -> None:
        self.file = file
        self.scan: LogScan | None = None
        """Which lines the filter shows; None: there is no filter."""
        self._matches: Matches | None = None

    def filter(self, matches: Matches | None) -> None:
        """Show only the lines that match; None: all."""
        self._matches = matches
        self.scan = LogScan(matches) if matches else None

    def before(self, offset: int, most: int) -> list[Span]:
        """At most `most` lines that end at `offset`."""
        if self.scan is None:
            return self.file.spans_before(offset, most)
        found = self.scan.found
        at = bisect.bisect_left(found, offset)
        return self._lines(found[max(0, at - most) : at])

    def behind(self, offset: int, most: int) -> list[Span]:
        """At most `most` lines from `offset` on."""
        if self.scan is None:
            return self.file.spans_from(offset, most)
        found = self.scan.found
        at = bisect.bisect_left(found, offset)
        return self._lines(found[at : at + most])

    def _lines(self, starts: Sequence[int]) -> list[Span]:
        return [span for start in starts for span in self.file.spans_from(start, 1)]

    def matching(self, matches: Matches) -> Matches:
        """What matches and is shown."""
        shown = self._matches
        if shown is None:
            return matches
        if isinstance(matches, Containing):
            return Containing(matches.needle, also=shown)
        return lambda text: shown(text) and matches(text)

    def stop_of(self, start: int) -> int:
        """Where the line that begins at `start` ends."""
        spans = self.file.spans_from(start, 1)
        return spans[0].stop if spans else self.file.end

    def search(self, matches: Matches, ways: Sequence[Way]) -> Iterator[int | None]:
        """None after each slice without a match, then where the nearest one begins; nothing when there is
        none. The `ways` are gone one after the other.
        """
        both = self.matching(matches)
        for place, back in ways:
            while span := self._slice_before(place) if back else self._slice_from(place):
                low, high = span
                if hits := matching(self.file.read(low, high), both):
                    yield low + (hits[-1] if back else hits[0])
                    return
                place = low if back else high
                yield None

    def _slice_from(self, place: int) -> tuple[int, int] | None:
        """Whole lines of about a slice from `place` on, as a range; gaps are passed over."""
        known = self.file.extents.run_from(place)
        if known is None:
            return None
        start, stop = known
        if stop - start <= SLICE:
            return start, stop
        end = self.file.start_of(start + SLICE)
        return start, end if end > start else self.stop_of(start)

    def _slice_before(self, place: int) -> tuple[int, int] | None:
        known = self.file.extents.run_before(place)
        if known is None:
            return None
        start, stop = known
        return start if stop - start <= SLICE else self.file.start_of(stop - SLICE), stop

    def save(self, path: Path, span: tuple[int, int] | None, ended: Callable[[], bool]) -> str:
        """Write the lines from the first to the last of `span`, or all, to `path`, until `ended`; returns
        what is to be said of it.
        """
        low, high = (0, self.file.end) if span is None else span
        written = lines = 0
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with path.open("w", encoding="utf-8", errors="replace") as out:
                for row in self._rows(low, high):
                    text = f"--- {amount(row.stop - row.start)} are not here ---" if row.gap else row.text
                    written += out.write(f"{text}\n")
                    lines += 1
                    if written > SAVED_BYTES or ended():
                        break
        except OSError as error:
            return f"not saved: {path}: {error.strerror or error}"
        cut = f", cut after {amount(written)}" if written > SAVED_BYTES else ""
        return f"{lines:,} line{'s' * (lines != 1)} saved to {path}{cut}"

    def _rows(self, low: int, high: int) -> Iterator[Row]:
        place = low
        while place < high:
            spans = [span for span in self.behind(place, 1000) if span.start < high]
            if not spans:
                return
            for span in spans:
                yield self.file.row(span)
            place = spans[-1].stop
