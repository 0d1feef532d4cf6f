"""The GPUs of a run: nvidia-smi's samples, the trainer's own view, and one word for each.

A word is about what an operator would do something about. The power cap (0x4) is what a GPU at full
work always shows (measured: 95 % busy, 687 of 700 W), so it is normal; thermal limits and the board's
brakes are not. Reason bits are NVML's (`nvmlClocksEventReason*`).
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Iterable, Mapping

from controller.run_records import Device, Record, number, rows, table, text, whole
from controller.series import Point, Series

HISTORY = 60
"""Utilisation samples kept of each GPU: five minutes at one every 5 s."""

IDLE_SHARE = 0.25
FULL_SHARE = 0.97
HOT_C = 88.0

_THERMAL = {0x20: "software thermal limit", 0x40: "hardware thermal limit"}
_BRAKES = {0x8: "hardware slowdown", 0x80: "power brake"}


class GpuWord(enum.StrEnum):
    """What is with a GPU; empty when nothing is."""

    WORKING = ""
    IDLE = "IDLE"
    FULL = "FULL"
    HOT = "HOT"
    THROTTLED = "THROTTLED"
    LOST = "LOST"
    NO_DATA = "NO DATA"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU: its constants, its newest sample and its word; None where a value is not known."""

    uuid: str
    index: int | None
    name: str = ""
    memory_total_gib: float | None = None
    power_limit_w: float | None = None
    mig: bool = False
    roles: tuple[str, ...] = ()
    memory_used_gib: float | None = None
    utilization_share: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    sm_clock_mhz: float | None = None
    throttle: int = 0
    why: tuple[tuple[str, str], ...] = ()
    history: tuple[float | None, ...] = ()
    word: GpuWord = GpuWord.NO_DATA

    @property
    def throttle_text(self) -> str:
        """The limits that hold it back, in words."""
        return ", ".join(n for bit, n in (_THERMAL | _BRAKES).items() if self.throttle & bit)

    @property
    def memory_share(self) -> float | None:
        """Used part of its memory, 0 to 1."""
        if self.memory_used_gib is None or not self.memory_total_gib:
            return None
        return self.memory_used_gib / self.memory_total_gib


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuTable:
    """All GPUs of one host by uuid, in the order first seen; `none_reason` says why there are none, or no
    newer values.
    """

    gpus: tuple[Gpu, ...] = ()
    none_reason: str = ""
    t: float | None = None
    sampled: bool = False
    busy: Mapping[str, Series] = dataclasses.field(default_factory=dict)
    """By uuid: utilisation (0 to 1) over the container's Unix seconds."""
    memory: Mapping[str, Series] = dataclasses.field(default_factory=dict)
    """By uuid: used part of its memory (0 to 1) over the container's Unix seconds."""

    def updated(self, records: Iterable[Record]) -> GpuTable:
        """The table after these records of `gpu.jsonl`.

        A GPU that vanishes from the samples keeps its row and is LOST: rows never move.
        """
        records = list(records)
        if not records:
            return self
        known = {gpu.uuid: gpu for gpu in self.gpus}
        none_reason, t, sampled = self.none_reason, self.t, self.sampled
        busy: dict[str, list[Point]] = {}
        memory: dict[str, list[Point]] = {}
        for record in records:
            kind = text(record, "kind")
            if kind == "gpu_none":
                none_reason = text(record, "reason") or "no GPU was found"
                t = t if known else number(record, "t")  # with rows to show, their age goes on
            elif kind == "gpu_constants":
                none_reason = ""
                for row in rows(record, "gpus"):
                    uuid = text(row, "uuid")
                    before = known.get(uuid, Gpu(uuid=uuid, index=None))
                    known[uuid] = _constants(before, row)
            elif kind == "gpu":
                none_reason, sampled = "", True
                t = number(record, "t")
                samples = table(record, "gpus")
                for uuid in samples:
                    known.setdefault(uuid, Gpu(uuid=uuid, index=None))
                for uuid, gpu in known.items():
                    known[uuid] = now = _sampled(gpu, table(samples, uuid), uuid in samples)
                    if t is not None:
                        busy.setdefault(uuid, []).append((t, now.utilization_share))
                        memory.setdefault(uuid, []).append((t, now.memory_share))
        return GpuTable(
            gpus=tuple(known.values()),
            none_reason=none_reason,
            t=t,
            sampled=sampled,
            busy=_extended(self.busy, busy),
            memory=_extended(self.memory, memory),
        )

    def with_roles(self, devices: Iterable[Device], *, training: bool) -> GpuTable:
        """The table with the trainer's roles and the word of each GPU.

        A GPU is matched by its uuid, or by its number where the trainer knows no uuid.
        """
        devices = list(devices)
        by_uuid: dict[str, tuple[str, ...]] = {}
        by_index: dict[int, tuple[str, ...]] = {}
        for device in devices:
            if device.uuid:
                by_uuid[_bare(device.uuid)] = device.roles
            elif found := re.fullmatch(r"cuda:([0-9]{1,9})", device.device):
                by_index[int(found[1])] = device.roles
        gpus = []
        sliced = any(gpu.mig for gpu in self.gpus)  # there the trainer's uuid is that of a slice
        if sliced and not any(_bare(gpu.uuid) in by_uuid for gpu in self.gpus):
            by_index |= {n: device.roles for n, device in enumerate(devices) if device.uuid}
        for gpu in self.gpus:
            roles = by_uuid.get(_bare(gpu.uuid), ())
            if not roles and gpu.index is not None:
                roles = by_index.get(gpu.index, ())
            word = _word(gpu, sampled=self.sampled, training=training and bool(roles))
            gpus.append(dataclasses.replace(gpu, roles=roles, word=word))
        return dataclasses.replace(self, gpus=tuple(gpus))


def _extended(series: Mapping[str, Series], new: Mapping[str, list[Point]]) -> dict[str, Series]:
    return {uuid: series.get(uuid, Series()).extended(new.get(uuid, ())) for uuid in {**series, **new}}


def _bare(uuid: str) -> str:
    """nvidia-smi writes `GPU-1234`, torch only `1234`."""
    return uuid.removeprefix("GPU-").lower()


def _constants(gpu: Gpu, row: Record) -> Gpu:
    mig = row.get("mig")
    return dataclasses.replace(
        gpu,
        index=whole(row, "index"),
        name=text(row, "name"),
        memory_total_gib=number(row, "memory_total_gib"),
        power_limit_w=number(row, "power_limit_w"),
        mig=mig is True or (isinstance(mig, str) and mig.lower() == "enabled"),
    )


def _sampled(gpu: Gpu, row: Record, present: bool) -> Gpu:
    if not present:
        row = {"why": {"all": "not in nvidia-smi's list any more"}}
    index = whole(row, "index")
    utilization = number(row, "utilization_share")
    why = row.get("why")
    return dataclasses.replace(
        gpu,
        index=gpu.index if index is None else index,
        memory_used_gib=number(row, "memory_used_gib"),
        utilization_share=utilization,
        power_w=number(row, "power_w"),
        temperature_c=number(row, "temperature_c"),
        sm_clock_mhz=number(row, "sm_clock_mhz"),
        throttle=_bits(row),
        why=tuple((str(k), str(v)) for k, v in why.items()) if isinstance(why, Mapping) else (),
        history=(*gpu.history, utilization)[-HISTORY:],
    )


def _bits(row: Record) -> int:
    try:
        return int(text(row, "throttle"), 16)
    except ValueError:
        return 0


def _word(gpu: Gpu, *, sampled: bool, training: bool) -> GpuWord:
    values = (gpu.memory_used_gib, gpu.utilization_share, gpu.power_w, gpu.temperature_c)
    if sampled and all(value is None for value in values):
        lost = any(
            "lost" in v.lower() or "not in" in v or "No devices" in v or "Unable to determine" in v
            for _, v in gpu.why
        )
        return GpuWord.LOST if lost else GpuWord.NO_DATA
    if not sampled:
        return GpuWord.NO_DATA
    if gpu.temperature_c is not None and gpu.temperature_c >= HOT_C:
        return GpuWord.HOT
    if any(gpu.throttle & bit for bit in _THERMAL):
        return GpuWord.HOT
    if any(gpu.throttle & bit for bit in _BRAKES):
        return GpuWord.THROTTLED
    share = gpu.memory_share
    if share is not None and share >= FULL_SHARE:
        return GpuWord.FULL
    recent = [value for value in gpu.history[-3:] if value is not None]
    if training and recent and sum(recent) / len(recent) < IDLE_SHARE:
        return GpuWord.IDLE
    return GpuWord.WORKING


def gpu_role(gpu: Gpu) -> str:
    """`T` for a target, `D` for a drafter, `TD` for both, `-`."""
    roles = ("T" if any(r.startswith("target") for r in gpu.roles) else "") + (
        "D" if any(r.startswith("draft") for r in gpu.roles) else ""
    )
    return roles or "-"
