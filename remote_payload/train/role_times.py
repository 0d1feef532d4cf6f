"""What a target takes for a batch and a drafter for a row, measured before any GPU has its role.

One target is loaded on the first GPU and one drafter is warmed up on the last, in one thread and one after
the other, so that neither disturbs the other. The target is kept for the run. The drafter is thrown away,
since how many replicas there are says how its weights lie; what that costs is its warm-up, of which
inductor's cache spares those that follow all but some seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from remote_payload.job import Job, JobError
from remote_payload.train import execution
from remote_payload.train.batch import Batch, BatchMaker, RowShape
from remote_payload.train.buckets import EpochPlan
from remote_payload.train.devices import (
    DRAFTERS_FIRST,
    aside,
    compute_dtype,
    on_device,
    out_of_memory,
    synchronise,
)
from remote_payload.train.drafter import DrafterConfig
from remote_payload.train.features import Features
from remote_payload.train.objective import needs_teacher
from remote_payload.train.replica import Replica
from remote_payload.train.roles import RoleTimes
from remote_payload.train.run_control import RunControl
from remote_payload.train.statistics import Statistics
from remote_payload.train.target import Target
from remote_payload.train.target_layout import Layout, Packed, Padded
from remote_payload.train.target_pass import TargetPass

SAMPLED = 6
"""Batches of the first epoch that the target is timed on, spread over it."""

ROWS = 4
"""Rows and steps that the drafter is timed on."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RoleSources:
    """What target and drafter are made of, and what they are timed on."""

    model: str | Path
    config: DrafterConfig
    shape: RowShape
    statistics: Statistics
    plan: EpochPlan
    maker: BatchMaker
    """One of its own: what it counts counts nowhere."""


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredRoles:
    """Times, and the target that was loaded for them."""

    times: RoleTimes
    target: Target
    execution: str
    """The rung of the drafter that was timed."""


def measure_roles(
    job: Job, sources: RoleSources, first: str, last: str, control: RunControl
) -> MeasuredRoles | None:
    """Time a target on the device `first` and a drafter on `last`; None when the run was asked to stop.

    Raises JobError for what does not fit or cannot work.
    """
    return aside(lambda: _measure(job, sources, torch.device(first), torch.device(last), control))


def _measure(
    job: Job, sources: RoleSources, first: torch.device, last: torch.device, control: RunControl
) -> MeasuredRoles | None:
    free = torch.cuda.mem_get_info(first)[0] / 2**30 if first.type == "cuda" else None
    chosen = np.unique(np.linspace(0, len(sources.plan.batches) - 1, SAMPLED).astype(int)).tolist()
    batches = [
        sources.maker.make(sources.plan.batches[n], int(sources.plan.buckets[n]), 0, n) for n in chosen
    ]
    with on_device(first), _memory_for("a target", first) as peak:
        target = Target.load(
            sources.model,
            sources.config.tap_layers,
            device=first,
            dtype=compute_dtype(job.target_dtype, first),
            attention=job.target_attention,
            trust_remote_code=job.trust_remote_code,
        )
        if control.stop.is_set():
            return None
        target_s, features = _time_target(job, sources, target, batches)
        target_gib = peak()
    if control.stop.is_set():
        return None
    beside = " beside a target" if first == last else ""
    with on_device(last, priority=DRAFTERS_FIRST), _memory_for(f"a drafter{beside}", last) as peak:
        alone = dataclasses.replace(job, targets=[str(first)], drafters=[str(last)])
        with execution.WARM_UP_LOCK:
            row_s, step_s, rung = _time_drafter(alone, sources, target, features, last)
        drafter_gib = peak()
    columns = features.packed.shape[1]
    queue = job.queue_depth * job.token_budget * columns * features.packed.element_size()
    times = RoleTimes(
        target_s=target_s,
        tokens=sum(batch.tokens for batch in batches) / len(batches),
        row_s=row_s,
        step_s=step_s,
        target_gib=target_gib,
        drafter_gib=drafter_gib,
        features_gib=queue / 2**30,
        free_gib=free,
    )
    return MeasuredRoles(times, target, rung)


def _time_target(
    job: Job, sources: RoleSources, target: Target, batches: list[Batch]
) -> tuple[float, Features]:
    """Seconds of a batch in the mean, after a pass over the widest and over each; features of the last.

    Passes run as in training, by those of its graphs that these batches take.
    """
    device = target.device
    forward = TargetPass(target, needs_teacher(job))
    lengths = [batch.lengths for batch in batches]
    packed_shapes, padded_shapes = sources.maker.target_shapes(sources.plan, job.max_batch)
    layouts: list[Layout[Any]] = [
        Packed(packed_shapes).only_for(lengths),
        Padded(padded_shapes).only_for(lengths),
    ]
    with execution.WARM_UP_LOCK:
        forward.warm_up(job.target_execution, layouts)
    for rows, tokens in sources.maker.widest(sources.plan, job.max_batch):
        forward.packed(torch.zeros((rows, tokens), dtype=torch.int64), [tokens] * rows)
    for batch in batches:
        packed = forward.packed(batch.ids, batch.lengths)
    synchronise(device)
    start = time.perf_counter()
    for batch in batches:
        packed = forward.packed(batch.ids, batch.lengths)
    synchronise(device)
    return (time.perf_counter() - start) / len(batches), Features(batches[-1], packed, None)


def _time_drafter(
    job: Job, sources: RoleSources, target: Target, features: Features, device: torch.device
) -> tuple[float, float, str]:
    """Seconds of a row and of a step, and the rung that they ran on."""
    replica = Replica(0, device, job, sources.config, sources.shape, sources.statistics, target)
    rung = replica.warm_up(job.execution).execution

    def run(rows: int) -> None:
        for _ in range(rows):
            replica.load(features, features.batch.row)
            replica.run_row(features.batch.row, features.batch.bucket, first=True)

    def step(steps: int) -> None:
        for _ in range(steps):
            replica.step(max(1.0, features.batch.weight), job.learning_rate)

    run(1)
    step(1)
    row_s = _seconds(device, lambda: run(ROWS)) / ROWS
    step_s = _seconds(device, lambda: step(ROWS)) / ROWS
    return row_s, step_s, rung


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    synchronise(device)
    start = time.perf_counter()
    work()
    synchronise(device)
    return time.perf_counter() - start


@contextlib.contextmanager
def _memory_for(what: str, device: torch.device) -> Iterator[Callable[[], float | None]]:
    """Tells the most memory in GiB that was taken inside; JobError naming `what` when it does not suffice."""
    if device.type != "cuda":
        yield lambda: None
        return
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    try:
        yield lambda: (torch.cuda.max_memory_reserved(device) - before) / 2**30
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        total = torch.cuda.get_device_properties(device).total_memory / 2**30
        raise JobError(
            f"{what} does not fit into the {total:.1f} GiB of {device}; lower token_budget, or anchors"
        ) from error
    finally:
        gc.collect()
        torch.cuda.empty_cache()
