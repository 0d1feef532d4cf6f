"""The reading half of a mirror folder: the bytes of train.log, in order, once, whoever writes the folder.

A reader never looks behind what `mirror.json` claims, with one exception that keeps it as fast as the
writer: bytes from the end of the last extent to the end of the file are good too, if the generation is
still the same after they were read (`mirror_files` says why). The file stays open, so that one that was
replaced is read to its end before the new one.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any, Final

from controller.extents import Extents
from controller.mirror_files import MIRROR
from remote_payload import rundir

MOST_BYTES: Final = 1 << 20
"""Of a piece, unless less is asked for."""


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """The next bytes of a file, and what lies between them and the ones before."""

    data: bytes
    missing: int = 0
    """Bytes before `data` that the mirror does not have."""
    restarted: bool = False
    """The file was truncated or replaced: `data` does not continue what came before."""


class MirrorReader:
    """Reads `train.log` of the mirror in `directory` from its start.

    `skip_holes`: go on behind bytes that are missing; otherwise wait until they are there.
    """

    def __init__(self, directory: Path, *, skip_holes: bool = True) -> None:
        self._directory = directory
        self._path = directory / rundir.TRAIN_LOG
        self.skip_holes = skip_holes
        """Whether to go on behind missing bytes; may change at any time."""
        self._key: tuple[int, int, int] | None = None
        self._record: dict[str, Any] = {}
        self._generation: int | None = None
        self._offset = 0
        self._descriptor = -1
        self._last_from = 0  # where the newest range began when we last read

    def __del__(self) -> None:
        self._close()

    def record(self) -> dict[str, Any]:
        """`mirror.json` as it is now; empty when there is none."""
        path = self._directory / MIRROR
        try:
            status = path.stat()
            key = (status.st_ino, status.st_mtime_ns, status.st_size)
            if key != self._key:
                self._record = rundir.read_whole(path) or {}
                self._key = key
        except OSError:
            self._record, self._key = {}, None
        return self._record

    def read(self, most: int = MOST_BYTES) -> Piece | None:
        """The next bytes, at most `most`; None when there are none now."""
        while True:
            generation, extents = self.known()
            if generation is None:
                return None
            restarted = self._generation is not None and generation != self._generation
            if restarted:
                if rest := self._rest(most):
                    return Piece(rest)
                self._close()
            offset = self._offset if generation == self._generation else 0
            was_open = self._descriptor >= 0
            piece = self._piece(extents, offset, most)
            if self.known()[0] != generation:  # it began anew while we read
                if not was_open:
                    self._close()  # whichever of the two it is
                continue
            if piece is None and not restarted:
                return None
            self._generation = generation
            data, start = piece or (b"", offset)
            self._offset = start + len(data)
            self._last_from = extents.last[0]
            return Piece(data, start - offset, restarted)

    def _rest(self, most: int) -> bytes:
        """What is left of the file that was replaced, if nothing is missing before it."""
        if self._descriptor < 0 or self._offset < self._last_from:
            return b""
        data = os.pread(self._descriptor, most, self._offset)
        self._offset += len(data)
        return data

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def waits_at_hole(self) -> bool:
        """Whether there are known bytes, but missing ones before them."""
        generation, extents = self.known()
        offset = self._offset if generation == self._generation else 0
        found = extents.run_from(offset)
        return found is not None and found[0] > offset

    def stamp(self) -> tuple[int, ...]:
        """Changes whenever there may be something new to read, by the files' status alone."""
        found: list[int] = []
        for path in (self._directory / MIRROR, self._path):
            try:
                status = path.stat()
                found += (status.st_ino, status.st_size, status.st_mtime_ns)
            except OSError:
                found.append(-1)
        return tuple(found)

    def skip_to_last_bytes(self, count: int) -> bool:
        """Go to where the last `count` bytes begin, or the newest range does; False: there are none yet."""
        generation, extents = self.known()
        if generation is None or not extents:
            return False
        self._generation, self._offset = generation, max(extents.last[0], self._end(extents) - count)
        return True

    def skip_to_last_lines(self, count: int) -> None:
        """Go to where the last `count` lines begin (an unfinished one counts), if they are here."""
        generation, extents = self.known()
        if generation is None:
            return
        first, end = 0, self._end(extents)
        for start, _ in extents:
            first = start
        position, wanted = end, count
        try:
            with self._path.open("rb") as file:
                while position > first and count:
                    start = max(first, position - 65536)
                    file.seek(start)
                    block = file.read(position - start)
                    if position == end and not block.endswith(b"\n"):
                        wanted -= 1
                    at = len(block)
                    while wanted >= 0 and (at := block.rfind(b"\n", 0, at)) >= 0:
                        wanted -= 1
                        if wanted < 0:
                            start += at + 1
                            break
                    position = start
                    if wanted < 0:
                        break
        except OSError:
            return
        self._generation, self._offset = generation, position

    def _piece(self, extents: Extents, offset: int, most: int) -> tuple[bytes, int] | None:
        if not extents:
            return None
        found = extents.run_from(offset)
        if found is None:
            start, stop = offset, self._end(extents)
        else:
            start, stop = found
            if stop == extents.end:
                stop = self._end(extents)
        if start > offset and not self.skip_holes:
            return None
        if self._descriptor < 0:
            try:
                self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                return None
        data = os.pread(self._descriptor, max(0, min(most, stop - start)), start)
        return (data, start) if data else None

    def _end(self, extents: Extents) -> int:
        """Where the known bytes end: the file's size, if it has grown since the last claim."""
        if not extents:
            return 0
        try:
            return max(extents.end, self._path.stat().st_size)
        except OSError:
            return 0

    def known(self) -> tuple[int | None, Extents]:
        """The file's generation, None when nothing is known of it, and which bytes of it are here."""
        files = self.record().get("files")
        entry = files.get(rundir.TRAIN_LOG) if isinstance(files, dict) else None
        generation = entry.get("generation") if isinstance(entry, dict) else None
        if not isinstance(entry, dict) or type(generation) is not int:
            return None, Extents()
        return generation, Extents.from_json(entry.get("arrived", entry.get("extents")))
