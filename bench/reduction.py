"""The sum of gradients over replicas, by NCCL and by peer copies: how long, and how many bytes a second.

    python -m bench.reduction [--shape 8b|4b|tiny] [--devices cuda:0,cuda:1,...] [--steps N] [--json FILE]

One replica a device, each in a thread and a stream as in a training run, with the flat weights of a real
drafter and gradients that lie where autograd would leave them. A step is what the trainer does between a
backward pass and AdamW: collect the gradient into its flat tensor, bucket by bucket, and add up over all
replicas. `collect` is timed alone as well, so that what a sum hides of it can be seen. GB/s are bytes of the
flat gradient over the whole time; on D GPUs each sends and receives 2 (D - 1) / D of them by NCCL, and D - 1
times all of them by peer copies. All replicas must hold the same bits afterwards, or the bench fails. Prints
a table, and all numbers as one JSON object on the last line. On a CPU it shows life only.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.pipeline_parts import in_threads
from bench.shapes import SHAPES, Shape
from bench.step import config_of
from remote_payload.train.devices import dtype_name
from remote_payload.train.drafter import Drafter
from remote_payload.train.run_control import RunControl
from remote_payload.train.sync import NCCL, PEER, Contribution, Reduction
from remote_payload.train.weights import FlatWeights, SumPlace


def flat_weights(
    shape: Shape, device: torch.device, gradient: torch.dtype, place: SumPlace
) -> tuple[FlatWeights, list[Tensor]]:
    """A drafter's weights, and gradients of it that differ between devices and are all of one size."""
    compute = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        drafter = Drafter(config_of(shape))
    weights = FlatWeights(drafter, compute, adjacent=drafter.adjacent(), gradient=gradient, place=place)
    generator = torch.Generator(device).manual_seed(device.index or 0)
    gradients = [
        torch.randn(leaf.shape, dtype=compute, device=device, generator=generator) for leaf in weights.leaves
    ]
    return weights, gradients


def measure(
    shape: Shape, devices: list[torch.device], way: str, gradient: torch.dtype, steps: int
) -> dict[str, Any]:
    """Milliseconds of one way in one type, or why it cannot be."""
    control = RunControl()
    reduction = Reduction(devices, control, way if way == PEER else "auto")
    made: list[FlatWeights | None] = [None] * len(devices)
    spans: dict[str, list[tuple[float, float]]] = {"collect": [], "step": []}
    barrier = threading.Barrier(len(devices))
    control.on_abort(barrier.abort)

    def replica(number: int) -> None:
        device = devices[number]
        weights, gradients = flat_weights(shape, device, gradient, reduction.place(number))
        statistics = torch.zeros(100, dtype=torch.float64, device=device)
        made[number] = weights

        def step() -> None:
            weights.collect(gradients, first=True)
            reduction.reduce(number, Contribution(weights, statistics, 1.0))

        def timed(name: str, work: Any, repeats: int) -> None:
            wait(device)
            barrier.wait()
            start = time.perf_counter()
            for _ in range(repeats):
                work()
            wait(device)
            spans[name].append((start, time.perf_counter()))

        for _ in range(3):
            step()
        timed("collect", lambda: weights.collect(gradients, first=True), steps)
        for _ in range(3):  # windows, so that one that was disturbed can be told
            timed("step", step, steps)

    with reduction.serving() as choice:
        if choice.way != way:
            return {"way": way, "gradient": dtype_name(gradient), "failure": choice.reason}
        in_threads([(device, replica, number) for number, device in enumerate(devices)], control)
    done = [weights for weights in made if weights is not None]
    for weights in done[1:]:
        if not weights.total.to(done[0].total.device).equal(done[0].total):
            raise SystemExit(f"{way}, {dtype_name(gradient)}: replicas hold different sums")
    windows = [spans["step"][n : n + len(devices)] for n in range(0, 3 * len(devices), len(devices))]
    times = [(max(e for _, e in w) - min(b for b, _ in w)) / steps for w in windows]
    best, size = min(times), done[0].local.numel() * done[0].local.element_size()
    collected = spans["collect"]
    return {
        "way": way,
        "gradient": dtype_name(gradient),
        "ms": best * 1e3,
        "windows_ms": [t * 1e3 for t in times],
        "collect_ms": (max(e for _, e in collected) - min(b for b, _ in collected)) / steps * 1e3,
        "gb_per_s": size / best / 1e9,
        "bytes": size,
        "buckets": len(done[0].buckets),
        "trial_s": choice.trial_s,
        "peak_gib": torch.cuda.max_memory_allocated(devices[0]) / 2**30
        if devices[0].type == "cuda"
        else None,
    }


def wait(device: torch.device) -> None:
    """For the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


HEAD = f"{'way':<7}{'gradient':<10}{'ms':>8}{'collect ms':>12}{'GB/s':>8}{'buckets':>9}{'peak GiB':>10}"


def line(r: dict[str, Any]) -> str:
    """One measurement for people, under `HEAD`."""
    if "failure" in r:
        return f"{r['way']:<7}{r['gradient']:<10}  {r['failure']}"
    peak = "-" if r["peak_gib"] is None else f"{r['peak_gib']:.1f}"
    return (
        f"{r['way']:<7}{r['gradient']:<10}{r['ms']:>8.2f}{r['collect_ms']:>12.2f}{r['gb_per_s']:>8.1f}"
        f"{r['buckets']:>9}{peak:>10}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found = torch.cuda.device_count()
    default = (
        ",".join(f"cuda:{n}" for n in range(found)) if found > 1 else "cuda:0,cuda:0" if found else "cpu,cpu"
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="8b" if found else "tiny")
    parser.add_argument("--devices", default=default, help="one a replica, separated by commas")
    parser.add_argument("--steps", type=int, default=10, help="steps in a window; three windows are timed")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    devices = [torch.device(name) for name in arguments.devices.split(",")]
    dtypes = [torch.bfloat16, torch.float32] if devices[0].type == "cuda" else [torch.float32]
    results = []
    one = functools.partial(measure, SHAPES[arguments.shape], devices, steps=arguments.steps)
    print(HEAD)
    for dtype in dtypes:
        for way in (NCCL, PEER):
            results.append(one(way=way, gradient=dtype))
            print(line(results[-1]), flush=True)  # now: the next one may hang
            if devices[0].type == "cuda":
                for device in set(devices):
                    with torch.cuda.device(device):
                        torch.cuda.empty_cache()
                        torch.cuda.reset_peak_memory_stats()
    name = torch.cuda.get_device_name(devices[0]) if devices[0].type == "cuda" else "cpu"
    summary = {"shape": arguments.shape, "devices": arguments.devices.split(","), "name": name}
    summary |= {"torch": torch.__version__, "results": results}
    text = json.dumps(summary)
    if arguments.json:
        arguments.json.write_text(text + os.linesep)
    print(text)


if __name__ == "__main__":
    main()
