"""The two ends of a feed: frames to stdout, lines from stdin. Standard library only."""

from __future__ import annotations

import fcntl
import json
import os
import queue
import select
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

_MOST_LINE = 4 << 20
_PIPE_BYTES = 1 << 20  # a frame fits: fewer turns between us and whoever reads


class Output:
    """Frames on stdout, past Python's own buffer."""

    def __init__(self) -> None:
        with suppress(OSError):  # no pipe, or the user's share of pipe memory is used up
            fcntl.fcntl(1, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._writable = select.poll()
        self._writable.register(1, select.POLLOUT)

    def frame(self, kind: str, data: bytes | None = None, /, **fields: Any) -> None:
        """Write one frame: a line of JSON, and `data` behind it where there is any."""
        size = {} if data is None else {"size": len(data)}
        line = json.dumps({"frame": kind, **fields, **size}, separators=(",", ":")).encode() + b"\n"
        self.write(line, data or b"")

    def write(self, *parts: bytes) -> None:
        """Write all bytes, however long the reader takes. Raises BrokenPipeError when it has gone."""
        views = [memoryview(part) for part in parts if part]
        while views:
            try:
                written = os.writev(1, views)
            except BlockingIOError:  # whoever started us had set the pipe so
                self._writable.poll()
                continue
            while views and written >= len(views[0]):
                written -= len(views.pop(0))
            if views:
                views[0] = views[0][written:]


class Listener:
    """Lines from the reader, in a thread that ends the process when the reader is gone or silent.

    `woken` can be read when there is more than pings.
    """

    def __init__(self, silence: float) -> None:
        self._silence = silence
        self.woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="listener", daemon=True).start()

    def first(self) -> bytes:
        """Wait for the first line; the listener ends the process if none comes."""
        return self._lines.get()

    def later(self) -> Iterator[bytes]:
        """Further lines so far that ask for something; plain pings are left out."""
        with suppress(BlockingIOError):
            os.read(self.woken, 4096)
        while True:
            try:
                line = self._lines.get_nowait()
            except queue.Empty:
                return
            yield line

    def _listen(self) -> None:
        buffer = b""
        poll = select.poll()
        poll.register(0, select.POLLIN)
        try:
            while poll.poll(self._silence * 1000):
                data = os.read(0, 65536)
                if not data:
                    break
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines:
                    if line.strip() not in (b"", b"{}"):
                        self._lines.put(line)
                        with suppress(BlockingIOError):
                            os.write(self._wake, b"x")
                if len(buffer) > _MOST_LINE:
                    break
        finally:
            # The main thread may be stuck in a write to a pipe that nobody empties; nothing of it
            # needs to be finished.
            os._exit(0)
