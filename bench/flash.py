"""FlashAttention-4 beside FlexAttention under the training mask: errors of tiles, milliseconds of a layer.

Called by `python -m bench.attention --flash`. All runs in a worker thread on a stream of its own, compiled
and captured as a replica does it; what is timed are replays of captured passes, so that the host is no part.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.shapes import SHAPES
from remote_payload.train.attention_gate import Trial, refusal
from remote_payload.train.devices import on_device
from remote_payload.train.drafter import attend
from remote_payload.train.execution import Graph
from remote_payload.train.flash_attention import unavailable
from remote_payload.train.row_mask import FLASH, FLEX, AttentionSizes, RowMask

FLEX_LAUNCHES = 5
"""Of FlexAttention, which is there for comparison."""


def compare(shape: str, launches: int, profile: bool) -> None:
    """Print the table; says what fails and goes on with the rest."""
    reason = "needs an NVIDIA GPU"
    if not torch.cuda.is_available() or (
        reason := unavailable(torch.device("cuda:0"), torch.bfloat16, SHAPES[shape].head_dim)
    ):
        raise SystemExit(f"FlashAttention-4 cannot run here: {reason}")
    thread = threading.Thread(target=_compare, args=(shape, launches, profile))
    thread.start()
    thread.join()


def _compare(name: str, launches: int, profile: bool) -> None:
    shape, device = SHAPES[name], torch.device("cuda:0")
    sizes = AttentionSizes(
        context=shape.context,
        anchors=shape.anchors,
        block_size=shape.block_size,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
    )
    with on_device(device):
        start = time.perf_counter()
        trial = Trial(sizes, device, torch.bfloat16)
        torch.cuda.synchronize()
        print(f"exact results after {time.perf_counter() - start:.1f} s")
        print(
            f"{'':6}{'output':>9}{'dq':>9}{'dk':>9}{'dv':>9}   greatest error of a tile;  a layer, ms: "
            "forward, backward; same bits again"
        )
        for kind, count in ((FLASH, launches), (FLEX, FLEX_LAUNCHES)):
            try:
                _line(kind, count, trial, sizes, device, profile)
            except Exception as error:  # the other kind is still worth its line
                print(f"{kind}: {type(error).__name__}: {str(error)[:2000]}", flush=True)
                if kind == FLASH:
                    import traceback

                    traceback.print_exc()


def _line(
    kind: str, launches: int, trial: Trial, sizes: AttentionSizes, device: torch.device, profile: bool
) -> None:
    start = time.perf_counter()
    run: Any = torch.compile(attend, fullgraph=True, dynamic=False)
    mask = RowMask(trial.starts, trial.anchors, sizes, kind).make()
    errors = trial.errors(lambda q, k, v: run(q, k, v, mask), launches)
    passes = [_pass(run, trial, mask) for _ in range(2)]
    same = ["yes" if one.equal(other) else "no" for one, other in zip(*passes, strict=True)]
    seconds = time.perf_counter() - start
    generator = torch.Generator(device).manual_seed(0)
    room = sizes.context - sizes.block_size
    anchors = torch.randperm(room, generator=generator, device=device)[: sizes.anchors].sort().values
    row_mask = RowMask(torch.zeros_like(anchors), anchors, sizes, kind)
    timed = row_mask.make()
    inputs = (trial.queries, trial.keys, trial.values)
    forward = _replayed(lambda: run(*inputs, timed), device)
    both = _replayed(lambda: _pass(run, trial, timed), device)
    made = _replayed(row_mask.make, device)
    print(
        f"{kind:6}" + "".join(f"{error:9.4f}" for error in errors) + f"   {launches} launches"
        f"  {forward:7.3f} {both - forward:7.3f}   out {same[0]}, dq {same[1]}, dk {same[2]}, dv {same[3]};"
        f" the mask {made:.3f} ms; {seconds:.1f} s with compiling; {refusal(errors) or 'passes'}",
        flush=True,
    )
    if profile:
        _profile(lambda: _pass(run, trial, timed))


def _pass(run: Any, trial: Trial, mask: Any) -> tuple[Tensor, ...]:
    inputs = (trial.queries, trial.keys, trial.values)
    out = run(*inputs, mask)
    return (out.detach(), *torch.autograd.grad(out, inputs, trial.slope))


def _replayed(work: Callable[[], Any], device: torch.device) -> float:
    """Median milliseconds of a replay, in bursts of five."""
    kept: list[Any] = []
    for _ in range(2):
        work()
    graph = Graph(lambda: kept.append(work()), device)
    times = []
    for _ in range(8):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(5):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 5)
    return float(statistics.median(times[2:]))


def _profile(work: Callable[[], Any]) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    events = sorted(profiler.key_averages(), key=lambda event: -event.device_time_total)
    for event in events[:9]:
        print(f"    {event.device_time_total / 1e3:7.3f} ms {event.count:3} x {event.key[:100]}")
