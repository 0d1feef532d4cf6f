"""Starting a run: make its directory, then a supervisor that outlives the connection it was started from.

The directory's `mkdir` decides who wins when one id is started twice. The supervisor gets a session of its
own and none of our descriptors, since one inherited pipe would hold the ssh channel open until the run
ends. It is forked once, not twice: it never opens a terminal, and as our child it can be seen to fail
while we wait for its first `status.json`. Standard library only.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from remote_payload import includes, lock, rundir
from remote_payload.living import RUNS, living_runs

PAYLOAD = Path(__file__).resolve().parent
SUPERVISOR_ERRORS = "supervisor.err"
"""The supervisor's own stderr in the run directory: empty unless it fails itself. Never mirrored."""

_PATIENCE_S = 25.0


class StartError(Exception):
    """The run cannot be started; the text says why in one sentence."""


def start(
    workspace: Path,
    run_id: str,
    run: Mapping[str, Any],
    job: str,
    *,
    known: Collection[str] | None = None,
    include: Sequence[Mapping[str, Any]] = (),
) -> tuple[Path, int]:
    """Create `<workspace>/runs/<run_id>/` and start its supervisor; returns the directory and its pid.

    `run`: fields of run.json; `job`: text of job.toml; `known`: the living runs that the launch has seen and
    takes into account (None: any may live); `include`: the files that it gets (`includes.put`). Raises
    StartError when the id is taken or no id, a needed field is missing, another run was started meanwhile,
    the folder cannot be written, or the supervisor fails at once.
    """
    if not rundir.is_run_id(run_id):
        raise StartError(f"{run_id!r} is no run id: 1 to 63 lower-case letters, digits and dashes")
    for key in ("python", "job"):
        if not isinstance(run.get(key), str) or not run[key]:
            raise StartError(f"run.{key} is missing: expected a string")
    env = run.get("env", {})
    if not isinstance(env, dict) or not all(isinstance(value, str) for value in env.values()):
        raise StartError("run.env: expected an object of strings")
    run_dir = Path(os.path.abspath(workspace)) / RUNS / run_id  # noqa: PTH100 (links stay as named)
    try:
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(run_dir.parent):
            new = sorted({living["id"] for living in living_runs(workspace)} - set(known or ()))
            if known is not None and new:
                raise StartError(f"another run was started meanwhile: {', '.join(new)}; launch again")
            return _make(run_dir, run, job, include)
    except OSError as error:
        raise StartError(f"{run_dir} cannot be made ({error.strerror})") from error


def _make(
    run_dir: Path, run: Mapping[str, Any], job: str, include: Sequence[Mapping[str, Any]]
) -> tuple[Path, int]:
    try:
        run_dir.mkdir(mode=0o700)
    except FileExistsError as error:
        raise StartError(f"{run_dir} exists: a run of this id was started before") from error
    except OSError as error:
        raise StartError(f"{run_dir} cannot be made ({error.strerror})") from error
    record = rundir.stamp("run", {"attempt": 1, "created": round(time.time(), 3), **run})
    record |= {"id": run_dir.name, "workspace": str(run_dir.parents[1])}
    try:
        (run_dir / rundir.CONTROL).mkdir(mode=0o700)
        (run_dir / rundir.CRASH).mkdir(mode=0o700)
        includes.put(run_dir.parents[1], run_dir, include)
        rundir.write_whole(run_dir / rundir.JOB, job.encode())
        rundir.write_whole(run_dir / rundir.RUN, rundir.encode(record))
        return run_dir, detach(run_dir, 1)
    except includes.IncludeError as error:
        raise StartError(str(error)) from error
    except OSError as error:
        raise StartError(f"{run_dir} cannot be written ({error.strerror})") from error


@contextmanager
def _one_at_a_time(runs: Path) -> Iterator[None]:
    """Hold the folder of runs: of two launches at once, the second sees the first one's run."""
    descriptor = os.open(runs, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                lock.hold(descriptor)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise StartError(f"{runs}: another launch has held it for {_PATIENCE_S:g} s") from None
                time.sleep(0.02)
        yield
    finally:
        os.close(descriptor)


def detach(run_dir: Path, attempt: int) -> int:
    """Start the supervisor of `attempt`, wait until it has written its first status, and return its pid.

    Raises StartError when it ends before that, or takes longer than `_PATIENCE_S`.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    errors = os.open(run_dir / SUPERVISOR_ERRORS, flags, 0o600)
    try:
        process = subprocess.Popen(
            [sys.executable, "-S", str(PAYLOAD), "supervise", str(run_dir)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
            cwd="/",
        )
    finally:
        os.close(errors)
    deadline = time.monotonic() + _PATIENCE_S
    while not _speaks(run_dir, attempt):
        if process.poll() is not None:
            raise StartError(f"the supervisor ended at once: {_said(run_dir)}")
        if time.monotonic() > deadline:
            process.terminate()  # a run that was called refused must not train unseen
            process.returncode = 0
            raise StartError(
                f"the supervisor wrote no {rundir.STATUS} within {_PATIENCE_S:g} s, and was told to end"
            )
        time.sleep(0.01)
    process.returncode = 0  # it is not ours to wait for: Popen would warn of a child left behind
    return process.pid


def _speaks(run_dir: Path, attempt: int) -> bool:
    written = (rundir.read_whole(run_dir / rundir.STATUS) or {}).get("attempt")
    return isinstance(written, int) and written >= attempt


def _said(run_dir: Path) -> str:
    with suppress(OSError):
        lines = (run_dir / SUPERVISOR_ERRORS).read_text(errors="replace").strip().splitlines()
        if lines:
            return lines[-1]
    return f"it said nothing; see {run_dir / SUPERVISOR_ERRORS}"
