"""The thread that writes checkpoints beside training; `saving.py` says when it is used."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable

from remote_payload.train.run_control import RunControl

SAVER = "saver"
"""What the thread's name begins with."""


class Saver:
    """The thread that writes checkpoints beside training, one at a time."""

    def __init__(self, control: RunControl) -> None:
        self._control = control
        self._pool = concurrent.futures.ThreadPoolExecutor(1, SAVER)
        self._writing: concurrent.futures.Future[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether something is being written."""
        return self._writing is not None and not self._writing.done()

    def wait(self) -> None:
        """Until nothing is being written. Raises Aborted, or whatever writing raised."""
        while self._writing is not None:
            self._control.check()
            # What writing raises may be a TimeoutError too: a disk behind a network says it so.
            if concurrent.futures.wait([self._writing], timeout=0.5).done:
                self._writing.result()
                return

    def submit(self, write: Callable[[], None]) -> None:
        """Have `write` done beside training, after what is being written now."""
        self.wait()
        self._writing = self._pool.submit(write)
