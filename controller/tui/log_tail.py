"""Reads the end of a mirrored `train.log` as it grows, for a screen: never more than a screen can use.

A screen is no archive. When the log grows faster than a view can show it (100,000 lines a second), the
reader jumps to its end and says how much it passed over; `dflashctl logs` gives every byte. A log that was
attached late has a hole before its tail: reading starts behind the hole, for a hole is not text.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from controller.extents import Extents
from controller.run_records import table, whole
from controller.text import LineDecoder
from remote_payload import rundir

FIRST_BYTES = 256 << 10
"""How much of the end is shown at the start: a log of 2 GB opens as fast as one of 1 MB."""

FIRST_LINES = 100
"""At the start the window grows until it has so many lines: one line of 1 MB must not be all one sees."""

WIDEST_BYTES = 4 << 20
"""How far it grows."""

MOST_BYTES = 512 << 10
"""Most bytes taken in one poll; of what is beyond, only the end is shown."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogNews:
    """New whole lines, safe to show; the unfinished last line as it stands; bytes passed over."""

    lines: tuple[str, ...] = ()
    partial: str = ""
    skipped_bytes: int = 0
    restarted: bool = False
    """The file was truncated or replaced: what was shown before is of another one."""


class LogTail:
    """Follows `train.log` in the mirror folder `directory`; one thread only."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / rundir.TRAIN_LOG
        self._mirror = directory / "mirror.json"
        self._decoder = LineDecoder()
        self._offset: int | None = None
        self._generation: int | None = None

    def poll(self) -> LogNews:
        """What is new since the last call; an absent file has no news."""
        entry = table(table(rundir.read_whole(self._mirror) or {}, "files"), rundir.TRAIN_LOG)
        generation = whole(entry, "generation")
        known = list(Extents.from_json(entry.get("extents")))
        try:
            with self._path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                return self._read(file.fileno(), size, generation, known[-1][0] if known else 0)
        except OSError:
            return LogNews()

    def _read(self, descriptor: int, size: int, generation: int | None, first: int) -> LogNews:
        started = self._offset is not None
        restarted = started and (generation != self._generation or size < (self._offset or 0))
        self._generation = generation
        if restarted:
            self._decoder.restart()
            self._offset = None
        skipped = 0
        to_line_start = False
        if self._offset is None:
            self._offset = _start(descriptor, size, first)
            to_line_start = self._offset > first
        elif size - self._offset > MOST_BYTES:
            start = _start(descriptor, size, size - MOST_BYTES)
            skipped, self._offset, to_line_start = start - self._offset, start, True
            self._decoder.restart()
        data = os.pread(descriptor, size - self._offset, self._offset)
        self._offset += len(data)
        if to_line_start:
            cut = data.find(b"\n") + 1
            skipped += cut if skipped else 0
            data = data[cut:]
        lines = tuple(self._decoder.feed(data))
        return LogNews(lines=lines, partial=self._decoder.partial, skipped_bytes=skipped, restarted=restarted)


def _start(descriptor: int, size: int, first: int) -> int:
    """Where to begin so that the end of the file, of `size` bytes, gives enough lines."""
    window = FIRST_BYTES
    while True:
        start = max(first, size - window)
        if start == first or window >= WIDEST_BYTES:
            return start
        if os.pread(descriptor, size - start, start).count(b"\n") >= FIRST_LINES:
            return start
        window *= 4
