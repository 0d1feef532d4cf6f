"""Several measurements may warm up at once on one GPU, and measure one at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def alone(lock: Path | None) -> Iterator[None]:
    """Hold the file `lock` while measuring; None: nobody else is there. Waits for those before it.

    A file beside it, `LOCK.PID.ready`, tells that this process is warm: whoever holds the lock from the start
    can wait until all are, so that no warm-up disturbs a measurement.
    """
    if lock is None:
        yield
        return
    lock.with_name(f"{lock.name}.{os.getpid()}.ready").touch()
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
