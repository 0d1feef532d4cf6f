"""The runs of a workspace, as the container itself sees them. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from remote_payload import rundir
from remote_payload.living import alive, run_folders


def list_runs(workspace: Path) -> Iterator[dict[str, Any]]:
    """`id`, `created`, `job`, `state` and `step` of every run in `workspace`, oldest first.

    What is not known is null. A state that is not an end, under a supervisor that does not live, is `lost`.
    """
    runs = map(_describe, run_folders(workspace))
    yield from sorted(runs, key=lambda run: (run["created"] or 0, run["id"]))


def _describe(run_dir: Path) -> dict[str, Any]:
    run = rundir.read_whole(run_dir / rundir.RUN) or {}
    status = rundir.read_whole(run_dir / rundir.STATUS) or {}
    progress = rundir.read_whole(run_dir / rundir.PROGRESS) or {}
    state = status.get("state")
    if state and state not in rundir.ENDED and "supervisor" not in alive(status):
        state = "lost"
    return {
        "id": run_dir.name,
        "created": run.get("created"),
        "job": run.get("job"),
        "state": state,
        "step": progress.get("step"),
    }
