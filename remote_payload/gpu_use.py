"""Who uses which GPU: the living runs of a workspace by their own word, and what nvidia-smi shows.

Both are needed. A run that is still loading holds no memory yet; a process that is no run of ours has no
status. In a container nvidia-smi's pids are the host's, or missing altogether, so nothing is concluded
from a pid: it is only named. Standard library only.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from remote_payload import nvidia_smi
from remote_payload.gpu import COMMAND
from remote_payload.living import living_runs
from remote_payload.nvidia_smi import NvidiaSmiError

_GPUS = "--query-gpu=index,uuid,name,memory.used,memory.total"
_APPS = "--query-compute-apps=gpu_uuid,pid,process_name,used_memory"
_FORM = "--format=csv,noheader,nounits"


def gpu_use(
    workspace: Path, *, command: str = COMMAND, patience: float = nvidia_smi.PATIENCE_S
) -> dict[str, Any]:
    """`runs`, `gpus` and `why` (null, or why there are no `gpus`).

    `runs`: `id`, `state`, `job`, `devices` (names of `job.toml` such as `cuda:0` or `auto`) and `uuids` (of
    `progress.json`, empty before it tells) of every run whose supervisor or trainer lives. `gpus`: `index`,
    `uuid`, `name`, `used_gib`, `total_gib` and `processes` (`pid`, `name`, `used_gib`); what is not known is
    null.
    """
    with ThreadPoolExecutor(2) as pool:
        questions = [
            pool.submit(nvidia_smi.ask, [query, _FORM], command=command, patience=patience)
            for query in (_GPUS, _APPS)
        ]
        runs = list(living_runs(workspace))
        try:
            gpus = {gpu["uuid"]: gpu for gpu in map(_gpu, questions[0].result()) if gpu}
            why = None
        except NvidiaSmiError as error:
            gpus, why = {}, str(error)
        try:
            for line in questions[1].result():
                cells = [cell.strip() for cell in line.split(", ")]
                if len(cells) >= 4 and cells[0] in gpus:
                    gpus[cells[0]]["processes"].append(_process(cells))
        except NvidiaSmiError:
            pass  # the GPUs' memory still tells that they are in use
    return {"runs": runs, "gpus": list(gpus.values()), "why": why}


def _gpu(line: str) -> dict[str, Any] | None:
    cells = [cell.strip() for cell in line.split(", ")]
    if len(cells) != 5 or not cells[0].isdecimal():
        return None
    index, uuid, name, used, total = cells
    return {
        "index": int(index),
        "uuid": uuid,
        "name": name,
        "used_gib": _gib(used),
        "total_gib": _gib(total),
        "processes": [],
    }


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
