"""State directories of rigs: claimed by a lock, taken down the same way by their owner or a later rig.

A rig owns /var/tmp/dflashctl-rig-XXXXXXXX for as long as it holds the lock on that directory; the
kernel drops the lock with the process, however that ended. So a directory whose lock is free is a
leftover, and any rig may take it down. There is one way down, used by both.

A container's overlay stands on a read-only bind mount of / at `lower` in the state directory. It is
mounted in a mount namespace of the container's own only; should it ever be seen here, nothing is
deleted.
"""

import fcntl
import os
import shutil
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from tests.rig import cgroups
from tests.rig.cgroups import RigError

BASE = Path("/var/tmp")
PREFIX = "dflashctl-rig-"
LXC_LOCKS = Path("/run/lxc/lock")


def lock(state: Path) -> int | None:
    """A descriptor that holds the lock on `state`, or None where another process has it."""
    try:
        descriptor = os.open(state, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        mine, there = os.fstat(descriptor), os.lstat(state)
    except OSError:
        os.close(descriptor)
        return None
    if (mine.st_dev, mine.st_ino) != (there.st_dev, there.st_ino):
        os.close(descriptor)
        return None
    return descriptor


def claim() -> tuple[Path, int]:
    """A new state directory and the descriptor that holds its lock."""
    while True:
        state = Path(tempfile.mkdtemp(prefix=PREFIX, dir=BASE))
        # Between the two, another rig may take the new directory for a leftover.
        descriptor = lock(state)
        if descriptor is not None:
            return state, descriptor


def sweep() -> list[Path]:
    """Takes down what rigs left that are no more; returns their state directories.

    One that resists is told on stderr and stays: it is no reason against another rig.
    """
    swept = []
    for state in BASE.glob(PREFIX + "*"):
        with suppress(FileNotFoundError):
            info = state.lstat()
            ours = stat.S_ISDIR(info.st_mode) and stat.S_IMODE(info.st_mode) == 0o700
            if not ours or info.st_uid != os.geteuid():
                continue
            descriptor = lock(state)
            if descriptor is not None:
                try:
                    take_down(state)
                    swept.append(state)
                except (RigError, OSError) as error:
                    print(f"rig: leftover {state} cannot be taken down: {error}", file=sys.stderr)
                finally:
                    os.close(descriptor)
    return swept


def mounts_below(state: Path) -> list[str]:
    """Mount points at or below `state` that this process sees."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    points = [line.split(" ")[4] for line in lines]
    return [p for p in points if p == str(state) or p.startswith(f"{state}/")]


def take_down(state: Path) -> None:
    """Ends the processes of the rig at `state`, then removes its cgroups and files.

    The caller holds the lock on `state`. Raises `RigError` if something cannot be removed.
    """
    assert state.parent == BASE and state.name.startswith(PREFIX), state
    cgroups.kill(state.name)
    cgroups.remove(state.name)
    shutil.rmtree(LXC_LOCKS / state.relative_to("/"), ignore_errors=True)
    if seen := mounts_below(state):
        raise RigError(f"{seen} still mounted, so {state} stays; unmount it, then remove it")
    with suppress(FileNotFoundError):
        (state / "lower").rmdir()
    shutil.rmtree(state)
