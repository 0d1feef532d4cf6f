"""The runs of a workspace that somebody works on. Standard library only."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from remote_payload import identity, rundir

RUNS: Final = "runs"
"""The folder of run directories in a workspace."""


def run_folders(workspace: Path) -> list[Path]:
    """The run directories of `workspace` by name; none where it holds none, or may not be read."""
    try:
        return sorted(path for path in (workspace / RUNS).iterdir() if path.is_dir())
    except OSError:
        return []


def alive(status: Mapping[str, Any]) -> list[str]:
    """Which of supervisor and trainer live, by the `status` that a run has written."""
    boot = status.get("boot_id")
    return [who for who in ("supervisor", "trainer") if identity.state_of(status.get(who), boot) == "alive"]


def living_runs(workspace: Path) -> Iterator[dict[str, Any]]:
    """The runs of `workspace` that somebody works on."""
    for run_dir in run_folders(workspace):
        status = rundir.read_whole(run_dir / rundir.STATUS) or {}
        if not alive(status):
            continue
        progress = rundir.read_whole(run_dir / rundir.PROGRESS) or {}
        run = rundir.read_whole(run_dir / rundir.RUN) or {}
        devices = progress.get("devices")
        uuids = [device.get("uuid") for device in devices] if isinstance(devices, list) else []
        yield {
            "id": run_dir.name,
            "state": status.get("state"),
            "job": run.get("job"),
            "devices": _devices(run_dir / rundir.JOB),
            "uuids": sorted({uuid for uuid in uuids if isinstance(uuid, str) and uuid}),
        }


def _devices(job: Path) -> list[str]:
    try:
        values = tomllib.loads(job.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    named = [values.get(key) for key in ("targets", "drafters")]
    return sorted({str(device) for devices in named if isinstance(devices, list) for device in devices})
