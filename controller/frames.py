"""The feed's frames, decoded as the bytes come (`docs/rundir.md`, protocol version 1).

The other end is not trusted: it is whatever answered at the address. So every header is checked before a
byte of its body is used, nothing grows without a bound, and a file name that `rundir.is_mirrored` refuses
never leaves this module. The body of an `append` is handed on in the pieces in which it arrives, so a slow
line loses nothing of a frame that a break cut in two, and a 1 MiB frame is never held in memory.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any, Final

from controller.errors import ProtocolError
from remote_payload import rundir

MAX_NOISE_BYTES: Final = 1 << 20
"""A login that prints more than this before the nonce is not one that a feed can speak through."""

MAX_HEADER_BYTES: Final = 1 << 18
MAX_NAME_BYTES: Final = 200
_MAX_OFFSET: Final = 1 << 62
_MAX_INODE: Final = 1 << 64


class FeedRefusedError(ProtocolError):
    """The feed will not serve this reader, now or later: trying again changes nothing."""


@dataclasses.dataclass(frozen=True, slots=True)
class Hello:
    """The feed's first frame, of a protocol and schema that we speak; `run`: whom it serves."""

    run: str


@dataclasses.dataclass(frozen=True, slots=True)
class Append:
    """Bytes of an appended file at their offset; one frame on the wire may come as several of these."""

    file: str
    generation: int
    offset: int
    data: bytes | memoryview


@dataclasses.dataclass(frozen=True, slots=True)
class Replace:
    """The whole content of a small file."""

    file: str
    sequence: int
    data: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life. `files`: name to (generation, size in bytes); `inodes`: name to inode, where it is
    known; `record`: all of it, as sent.
    """

    t: float | None
    supervisor: str
    trainer: str
    files: dict[str, tuple[int, int]]
    inodes: dict[str, int]
    record: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """The feed says why it will not go on."""

    text: str


Frame = Hello | Append | Replace | Beat | Refusal


class FrameDecoder:
    """Turns one feed's stdout into frames, whatever the borders of the chunks.

    Raises ProtocolError for anything that the protocol does not allow; the stream is unusable then.
    """

    def __init__(self, nonce: str) -> None:
        self._mark = nonce.encode() + b"\n"
        self._rest = b""  # what is neither a body nor, so far, a line
        self._small = bytearray()  # the body of a small file, which is handed on whole
        self._body: dict[str, Any] | None = None  # header whose bytes are still to come
        self._left = 0
        self._offset = 0
        self._ignored = False  # the body of a frame kind of a later protocol
        self._greeted = False
        self.noise = b""
        """What came before the nonce: a login's greeting, or why there is no feed."""
        self.started = False
        """Whether the nonce was seen."""

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that `data` completes, in order."""
        if self._rest:
            data = self._rest + data
        position = 0
        try:
            if not self.started:
                position = self._after_noise(data)
            while self.started:
                if self._body is not None:
                    piece = memoryview(data)[position : position + self._left]
                    if self._left and not piece:
                        return
                    position += len(piece)
                    frame = self._piece(piece)
                else:
                    end = data.find(b"\n", position)
                    if end < 0:
                        if len(data) - position > MAX_HEADER_BYTES:
                            raise _nonsense("a header line without an end")
                        return
                    line = data[position:end]
                    position = end + 1
                    frame = self._header(line)
                if frame is not None:
                    yield frame
        finally:
            self._rest = data[position:]

    def _after_noise(self, data: bytes) -> int:
        """Where the first frame begins in `data`; 0 while that is not known."""
        found = data.find(self._mark)
        if found >= 0:
            self.noise = data[:found][-65536:]
            self.started = True
            return found + len(self._mark)
        self.noise = data[-65536:]
        if len(data) > MAX_NOISE_BYTES:
            raise ProtocolError(
                f"the login printed more than {MAX_NOISE_BYTES} bytes and no feed began",
                "look at what the account's shell start files print; a feed needs a quiet login",
            )
        return 0

    def _header(self, line: bytes) -> Frame | None:
        if len(line) > MAX_HEADER_BYTES:
            raise _nonsense(f"a header of {len(line)} bytes")
        record = rundir.decode(line)
        kind = record.get("frame") if record else None
        if record is None or not isinstance(kind, str):
            raise _nonsense(f"a line that is no frame: {_shown(line)}")
        if not self._greeted and kind not in ("hello", "error"):
            raise _nonsense(f"a frame before hello: {_shown(line)}")
        if kind == "hello":
            return self._hello(record)
        if kind == "error":
            return Refusal(str(record.get("text", ""))[:4096])
        if kind == "beat":
            return _beat(record)
        if kind not in ("append", "replace"):
            if "size" in record:  # a kind that a later feed of the same protocol may add
                self._expect(record, _integer(record, "size", 0, rundir.MAX_FRAME_BYTES))
                self._ignored = True
            return None
        name = record.get("file")
        if (
            not isinstance(name, str)
            or not rundir.is_mirrored(name)
            or len(name) > MAX_NAME_BYTES
            or (name in rundir.REPLACED) != (kind == "replace")
        ):
            raise _nonsense(f"a file that it may not {kind}: {_shown(str(name).encode())}")
        size = _integer(record, "size", 0, rundir.MAX_FRAME_BYTES)
        if kind == "append":
            _integer(record, "generation", 1, _MAX_OFFSET)
            self._offset = _integer(record, "offset", 0, _MAX_OFFSET)
        else:
            _integer(record, "sequence", 0, _MAX_OFFSET)
        self._expect(record, size)
        return None

    def _expect(self, record: dict[str, Any], size: int) -> None:
        self._body, self._left, self._ignored = record, size, False

    def _piece(self, piece: memoryview) -> Frame | None:
        header = self._body
        assert header is not None
        self._left -= len(piece)
        if not self._left:
            self._body = None
        if self._ignored:
            return None
        if header["frame"] == "append":
            offset = self._offset
            self._offset += len(piece)
            return Append(header["file"], header["generation"], offset, piece)
        self._small += piece
        if self._left:
            return None
        content = bytes(self._small)
        self._small.clear()
        return Replace(header["file"], header["sequence"], content)

    def _hello(self, record: dict[str, Any]) -> Hello:
        for key, ours in (("protocol", rundir.PROTOCOL_VERSION), ("schema", rundir.SCHEMA_VERSION)):
            theirs = record.get(key)
            if theirs != ours:
                shown = str(theirs) if isinstance(theirs, int) else _shown(json.dumps(theirs).encode())
                raise FeedRefusedError(
                    f"the feed speaks {key} version {shown}, this dflashctl speaks {ours}",
                    "use the dflashctl that launched the run, or launch anew",
                )
        self._greeted = True
        return Hello(str(record.get("run", "")))


def _beat(record: dict[str, Any]) -> Beat:
    files: dict[str, tuple[int, int]] = {}
    inodes: dict[str, int] = {}
    listed = record.get("files")
    for name, entry in listed.items() if isinstance(listed, dict) else ():
        if not rundir.is_mirrored(name) or len(name) > MAX_NAME_BYTES or name in rundir.REPLACED:
            continue
        if not isinstance(entry, dict):
            raise _nonsense(f"a beat with a file that is no object: {_shown(name.encode())}")
        files[name] = (
            _integer(entry, "generation", 1, _MAX_OFFSET),
            _integer(entry, "size", 0, _MAX_OFFSET),
        )
        if entry.get("inode") is not None:
            inodes[name] = _integer(entry, "inode", 0, _MAX_INODE)
    return Beat(
        t=_time(record),
        supervisor=str(record.get("supervisor", "")),
        trainer=str(record.get("trainer", "")),
        files=files,
        inodes=inodes,
        record=record,
    )


def _time(record: dict[str, Any]) -> float | None:
    t = record.get("t")
    if isinstance(t, bool) or not isinstance(t, int | float) or not abs(t) < 1e12:  # so NaN is none
        return None
    return float(t)


def _integer(record: dict[str, Any], key: str, low: int, high: int) -> int:
    value = record.get(key)
    if type(value) is not int or not low <= value <= high:
        raise _nonsense(f"{key} {_shown(repr(value).encode())}, expected a number from {low} to {high}")
    return value


def _shown(line: bytes) -> str:
    return ascii(line[:80].decode(errors="replace"))


def _nonsense(what: str) -> ProtocolError:
    return ProtocolError(
        f"the feed sent {what}", "is the payload at that address the one that dflashctl shipped?"
    )
