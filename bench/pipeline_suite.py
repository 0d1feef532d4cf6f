"""`python -m bench.pipeline --suite two`: the splits of two GPUs, one after the other in one process.

Two targets and two sets of replicas (one on the second GPU, and two in lockstep) are made once and stay: a
measurement takes some of them. So their compilation is paid once, and the peak memory of each measurement
counts what lies idle beside it.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch

from bench.pipeline import Sides, host_ms, measure, measure_ceilings, table
from bench.pipeline_parts import make_parts, make_replicas
from bench.shapes import SHAPES
from remote_payload.train.roles import RoleTimes, splits

ALONE_TARGET, ALONE_DRAFTER, ALONE_DRAFTERS = "1 target", "1 drafter", "2 drafters"


def measure_suite(arguments: argparse.Namespace) -> dict[str, Any]:
    """All measurements; prints their table and a few lines under it."""
    start = time.perf_counter()
    pair = [torch.device(arguments.device)] * 2 if arguments.device else _two_gpus()
    shape = SHAPES[arguments.shape]
    parts = make_parts(shape, pair, arguments.rows, arguments.target_execution)
    made_targets = time.perf_counter()
    (single,), rung, _ = make_replicas(parts, pair[1:], arguments.execution, arguments.set)
    double, rungs, way = make_replicas(parts, pair, arguments.execution, arguments.set)
    warm = time.perf_counter()
    before = measure_ceilings(sorted(set(pair), key=str))
    sides = {
        ALONE_TARGET: Sides(targets=parts.targets[:1]),
        ALONE_DRAFTER: Sides(replicas=[single]),
        ALONE_DRAFTERS: Sides(replicas=double),
        "1 + 1": Sides(parts.targets[:1], [single]),
        "2 + 1, one shared": Sides(parts.targets, [single]),
        "2 + 2, both shared": Sides(parts.targets, double),
    }
    found: dict[str, dict[str, Any]] = {}
    for name, each in sides.items():
        found[name] = measure(parts, each, arguments.batches, before)
        # Now, since the next one may hang; the table is of all.
        print(f"{name}: {found[name]['batch_ms']:.1f} ms a batch", file=sys.stderr, flush=True)
    after = measure_ceilings(sorted(set(pair), key=str))
    t, d = (found[name]["batch_ms"] / 1e3 for name in (ALONE_TARGET, ALONE_DRAFTER))
    times = RoleTimes(target_s=t, tokens=shape.context, row_s=d, step_s=0.0)
    for split in splits(2, times, 2):
        for name, each in sides.items():
            if (split.targets, split.drafters) == (len(each.targets), len(each.replicas)):
                found[name]["predicted_ms"] = 1e3 / split.batches_per_s
    found[ALONE_DRAFTERS]["predicted_ms"] = d / 2 * 1e3
    scaling = found[ALONE_DRAFTER]["batch_ms"] / found[ALONE_DRAFTERS]["batch_ms"]
    host = host_ms(parts, single)
    seconds = {
        "targets": made_targets - start,
        "replicas": warm - made_targets,
        "measuring": time.perf_counter() - warm,
    }
    print(table(found))
    print(f"2 drafters against 1: {scaling:.2f} times as fast; gradients are added up by {way}")
    print(f"host CPU of a drafter's step with an idle device: {host:.2f} ms")
    print(
        f"targets {', '.join(forward.rung for forward in parts.targets)}; drafters {', '.join(rung + rungs)};"
        f" {', '.join(f'{name} {value:.0f} s' for name, value in seconds.items())}"
    )
    return {
        "suite": "two",
        "shape": arguments.shape,
        "torch": torch.__version__,
        "execution": rung + rungs,
        "target_execution": [forward.rung for forward in parts.targets],
        "reduction": way,
        "scaling": scaling,
        "host_step_ms": host,
        "seconds": seconds,
        "ceiling_tflops": {
            str(device): [flops / 1e12, after[device] / 1e12] for device, flops in before.items()
        },
        **found,
    }


def _two_gpus() -> list[torch.device]:
    count = torch.cuda.device_count()
    if count < 2:
        raise SystemExit(f"--suite two needs two GPUs, and torch sees {count}; --device cpu shows life")
    return [torch.device("cuda:0"), torch.device("cuda:1")]
