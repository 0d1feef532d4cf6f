"""A run directory seen by a feed: opens what may be sent, and nothing that only pretends to be it.

A link in place of a file or of `crash/` would hand out any file of the container, so none is followed;
pipes and devices are not opened either. Standard library only.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

from remote_payload import rundir
from remote_payload.inotify import Watch

_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class RunFolder:
    """Descriptors of a run directory and of its `crash/`. Raises OSError when there is no such directory."""

    source: Final = "run"

    def __init__(self, path: Path) -> None:
        self._run = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._crash: int | None = None

    def gone(self) -> bool:
        """Whether the directory itself was removed."""
        return os.fstat(self._run).st_nlink == 0

    def watch(self, watch: Watch) -> None:
        """Have changes told by the files' names. Raises OSError where the kernel refuses.

        To be called again after every `crash_names`, which may find a new folder.
        """
        watch.add(self._run, lambda name: name)
        if self._crash is not None:
            watch.add(self._crash, lambda name: f"{rundir.CRASH}/{name}")

    def crash_names(self) -> list[str]:
        """The names `crash/...` that may be sent, sorted. Opens `crash/` anew."""
        if self._crash is not None:
            os.close(self._crash)
            self._crash = None
        try:
            self._crash = os.open(rundir.CRASH, _FLAGS | os.O_DIRECTORY, dir_fd=self._run)
            names = [f"{rundir.CRASH}/{name}" for name in os.listdir(self._crash)]  # noqa: PTH208 (a descriptor)
        except OSError:
            return []
        return sorted(name for name in names if rundir.is_mirrored(name))

    def open(self, name: str) -> int | None:
        """A descriptor of the plain file `name`, or None when there is none of that kind."""
        folder, base = self._place(name)
        if folder is None:
            return None
        with suppress(OSError):
            # A pipe or device must not be opened for reading at all, not even without waiting.
            if not stat.S_ISREG(os.stat(base, dir_fd=folder, follow_symlinks=False).st_mode):
                return None
            descriptor = os.open(base, _FLAGS, dir_fd=folder)
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                return descriptor
            os.close(descriptor)
        return None

    def status(self, name: str) -> os.stat_result | None:
        """The status of the file `name` itself, or None when there is nothing of that name."""
        folder, base = self._place(name)
        if folder is None:
            return None
        try:
            return os.stat(base, dir_fd=folder, follow_symlinks=False)
        except OSError:
            return None

    def _place(self, name: str) -> tuple[int | None, str]:
        folder, slash, base = name.rpartition("/")
        return (self._crash, base) if slash and folder == rundir.CRASH else (self._run, name)
