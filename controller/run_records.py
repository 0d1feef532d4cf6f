"""What a run directory's records say, as typed values: the lenient half of `docs/rundir.md`.

Another version may have written a record, and half of one may be missing. So nothing here raises: a key
that is absent, of the wrong type or not finite is None (or the empty value), and unknown keys are
ignored. Text stays as the remote wrote it; whoever shows it cleans it (`controller.text`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

Record = Mapping[str, Any]

BOUND: Final = 1e300
"""No quantity of a run comes near it, and beyond it differences and means of two are infinite: a plot has no
scale for them.
"""


def number(record: Record, key: str) -> float | None:
    """The number at `key`; None for another value, and for one beyond `BOUND`."""
    value = record.get(key)
    if type(value) is float:  # nearly always; 400,000 events ask 3 million times
        return value if -BOUND <= value <= BOUND else None  # so NaN is none
    return float(value) if type(value) is int and -BOUND <= value <= BOUND else None


def whole(record: Record, key: str) -> int | None:
    """The whole number at `key`, or None."""
    value = number(record, key)
    return None if value is None else int(value)


def text(record: Record, key: str) -> str:
    """The text at `key`, or the empty one."""
    value = record.get(key)
    return value if isinstance(value, str) else ""


def table(record: Record, key: str) -> Record:
    """The object at `key`, or the empty one."""
    value = record.get(key)
    return value if isinstance(value, Mapping) else {}


def rows(record: Record, key: str) -> list[Record]:
    """The objects in the list at `key`."""
    value = record.get(key)
    return [row for row in value if isinstance(row, Mapping)] if isinstance(value, list) else []


def numbers(record: Record, key: str) -> tuple[float | None, ...]:
    """The list of numbers at `key`; what is no number is None."""
    value = record.get(key)
    return tuple(number({"": v}, "") for v in value) if isinstance(value, list) else ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """A bounded queue between two stages of the trainer."""

    name: str
    depth: int | None
    capacity: int | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """One length bucket [low, high) in tokens; shares are 0 to 1, rates tokens per second."""

    bucket: int
    low: int | None
    high: int | None
    planned: int | None
    planned_share: float | None
    batches: int | None
    tokens: int | None
    padding_share: float | None
    tokens_per_s: float | None
    loss: float | None
    peak_gib: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Thread:
    """One thread of the trainer and its last sign of life (Unix seconds of the container)."""

    name: str
    role: str
    device: str
    state: str
    step: int | None
    bucket: int | None
    last_sign: float | None
    busy_s: float | None
    waited_s: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device as the trainer sees it; sizes are GiB, None on a CPU."""

    device: str
    uuid: str
    roles: tuple[str, ...]
    allocated_gib: float | None
    reserved_gib: float | None
    peak_gib: float | None
    total_gib: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """`progress.json`: everything the overview shows."""

    t: float | None
    attempt: int
    phase: str
    step: int | None
    steps: int | None
    epoch: float | None
    eta_s: float | None
    loss: float | None
    loss_ema: float | None
    loss_is_nan: bool
    tau_estimate: float | None
    tau: float | None
    tau_step: int | None
    gradient_norm: float | None
    learning_rate: float | None
    tokens: int | None
    anchors: int | None
    anchor_coverage_share: float | None
    tokens_per_s: float | None
    step_s: float | None
    mfu_share: float | None
    execution: str
    recompiles: int | None
    nonfinite_steps: int | None
    targets_wait_share: float | None
    drafters_wait_share: float | None
    queues: tuple[Queue, ...]
    buckets: tuple[Bucket, ...]
    threads: tuple[Thread, ...]
    devices: tuple[Device, ...]
    skipped: tuple[tuple[str, int], ...]
    checkpoint_step: int | None
    checkpoint_t: float | None
    checkpoint_error: str
    best_tau: float | None
    best_step: int | None
    alarm: str
    """The reason of the newest evaluation's alarm; empty: it raised none."""


def progress(record: Record) -> Progress:
    """The record of `progress.json`."""
    wait, checkpoint, best = (table(record, name) for name in ("wait", "checkpoint", "best"))
    nonfinite = record.get("nonfinite")
    skipped = table(record, "skipped")
    return Progress(
        t=number(record, "t"),
        attempt=whole(record, "attempt") or 1,
        phase=text(record, "phase"),
        step=whole(record, "step"),
        steps=whole(record, "steps"),
        epoch=number(record, "epoch"),
        eta_s=number(record, "eta_s"),
        loss=number(record, "loss"),
        loss_ema=number(record, "loss_ema"),
        loss_is_nan=isinstance(nonfinite, list) and "loss" in nonfinite,
        tau_estimate=number(record, "tau_estimate"),
        tau=number(record, "tau"),
        tau_step=whole(record, "tau_step"),
        gradient_norm=number(record, "gradient_norm"),
        learning_rate=number(record, "learning_rate"),
        tokens=whole(record, "tokens"),
        anchors=whole(record, "anchors"),
        anchor_coverage_share=number(record, "anchor_coverage_share"),
        tokens_per_s=number(record, "tokens_per_s"),
        step_s=number(record, "step_s"),
        mfu_share=number(record, "mfu_share"),
        execution=text(record, "execution"),
        recompiles=whole(record, "recompiles"),
        nonfinite_steps=whole(record, "nonfinite_steps"),
        targets_wait_share=number(wait, "targets_share"),
        drafters_wait_share=number(wait, "drafters_share"),
        queues=tuple(
            Queue(name=str(name), depth=whole(q, "depth"), capacity=whole(q, "capacity"))
            for name, q in table(record, "queues").items()
            if isinstance(q, Mapping)
        ),
        buckets=tuple(_bucket(row, position) for position, row in enumerate(rows(record, "buckets"))),
        threads=tuple(map(_thread, rows(record, "threads"))),
        devices=tuple(map(_device, rows(record, "devices"))),
        skipped=tuple((str(why), whole(skipped, why) or 0) for why in skipped),
        checkpoint_step=whole(checkpoint, "step"),
        checkpoint_t=number(checkpoint, "t"),
        checkpoint_error=text(record, "checkpoint_error"),
        best_tau=number(best, "tau"),
        best_step=whole(best, "step"),
        alarm=text(table(record, "alarm"), "reason"),
    )


def _bucket(row: Record, position: int) -> Bucket:
    named = whole(row, "bucket")
    return Bucket(
        bucket=position if named is None else named,
        low=whole(row, "low"),
        high=whole(row, "high"),
        planned=whole(row, "planned"),
        planned_share=number(row, "planned_share"),
        batches=whole(row, "batches"),
        tokens=whole(row, "tokens"),
        padding_share=number(row, "padding_share"),
        tokens_per_s=number(row, "tokens_per_s"),
        loss=number(row, "loss"),
        peak_gib=number(row, "peak_gib"),
    )


def _thread(row: Record) -> Thread:
    return Thread(
        name=text(row, "name"),
        role=text(row, "role"),
        device=text(row, "device"),
        state=text(row, "state"),
        step=whole(row, "step"),
        bucket=whole(row, "bucket"),
        last_sign=number(row, "last_sign"),
        busy_s=number(row, "busy_s"),
        waited_s=number(row, "waited_s"),
    )


def _device(row: Record) -> Device:
    roles = row.get("roles")
    if isinstance(roles, str):
        roles = [roles]
    return Device(
        device=text(row, "device"),
        uuid=text(row, "uuid"),
        roles=tuple(map(str, roles)) if isinstance(roles, list) else (),
        allocated_gib=number(row, "allocated_gib"),
        reserved_gib=number(row, "reserved_gib"),
        peak_gib=number(row, "peak_gib"),
        total_gib=number(row, "total_gib"),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """One failed thread: its file in `crash/`."""

    file: str
    t: float | None
    attempt: int
    thread: str
    role: str
    device: str
    step: int | None
    bucket: int | None
    samples: str
    error: str
    traceback: str
    first: bool
    memory: str

    @property
    def where(self) -> str:
        """`cuda:7`, or `drafter cuda:7` where the thread's name does not say its role."""
        role = "" if self.thread.startswith(self.role) else self.role
        return " ".join(filter(None, (role, self.device)))


def crash(record: Record, file: str) -> Crash:
    """The record of one `crash/thread-*.json`."""
    samples = record.get("samples")
    return Crash(
        file=file,
        t=number(record, "t"),
        attempt=whole(record, "attempt") or 1,
        thread=text(record, "thread"),
        role=text(record, "role"),
        device=text(record, "device"),
        step=whole(record, "step"),
        bucket=whole(record, "bucket"),
        samples=", ".join(map(str, samples[:8])) if isinstance(samples, list) else "",
        error=text(record, "error"),
        traceback=text(record, "traceback"),
        first=record.get("first") is True,
        memory=text(record, "memory"),
    )
