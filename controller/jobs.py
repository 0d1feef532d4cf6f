"""Which job a user means: one of the payload's own by name, or a file."""

from __future__ import annotations

import difflib
from pathlib import Path

from controller.errors import UsageError
from controller.paths import expanded
from controller.ship import PACKAGE
from remote_payload import job
from remote_payload.job import Job, JobError


def names(folder: Path = PACKAGE / "jobs") -> list[str]:
    """The jobs that come with the payload."""
    return sorted(path.stem for path in folder.glob("*.toml"))


def load(text: str, changes: list[str]) -> tuple[str, Job]:
    """Name and checked job for `--job text`, with `--set` changes. Raises UsageError."""
    if text.endswith(".toml") or "/" in text:
        path = expanded(text)
    elif text in names():
        path = PACKAGE / "jobs" / f"{text}.toml"
    else:
        near = difflib.get_close_matches(text, names(), n=3, cutoff=0.5)
        meant = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(names())}"
        raise UsageError(f"--job {text}: there is no such job; {meant}", "A file's name ends in .toml.")
    try:
        return path.stem, job.load(path, changes)
    except JobError as error:
        raise UsageError(str(error)) from error
