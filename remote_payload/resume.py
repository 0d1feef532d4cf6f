"""Resuming a run: the next attempt in the same run directory, under a new supervisor.

The job is the run's own. What the order changes of it is compared key by key, and refused unless the key
is `resumable` (`job.differences`); the trainer compares its checkpoint with the job once more. The payload
is the one that was asked, so a run may go on under a newer one: `run.json` and `supervisor.jsonl` say which.
One resume at a time: it holds `control/` while it looks, writes and waits. Standard library only.
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from remote_payload import job, lock, rundir
from remote_payload.living import alive
from remote_payload.rundir import State
from remote_payload.start import StartError, detach
from remote_payload.supervisor import last_attempt

LONGER = ("steps", "epochs")
"""The keys that give a finished run something to do."""
REPLACED = ("payload", "python", "env", "dflashctl")
"""The fields of run.json that are this attempt's."""


@dataclasses.dataclass(frozen=True, slots=True)
class Resumed:
    """A run that goes on."""

    attempt: int
    pid: int
    """The new supervisor's."""
    changes: list[job.Change]
    payload_before: str | None
    """Digest of the payload of the attempt before."""
    checkpoint: int | None
    """Step of the newest checkpoint, from which the trainer goes on; None: from the beginning."""


def resume(run_dir: Path, run: Mapping[str, Any], changes: Mapping[str, Any], by: str | None) -> Resumed:
    """Start the next attempt at the run in `run_dir`.

    `run`: the fields `REPLACED` of run.json; `changes`: keys of the job and their new values. Raises
    StartError: no run, it lives, it has finished, a change is not allowed, or the supervisor fails.
    """
    before = rundir.read_whole(run_dir / rundir.RUN)
    if before is None:
        raise StartError(f"{run_dir}: there is no run (no {rundir.RUN}); was it removed? Launch a new one")
    with _alone(run_dir):
        status = rundir.read_whole(run_dir / rundir.STATUS) or {}
        for who in alive(status):
            state = status.get("state")
            raise StartError(f"the run is alive ({state}, {who} {status[who]['pid']}): stop it first")
        path = run_dir / rundir.JOB
        after, changed = _changed(path, changes)
        finished = status.get("state") == State.FINISHED and status.get("exit_code") == 0
        if finished and not any(change.key in LONGER for change in changed):
            raise StartError("the run has finished; to train it longer give it more: --set steps=N")
        newest = max(rundir.checkpoint_steps(run_dir), default=None)
        if newest is not None and 0 < after.steps < newest:
            raise StartError(f"steps = {after.steps}, but the newest checkpoint is of step {newest} already")
        attempt = last_attempt(run_dir) + 1
        record = before | {key: run[key] for key in REPLACED if key in run} | {"attempt": attempt}
        try:
            rundir.write_whole(run_dir / rundir.RUN, rundir.encode(record))
            if changed:
                rundir.write_whole(path, after.to_toml().encode())
            records = rundir.RecordWriter(run_dir / rundir.SUPERVISOR_LOG, attempt=attempt)
            records.write(
                "resume",
                by=by,
                payload=record.get("payload"),
                payload_before=before.get("payload"),
                changes={change.key: [change.before, change.after] for change in changed},
            )
            records.close()
            pid = detach(run_dir, attempt)
        except OSError as error:
            raise StartError(f"{run_dir} cannot be written ({error.strerror})") from error
        return Resumed(attempt, pid, changed, before.get("payload"), newest)


def _changed(path: Path, changes: Mapping[str, Any]) -> tuple[job.Job, list[job.Change]]:
    """The run's job with `changes`, and how it differs. Raises StartError for what is not allowed."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
        before = job.Job.from_mapping(values, rundir.JOB)
        after = job.Job.from_mapping(values | dict(changes), f"{rundir.JOB} with --set")
    except OSError as error:
        raise StartError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:  # JobError, and text that is no TOML or no UTF-8
        raise StartError(str(error)) from error
    changed = job.differences(before, after)
    refused = [f"{c.key} from {c.before!r} to {c.after!r}" for c in changed if not c.allowed]
    if refused:
        raise StartError(
            f"a resumed run keeps its job; this would change {', '.join(refused)}. What may change:"
            f" {', '.join(job.resumable_keys())}"
        )
    return after, changed


@contextmanager
def _alone(run_dir: Path) -> Iterator[None]:
    try:
        (run_dir / rundir.CONTROL).mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(run_dir / rundir.CONTROL, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise StartError(f"{run_dir}: cannot be used ({error.strerror})") from error
    try:
        try:
            lock.hold(descriptor)
        except BlockingIOError as error:
            raise StartError("somebody else is resuming this run right now") from error
        yield
    finally:
        os.close(descriptor)
