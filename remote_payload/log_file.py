"""One log file anywhere on this machine, seen by a feed as if it were a run directory with little else.

For logs of programs that nobody here started. The file is sent under the name `train.log`. A link is
followed, since the user named it, and may be made to point elsewhere, which makes it another file. The
file may be absent for a while, as between the two steps of a rotation. Since no supervisor samples the GPUs
of such a program, the feed does, into a file without a name that is sent as `gpu.jsonl` and ends with it.
Standard library only.
"""

from __future__ import annotations

import difflib
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from remote_payload import rundir
from remote_payload.gpu import GpuSampler
from remote_payload.inotify import Watch

_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_NEAR = 5


def log_status(path: Path) -> dict[str, Any]:
    """Whether there is a log file at `path`: `{"ok": true, "size"}`, or `{"ok": false, "error", "near"}` with
    names of its folder.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return {"ok": False, "error": f"{path} is no plain file", "near": _near(path)}
        os.close(os.open(path, _FLAGS))
    except OSError as error:
        return {"ok": False, "error": f"{path}: {error.strerror}", "near": _near(path)}
    return {"ok": True, "size": status.st_size}


def _near(path: Path) -> list[str]:
    folder = path if path.is_dir() else path.parent
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if entry.is_file())
    except OSError:
        return []
    near = difflib.get_close_matches(path.name, names, n=_NEAR)
    near += [name for name in names if name.endswith((".log", ".out", ".txt")) and name not in near]
    return [str(folder / name) for name in near[:_NEAR]]


class LogFile:
    """The log file at `path`. Raises OSError when its folder cannot be opened."""

    source: Final = "log"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._samples: int | None = None
        with suppress(OSError):  # no room for a temporary file: then without GPUs
            with tempfile.TemporaryFile(prefix="dflashctl-gpu-") as file:
                self._samples = os.dup(file.fileno())
            records = rundir.RecordWriter(Path(f"/proc/self/fd/{self._samples}"), attempt=1)
            GpuSampler(records, on_problem=lambda text: records.write("gpu_problem", text=text)).start()

    def gone(self) -> bool:
        """Whether the file's folder was removed."""
        return os.fstat(self._folder).st_nlink == 0

    def watch(self, watch: Watch) -> None:
        """Have changes of the files told by their names. Raises OSError where the kernel refuses."""
        base = self._path.name
        watch.add(self._folder, lambda name: rundir.TRAIN_LOG if name == base else "")
        descriptor = self.open(rundir.TRAIN_LOG)  # a link's file lies in a folder that nobody watches
        if descriptor is not None:
            try:
                watch.add(descriptor, lambda _: rundir.TRAIN_LOG)
            finally:
                os.close(descriptor)
        if self._samples is not None:
            watch.add(self._samples, lambda _: rundir.GPU)

    def crash_names(self) -> list[str]:
        """None."""
        return []

    def open(self, name: str) -> int | None:
        """A descriptor of the file for `train.log` or the samples for `gpu.jsonl`; None for another name, or
        where there is no plain file.
        """
        if name == rundir.GPU and self._samples is not None:
            return os.dup(self._samples)
        status = self.status(name)
        if status is None or not stat.S_ISREG(status.st_mode):
            return None
        with suppress(OSError):
            return os.open(self._path.name, _FLAGS, dir_fd=self._folder)
        return None

    def status(self, name: str) -> os.stat_result | None:
        """The status of what `open` opens; None where that is nothing."""
        if name == rundir.GPU and self._samples is not None:
            return os.fstat(self._samples)
        if name != rundir.TRAIN_LOG:
            return None
        try:
            return os.stat(self._path.name, dir_fd=self._folder)
        except OSError:
            return None
