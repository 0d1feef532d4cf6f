"""A run's health by the small files of its mirror alone: no history is read, so it may be asked often."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from controller.health import Health, Limits, judge
from controller.mirror_files import MIRROR
from controller.run_records import Record, number, whole
from controller.timing import Timing
from remote_payload import rundir


@dataclasses.dataclass(frozen=True, slots=True)
class Glance:
    """What one look found."""

    health: Health
    attempt: int
    since: float | None
    """When its supervisor last changed the state; Unix seconds of the container."""
    progress: Record
    """`progress.json`, of whatever attempt; empty when there is none."""


def glance(directory: Path, now: float) -> Glance:
    """The run mirrored in `directory` at the laptop's Unix time `now`. What cannot be read is absent."""
    status = rundir.read_whole(directory / rundir.STATUS)
    progress = rundir.read_whole(directory / rundir.PROGRESS) or {}
    health = judge(
        status=status,
        exit_record=rundir.read_whole(directory / rundir.EXIT),
        mirror=rundir.read_whole(directory / MIRROR),
        progress_t=number(progress, "t"),
        now=now,
        limits=Limits().scaled(Timing.from_environment().scale),
    )
    return Glance(health, whole(status or {}, "attempt") or 1, number(status or {}, "since"), progress)
