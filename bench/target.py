"""A target's forward pass for features: eager, by graphs of padded rows and of packed documents, compiled.

    python -m bench.target [--kind smollm2,4b|tiny] [--device cuda|cpu] [--ways eager,padded,packed,compiled]
                           [--texts unequal|equal] [--batches N] [--profile WAY] [--json FILE]

Targets have random weights: a Llama of SmolLM2-135M's sizes, and the Qwen3 of bench.shapes' 4b with the
layers that run for its taps. Batches are planned as a run plans them, from texts whose lengths scatter as
those of conversations do (`unequal`: log-normal, mean some 300 tokens), or from texts of one length. What
is timed is what a target's thread does for a batch: ids on the host to packed features on the device. Host
time is that of the call alone, with an idle device. MFU is useful work on real tokens
(remote_payload.train.flops) over time, against a product of 8192^3 in the same process. `apart` is how far
features are from those of the eager pass.
On a CPU only the eager way runs, and shows life.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from bench.shapes import SHAPES
from remote_payload.train import execution
from remote_payload.train.buckets import EpochPlan, bucket_of, plan_epoch
from remote_payload.train.devices import on_device, turn
from remote_payload.train.drafter import choose_taps
from remote_payload.train.flops import ForwardWork
from remote_payload.train.fused_norms import fuse_norms
from remote_payload.train.target import Target
from remote_payload.train.target_layout import Layout, Packed, Padded
from remote_payload.train.target_pass import TargetPass, apart
from remote_payload.train.target_shapes import packed_shapes, padded_shapes
from remote_payload.train.useful_work import matmul_ceiling

WAYS = ("eager", "padded", "packed", "compiled")
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
    shape = SHAPES[kind]
    return Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.target_layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=True,
    )


def make_target(kind: str, device: torch.device) -> Target:
    """A target with random weights on `device`; sets torch's default type meanwhile."""
    config = config_of(kind)
    family: Any = LlamaForCausalLM if kind == "smollm2" else Qwen3ForCausalLM
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
    try:
        with torch.device(device):
            model: Any = family(config)
    finally:
        torch.set_default_dtype(before)
    if device.type == "cuda":
        fuse_norms(model)  # as `Target.load` does
    return Target(model, choose_taps(config.num_hidden_layers, 3 if kind == "tiny" else 5))


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
    wanted = {"eager": execution.EAGER, "compiled": execution.COMPILED}.get(way, execution.GRAPH)
    with execution.WARM_UP_LOCK:
        warm = forward.warm_up(wanted, layouts)
    result: dict[str, Any] = {"way": way, "warm_up_s": warm.seconds, "gib": forward.gib}
    result["failure"] = warm.reason if warm.execution != wanted else None
    result["graphs"] = len(forward.layout.shapes) if forward.layout else 0
    result["apart"] = forward.apart
    for ids, lengths in batches[:2]:
        forward.packed(ids, lengths)
    wait(target)
    host = []
    for ids, lengths in batches:
        start = time.perf_counter()
        forward.packed(ids, lengths)
        host.append(time.perf_counter() - start)
        wait(target)
    result["host_ms"] = 1e3 * sorted(host)[len(host) // 2]
    start = time.perf_counter()
    for ids, lengths in batches:
        with turn(target.device):
            forward.packed(ids, lengths)
    wait(target)
    result["seconds"] = (time.perf_counter() - start) / len(batches)
    return result | {"forward": forward}


def wait(target: Target) -> None:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)


def profile(forward: TargetPass, ids: torch.Tensor, lengths: list[int]) -> list[tuple[str, float]]:
    """Milliseconds by kernel of one batch, the longest first."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CUDA]) as found:
        forward.packed(ids, lengths)
        wait(forward.target)
    times = [(event.key[:90], event.self_device_time_total / 1e3) for event in found.key_averages()]
    return sorted(times, key=lambda each: -each[1])[:14]


def run(kind: str, device: torch.device, arguments: argparse.Namespace) -> dict[str, Any]:
    """All ways for one kind of target."""
    target = make_target(kind, device)
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
    print(f"  {'way':<10}{'ms':>8}{'host ms':>9}{'MFU':>6}{'apart':>9}{'graphs':>7}{'GiB':>7}{'warm s':>8}")
    eager: list[torch.Tensor] = []
    for way in arguments.ways.split(",") if device.type == "cuda" else ["eager"]:
        result = measure(way, target, batches, layouts_of(way, plan, lengths, kind))
        forward = result.pop("forward")
        some = [forward.packed(*batch) for batch in batches[:2]]
        if way == "eager":
            eager = some
        parted = max((apart(*pair)[0] for pair in zip(some, eager, strict=False)), default=None)
        result |= {"mfu": useful / result["seconds"] / ceiling, "apart_from_eager": parted}
        found["ways"].append(result)
        print(
            f"  {way:<10}{result['seconds'] * 1e3:>8.1f}{result['host_ms']:>9.2f}{result['mfu']:>6.2f}"
            f"{'-' if parted is None else format(parted, '.1e'):>9}{result['graphs']:>7}"
            f"{result['gib'] or 0:>7.2f}{result['warm_up_s']:>8.1f}  {result['failure'] or ''}",
            flush=True,
        )
        if way == arguments.profile:
            result["profile"] = profile(forward, *batches[0])
            for name, milliseconds in result["profile"]:
                print(f"    {milliseconds:8.2f} ms  {name}")
        del forward, some
        gc.collect()
    return found


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
    parser.add_argument("--profile", choices=WAYS, help="print the longest kernels of a batch, this way")
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
