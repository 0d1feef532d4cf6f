"""A lock on an open file or folder, which ends with its holder, however that ends. Standard library only."""

from __future__ import annotations

import fcntl


def hold(descriptor: int) -> None:
    """Lock `descriptor` for this process alone, as long as it stays open; does not wait.

    Raises BlockingIOError when somebody else holds it. Some network file systems know no locks: there nobody
    is kept out.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        pass
