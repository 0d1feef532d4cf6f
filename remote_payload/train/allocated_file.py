"""Files that are written through a memory map, with their place on the disk taken before.

A page of a hole that is written when the disk has no room left ends the process by SIGBUS: no exception, no
crash report, perhaps after a day. So the room is taken at the start, where its lack is an error like others.
"""

from __future__ import annotations

import os
from pathlib import Path


def allocate(path: Path, size: int) -> None:
    """Give `path` `size` bytes that are its own on the disk; what it holds stays, what is new is 0.

    Raises OSError when there is no room, and leaves no new file behind then.
    """
    is_new = not path.exists()
    with path.open("ab") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError:
            if is_new:
                path.unlink(missing_ok=True)
            raise
