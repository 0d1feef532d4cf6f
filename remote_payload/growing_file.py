"""An appended file followed by its bytes: what is new, and whether it is still the same file.

The file stays open, so its inode cannot be given to another file meanwhile: renames over one name were
seen to alternate between two inodes, which a bare inode number cannot tell from no change at all. A
truncation that has grown past the old size again is known by the first 4,096 and the last 256 bytes sent.
Standard library only.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping
from typing import Any, Final

from remote_payload.run_folder import RunFolder

HEAD_BYTES: Final = 4096
_TAIL_BYTES = 256


@dataclasses.dataclass(frozen=True, slots=True)
class Have:
    """How far a reader has a file: its generation, its size, and the sha256 of its first `head` bytes."""

    generation: int
    size: int
    head: int
    head_sha256: str

    @classmethod
    def from_mapping(cls, name: str, value: Any) -> Have:
        """Check what a reader sent about file `name`; raises ValueError that names the key."""
        if not isinstance(value, Mapping):
            raise ValueError(f"have.{name}: expected an object")
        numbers = {}
        for key, low, high in (("generation", 1, 2**53), ("size", 0, 2**53), ("head", 0, HEAD_BYTES)):
            number = value.get(key)
            if not isinstance(number, int) or isinstance(number, bool) or not low <= number <= high:
                raise ValueError(f"have.{name}.{key} = {number!r}: expected {low} to {high}")
            numbers[key] = number
        digest = value.get("head_sha256")
        if not isinstance(digest, str):
            raise ValueError(f"have.{name}.head_sha256 = {digest!r}: expected hex digits")
        return cls(head_sha256=digest.lower(), **numbers)


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """New bytes of a file, at their offset in a generation."""

    generation: int
    offset: int
    data: bytes


class GrowingFile:
    """One appended file of a run. `sent` bytes of `generation` went out."""

    def __init__(self, folder: RunFolder, name: str, have: Have | None, tail: int | None) -> None:
        """Follow `name`; the reader has `have`. `tail`: send only so many last bytes of what is there."""
        self.name = name
        self.generation = have.generation if have else 1
        self.sent = 0
        self._folder = folder
        self._descriptor: int | None = None
        self._have = have
        self._tail_only = tail
        self._opened_before = False
        self._first = b""
        self._last = b""

    def look(self) -> int | None:
        """The size up to which bytes can be sent now, or None when there is no such file."""
        status = self._folder.status(self.name)
        if self._descriptor is not None:
            held = os.fstat(self._descriptor)
            same = status is not None and (status.st_dev, status.st_ino) == (held.st_dev, held.st_ino)
            if not same or held.st_nlink == 0:
                os.close(self._descriptor)
                self._descriptor = None
        if self._descriptor is None:
            if status is None or not self._open():
                return None
        elif not self._is_continued(self._descriptor):
            self._start_over()
        assert self._descriptor is not None
        return os.fstat(self._descriptor).st_size

    def chunk(self, until: int, most: int) -> Chunk | None:
        """At most `most` new bytes, none of them at or after offset `until`; None when there are none."""
        wanted = min(most, until - self.sent)
        if self._descriptor is None or wanted <= 0:
            return None
        data = os.pread(self._descriptor, wanted, self.sent)
        if not data:
            return None
        chunk = Chunk(self.generation, self.sent, data)
        if len(self._first) == self.sent:
            self._first += data[: HEAD_BYTES - len(self._first)]
        self._last = (self._last + data)[-_TAIL_BYTES:]
        self.sent += len(data)
        return chunk

    def rewind(self, have: Have) -> None:
        """Send again what the reader says that it lacks after `have.size`, if it means this generation."""
        if self._descriptor is not None and have.generation == self.generation and have.size < self.sent:
            self._continue_at(self._descriptor, have.size)

    def close(self) -> None:
        """Let go of the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> bool:
        self._descriptor = self._folder.open(self.name)
        if self._descriptor is None:
            return False
        if self._opened_before:
            self._start_over()
            return True
        self._opened_before = True
        size = os.fstat(self._descriptor).st_size
        have = self._have
        if have is not None and have.size > 0:
            head = os.pread(self._descriptor, have.head, 0)
            if have.size <= size and hashlib.sha256(head).hexdigest() == have.head_sha256:
                self._continue_at(self._descriptor, have.size)
            else:
                self._start_over()
        elif self._tail_only is not None and size > self._tail_only:
            self._continue_at(self._descriptor, _line_start(self._descriptor, size - self._tail_only, size))
        return True

    def _continue_at(self, descriptor: int, offset: int) -> None:
        self.sent = offset
        self._first = os.pread(descriptor, min(offset, HEAD_BYTES), 0)
        start = max(0, offset - _TAIL_BYTES)
        self._last = os.pread(descriptor, offset - start, start)

    def _start_over(self) -> None:
        self.generation += 1
        self.sent, self._first, self._last = 0, b"", b""

    def _is_continued(self, descriptor: int) -> bool:
        last = self.sent - len(self._last)
        return (
            os.fstat(descriptor).st_size >= self.sent
            and os.pread(descriptor, len(self._first), 0) == self._first
            and os.pread(descriptor, len(self._last), last) == self._last
        )


def _line_start(descriptor: int, offset: int, size: int) -> int:
    """The first start of a line at or after `offset`, or `offset` where none follows (a progress bar)."""
    position = max(0, offset - 1)  # the newline just before `offset` makes `offset` itself a line's start
    while position < size:
        data = os.pread(descriptor, min(65536, size - position), position)
        if not data:
            break
        found = data.find(b"\n")
        if found >= 0:
            start = position + found + 1
            return start if start < size else offset
        position += len(data)
    return offset
