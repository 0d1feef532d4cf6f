"""Which device does what: as the job says, or by a measurement that the job asks for.

`roles = "given"` takes the job's lists. `"propose"` takes them too, and says what a measurement would have
taken; `"auto"` takes that. The arithmetic is in `roles.py`. An attempt that goes on keeps what the first one
chose, as long as it sees the same GPUs: nothing is measured twice, and sums are added in the same order.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import torch

from remote_payload.job import Job
from remote_payload.rundir import RecordWriter
from remote_payload.train.event_log import events_of
from remote_payload.train.role_times import MeasuredRoles
from remote_payload.train.roles import RoleTimes, Split, splits
from remote_payload.train.run import Log
from remote_payload.train.target import Target

GIVEN = "given"
PROPOSE = "propose"
AUTO = "auto"

SHOWN = 5
"""Splits whose arithmetic is said, the best ones."""


def settle_roles(
    job: Job,
    run_dir: Path,
    events: RecordWriter,
    log: Log,
    measure: Callable[[str, str], MeasuredRoles | None],
    *,
    resuming: bool,
) -> Target | None:
    """Set the job's `targets` and `drafters` as its `roles` says; the target that was loaded to find out.

    `measure` times both sides on two devices, and gives None when the run was asked to stop. Raises JobError
    when no split fits.
    """
    if job.roles == GIVEN or (job.roles == PROPOSE and resuming):
        return None
    gpus = visible_devices()
    if resuming and (kept := earlier_choice(run_dir, gpus)) is not None:
        job.targets, job.drafters = kept
        log(f"Roles as chosen before: targets {', '.join(job.targets)}; drafters {', '.join(job.drafters)}")
        return None
    log(f"Measuring a target on {gpus[0]} and a drafter on {gpus[-1]}, to share out {_count(gpus)}...")
    began = time.monotonic()
    found = measure(gpus[0], gpus[-1])
    if found is None:
        return None
    rows = job.rows_per_step or len(job.drafters)
    ordered = splits(len(gpus), found.times, rows)
    taken = job.roles == AUTO
    targets, drafters = ordered[0].devices(gpus)
    seconds = time.monotonic() - began
    if taken:
        job.targets, job.drafters = targets, drafters
    _say(log, found, rows, ordered, seconds, taken)
    events.write(
        "roles",
        gpus=gpus,
        taken=taken,
        targets=targets,
        drafters=drafters,
        execution=found.execution,
        **{name: _rounded(value) for name, value in dataclasses.asdict(found.times).items()},
        batches_per_s=_rounded(ordered[0].batches_per_s),
        arithmetic=[split.arithmetic for split in ordered[:SHOWN]],
        seconds=round(seconds, 2),
    )
    return found.target


def visible_devices() -> list[str]:
    """All GPUs that torch sees, by name; where there is none, the CPU as the one device."""
    return [f"cuda:{number}" for number in range(torch.cuda.device_count())] or ["cpu"]


def earlier_choice(run_dir: Path, gpus: list[str]) -> tuple[list[str], list[str]] | None:
    """Targets and drafters that an earlier attempt chose of the same `gpus`, from the run's own events."""
    taken = [record for record in events_of(run_dir, "roles") if record["taken"]]
    if not taken or taken[-1]["gpus"] != gpus:
        return None
    return taken[-1]["targets"], taken[-1]["drafters"]


def _say(
    log: Log, found: MeasuredRoles, rows: int, ordered: list[Split], seconds: float, taken: bool
) -> None:
    t: RoleTimes = found.times
    log(
        f"A target takes {t.target_s:.4f} s a batch ({t.tokens / t.target_s:,.0f} tokens/s); a drafter"
        f" {t.row_s:.4f} s a row ({found.execution}) and {t.step_s:.4f} s a step of {rows} rows; measured in"
        f" {seconds:.1f} s"
    )
    if t.free_gib is not None:
        log(
            f"A target needs {t.target_gib:.1f} GiB, a drafter {t.drafter_gib:.1f}, a queue of features"
            f" {t.features_gib:.1f}; a GPU has {t.free_gib:.1f} free"
        )
    log(f"{'Taken' if taken else 'Proposed, not taken'}: {ordered[0].arithmetic}")
    for split in ordered[1:SHOWN]:
        log(f"  instead of {split.arithmetic}")


def _count(gpus: list[str]) -> str:
    return f"{len(gpus)} device{'s' * (len(gpus) > 1)}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)
