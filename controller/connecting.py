"""Starting a command in a place, in a thread of its own, because it may hang.

A name that does not resolve, a host that drops packets, a frozen container: each can hold a call for many
seconds, and whoever waits must meanwhile stay able to end. An abandoned attempt lets go of what it gets.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Self

from controller.place import Place, Process


class Connecting:
    """One attempt to start `argv` in the place that `opener` makes; leaving the context closes both."""

    def __init__(self, opener: Callable[[], Place], argv: Sequence[str]) -> None:
        self._opener = opener
        self._argv = argv
        self._lock = threading.Lock()
        self._abandoned = False
        self._place: Place | None = None
        self._process: Process | None = None
        self._error: BaseException | None = None
        self._done = threading.Event()

    def __enter__(self) -> Self:
        threading.Thread(target=self._connect, name="connecting", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._abandoned = True
            if not self._done.is_set():
                return  # the thread closes what it gets
        self._close()

    def wait(self, timeout: float) -> bool:
        """Whether the attempt is over, after at most `timeout` seconds."""
        return self._done.wait(timeout)

    @property
    def process(self) -> Process:
        """The started command. Raises what starting it raised."""
        assert self._done.is_set()
        if self._error is not None:
            raise self._error
        assert self._process is not None
        return self._process

    def _connect(self) -> None:
        try:
            self._place = self._opener()
            self._process = self._place.start(self._argv)
        except BaseException as error:
            self._error = error
        with self._lock:
            self._done.set()
            abandoned = self._abandoned
        if abandoned:
            self._close()

    def _close(self) -> None:
        if self._process is not None:
            self._process.close()
        if self._place is not None:
            self._place.close()
