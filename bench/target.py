"""A target's forward pass for features: eager, by graphs of padded rows and of packed documents, compiled.

    python -m bench.target [--kind smollm2,4b|tiny] [--device cuda|cpu] [--texts unequal|equal] [--batches N]
                           [--ways eager,padded,packed,compiled,auto] [--profile WAY,...] [--json FILE]

Targets have random weights: a Llama of SmolLM2-135M's sizes, and the Qwen3 of bench.shapes' 4b with the
layers that run for its taps. Batches are planned as a run plans them, from texts whose lengths scatter as
those of conversations do (`unequal`: log-normal, mean some 300 tokens), or from texts of one length. What
is timed is what a target's thread does for a batch (`ms`): ids on the host to packed features on the device,
one batch after the other. `graph` is of that the replay alone, by the device's clock. Host time is that of
the call alone after an idle device, on the clock and (`cpu`) of the thread's own processor time, in the
median and once every size has been seen: memory that must be had first waits for the device. MFU is useful
work on real tokens (remote_payload.train.flops) over `ms`, against a product of 8192^3 in the same process.
`apart` is how far features are from those of the eager pass, and `fp32` how far from those of the same
weights in float32: where two ways are about as far, what sets them apart is rounding. `auto` is what a run
takes.
On a CPU only the eager way runs, and shows life.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig

from bench.random_target import qwen3_config, random_target
from bench.shapes import SHAPES
from remote_payload.train import execution
from remote_payload.train.buckets import EpochPlan, bucket_of, plan_epoch
from remote_payload.train.devices import on_device, turn
from remote_payload.train.drafter import choose_taps
from remote_payload.train.features import pack
from remote_payload.train.flops import ForwardWork
from remote_payload.train.target import Target
from remote_payload.train.target_graphs import apart
from remote_payload.train.target_layout import Layout, Packed, Padded
from remote_payload.train.target_pass import TargetPass
from remote_payload.train.target_shapes import packed_shapes, padded_shapes
from remote_payload.train.useful_work import matmul_ceiling

WAYS = ("eager", "padded", "packed", "compiled", "auto")
GRAPHS = 6
"""Shapes of each way; a run has up to twelve."""

BUDGET = {"smollm2": 32768, "4b": 8192, "tiny": 512}
ROWS = {"smollm2": 256, "4b": 64, "tiny": 16}
EDGES = [0, 192, 256, 320, 448, 770, 1216, 1728, 2432, 3296, 8193]


def config_of(kind: str) -> Any:
    """The Hugging Face config of a kind."""
    if kind == "smollm2":
        return LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1e5},
            max_position_embeddings=8192,
        )
    return qwen3_config(SHAPES[kind])


def make_target(kind: str, device: torch.device, dtype: torch.dtype) -> Target:
    """The target of a kind, tapped as a run taps it."""
    config = config_of(kind)
    taps = choose_taps(config.num_hidden_layers, 3 if kind == "tiny" else 5)
    return random_target(config, device, dtype, taps)


def make_plan(kind: str, texts: str) -> tuple[EpochPlan, np.ndarray]:
    """An epoch's batches, and the lengths of all texts."""
    budget, dice = BUDGET[kind], np.random.default_rng(0)
    if texts == "equal":
        length = budget // 4 if kind == "4b" else min(190, budget // 4)
        lengths = np.full(8 * (budget // length), length)
    else:
        lengths = np.clip(dice.lognormal(5.4, 0.8, 4000), 16, budget // 4).astype(np.int64)
    buckets = bucket_of(lengths, EDGES)
    return plan_epoch(lengths, buckets, token_budget=budget, max_batch=ROWS[kind], seed=0, epoch=0), lengths


def layouts_of(way: str, plan: EpochPlan, lengths: np.ndarray, kind: str) -> list[Layout[Any]]:
    """The graphs of a way."""
    options = {"token_budget": BUDGET[kind], "max_batch": ROWS[kind], "most": GRAPHS}
    if way == "padded":
        return [Padded(padded_shapes(plan, lengths, **options))]
    return [Packed(packed_shapes(plan, lengths, **options))]


def measure(
    way: str, target: Target, batches: list[tuple[torch.Tensor, list[int]]], layouts: list[Layout[Any]]
) -> dict[str, Any]:
    """All numbers of one way."""
    forward = TargetPass(target, last_hidden=False)
    wanted = {"padded": execution.GRAPH, "packed": execution.GRAPH}.get(way, way)
    with execution.WARM_UP_LOCK:
        warm = forward.warm_up(wanted, layouts)
    result: dict[str, Any] = {"way": way, "warm_up_s": warm.seconds, "gib": forward.gib}
    failed = bool(warm.steps_down) if way == "auto" else warm.execution != wanted
    result["failure"] = warm.reason if failed else None
    result["graphs"] = len(forward.layout.shapes) if forward.layout else 0
    result["apart"] = forward.apart
    if way == "auto":
        result["taken"], result["reason"] = warm.execution, warm.reason
    for ids, lengths in batches:
        forward.packed(ids, lengths)
    host, cpu, replays = [], [], []
    for ids, lengths in batches:
        wait(target)
        start, busy = time.perf_counter(), time.thread_time()
        forward.packed(ids, lengths)
        host.append(time.perf_counter() - start)
        cpu.append(time.thread_time() - busy)
        if forward.graphs and (shape := forward.graphs.layout.fitting(lengths)):
            replays.append(replay_ms(forward, shape))
    result["host_ms"] = 1e3 * statistics.median(host)
    result["host_cpu_ms"] = 1e3 * statistics.median(cpu)
    result["graph_ms"] = statistics.mean(replays) if replays else None
    wait(target)
    start = time.perf_counter()
    for ids, lengths in batches:
        with turn(target.device):
            forward.packed(ids, lengths)
    wait(target)
    result["seconds"] = (time.perf_counter() - start) / len(batches)
    return result | {"forward": forward}


def replay_ms(forward: TargetPass, shape: Any) -> float:
    """Milliseconds of the device for a replay over what lies there."""
    assert forward.graphs is not None
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
    wait(forward.target)
    begin.record()
    forward.graphs.replay(shape)
    end.record()
    wait(forward.target)
    return float(begin.elapsed_time(end))


def exact_features(
    kind: str, target: Target, batches: list[tuple[torch.Tensor, list[int]]]
) -> list[torch.Tensor]:
    """What the same weights say in float32, by the model's own pass."""
    exact = make_target(kind, target.device, torch.float32)
    exact.model.load_state_dict(target.model.state_dict())
    return [pack(exact.features(ids.to(target.device)), lengths) for ids, lengths in batches]


def wait(target: Target) -> None:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)


def profile(forward: TargetPass, ids: torch.Tensor, lengths: list[int]) -> list[str]:
    """Lines on one batch: milliseconds by kernel, the longest first, and of the host's calls of CUDA."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        forward.packed(ids, lengths)
        wait(forward.target)
    events = found.key_averages()
    kernels = [
        each for each in events if each.self_device_time_total and str(each.device_type).endswith("CUDA")
    ]
    total = sum(each.self_device_time_total for each in kernels) / 1e3
    lines = [f"{total:8.2f} ms in {sum(each.count for each in kernels)} kernels"]
    for each in sorted(kernels, key=lambda each: -each.self_device_time_total)[:14]:
        lines.append(f"{each.self_device_time_total / 1e3:8.2f} ms {each.count:5} x  {each.key[:110]}")
    calls = [each for each in events if each.key.startswith("cuda") and each.self_cpu_time_total > 100]
    for each in sorted(calls, key=lambda each: -each.self_cpu_time_total)[:6]:
        lines.append(f"{each.self_cpu_time_total / 1e3:8.2f} ms {each.count:5} x  (host) {each.key}")
    return lines


def run(kind: str, device: torch.device, arguments: argparse.Namespace) -> dict[str, Any]:
    """All ways for one kind of target."""
    target = make_target(kind, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    plan, lengths = make_plan(kind, arguments.texts)
    work = ForwardWork.of(target)
    generator = torch.Generator().manual_seed(0)
    batches = []
    for samples in plan.batches[: arguments.batches]:
        of_batch = lengths[samples].tolist()
        shape = (len(of_batch), max(of_batch))
        ids = torch.randint(3, target.embedding.num_embeddings, shape, generator=generator)
        batches.append((ids, of_batch))
    real = [sum(of_batch) for _, of_batch in batches]
    padded = [ids.numel() for ids, _ in batches]
    ceiling = matmul_ceiling(device)
    useful = sum(work.flops(of_batch) for _, of_batch in batches) / len(batches)
    found: dict[str, Any] = {
        "kind": kind,
        "texts": arguments.texts,
        "tokens": sum(real) / len(real),
        "real_share": sum(real) / sum(padded),
        "tflop": useful / 1e12,
        "ceiling_tflops": ceiling / 1e12,
        "ways": [],
    }
    print(
        f"{kind}: {found['tokens']:,.0f} real tokens a batch, {found['real_share']:.0%} of the padded;"
        f" {found['tflop']:.1f} TFLOP; ceiling {found['ceiling_tflops']:.0f} TFLOP/s"
    )
    names = ("ms", "graph", "host ms", "cpu", "MFU", "apart", "fp32", "graphs", "GiB", "warm s")
    columns = tuple(zip(names, (8, 8, 9, 7, 6, 9, 9, 7, 7, 8), strict=True))
    print(f"  {'way':<10}{''.join(f'{name:>{width}}' for name, width in columns)}")
    exact = exact_features(kind, target, batches[:2])
    eager: list[torch.Tensor] = []
    for way in arguments.ways.split(",") if device.type == "cuda" else ["eager"]:
        result = measure(way, target, batches, layouts_of(way, plan, lengths, kind))
        forward = result.pop("forward")
        some = [forward.packed(*batch) for batch in batches[:2]]
        if way == "eager":
            eager = some
        parted = max((apart(*pair)[0] for pair in zip(some, eager, strict=False)), default=None)
        rounded = max(apart(*pair)[0] for pair in zip(some, exact, strict=True))
        result |= {
            "mfu": useful / result["seconds"] / ceiling,
            "apart_from_eager": parted,
            "apart_from_float32": rounded,
        }
        found["ways"].append(result)
        print(
            f"  {way:<10}{result['seconds'] * 1e3:>8.1f}{shown(result['graph_ms'], '.1f'):>8}"
            f"{result['host_ms']:>9.2f}{result['host_cpu_ms']:>7.2f}{result['mfu']:>6.2f}"
            f"{shown(parted, '.1e'):>9}{rounded:>9.1e}{result['graphs']:>7}{result['gib'] or 0:>7.2f}"
            f"{result['warm_up_s']:>8.1f}  {result['failure'] or result.get('reason', '')}",
            flush=True,
        )
        if way in arguments.profile.split(","):
            result["profile"] = profile(forward, *batches[0])
            print(*(f"    {line}" for line in result["profile"]), sep=os.linesep, flush=True)
        del forward, some
        gc.collect()
    return found


def shown(value: float | None, form: str) -> str:
    """A number, or a dash for none."""
    return "-" if value is None else format(value, form)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", default="smollm2,4b", help="of smollm2, 4b, tiny; separated by commas")
    parser.add_argument("--tiny", action="store_const", dest="kind", const="tiny", help="--kind tiny")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ways", default=",".join(WAYS), help="separated by commas, eager first")
    parser.add_argument("--texts", choices=("unequal", "equal"), default="unequal")
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--profile", default="", help="print the longest kernels of a batch, by these ways")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cuda:0" if arguments.device == "cuda" else arguments.device)
    results = []
    with on_device(device):
        for kind in arguments.kind.split(","):
            results.append(run(kind, device, arguments))
            gc.collect()
    if arguments.json:
        arguments.json.write_text(json.dumps({"torch": torch.__version__, "kinds": results}) + os.linesep)


if __name__ == "__main__":
    main()
