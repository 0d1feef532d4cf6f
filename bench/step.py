"""One training step of a drafter replica, by each rung of the ladder: how long, how fast, how much memory.

    python -m bench.step [--shape 8b|4b|tiny] [--device cuda|cpu] [--rungs graph,compiled,eager]
                         [--fp8 none,head+mlp,all] [--reference] [--profile FILE] [--steps N] [--json FILE]

What is timed is what a training run does for a step: load a row (features on the device, the rest from the
host), forward and backward, reduction, clip and AdamW, with fresh anchors every step and no wait for the
device within a window of steps. Every rung runs in a process of its own. MFU is useful work by
`remote_payload.train.flops` over time, against a matrix product of 8192 x 8192 x 8192 that is timed in the
same process before and after. `--fp8` names parts that multiply 8-bit numbers as a job's `fp8` does; each
has a row of its own, against the same 16-bit ceiling. `--reference` times `bench.reference` in the same run,
so that a ratio is of one machine at one time.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, cast

import torch

from bench import reference
from bench.alone import alone
from bench.shapes import SHAPES, Shape
from remote_payload.job import Job
from remote_payload.tools.synthetic import random_ends, random_rows
from remote_payload.train import drafter, execution, objective
from remote_payload.train.batch import Batch, RowShape
from remote_payload.train.devices import on_device
from remote_payload.train.drafter import DrafterConfig, choose_taps
from remote_payload.train.features import Features
from remote_payload.train.flops import step_flops
from remote_payload.train.replica import Replica
from remote_payload.train.run_control import RunControl
from remote_payload.train.statistics import Statistics
from remote_payload.train.sync import Contribution, Reduction
from remote_payload.train.useful_work import matmul_ceiling

RUNGS = (execution.GRAPH, execution.COMPILED, execution.EAGER)


def config_of(shape: Shape) -> DrafterConfig:
    """The drafter of a shape."""
    return DrafterConfig(
        layers=shape.layers,
        width=shape.width,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        ffn=shape.ffn,
        norm_eps=1e-6,
        rope_theta=1e6,
        vocabulary=shape.vocabulary,
        tap_layers=choose_taps(shape.target_layers, shape.taps),
        target_layers=shape.target_layers,
        block_size=shape.block_size,
        mask_token_id=shape.vocabulary - 1,
        max_positions=40960,
    )


def measure(
    rung: str, fp8: str, name: str, device: torch.device, steps: int, profile: Path | None, lock: Path | None
) -> dict[str, Any]:
    """All numbers of one rung, in a worker thread as in a training run."""
    result: dict[str, Any] = {}

    def work() -> None:
        with on_device(device):
            result.update(_measure(rung, fp8, name, device, steps, profile, lock))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if not result:
        raise SystemExit("the worker failed; its traceback stands above")
    return result


def _measure(
    rung: str, fp8: str, name: str, device: torch.device, steps: int, profile: Path | None, lock: Path | None
) -> dict[str, Any]:
    shape, cuda = SHAPES[name], device.type == "cuda"
    config = config_of(shape)
    job = Job.from_mapping(
        {
            "target": "random",
            "dataset": "random",
            "mask_token_id": config.mask_token_id,
            "drafters": [str(device)],
            "fp8": fp8,
        },
        "bench",
    )
    row_shape = RowShape(
        token_budget=shape.context,
        anchors=shape.anchors,
        block_size=shape.block_size,
        mask_token_id=config.mask_token_id,
        gamma=7.0,
    )
    dtype = torch.bfloat16 if cuda else torch.float32
    target = random_ends(config, device, dtype)
    replica = Replica(0, device, job, config, row_shape, Statistics(shape.block_size, 1), target)
    warm = replica.warm_up(rung)
    if warm.execution != rung:
        raise RuntimeError(f"{rung} stepped down to {warm.execution}: {warm.reason}")
    reduction = Reduction([device], RunControl())
    rows = random_rows(row_shape, shape.vocabulary, 8)
    packed = torch.randn(shape.context, replica.features.shape[1], device=device, dtype=dtype)
    weight = float(rows[0].weights.sum())

    def step(number: int) -> dict[str, float]:
        row = rows[number % len(rows)]
        marks = [time.thread_time()]
        replica.load(Features(cast(Batch, None), packed, None), row)
        marks.append(time.thread_time())
        replica.run_row(row, 0, first=True)
        marks.append(time.thread_time())
        agreed, _ = reduction.reduce(0, Contribution(replica.weights, replica.statistics, weight))
        marks.append(time.thread_time())
        replica.step(agreed.weight, 6e-4)
        marks.append(time.thread_time())
        spans = [(after - before) * 1e3 for before, after in itertools.pairwise(marks)]
        return dict(zip(("load", "row", "reduce", "step"), spans, strict=True))

    for number in range(3):
        step(number)
    replica.synchronise()
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    graphs = execution.compiled_graphs()
    windows, busy = [], []
    with alone(lock):
        ceilings = [matmul_ceiling(device)]
        for _ in range(3):
            start = time.perf_counter()
            for number in range(steps):
                step(number)
            replica.synchronise()
            windows.append((time.perf_counter() - start) / steps)
        for number in range(5):  # with an idle device, so that nothing but the host's own work is counted
            busy.append(step(number))
            replica.synchronise()
        ceilings.append(matmul_ceiling(device))
        if profile is not None:
            _profile(step, replica, profile)
    seconds = statistics.median(windows)
    pairs = float(sum((row.anchors + shape.block_size).sum() * shape.block_size for row in rows)) / len(rows)
    work = step_flops(config, shape.context, shape.anchors, pairs)
    reading = Statistics(shape.block_size, 1).read(replica.statistics)
    return {
        "what": rung if fp8 == "none" else f"{rung} {fp8}",
        "fp8": fp8,
        "shape": name,
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "torch": torch.__version__,
        "step_ms": seconds * 1e3,
        "windows_ms": [w * 1e3 for w in windows],
        "tokens_per_s": shape.context / seconds,
        "anchors_per_s": shape.anchors / seconds,
        "flops": work,
        "mfu": work / seconds / max(ceilings),
        "ceiling_tflops": [c / 1e12 for c in ceilings],
        "peak_gib": torch.cuda.max_memory_allocated(device) / 2**30 if cuda else None,
        "reserved_gib": torch.cuda.max_memory_reserved(device) / 2**30 if cuda else None,
        "host_cpu_ms": statistics.median(sum(spans.values()) for spans in busy),
        "host_cpu_by_part_ms": {name: statistics.median(spans[name] for spans in busy) for name in busy[0]},
        "recompiles": execution.compiled_graphs() - graphs,
        "warm_up_s": warm.seconds,
        "warm_up": warm.step_s,
        "loss": reading.loss,
        "skipped": replica.optimizer.read().skipped,
    }


def _profile(step: Any, replica: Replica, path: Path) -> None:
    """Time by kernel of three steps, the longest first, as text."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        for number in range(3):
            step(number)
        replica.synchronise()
    kernels: dict[str, list[float]] = {}
    for event in profiler.events() or []:
        if event.device_type.name == "CUDA":
            kernels.setdefault(event.name, []).append(event.time_range.elapsed_us())
    lines = [f"{sum(sum(times) for times in kernels.values()) / 3e3:8.3f} ms in kernels a step"]
    for name, times in sorted(kernels.items(), key=lambda item: -sum(item[1])):
        lines.append(f"{sum(times) / 3e3:8.3f} ms {len(times) / 3:6.1f} x  {name[:150]}")
    path.write_text("\n".join(lines) + "\n")


def table(results: list[dict[str, Any]]) -> str:
    """The results as one table for people."""
    columns = ("step ms", 9), ("tokens/s", 11), ("anchors/s", 11), ("MFU", 7), ("GiB", 7), ("host ms", 9)
    lines = [f"{'what':<20}{''.join(f'{name:>{width}}' for name, width in columns)}{'recompiles':>12}"]
    for r in results:
        if "failure" in r:
            lines.append(f"{r['what']:<20}  {r['failure']}")
            continue
        peak = f"{r['peak_gib']:.1f}" if r.get("peak_gib") else "-"
        host = f"{r['host_cpu_ms']:.2f}" if "host_cpu_ms" in r else "-"
        mfu = f"{r['mfu']:.2f}" if "mfu" in r else "-"
        lines.append(
            f"{r['what']:<20}{r['step_ms']:>9.1f}{r['tokens_per_s']:>11,.0f}{r['anchors_per_s']:>11,.0f}"
            f"{mfu:>7}{peak:>7}{host:>9}{r.get('recompiles', '-'):>12}"
        )
    return "\n".join(lines)


def _one(arguments: argparse.Namespace, rung: str, fp8: str) -> dict[str, Any]:
    """One rung in a process of its own."""
    what = rung if fp8 == "none" else f"{rung} {fp8}"
    command = [sys.executable, "-m", "bench.step", "--shape", arguments.shape, "--device", arguments.device]
    command += ["--steps", str(arguments.steps), "--one", rung, "--fp8", fp8]
    if arguments.chunk_rows:
        command += ["--chunk-rows", str(arguments.chunk_rows)]
    if arguments.lock:
        command += ["--lock", str(arguments.lock)]
    if arguments.flex is not None:
        command += ["--flex", json.dumps(arguments.flex)]
    if arguments.profile and rung != "reference":
        command += ["--profile", f"{arguments.profile}.{what.replace(' ', '.').replace('+', '-')}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=arguments.limit, check=False)
    except subprocess.TimeoutExpired:
        return {"what": what, "failure": f"not done after {arguments.limit:.0f} s"}
    with contextlib.suppress(IndexError, ValueError):
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found
    errors = [line for line in done.stderr.splitlines() if "Error" in line]
    sys.stderr.write(done.stderr[-3000:])
    return {"what": what, "failure": (errors or ["no reason given"])[-1][:300]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="8b")
    parser.add_argument("--tiny", action="store_const", dest="shape", const="tiny", help="--shape tiny")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--rungs", default=None, help="those of graph,compiled,eager; on a CPU there is no graph"
    )
    parser.add_argument(
        "--fp8",
        default="none",
        help="parts in 8 bits, a row each: none, head, mlp, head+mlp, all; with commas",
    )
    parser.add_argument("--reference", action="store_true", help="time the plain step too")
    parser.add_argument("--profile", type=Path, help="write kernel times to FILE.RUNG")
    parser.add_argument("--steps", type=int, default=20, help="steps in a window; three windows are timed")
    parser.add_argument(
        "--chunk-rows", type=int, help="logits of so many rows at once, instead of the default"
    )
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one rung")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--lock", type=Path, help="measure while holding this file, as others do that share the GPU"
    )
    parser.add_argument("--flex", type=json.loads, help="FlexAttention's kernel_options, instead of ours")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    device = torch.device(
        arguments.device if ":" in arguments.device else arguments.device.replace("cuda", "cuda:0")
    )
    shape = SHAPES[arguments.shape]
    if arguments.chunk_rows:
        rows: int = arguments.chunk_rows
        objective.most_rows = lambda _head: rows  # type: ignore[assignment]
    if arguments.flex is not None:
        drafter.FLEX_OPTIONS = arguments.flex
    if arguments.one == "reference":
        seconds = reference.measure(shape, device, steps=arguments.steps, lock=arguments.lock)
        result = {"what": "reference", "shape": arguments.shape, "step_ms": seconds * 1e3}
        result |= {"tokens_per_s": shape.context / seconds, "anchors_per_s": shape.anchors / seconds}
        print(json.dumps(result))
        return
    if arguments.one:
        found = measure(
            arguments.one,
            arguments.fp8,
            arguments.shape,
            device,
            arguments.steps,
            arguments.profile,
            arguments.lock,
        )
        print(json.dumps(found))
        return
    rungs = (arguments.rungs or ",".join(RUNGS if device.type == "cuda" else RUNGS[1:])).split(",")
    runs = [(rung, fp8) for rung in rungs for fp8 in arguments.fp8.split(",")]
    runs += [("reference", "none")] * arguments.reference
    results = []
    for rung, fp8 in runs:
        results.append(_one(arguments, rung, fp8))
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1) + os.linesep)
    print(table(results))


if __name__ == "__main__":
    main()
