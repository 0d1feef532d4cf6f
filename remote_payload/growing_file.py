"""An appended file followed by its bytes: what is new, and whether it is still the same file.

The file stays open, so its inode cannot be given to another file meanwhile: renames over one name were
seen to alternate between two inodes, which a bare inode number cannot tell from no change at all. A
truncation that has grown past the old size again is known by the first 4,096 and the last 256 bytes sent.
A reader that comes back says the same of what it has, and the inode, so a file that was replaced while
nobody watched is another one even when it has the same size. A file that was renamed away is first sent
to its end. Standard library only.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterable, Mapping
from typing import Any, Final, Protocol

HEAD_BYTES: Final = 4096
TAIL_BYTES: Final = 256
_MOST = 2**53


class Folder(Protocol):
    """Where the files are that a feed sends."""

    def open(self, name: str) -> int | None:
        """A descriptor of the plain file `name`, or None."""

    def status(self, name: str) -> os.stat_result | None:
        """The status of `name`, or None when there is nothing of that name."""


@dataclasses.dataclass(frozen=True, slots=True)
class Have:
    """How far a reader has a file: its generation and size, the sha256 of its first `head` and last `tail`
    bytes, and its inode (None: not known).
    """

    generation: int
    size: int
    head: int
    head_sha256: str
    tail: int = 0
    tail_sha256: str = ""
    inode: int | None = None

    @classmethod
    def from_mapping(cls, name: str, value: Any) -> Have:
        """Check what a reader sent about file `name`; raises ValueError that names the key."""
        where = f"have.{name}"
        if not isinstance(value, Mapping):
            raise ValueError(f"{where}: expected an object")
        size = whole(value.get("size"), f"{where}.size", 0, _MOST)
        tail = whole(value.get("tail", 0), f"{where}.tail", 0, min(TAIL_BYTES, size))
        inode = value.get("inode")
        return cls(
            generation=whole(value.get("generation"), f"{where}.generation", 1, _MOST),
            size=size,
            head=whole(value.get("head"), f"{where}.head", 0, HEAD_BYTES),
            head_sha256=_digest(value.get("head_sha256"), f"{where}.head_sha256"),
            tail=tail,
            tail_sha256=_digest(value.get("tail_sha256"), f"{where}.tail_sha256") if tail else "",
            inode=None if inode is None else whole(inode, f"{where}.inode", 0, 2**64),
        )

    def fits(self, descriptor: int) -> bool:
        """Whether the open file continues what the reader has."""
        status = os.fstat(descriptor)
        return (
            self.size <= status.st_size
            and self.inode in (None, status.st_ino)
            and _sha256(descriptor, 0, self.head) == self.head_sha256
            and (not self.tail or _sha256(descriptor, self.size - self.tail, self.tail) == self.tail_sha256)
        )


def whole(value: Any, where: str, low: int, high: int) -> int:
    """The whole number `value`; raises ValueError that names `where` it stood."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{where} = {value!r}: expected {low} to {high}")
    return value


def _digest(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where} = {value!r}: expected hex digits")
    return value.lower()


def _sha256(descriptor: int, offset: int, length: int) -> str:
    return hashlib.sha256(os.pread(descriptor, length, offset)).hexdigest()


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """New bytes of a file, at their offset in a generation."""

    generation: int
    offset: int
    data: bytes


class GrowingFile:
    """One appended file of a run. `sent` bytes of `generation` went out."""

    def __init__(self, folder: Folder, name: str, have: Have | None, tail: int | None) -> None:
        """Follow `name`; the reader has `have`. `tail`: send only so many last bytes of what is there."""
        self.name = name
        self.generation = have.generation if have else 1
        self.sent = 0
        self._folder = folder
        self._descriptor: int | None = None
        self._have = have
        self._tail_only = tail
        self._opened_before = False
        self._renamed = False
        self._first = b""
        self._last = b""
        self._holes: list[tuple[int, int]] = []

    def look(self) -> int | None:
        """The size up to which bytes can be sent now, or None when there is no such file."""
        status = self._folder.status(self.name)
        if self._descriptor is not None:
            held = os.fstat(self._descriptor)
            same = status is not None and (status.st_dev, status.st_ino) == (held.st_dev, held.st_ino)
            if not same:
                if not self._renamed and held.st_size > self.sent and self._is_continued(self._descriptor):
                    self._renamed = True
                    return held.st_size
                self._renamed = False
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
        self._last = data[-TAIL_BYTES:] if len(data) >= TAIL_BYTES else (self._last + data)[-TAIL_BYTES:]
        self.sent += len(data)
        return chunk

    @property
    def renamed(self) -> bool:
        """The file was renamed away; once its rest is sent, `look` is to be called again."""
        return self._renamed

    @property
    def grown(self) -> bool:
        """Whether the file that is held has bytes that were not sent."""
        return self._descriptor is not None and os.fstat(self._descriptor).st_size > self.sent

    @property
    def inode(self) -> int | None:
        """The inode of the file that `generation` is; None while there is none."""
        return None if self._descriptor is None else os.fstat(self._descriptor).st_ino

    def fill(self, generation: int, ranges: Iterable[tuple[int, int]]) -> None:
        """Send these older bytes as well, in order, if the reader means this generation."""
        if generation == self.generation:
            self._holes = [(start, min(stop, self.sent)) for start, stop in ranges if start < self.sent]

    def fill_chunk(self, most: int) -> Chunk | None:
        """At most `most` of the older bytes that were asked for; None when there are none (any more)."""
        while self._holes and self._descriptor is not None:
            start, stop = self._holes[0]
            data = os.pread(self._descriptor, min(most, stop - start), start) if start < stop else b""
            if data:
                self._holes[0] = (start + len(data), stop)
                return Chunk(self.generation, start, data)
            del self._holes[0]
        return None

    def rest(self) -> None:
        """Let go of the file; the next `look` goes on as for a reader who has what was sent."""
        if self._descriptor is None:
            return
        first, last = (hashlib.sha256(data).hexdigest() for data in (self._first, self._last))
        sizes = len(self._first), first, len(self._last), last
        self._have = Have(self.generation, self.sent, *sizes, self.inode)
        self._opened_before = False
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
            if have.fits(self._descriptor):
                self._continue_at(self._descriptor, have.size)
            else:
                self._start_over()
        elif self._tail_only is not None and size > self._tail_only:
            self._continue_at(self._descriptor, _line_start(self._descriptor, size - self._tail_only, size))
        return True

    def _continue_at(self, descriptor: int, offset: int) -> None:
        self.sent = offset
        self._first = os.pread(descriptor, min(offset, HEAD_BYTES), 0)
        start = max(0, offset - TAIL_BYTES)
        self._last = os.pread(descriptor, offset - start, start)

    def _start_over(self) -> None:
        self.generation += 1
        self.sent, self._first, self._last = 0, b"", b""
        self._holes = []

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
