"""Who uses which GPU: the living runs of a workspace by their own word, and what nvidia-smi shows.

Both are needed. A run that is still loading holds no memory yet; a process that is no run of ours has no
status. In a container nvidia-smi's pids are the host's, or missing altogether, so nothing is concluded
from a pid: it is only named. One lost GPU can end the whole listing, and says nothing of the others: then
these are asked one by one. Standard library only.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from remote_payload import nvidia_smi
from remote_payload.gpu import COMMAND
from remote_payload.gpu_rows import MOST_GPUS, NO_DEVICES, names_one_gpu
from remote_payload.living import living_runs
from remote_payload.nvidia_smi import NvidiaSmiError

_GPUS = "--query-gpu=index,uuid,name,memory.used,memory.total"
_APPS = "--query-compute-apps=gpu_uuid,pid,process_name,used_memory"
_FORM = "--format=csv,noheader,nounits"
_LOST = re.compile(r"GPU is lost|Unknown Error|^\[?ERR!", re.IGNORECASE)
"""In a cell: the driver does not reach this GPU. `[N/A]` and the like are of GPUs that work."""


def gpu_use(
    workspace: Path, *, command: str = COMMAND, patience: float = nvidia_smi.PATIENCE_S
) -> dict[str, Any]:
    """`runs`, `gpus` and `why` (null, or why there are no `gpus`).

    `runs`: `id`, `state`, `job`, `devices` (names of `job.toml` such as `cuda:0` or `auto`) and `uuids` (of
    `progress.json`, empty before it tells) of every run whose supervisor or trainer lives. `gpus`: `index`,
    `uuid`, `name`, `used_gib`, `total_gib`, `processes` (`pid`, `name`, `used_gib`) and `lost` (null, or how
    nvidia-smi says that it does not reach it); what is not known is null.
    """
    with ThreadPoolExecutor(2) as pool:
        questions = [
            pool.submit(nvidia_smi.ask, [query, _FORM], command=command, patience=patience)
            for query in (_GPUS, _APPS)
        ]
        runs = list(living_runs(workspace))
        try:
            gpus, why = [gpu for gpu in map(_gpu, questions[0].result()) if gpu], None
        except NvidiaSmiError as error:
            gpus, why = [], str(error)
            if names_one_gpu(error.said):
                gpus = _one_by_one(command, patience)
                why = None if gpus else why
        by_uuid = {gpu["uuid"]: gpu for gpu in gpus if gpu["uuid"]}
        try:
            for line in questions[1].result():
                cells = [cell.strip() for cell in line.split(", ")]
                if len(cells) >= 4 and cells[0] in by_uuid:
                    by_uuid[cells[0]]["processes"].append(_process(cells))
        except NvidiaSmiError:
            pass  # the GPUs' memory still tells that they are in use
    return {"runs": runs, "gpus": gpus, "why": why}


def _one_by_one(command: str, patience: float) -> list[dict[str, Any]]:
    """The GPUs, counted up to the last one; none where nvidia-smi gives another answer than about one GPU."""
    gpus = []
    for index in range(MOST_GPUS):
        try:
            found = [gpu for gpu in map(_gpu, _ask(command, patience, "-i", str(index))) if gpu]
        except NvidiaSmiError as error:
            if error.said.startswith(NO_DEVICES):
                break
            if not names_one_gpu(error.said):
                return []
            found = [_lost(index, str(error))]
        gpus += found
    return gpus


def _ask(command: str, patience: float, *which: str) -> list[str]:
    return nvidia_smi.ask([_GPUS, _FORM, *which], command=command, patience=patience)


def _gpu(line: str) -> dict[str, Any] | None:
    cells = [cell.strip() for cell in line.split(", ")]
    if len(cells) != 5 or not cells[0].isdecimal():
        return None
    index, uuid, name, used, total = cells
    if lost := next((cell for cell in cells if _LOST.search(cell)), None):
        return _lost(int(index), lost.strip("[]"), uuid, name)
    return {
        "index": int(index),
        "uuid": uuid,
        "name": name,
        "used_gib": _gib(used),
        "total_gib": _gib(total),
        "processes": [],
        "lost": None,
    }


def _lost(index: int, why: str, uuid: str = "", name: str = "") -> dict[str, Any]:
    """A GPU that does not answer; what it still says of itself may be a reason in place of a name."""
    known = [None if not text or _LOST.search(text) else text for text in (uuid, name)]
    nothing: dict[str, Any] = {"used_gib": None, "total_gib": None, "processes": []}
    return {"index": index, "uuid": known[0], "name": known[1], **nothing, "lost": why}


def _process(cells: list[str]) -> dict[str, Any]:
    pid, used = cells[1], cells[-1]
    return {
        "pid": int(pid) if pid.isdecimal() else None,
        "name": ", ".join(cells[2:-1]),
        "used_gib": _gib(used),
    }


def _gib(mib: str) -> float | None:
    try:
        return round(float(mib) / 1024, 3)
    except ValueError:  # [N/A] and the like
        return None
