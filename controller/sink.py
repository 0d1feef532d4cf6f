"""Where the bytes of a transfer go: to a file and through a hash, beside the thread that receives them.

A disk that is busy, or a hash that takes a core, then holds nobody up while the network has bytes, and
memory stays bounded: at most `_QUEUED` chunks wait.
"""

from __future__ import annotations

import os
import queue
import threading
from io import FileIO
from types import TracebackType
from typing import Any, Final, Self

_QUEUED: Final = 16
_UNSYNCED: Final = 64 << 20
"""Most bytes that wait for the disk: it works beside the network, and little is left for the end."""


class Sink:
    """Writes to `file` and feeds `digest` in a thread of its own; leaving the context waits for it."""

    def __init__(self, file: FileIO, digest: Any) -> None:
        self._file = file
        self._digest = digest
        self._queue: queue.Queue[memoryview | None] = queue.Queue(_QUEUED)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="sink", daemon=True)

    def put(self, data: memoryview) -> None:
        """Take `data`; waits while too much of it waits. Raises what an earlier write raised: OSError."""
        if self._error is not None:
            raise self._error
        self._queue.put(data)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._queue.put(None)
        self._thread.join()
        if self._error is not None and error is None:
            raise self._error

    def _run(self) -> None:
        unsynced = 0
        while (data := self._queue.get()) is not None:
            if self._error is not None:
                continue  # the rest is of no use, and whoever puts it must not wait
            try:
                left = data
                while left:
                    left = left[self._file.write(left) :]
                self._digest.update(data)
                unsynced += len(data)
                if unsynced >= _UNSYNCED:
                    os.fsync(self._file.fileno())
                    unsynced = 0
            except Exception as error:
                self._error = error
