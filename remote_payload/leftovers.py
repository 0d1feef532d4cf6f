"""What killed processes left half made. Standard library only."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path


def left_behind(paths: Iterable[Path], older_s: float) -> Iterator[Path]:
    """Those of `paths` that nobody has changed for `older_s` seconds.

    One that goes while it is looked at belongs to somebody at work.
    """
    for path in paths:
        try:
            age = time.time() - path.stat().st_mtime
        except FileNotFoundError:
            continue
        if age > older_s:
            yield path
