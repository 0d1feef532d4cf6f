"""Targets and drafters at work together: how many tokens a second, and who waits for whom.

    python -m bench.pipeline [--shape 8b|4b|tiny] [--targets cuda:0,...] [--drafters cuda:0,...] [--batches N]
                             [--rows B] [--set KEY=VALUE ...] [--suite two] [--json FILE]

Targets (at random, Qwen3 of the shape's width and depth) turn batches into features, replicas take them in
order as in a training run: `TargetPass`, `Replica`, `OrderedQueue`, `Reduction` are the trainer's, each in a
thread and a stream. First each side is timed alone: targets for features that nobody takes, replicas on
features at random that lie on their own GPUs. Then both run together. A worker's idle share is the time in
which it had no batch on its device (a replica that waits for the others' gradients has one); a GPU's is the
time in which none of those on it had any. Waits are the host's: for features, and for room in a queue. MFU
is useful work of the sides that run (`remote_payload/train/flops.py`) over what products of 8192^3 reach on
the GPUs in use, measured just before. On a CPU the sides take turns: the numbers only show life.

`--suite two` measures, on two GPUs and in one process: 1 target + 1 drafter, 2 targets + 1 drafter on one of
their GPUs, 2 + 2 that share both, and 2 drafters against 1; beside what `remote_payload/train/roles.py`
predicts. It prints a table, and all numbers as one JSON object on the last line.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.pipeline_parts import Parts, in_threads, make_parts, make_replicas
from bench.shapes import SHAPES
from bench.step import config_of
from remote_payload.job import JobError
from remote_payload.train import execution
from remote_payload.train.batch import Batch
from remote_payload.train.devices import DRAFTERS_FIRST, on_device, turn
from remote_payload.train.features import Features
from remote_payload.train.flops import step_flops
from remote_payload.train.replica import Replica
from remote_payload.train.run_control import OrderedQueue, RunControl
from remote_payload.train.sync import Contribution, Reduction
from remote_payload.train.target_pass import TargetPass
from remote_payload.train.useful_work import matmul_ceiling

QUEUE_DEPTH = 4

WARM_BATCHES = 4
"""Batches a replica before a measurement."""


class Busy:
    """One worker: when it had work on its device, and how long its thread waited."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.waited_s = 0.0
        self._marks: list[Any] = []

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        """Around the work for a batch, on the worker's stream."""
        self._mark()
        yield
        self._mark()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what the host waits for."""
        start = time.perf_counter()
        yield
        self.waited_s += time.perf_counter() - start

    def _mark(self) -> None:
        if self.device.type != "cuda":
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def spans(self) -> list[tuple[float, float]]:
        """Beginning and end of each batch in seconds, on the clock of the device."""
        if self.device.type != "cuda":
            times = self._marks
        else:
            torch.cuda.synchronize(self.device)
            times = [BASE[self.device].elapsed_time(event) / 1e3 for event in self._marks]
        return list(zip(times[::2], times[1::2], strict=True))


BASE: dict[torch.device, torch.cuda.Event] = {}
"""An event on each GPU that its clock starts from."""


@dataclasses.dataclass(slots=True)
class Sides:
    """What runs in a measurement; a side that is empty does not."""

    targets: Sequence[TargetPass] = ()
    replicas: Sequence[Replica] = ()

    @property
    def devices(self) -> list[torch.device]:
        """Those in use, each once."""
        every = [t.target.device for t in self.targets] + [r.device for r in self.replicas]
        return sorted(set(every), key=str)


def compute(forward: TargetPass, batch: Batch) -> Features:
    """What a target's thread does for a batch."""
    device = forward.target.device
    with turn(device):
        packed = forward.packed(batch.ids, batch.lengths)
    if device.type != "cuda":
        return Features(batch, packed, None)
    ready = torch.cuda.Event()
    ready.record()
    return Features(batch, packed, ready)


def random_features(replica: Replica, batch: Batch) -> Features:
    """Features of a batch on the replica's own device."""
    generator = torch.Generator(replica.device).manual_seed(0)
    return Features(batch, torch.empty_like(replica.features).normal_(generator=generator), None)


def step(replica: Replica, reduction: Reduction, features: Features) -> None:
    """What a drafter's thread does for a batch."""
    with turn(replica.device):
        replica.load(features, features.batch.row)
        replica.run_row(features.batch.row, 0, first=True)
    mine = Contribution(replica.weights, replica.statistics, features.batch.weight)
    agreed, _ = reduction.reduce(replica.number, mine)
    replica.step(agreed.weight, 1e-4)


def run(parts: Parts, sides: Sides, count: int) -> tuple[list[Busy], list[Busy], list[int]]:
    """`count` batches through both sides, or through one.

    Returns targets and drafters, and how many features waited each time a drafter asked for some.
    """
    control = RunControl()
    targets, replicas = sides.targets, sides.replicas
    queues = [OrderedQueue[Features](QUEUE_DEPTH, control) for _ in replicas]
    depths: list[int] = []
    lie_ready = [] if targets else [random_features(replica, parts.batches[0]) for replica in replicas]
    busy_targets = [Busy(forward.target.device) for forward in targets]
    busy_drafters = [Busy(replica.device) for replica in replicas]
    for device in sides.devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
    for device in sides.devices:
        if device.type == "cuda":
            with torch.cuda.device(device):
                BASE[device] = torch.cuda.Event(enable_timing=True)
                BASE[device].record()
    numbers = itertools.count()  # whichever target is free takes the next batch, as in a run

    def target_work(number: int) -> None:
        mine, held = busy_targets[number], collections.deque[Features](maxlen=QUEUE_DEPTH)
        while (sequence := next(numbers)) < count:
            with mine.work():
                features = compute(targets[number], parts.batches[sequence % len(parts.batches)])
            held.append(features)
            if replicas:
                with mine.waiting():
                    queues[sequence % len(replicas)].put(sequence // len(replicas), features)
            elif len(held) == QUEUE_DEPTH and held[0].ready is not None:
                held[0].ready.synchronize()  # as a full queue would make it wait

    def drafter_work(number: int) -> None:
        replica, mine = replicas[number], busy_drafters[number]
        with on_device(replica.device, priority=DRAFTERS_FIRST):
            for _ in range(count // len(replicas)):
                if targets:
                    depths.append(len(queues[number]))
                    with mine.waiting():
                        taken = queues[number].get()
                    assert taken is not None
                else:
                    taken = lie_ready[number]
                if taken.ready is not None:
                    taken.ready.wait()
                with mine.work():
                    step(replica, reduction, taken)
            replica.synchronise()

    work: list[tuple[torch.device, Callable[[int], None], int]] = []
    work += [(forward.target.device, target_work, n) for n, forward in enumerate(targets)]
    work += [(replica.device, drafter_work, n) for n, replica in enumerate(replicas)]
    if not replicas:
        in_threads(work, control)
        return busy_targets, busy_drafters, depths
    reduction = Reduction([replica.device for replica in replicas], control)
    with reduction.serving():
        in_threads(work, control)
    return busy_targets, busy_drafters, depths


def measure(parts: Parts, sides: Sides, count: int, ceilings: dict[torch.device, float]) -> dict[str, Any]:
    """All numbers of `count` batches, after some that do not count."""
    lanes = max(1, len(sides.replicas))
    run(parts, sides, WARM_BATCHES * lanes)
    graphs, cpu = execution.compiled_graphs(), time.process_time()
    count -= count % lanes
    targets, drafters, depths = run(parts, sides, count)
    cpu = time.process_time() - cpu
    spans = {id(worker): worker.spans() for worker in (*targets, *drafters)}
    every = [span for each in spans.values() for span in each]
    whole = max(end for _, end in every) - min(begin for begin, _ in every)
    useful = parts.work.flops(parts.batches[0].lengths) if targets else 0.0
    if drafters:
        pairs = sum(batch.pairs for batch in parts.batches) / len(parts.batches)
        useful += step_flops(config_of(parts.shape), parts.shape.context, parts.shape.anchors, pairs)
    by_device = {
        device: [
            span for worker in (*targets, *drafters) if worker.device == device for span in spans[id(worker)]
        ]
        for device in sides.devices
    }
    return {
        "targets": [str(worker.device) for worker in targets],
        "drafters": [str(worker.device) for worker in drafters],
        "batches": count,
        "batch_ms": whole / count * 1e3,
        "tokens_per_s": parts.shape.context * count / whole,
        "anchors_per_s": parts.shape.anchors * count / whole if drafters else None,
        "useful_tflop": useful / 1e12,
        "mfu": useful * count / whole / sum(ceilings[device] for device in sides.devices),
        "idle": {str(device): 1 - covered(on) / whole for device, on in by_device.items()},
        "idle_targets": [_idle(spans[id(worker)], whole) for worker in targets],
        "idle_drafters": [_idle(spans[id(worker)], whole) for worker in drafters],
        "targets_wait_for_room": _mean([worker.waited_s / whole for worker in targets if drafters]),
        "drafters_wait_for_features": _mean([worker.waited_s / whole for worker in drafters if targets]),
        "queue_depth": _mean(depths),
        "peak_gib": {
            str(device): torch.cuda.max_memory_allocated(device) / 2**30
            for device in sides.devices
            if device.type == "cuda"
        },
        "host_cpu_ms": cpu / count * 1e3,
        "recompiles": execution.compiled_graphs() - graphs,
    }


def host_ms(parts: Parts, replica: Replica) -> float:
    """CPU milliseconds of a step's thread with an idle device: of the host's own work, and no waiting."""
    found: list[float] = []

    def work(_number: int) -> None:
        features = random_features(replica, parts.batches[0])
        reduction = Reduction([replica.device], RunControl())
        for _ in range(6):
            replica.synchronise()
            start = time.thread_time()
            step(replica, reduction, features)
            found.append((time.thread_time() - start) * 1e3)
        replica.synchronise()

    in_threads([(replica.device, work, 0)], RunControl())
    return statistics.median(found[1:])


def measure_ceilings(devices: Sequence[torch.device]) -> dict[torch.device, float]:
    """FLOP/s of products on each device, one after the other."""
    found: dict[torch.device, float] = {}
    for device in devices:

        def work(_number: int, device: torch.device = device) -> None:
            found[device] = matmul_ceiling(device)

        in_threads([(device, work, 0)], RunControl())
    return found


def covered(spans: list[tuple[float, float]]) -> float:
    """Seconds in which at least one of the spans is going on."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def _idle(spans: list[tuple[float, float]], whole: float) -> float:
    return 1 - covered(spans) / whole


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def table(found: dict[str, dict[str, Any]]) -> str:
    """The measurements as one table for people."""
    heads = [("batch ms", 9), ("predicted", 10), ("tokens/s", 10), ("anchors/s", 10), ("MFU", 6)]
    heads += [("room", 6), ("features", 9), ("queue", 6), ("host ms", 8), ("recompiles", 11)]
    lines = [f"{'what':<20}" + "".join(f"{name:>{width}}" for name, width in heads) + "  idle; peak GiB"]
    for name, r in found.items():
        cells = [
            f"{r['batch_ms']:>9.1f}",
            _cell(r.get("predicted_ms"), ">10.1f"),
            f"{r['tokens_per_s']:>10,.0f}",
            _cell(r["anchors_per_s"], ">10,.0f"),
            f"{r['mfu']:>6.2f}",
            _cell(r["targets_wait_for_room"], ">6.0%"),
            _cell(r["drafters_wait_for_features"], ">9.0%"),
            _cell(r["queue_depth"], ">6.1f"),
            f"{r['host_cpu_ms']:>8.1f}",
            f"{r['recompiles']:>11}",
        ]
        idle = ", ".join(f"{device} {share:.0%}" for device, share in r["idle"].items())
        peak = ", ".join(f"{gib:.1f}" for gib in r["peak_gib"].values())
        lines.append(f"{name:<20}{''.join(cells)}  {idle}; {peak or '-'}")
    return "\n".join(lines)


def rounded(value: Any) -> Any:
    """All numbers in `value` to five digits."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _cell(value: float | None, form: str) -> str:
    return format("-", f">{form[1:].split('.')[0].rstrip(',')}") if value is None else format(value, form)


def measure_one(arguments: argparse.Namespace) -> dict[str, Any]:
    """The sides that the arguments name, alone and together."""
    names = {side: getattr(arguments, side).split(",") for side in ("targets", "drafters")}
    targets, drafters = ([torch.device(name) for name in names[side]] for side in ("targets", "drafters"))
    parts = make_parts(SHAPES[arguments.shape], targets, arguments.rows, arguments.target_execution)
    replicas, rungs, way = make_replicas(parts, drafters, arguments.execution, arguments.set)
    both = Sides(parts.targets, replicas)
    ceilings = measure_ceilings(both.devices)
    sides = {
        "targets alone": Sides(targets=parts.targets),
        "drafters alone": Sides(replicas=replicas),
        "together": both,
    }
    found = {name: measure(parts, each, arguments.batches, ceilings) for name, each in sides.items()}
    print(table(found))
    return {
        "shape": arguments.shape,
        "torch": torch.__version__,
        "execution": rungs,
        "target_execution": [forward.rung for forward in parts.targets],
        "reduction": way,
        "ceiling_tflops": {str(device): flops / 1e12 for device, flops in ceilings.items()},
        **found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "cuda:0" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--shape", choices=list(SHAPES), default="4b")
    parser.add_argument("--tiny", action="store_const", dest="shape", const="tiny", help="--shape tiny")
    parser.add_argument("--device", help="of all targets and drafters")
    parser.add_argument("--targets", default=default, help="devices, separated by commas")
    parser.add_argument("--drafters", default=default, help="devices, separated by commas")
    parser.add_argument("--execution", default="auto", help="rung of the ladder for the drafters")
    parser.add_argument("--target-execution", default="auto", help="the same for the targets")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="another key of the drafters' job"
    )
    parser.add_argument("--batches", type=int, default=24)
    parser.add_argument("--rows", type=int, default=4, help="documents in a batch")
    parser.add_argument("--suite", choices=["two"], help="several measurements on two GPUs")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.device:
        arguments.targets = arguments.drafters = arguments.device
    measuring = measure_one
    if arguments.suite:
        from bench.pipeline_suite import measure_suite as measuring  # which imports this module
    try:
        result = rounded(measuring(arguments))
    except JobError as error:
        raise SystemExit(f"error: {error}") from None
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + os.linesep)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
