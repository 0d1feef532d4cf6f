"""Hashing at the pace of a transfer: beside the thread that receives, in pieces worth a hand-over."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any, Final, Self

from controller.errors import ConnectionLostError

_QUEUED: Final = 8
"""Chunks that may wait to be hashed."""


class Hashing:
    """Feeds a hash in a thread beside the one that receives: each can take a core of its own."""

    def __init__(self, digest: Any) -> None:
        self._digest = digest
        self._queue: queue.Queue[bytes | None] = queue.Queue(_QUEUED)
        self._thread = threading.Thread(target=self._run, name="hash", daemon=True)

    def update(self, data: bytes) -> None:
        """Hash `data` soon; waits while too much of it waits."""
        self._queue.put(data)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (data := self._queue.get()) is not None:
            self._digest.update(data)


def in_chunks(pieces: Iterator[bytes], size: int) -> Iterator[bytes]:
    """The same bytes in pieces of at least `size` but for the last; a lost connection loses none of them."""
    held: list[bytes] = []
    length = 0
    try:
        for piece in pieces:
            held.append(piece)
            length += len(piece)
            if length >= size:
                yield b"".join(held)
                held, length = [], 0
    except ConnectionLostError:
        if held:
            yield b"".join(held)
        raise
    if held:
        yield b"".join(held)
