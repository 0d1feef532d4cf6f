"""Resuming a run: the next attempt in the same run directory, under the controller's own payload.

The changes to the job are checked here too, before anything is sent, against the mirrored `job.toml`; the
payload decides once more, where the run is. The mirror folder is then opened again: a copy that was whole
and ended is not any more.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from controller.errors import ConnectionLostError, LaunchError, LocalStateError, UsageError
from controller.launch import examination, of_this_attempt, prepare
from controller.mirror_files import MIRROR, MirrorFiles
from controller.narration import Say
from controller.place import open_place
from controller.run_place import RunPlace, answer_of, by
from controller.run_records import table, text, whole
from controller.ship import Sent, converse, pack
from controller.text import safe_line
from remote_payload import rundir
from remote_payload.job import Job, JobError, differences, parse_change, resumable_keys

_LOCK_S: Final = 3.0
"""How long a view may still hold the mirror of a run that has ended."""


@dataclasses.dataclass(frozen=True, slots=True)
class Resumed:
    """A run that goes on; the field names are the keys of `resume --json`."""

    run: str
    attempt: int
    checkpoint: int | None
    """Step of the newest checkpoint; None: there is none, it begins anew."""
    changes: Mapping[str, Any]
    """`{key: [before, after]}`"""
    payload: str
    payload_before: str
    directory: str
    """The mirror folder."""


def resume(
    directory: Path,
    changes: Sequence[str],
    *,
    say: Say,
    progress: Sent | None = None,
    force: bool = False,
) -> Resumed:
    """Start the next attempt at the run mirrored in `directory`; `changes` are `key=value`.

    `force`: also on GPUs that somebody uses. Raises UsageError for a change that is not allowed, what
    `launch` raises, and LaunchError when the payload refuses: the run lives, or has finished.
    """
    run_place = RunPlace.read(directory)
    values = dict(_change(text) for text in changes)
    job = changed_job(directory / rundir.JOB, values, say)
    run_place.write(directory)  # as it was: that the folder takes nothing is to be known before the start
    payload = pack()
    asked = examination(run_place.host, job)
    with open_place(run_place.host) as place, converse(place, payload, asked, progress=progress) as session:
        prepare(session, job, say=say, force=force, own=run_place.run_id)
        order = {"run": of_this_attempt(place, payload), "changes": values, "by": by()}
        argv = ["resume", run_place.run_dir]
        try:
            answer, said = answer_of(session.ask(argv, json.dumps(order).encode()))
            if not answer.get("ok"):
                raise LaunchError(f"{run_place.run_id}: not resumed: {safe_line(said)}")
            run_place.model_copy(
                update={"payload_dir": session.directory, "digest": payload.digest, "python": place.python}
            ).write(directory)
        except ConnectionLostError as error:
            error.hint = f"Whether it goes on says: dflashctl status {run_place.run_id}"
            raise
        finally:
            reopen(directory)  # whatever came of it: the run may go on, by this order or by somebody else's
    return Resumed(
        run=run_place.run_id,
        attempt=whole(answer, "attempt") or 0,
        checkpoint=whole(answer, "checkpoint"),
        changes=table(answer, "changes"),
        payload=payload.digest,
        payload_before=text(answer, "payload_before"),
        directory=str(directory),
    )


def changed_job(path: Path, changes: Mapping[str, Any], say: Say) -> Job:
    """The run's job with `changes`, each of which is told. Raises UsageError for what is not allowed."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LocalStateError(
            f"{path}: the run's job cannot be read ({getattr(error, 'strerror', None) or error})",
            f"To have it copied anew: rm {shlex.quote(str(path.with_name(MIRROR)))} ; then dflashctl status.",
        ) from error
    try:
        before = Job.from_mapping(values, str(path))
        after = Job.from_mapping(values | dict(changes), f"{path} with --set")
    except JobError as error:
        raise UsageError(str(error)) from error
    changed = differences(before, after)
    for change in changed:
        mark = "" if change.allowed else "  (not allowed)"
        say(f"{change.key}: {change.before!r} becomes {change.after!r}{mark}")
    refused = [change.key for change in changed if not change.allowed]
    if refused:
        raise UsageError(
            f"a resumed run keeps its job; {', '.join(refused)} cannot change",
            f"What may change: {', '.join(resumable_keys())}; and drafters, with as many rows a step. Another"
            " job is another run: dflashctl launch",
        )
    return after


def reopen(directory: Path) -> None:
    """Have the mirror in `directory` followed again, though it once said that the run has ended."""
    files = MirrorFiles(directory)
    deadline = time.monotonic() + _LOCK_S
    try:
        while not files.lock():  # whoever still holds it follows the run anyway, or is about to let go
            if time.monotonic() > deadline:
                return
            time.sleep(0.05)
        left = files.load()
        if left:
            for key in ("last_heard", "beat", "clock_difference_s", "since", "tries"):
                files.connection[key] = left.get(key)
            files.connection |= {"state": "connecting", "complete": False, "next_try": None}
            files.save()
    finally:
        files.close()


def _change(given: str) -> tuple[str, Any]:
    try:
        return parse_change(given)
    except JobError as error:
        raise UsageError(str(error)) from error
