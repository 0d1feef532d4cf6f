"""Whether a job's GPUs are free: its devices against the place's living runs and processes.

Pure. `cuda:N` counts the GPUs that `CUDA_VISIBLE_DEVICES` of the place's `[env]` leaves, in its order, as
CUDA does; `auto` means all of them. Names of processes come from the remote: whoever prints cleans them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

from controller.run_records import Record, number, rows, text, whole
from remote_payload.job import Job

UNSEEN_GIB = 1.0
"""More memory than this in use, and no process shown: somebody whom the container cannot see is there."""


@dataclasses.dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of the place, as `gpu-use` tells of it."""

    index: int
    uuid: str
    used_gib: float | None
    holders: tuple[str, ...]
    """Its processes as nvidia-smi shows them: `pid 4711 (python) 7.8 GiB`."""
    lost: str = ""
    """How nvidia-smi says that it does not reach it; empty: it does."""


def conflicts(use: Record, job: Job, env: Mapping[str, str], *, own: str = "") -> list[str]:
    """One line for each run or process that uses a GPU which `job` would use; empty: all are free.

    `use` is the answer of the payload's `gpu-use`; `env` the trainer's variables; `own` a run that does not
    count.
    """
    gpus = known_gpus(use)
    wanted = _chosen([*job.targets, *job.drafters], gpus, env)
    by_uuid = {gpu.uuid: gpu for gpu in gpus}
    lines = []
    for run in rows(use, "runs"):
        if text(run, "id") == own:
            continue
        devices, uuids = run.get("devices"), run.get("uuids")
        named = [by_uuid[u] for u in uuids if u in by_uuid] if isinstance(uuids, list) else []
        theirs = named or _chosen(map(str, devices) if isinstance(devices, list) else (), gpus, env)
        shared = sorted({gpu.index for gpu in theirs} & {gpu.index for gpu in wanted})
        if shared:
            lines.append(f"{_gpus(shared)}: run {text(run, 'id')} ({text(run, 'state') or 'no state'})")
    return [*lines, *_held(wanted)]


def wants_gpus(use: Record, job: Job, env: Mapping[str, str]) -> bool:
    """Whether the job would use a GPU of the place."""
    return bool(_chosen([*job.targets, *job.drafters], known_gpus(use), env))


def lost_gpus(use: Record, job: Job | None, env: Mapping[str, str]) -> list[tuple[Gpu, bool]]:
    """The GPUs that nvidia-smi does not reach, each with whether the job names it (`auto` names none)."""
    gpus = known_gpus(use)
    devices = () if job is None else (*job.targets, *job.drafters)
    named = _chosen((device for device in devices if device != "auto"), gpus, env)
    return [(gpu, gpu in named) for gpu in gpus if gpu.lost]


def living(use: Record) -> list[str]:
    """The ids of the runs that lived when the place was asked."""
    return [text(run, "id") for run in rows(use, "runs")]


def still_held(use: Record, uuids: Collection[str]) -> list[str]:
    """One line for each that holds memory of the GPUs `uuids`, after the run that used them has ended."""
    return _held([gpu for gpu in known_gpus(use) if gpu.uuid in uuids])


def _held(gpus: Iterable[Gpu]) -> list[str]:
    lines = []
    for gpu in gpus:
        lines += [f"GPU {gpu.index}: {holder}" for holder in gpu.holders]
        if not gpu.holders and (gpu.used_gib or 0.0) > UNSEEN_GIB:
            lines.append(f"GPU {gpu.index}: {gpu.used_gib:.1f} GiB held by what nvidia-smi does not show")
    return lines


def known_gpus(use: Record) -> list[Gpu]:
    """The GPUs in the answer of `gpu-use`, by index."""
    found = []
    for row in rows(use, "gpus"):
        index = whole(row, "index")
        if index is not None:
            holders = tuple(map(_holder, rows(row, "processes")))
            found.append(Gpu(index, text(row, "uuid"), number(row, "used_gib"), holders, text(row, "lost")))
    return sorted(found, key=lambda gpu: gpu.index)


def _holder(process: Record) -> str:
    pid, used = whole(process, "pid"), number(process, "used_gib")
    size = "" if used is None else f" {used:.1f} GiB"
    return f"pid {'?' if pid is None else pid} ({text(process, 'name') or '?'}){size}"


def _chosen(devices: Iterable[str], gpus: Sequence[Gpu], env: Mapping[str, str]) -> list[Gpu]:
    """The GPUs that these devices of a job mean."""
    visible = _visible(gpus, env)
    chosen: dict[int, Gpu] = {}
    for device in devices:
        kind, _, number_text = device.partition(":")
        if device == "auto":
            chosen |= {gpu.index: gpu for gpu in visible}
        elif kind == "cuda" and number_text.isdecimal() and int(number_text) < len(visible):
            gpu = visible[int(number_text)]
            chosen[gpu.index] = gpu
    return [chosen[index] for index in sorted(chosen)]


def _visible(gpus: Sequence[Gpu], env: Mapping[str, str]) -> list[Gpu]:
    named = env.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return list(gpus)
    visible = []
    for part in named.split(","):
        word = part.strip()
        found = [
            g for g in gpus if str(g.index) == word or (word.startswith("GPU-") and g.uuid.startswith(word))
        ]
        if len(found) != 1:
            break  # CUDA too takes the list only up to the first name that is none
        visible += found
    return visible


def _gpus(indices: Sequence[int]) -> str:
    return ("GPU " if len(indices) == 1 else "GPUs ") + ", ".join(map(str, indices))
