"""Several measurements may warm up at once on one GPU, and measure one at a time."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def alone(lock: Path | None) -> Iterator[None]:
    """Hold the file `lock` while measuring; None: nobody else is there. Waits for those before it."""
    if lock is None:
        yield
        return
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
