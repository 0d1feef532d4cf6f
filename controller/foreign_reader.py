"""Reads the mirrored log of a program that we did not start as if it were a run's events and progress.

Two readers: one from the log's beginning as far as the mirror takes it (there a trainer says what it trains
on), one from its newest MiB on (there are the steps). What lies between is history that costs more than it
tells. A log that begins anew begins everything anew.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from controller.foreign_log import ForeignRun
from controller.mirror import LOG_HEAD_BYTES, LOG_TAIL_BYTES
from controller.mirror_reader import MirrorReader
from controller.run_records import Record, number, table, text
from controller.text import LineDecoder
from remote_payload import rundir

_SLICE = 1 << 18
_SLICES = 4


@dataclasses.dataclass(frozen=True, slots=True)
class ForeignNews:
    """What one look found, in the records of a run."""

    run: Record
    progress: Record | None
    events: tuple[Record, ...]
    restarted: bool
    more: bool
    """Whether there is more to read at once."""


class ForeignReader:
    """Follows the log in the mirror folder `directory`, whose place.json holds `place`; one thread only."""

    def __init__(self, directory: Path, place: Record) -> None:
        host = table(place, "host")
        self._directory = directory
        self._run: Record = {
            "id": text(place, "log_path"),
            "place": text(host, "name"),
            "host": text(host, "address"),
            "job": text(place, "log_path"),
            "created": number(place, "created"),
        }
        self._begin()

    def _begin(self) -> None:
        self._found = ForeignRun()
        self._head = MirrorReader(self._directory, skip_holes=False)
        self._head_left = LOG_HEAD_BYTES
        self._head_lines = LineDecoder()
        self._tail = MirrorReader(self._directory)
        self._tail_lines = LineDecoder()
        self._tail_begun = False

    def poll(self) -> ForeignNews:
        """Read what is new, at most 1 MiB of it."""
        events: list[Record] = []
        restarted, more = False, False
        if not self._tail_begun:
            self._tail_begun = self._tail.skip_to_last_bytes(LOG_TAIL_BYTES)
        for slice_number in range(_SLICES if self._tail_begun else 0):
            piece = self._tail.read(_SLICE)
            if piece is None:
                break
            if piece.restarted:
                self._begin()
                restarted, more, events = True, True, []
                break
            if piece.missing:
                self._tail_lines.restart()
            events += self._found.take(self._tail_lines.feed(piece.data))
            more = slice_number == _SLICES - 1
        if self._head_left and not restarted:
            piece = self._head.read(min(_SLICE, self._head_left))
            if piece is not None:
                self._head_left -= len(piece.data)
                events += self._found.take(self._head_lines.feed(piece.data), steps=False)
        beat = table(self._tail.record(), "beat")
        written = number(table(table(beat, "files"), rundir.TRAIN_LOG), "written")
        return ForeignNews(self._run, self._found.progress(written), tuple(events), restarted, more)
