"""One log file anywhere on this machine, seen by a feed as if it were a run directory with nothing else.

For logs of programs that nobody here started. The file is sent under the name `train.log`. A link is
followed, since the user named it, and may be made to point elsewhere, which makes it another file. The
file may be absent for a while, as between the two steps of a rotation. Standard library only.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from remote_payload import rundir
from remote_payload.inotify import Watch

_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


class LogFile:
    """The log file at `path`. Raises OSError when its folder cannot be opened."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def gone(self) -> bool:
        """Whether the file's folder was removed."""
        return os.fstat(self._folder).st_nlink == 0

    def watch(self, watch: Watch) -> None:
        """Have changes of the file told as `train.log`. Raises OSError where the kernel refuses."""
        base = self._path.name
        watch.add(self._folder, lambda name: rundir.TRAIN_LOG if name == base else "")
        descriptor = self.open(rundir.TRAIN_LOG)  # a link's file lies in a folder that nobody watches
        if descriptor is not None:
            try:
                watch.add(descriptor, lambda _: rundir.TRAIN_LOG)
            finally:
                os.close(descriptor)

    def crash_names(self) -> list[str]:
        """None."""
        return []

    def open(self, name: str) -> int | None:
        """A descriptor of the file for `train.log`; None for any other name or where it is no plain file."""
        status = self.status(name)
        if status is None or not stat.S_ISREG(status.st_mode):
            return None
        with suppress(OSError):
            return os.open(self._path.name, _FLAGS, dir_fd=self._folder)
        return None

    def status(self, name: str) -> os.stat_result | None:
        """The status of the file for `train.log`; None for any other name or where there is none."""
        if name != rundir.TRAIN_LOG:
            return None
        try:
            return os.stat(self._path.name, dir_fd=self._folder)
        except OSError:
            return None
