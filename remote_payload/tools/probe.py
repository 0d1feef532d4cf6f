"""Which ways of running a step work here: each tried in a process of its own, with a small real draft model.

One JSON record a mode comes out as soon as it is known:

    {"mode", "trees", "where", "passes", "device", "torch", "works", "failure", "step_ms", "refused"}

`trees`: inductor's CUDA graphs in trees or, as before trees, each for itself; null where a mode has none.
`where`: two worker threads at once, as training has them, or the main thread. `passes`: forward alone or with
backward. `failure`: the first line of what went wrong, else null. `refused`: why training refuses the mode
although the probe tries it, else null. A mode that crashes its process, or hangs, costs that mode alone.
"""

from __future__ import annotations

import contextvars
import dataclasses
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import remote_payload
from remote_payload import rundir
from remote_payload.limited_command import run_within

LIMIT_S = 240.0
"""Seconds a mode may take: it compiles from nothing, on a machine that may be busy."""

THREADS, MAIN = "threads", "main"
FORWARD, BOTH = "forward", "forward + backward"
REPEATS = 10


@dataclasses.dataclass(frozen=True, slots=True)
class Mode:
    """One thing to try."""

    mode: str
    trees: bool | None
    where: str
    passes: str
    fp8: str = "none"


def modes(cuda: bool) -> list[Mode]:
    """What there is to try on a GPU or a CPU, the likeliest to work first."""
    plain = ["graph", "compiled", "eager"] if cuda else ["compiled", "eager"]
    found = [Mode(mode, None, where, BOTH) for mode in plain for where in (THREADS, MAIN)]
    if cuda:
        found += [
            Mode("reduce-overhead", trees, where, passes)
            for trees in (True, False)
            for where in (THREADS, MAIN)
            for passes in (BOTH, FORWARD)
        ]
    return found


def probe(device: str = "auto", fp8: str = "none", limit: float = LIMIT_S) -> Iterator[dict[str, Any]]:
    """Try every mode on `device` (auto: the first GPU, else the CPU), one after the other.

    `fp8` as a job has it. Raises JobError for a device that is not there, or cannot do that.
    """
    import torch

    from remote_payload.job import JobError
    from remote_payload.train.devices import resolve_devices
    from remote_payload.train.execution import refuse_trees
    from remote_payload.train.fp8 import PARTS, refuse

    if fp8 not in PARTS:
        raise JobError(f"fp8 = {fp8!r}: expected one of {', '.join(PARTS)}")
    (name,) = resolve_devices([device])
    if fp8 != "none" and (reason := refuse(torch.device(name))):
        raise JobError(f"fp8 = {fp8!r}: {reason}")
    for plain in modes(name.startswith("cuda")):
        mode = dataclasses.replace(plain, fp8=fp8)
        refused = refuse_trees() if mode.mode == "reduce-overhead" and mode.where == THREADS else None
        outcome = _in_process(mode, name, limit)
        yield {
            **dataclasses.asdict(mode),
            "device": name,
            "torch": torch.__version__,
            "works": outcome.get("failure") is None,
            "failure": None,
            "step_ms": None,
            **outcome,
            "refused": refused,
        }


def _in_process(mode: Mode, device: str, limit: float) -> dict[str, Any]:
    """Try one mode in a process of its own."""
    given = json.dumps(dataclasses.asdict(mode))
    command = [sys.executable, str(Path(remote_payload.__file__).parent), "probe-mode", given, device]
    try:
        done = run_within(limit, command, stderr=subprocess.PIPE)
    except subprocess.TimeoutExpired:
        return {"failure": f"not done after {limit:.0f} s"}
    outcomes, _ = rundir.read_records(done.stdout.splitlines())
    if outcomes:
        return outcomes[-1]
    said = [line.strip() for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
    return {"failure": f"the process ended with {done.returncode}: {said[-1] if said else 'it said nothing'}"}


def try_mode(given: str, device: str) -> dict[str, Any]:
    """Run one mode in this process: the median milliseconds of a pass, or the first line of its failure."""
    import torch

    from remote_payload import crash

    mode = Mode(**json.loads(given))
    place = torch.device(device)
    replicas = 2 if mode.where == THREADS else 1
    at_once = threading.Barrier(replicas)
    times: dict[int, float] = {}
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            times[number] = _run(mode, place, number, at_once)
        except BaseException as error:
            errors.append(error)
            at_once.abort()

    if mode.where == MAIN:
        work(0)
    else:
        threads = [
            threading.Thread(target=contextvars.copy_context().run, args=(work, number))
            for number in range(replicas)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    first = next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), None)
    if first is not None:
        return {"failure": crash.one_line(first)}
    return {"step_ms": round(max(times.values()) * 1e3, 3)}


def _run(mode: Mode, device: Any, number: int, at_once: threading.Barrier) -> float:
    """Seconds of one pass of a replica, which warms up in turn and then runs beside the others."""
    import statistics

    import torch

    from remote_payload.train import execution
    from remote_payload.train.devices import on_device

    with on_device(device):
        with execution.WARM_UP_LOCK:
            replica, row = _small_replica(device, number, mode.fp8)
            if mode.mode == execution.REDUCE_OVERHEAD:
                execution.configure()
                replica.use(mode.mode, trees=bool(mode.trees))
            else:
                result = replica.warm_up(mode.mode)
                if result.execution != mode.mode:
                    raise RuntimeError(result.reason)
            replica.load(None, row)

            def once() -> None:
                if mode.passes == FORWARD:
                    with torch.no_grad():
                        replica.forward()
                else:
                    replica.run_row(row, 0, first=True)

            for _ in range(3):
                once()
            replica.synchronise()
        at_once.wait(LIMIT_S)
        seconds = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            once()
            replica.synchronise()
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _small_replica(device: Any, number: int, fp8: str) -> Any:
    """A replica of a small drafter, and a row for it."""
    from remote_payload.job import Job
    from remote_payload.tools.synthetic import random_ends, random_rows
    from remote_payload.train.batch import RowShape
    from remote_payload.train.devices import compute_dtype
    from remote_payload.train.drafter import DrafterConfig
    from remote_payload.train.replica import Replica
    from remote_payload.train.statistics import Statistics

    config = DrafterConfig(
        layers=2,
        width=256,
        heads=4,
        kv_heads=2,
        head_dim=64,
        ffn=512,
        norm_eps=1e-6,
        rope_theta=1e6,
        vocabulary=1024,
        tap_layers=(1, 2, 3),
        target_layers=6,
        block_size=8,
        mask_token_id=1023,
        max_positions=4096,
    )
    shape = RowShape(token_budget=512, anchors=32, block_size=8, mask_token_id=1023, gamma=4.0)
    job = Job.from_mapping(
        {
            "target": "random",
            "dataset": "random",
            "mask_token_id": 1023,
            "drafters": [str(device)],
            "fp8": fp8,
        },
        "probe",
    )
    target = random_ends(config, device, compute_dtype("auto", device))
    replica = Replica(number, device, job, config, shape, Statistics(8, 1), target)
    return replica, random_rows(shape, 1024, 1)[0]


def main(device: str = "auto", fp8: str = "none") -> int:
    """The payload's command `probe`: a record a line; 1 when not even eager works."""
    from remote_payload.job import JobError

    worked = False
    try:
        for record in probe(device, fp8):
            worked |= bool(record["works"])
            print(json.dumps(record), flush=True)
    except JobError as error:
        print(json.dumps({"ok": False, "error": str(error)}), flush=True)
        return 1
    return 0 if worked else 1
