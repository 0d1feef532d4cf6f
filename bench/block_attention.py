"""Our attention kernels beside FlexAttention as it is used: one layer, alone, forward and backward apart.

    python -m bench.block_attention [--shape 8b|4b] [--only WORDS]

A line for each way: relative errors of out, dq, dk and dv against float32 (of the last queries, one key/value
head), milliseconds. `forward` and `backward` lines vary one pass and leave the other as in `Plan`. A kernel
that fails is a line too. Needs a GPU; a minute and a half.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from bench.attention import CHECKED, _exact
from bench.shapes import SHAPES, Shape
from remote_payload.train import block_attention, drafter
from remote_payload.train.block_attention import BY_DESCRIPTOR, BY_REGISTERS, DETERMINISTIC, Plan, Tiling
from remote_payload.train.folded import fold_mask, folded_rule
from remote_payload.train.mask import block_mask, dense_mask, mask_mod

ROUNDS = 10
AHEAD = 20_000_000
"""Cycles of the device, about 12 ms."""


def _hopper(rows: int, keys: int, stages: int, warps: int) -> Tiling:
    return Tiling(rows=rows, keys=keys, stages=stages, warps=warps, hopper=True)


def _plain(rows: int, keys: int, stages: int, warps: int, tma: bool = False) -> Tiling:
    return Tiling(rows=rows, keys=keys, stages=stages, warps=warps, tma=tma)


FORWARD = [
    _hopper(128, 128, 2, 8),
    _hopper(128, 64, 3, 8),
    _hopper(64, 64, 2, 4),
    _plain(128, 128, 2, 8, tma=True),
    _plain(128, 128, 2, 8),
    _plain(64, 64, 3, 4, tma=True),
]
BACKWARD = [
    Plan(by_keys=_hopper(64, 128, 2, 8)),
    Plan(by_keys=_hopper(64, 128, 3, 8)),
    Plan(by_keys=_plain(64, 128, 2, 8), slopes=BY_DESCRIPTOR),
    Plan(by_keys=_plain(64, 128, 2, 8), slopes=BY_REGISTERS),
    Plan(by_queries=_plain(128, 64, 2, 8, tma=True), slopes=DETERMINISTIC),
]


class Row:
    """A row of one document with random anchors, its queries, keys and values, and what is exact."""

    def __init__(self, shape: Shape) -> None:
        self.shape, device = shape, torch.device("cuda:0")
        torch.manual_seed(0)
        last = shape.context - shape.block_size
        self.anchors = torch.randperm(last, device=device)[: shape.anchors].sort().values
        self.starts = torch.zeros_like(self.anchors)
        count, all_keys = shape.queries, shape.context + shape.queries

        def random(length: int, heads: int) -> Tensor:
            return torch.randn(length, heads, shape.head_dim, device=device, dtype=torch.bfloat16)

        self.qkv = [
            random(length, heads).requires_grad_()
            for length, heads in (
                (count, shape.heads),
                (all_keys, shape.kv_heads),
                (all_keys, shape.kv_heads),
            )
        ]
        self.slope = random(count, shape.heads)
        self.some = slice(count - CHECKED, None)
        self.few = self.slope.clone()
        self.few[: self.some.start] = 0
        group = shape.heads // shape.kv_heads
        mask = dense_mask(self.starts, self.anchors, shape.context, shape.block_size)[self.some]
        q, k, v = self.qkv
        self.exact = _exact(
            q[self.some, :group], k[:, :1], v[:, :1], mask, self.few[self.some, :group].contiguous()
        )

    def ours(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        context, block = self.shape.context, self.shape.block_size
        return block_attention.block_attention(q, k, v, self.starts, self.anchors, context, block)

    def flex(self) -> Callable[..., Tensor]:
        """FlexAttention with folded heads, as a drafter uses it."""
        shape = self.shape
        rule = mask_mod(self.starts, self.anchors, shape.context, shape.block_size)
        plain = block_mask(self.starts, self.anchors, shape.context, shape.block_size, rule)
        by_place = folded_rule(rule, shape.queries, shape.heads, shape.kv_heads)
        tiles = fold_mask(plain, shape.heads, shape.kv_heads, by_place)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return drafter.attend(q, k, v, tiles)

        return torch.compile(attend, fullgraph=True, dynamic=False)

    def errors(self, run: Callable[..., Tensor]) -> list[float]:
        out = run(*self.qkv)
        by_q, by_k, by_v = torch.autograd.grad(out, self.qkv, self.few)
        found = [out.detach()[self.some], by_q[self.some], by_k, by_v]
        return [
            float((one[:, : other.shape[1]].float() - other).norm() / other.norm())
            for one, other in zip(found, self.exact, strict=True)
        ]

    def times(self, run: Callable[..., Tensor]) -> tuple[float, float]:
        """Median milliseconds forward and backward, by events on the device."""
        times = []
        for _ in range(ROUNDS + 2):
            events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
            torch.cuda._sleep(AHEAD)  # so that the host is ahead of the device, as by a graph
            events[0].record()
            out = run(*self.qkv)
            events[1].record()
            torch.autograd.grad(out, self.qkv, self.slope)
            events[2].record()
            torch.cuda.synchronize()
            times.append((events[0].elapsed_time(events[1]), events[1].elapsed_time(events[2])))
        return statistics.median(t[0] for t in times[2:]), statistics.median(t[1] for t in times[2:])


def _said(tiling: Tiling) -> str:
    kind = "hopper" if tiling.hopper else "triton tma" if tiling.tma else "triton"
    return f"{kind} {tiling.rows}x{tiling.keys} stages {tiling.stages} warps {tiling.warps}"


def _ways(row: Row) -> list[tuple[str, Plan, Callable[[], Callable[..., Tensor]]]]:
    plain = Plan()
    ways: list[tuple[str, Plan, Callable[[], Callable[..., Tensor]]]] = [("flex", plain, row.flex)]
    ways += [(f"backward {_said(p.by_keys)} {p.slopes}", p, lambda: row.ours) for p in BACKWARD]
    ways += [(f"forward {_said(t)}", Plan(forward=t), lambda: row.ours) for t in FORWARD]
    return ways


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=[s for s in SHAPES if s != "tiny"], default="8b")
    parser.add_argument("--only", default="", help="ways whose line has these words")
    arguments = parser.parse_args()
    began = time.monotonic()
    row = Row(SHAPES[arguments.shape])
    for name, plan, make in _ways(row):
        if not all(word in name for word in arguments.only.split()):
            continue
        block_attention.PLAN = plan
        try:
            run = make()
            errors = " ".join(f"{e:.1e}" for e in row.errors(run))
            forward, backward = row.times(run)
        except Exception as error:  # one kernel that does not compile says nothing of the others
            print(f"{name:58} {type(error).__name__}: {' '.join(str(error).split())[:200]}", flush=True)
            continue
        spent = time.monotonic() - began
        print(f"{name:58} {forward:6.3f} {backward:6.3f} ms  {errors}  at {spent:.0f} s", flush=True)


if __name__ == "__main__":
    main()
