"""The reading end of the payload's `send`: its frames, one file after another, with bounded memory."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from controller.errors import ConnectionLostError, PullError
from controller.place import Process
from controller.run_records import rows, text, whole
from controller.text import last_line, safe_line
from controller.timing import Timing
from remote_payload import rundir

_LONGEST_LINE: Final = 8 << 20


class PullStream:
    """Frames of one sender. Every method raises ConnectionLostError, and PullError for its `error` frame."""

    def __init__(self, process: Process, request: Mapping[str, Any], timing: Timing) -> None:
        self._process = process
        self._timing = timing
        self._data, self._at = b"", 0  # received, and how much of it was read
        self._next_ping = 0.0
        self.sha256 = ""
        """Of the file whose `data` was read to its end, as the sender computed it."""
        self._send(request)

    def files(self) -> list[tuple[str, int]]:
        """Names and sizes of what will come."""
        frame = self._frame("files")
        found = [(text(row, "file"), whole(row, "size")) for row in rows(frame, "files")]
        return [(name, size) for name, size in found if size is not None and size >= 0]

    def have(self, have: Mapping[str, Any]) -> None:
        """Say what we have of them."""
        self._send(have or {"": None})  # an empty object would be a ping

    def begin(self, name: str) -> int:
        """The offset at which the bytes of `name`, the next file, begin."""
        frame = self._frame("begin")
        if text(frame, "file") != name:
            raise PullError(f"the place sends {safe_line(text(frame, 'file'))!r} where {name!r} was due")
        return whole(frame, "offset") or 0

    def data(self) -> Iterator[memoryview]:
        """The bytes of the present file, to its end."""
        while True:
            frame = self._frame("data", "end")
            if text(frame, "frame") == "end":
                self.sha256 = text(frame, "sha256")
                return
            left = whole(frame, "size") or 0
            if not 0 < left <= rundir.MAX_FRAME_BYTES:
                raise PullError(f"the place sends a frame of {left} bytes")
            while left:
                if self._at == len(self._data):
                    self._data, self._at = self._some(), 0
                piece = memoryview(self._data)[self._at : self._at + left]
                self._at += len(piece)
                left -= len(piece)
                yield piece

    def finish(self) -> None:
        """Read the last frame."""
        self._frame("done")

    def close(self) -> None:
        """Let go of the sender."""
        self._process.close()

    def _frame(self, *kinds: str) -> Mapping[str, Any]:
        while True:
            frame = rundir.decode(self._line())
            kind = text(frame or {}, "frame")
            if frame is None or not kind:
                raise PullError("the place sent what is no frame")
            if kind == "beat":
                continue
            if kind == "error":
                raise PullError(safe_line(text(frame, "text")))
            if kind not in kinds:
                raise PullError(f"the place sent {safe_line(kind)!r} where {' or '.join(kinds)} was due")
            return frame

    def _line(self) -> bytes:
        while (end := self._data.find(b"\n", self._at)) < 0:
            if len(self._data) - self._at > _LONGEST_LINE:
                raise PullError("the place sent a line without an end")
            self._data, self._at = self._data[self._at :] + self._some(), 0
        line = self._data[self._at : end]
        self._at = end + 1
        return line

    def _some(self) -> bytes:
        deadline = time.monotonic() + self._timing.silence_s
        while True:
            self._ping()
            data = self._process.receive(self._timing.poll_s)
            if data:
                return data
            if data == b"":
                status = self._process.wait(1.0)
                said = last_line(self._process.stderr)
                if status == 64 or (status == 2 and "can't open file" in said):
                    raise UnfitPayloadError
                raise ConnectionLostError(f"the sender ended with status {status}: {said}")
            if time.monotonic() > deadline:
                raise ConnectionLostError(f"nothing came for {self._timing.silence_s:g} s")

    def _ping(self) -> None:
        if time.monotonic() >= self._next_ping:
            with contextlib.suppress(ConnectionLostError):  # it may have ended, and all of it be here to read
                self._process.send(b"{}\n")
            self._next_ping = time.monotonic() + self._timing.ping_s

    def _send(self, line: Mapping[str, Any]) -> None:
        self._process.send(json.dumps(line).encode() + b"\n")


class UnfitPayloadError(Exception):
    """The run's payload in the place knows no `send`, or was removed."""
