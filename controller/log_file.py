"""The mirrored log as a view reads it: any bytes of it that are here, of one generation at a time.

The file is opened once a generation and read through that descriptor: a log that is replaced while somebody
reads it stays readable to them until they let go (`refresh(hold=True)`). One thread only.
"""

from __future__ import annotations

import os
from pathlib import Path

from controller.extents import Extents
from controller.log_spans import Row, Span, row_of, span_start, spans_before, spans_from
from controller.mirror_reader import MirrorReader
from remote_payload import rundir


class LogFile:
    """`train.log` of the mirror in `directory`."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / rundir.TRAIN_LOG
        self._reader = MirrorReader(directory)
        self._descriptor = -1
        self._stamp: tuple[int, ...] = ()
        self.generation: int | None = None
        self.extents = Extents()
        """Which bytes are here."""
        self.replaced = False
        """Whether the log began anew, and what is held is the old one."""
        self.restarts = 0
        """How often it has begun anew since it was opened."""

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Let the file go."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    @property
    def end(self) -> int:
        """Where the known bytes end."""
        return self.extents.end

    @property
    def missing(self) -> int:
        """Bytes before the end that are not here."""
        return self.extents.missing

    def refresh(self, *, hold: bool = False) -> bool:
        """Look at what is here now; whether it has changed. `hold`: keep to a log that was replaced."""
        stamp = self._reader.stamp()
        if stamp == self._stamp and not (self.replaced and not hold):
            return False
        generation, extents = self._reader.known()
        if generation is None:
            return False
        if generation != self.generation:
            if hold and self.generation is not None:
                changed, self.replaced = not self.replaced, True
                return changed
            if not self._open(generation):
                return False
        self._stamp = stamp
        if extents:
            # What was appended since the last claim is good too (mirror_files says why).
            extents.add(extents.end, max(extents.end, os.fstat(self._descriptor).st_size))
        self.extents = extents
        return True

    def _open(self, generation: int) -> bool:
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        if self._reader.known()[0] != generation:  # it began anew meanwhile: whose file is this?
            os.close(descriptor)
            return False
        self.close()
        self._descriptor = descriptor
        self.restarts += self.generation is not None
        self.generation, self.replaced = generation, False
        return True

    def read(self, start: int, stop: int) -> bytes:
        """The bytes `[start, stop)`, fewer when the disk does not give them."""
        if self._descriptor < 0:
            return b""
        try:
            return os.pread(self._descriptor, stop - start, start)
        except OSError:
            return b""

    def spans_from(self, offset: int, most: int) -> list[Span]:
        """At most `most` lines and gaps from `offset` on."""
        return spans_from(self.read, self.extents, offset, most)

    def spans_before(self, offset: int, most: int) -> list[Span]:
        """At most `most` lines and gaps that end at `offset`."""
        return spans_before(self.read, self.extents, offset, most)

    def start_of(self, offset: int) -> int:
        """Where the line, or the gap, begins that the byte at `offset` lies in."""
        return span_start(self.read, self.extents, offset)

    def row(self, span: Span) -> Row:
        """The line in `span`."""
        return row_of(self.read, span)
