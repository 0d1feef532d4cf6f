"""FlexAttention under the training mask, one variant of its tiles after the other: where the next ms may be.

    python -m bench.attention [--shape 8b|4b] [--variants JSON] [--json FILE]
    python -m bench.attention --flash [--shape 8b|4b] [--launches N] [--profile]

Every variant is compiled in a process of its own, several at once; they measure one at a time, under a lock.
A variant is a dictionary of FlexAttention's `kernel_options`; `fwd_` and `bwd_` before a name say for which
pass. An empty one is torch's own choice. Needs a GPU.

`--flash` proves FlashAttention-4 as warm-up does, over `--launches`, and times it beside FlexAttention
(`bench.flash`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from bench import flash
from bench.alone import alone
from bench.shapes import SHAPES
from remote_payload.train import drafter
from remote_payload.train.folded import fold_mask, folded_rule
from remote_payload.train.mask import block_mask, dense_mask, mask_mod

AT_ONCE = 7
CHECKED = 1024
"""Queries, the last ones, whose output and gradients are compared with float32."""


def _forward(m: int, n: int, stages: int, warps: int, **more: bool) -> dict[str, Any]:
    sizes = {"BLOCK_M": m, "BLOCK_N": n, "num_stages": stages, "num_warps": warps, **more}
    return {f"fwd_{name}": value for name, value in sizes.items()}


def _backward(m1: int, n1: int, m2: int, n2: int, stages: int, warps: int, **more: bool) -> dict[str, Any]:
    sizes = {"BLOCK_M1": m1, "BLOCK_N1": n1, "BLOCK_M2": m2, "BLOCK_N2": n2}
    sizes |= {"num_stages": stages, "num_warps": warps, **more}
    return {f"bwd_{name}": value for name, value in sizes.items()}


VARIANTS: list[dict[str, Any]] = [
    {"folded": False},
    {},
    _forward(128, 128, 3, 8, ROWS_GUARANTEED_SAFE=True) | _backward(64, 128, 128, 64, 2, 8),
    _forward(128, 64, 3, 8, USE_TMA=True) | _backward(64, 128, 64, 128, 2, 8),
    _forward(128, 64, 4, 8) | _backward(32, 128, 128, 32, 2, 8),
    _forward(128, 128, 3, 8, ROWS_GUARANTEED_SAFE=True, USE_TMA=True) | _backward(64, 128, 128, 32, 2, 8),
    _forward(128, 64, 2, 8) | _backward(64, 128, 64, 64, 2, 8),
]
"""`folded` = False is by head, in FlexAttention's usual order."""


def measure(shape: str, options: dict[str, Any], lock: Path) -> dict[str, Any]:
    """Median milliseconds of both passes of one layer, and relative errors against float32."""
    sizes, device = SHAPES[shape], torch.device("cuda:0")
    context, queries = sizes.context, sizes.anchors * sizes.block_size
    torch.manual_seed(0)
    anchors = torch.randperm(context - sizes.block_size, device=device)[: sizes.anchors].sort().values
    starts = torch.zeros_like(anchors)
    rule = mask_mod(starts, anchors, context, sizes.block_size)
    plain = block_mask(starts, anchors, context, sizes.block_size, rule)
    by_place = folded_rule(rule, queries, sizes.heads, sizes.kv_heads)
    tiles = fold_mask(plain, sizes.heads, sizes.kv_heads, by_place)

    def random(count: int, heads: int) -> Tensor:
        made = torch.randn(count, heads, sizes.head_dim, device=device, dtype=torch.bfloat16)
        return made.requires_grad_()

    q, k, v = (
        random(n, h)
        for n, h in (
            (queries, sizes.heads),
            (context + queries, sizes.kv_heads),
            (context + queries, sizes.kv_heads),
        )
    )

    drafter.FLEX_OPTIONS = options

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if options.get("folded", True):
            return drafter.attend(q, k, v, tiles)
        return _by_head(q, k, v, plain)

    run: Any = torch.compile(attend, fullgraph=True, dynamic=False)
    slope = torch.randn(queries, sizes.heads, sizes.head_dim, device=device, dtype=torch.bfloat16)
    some = slice(queries - CHECKED, None)  # an exact pass over all queries would take too much memory
    slope[: some.start] = 0
    out = run(q, k, v)
    by_q, by_k, by_v = torch.autograd.grad(out, (q, k, v), slope)
    found = [out.detach()[some], by_q[some], by_k, by_v]
    checked = slope[some].clone()
    slope.normal_()
    with alone(lock):
        forward, backward = _timed(run, (q, k, v), slope)
    group = sizes.heads // sizes.kv_heads
    mask = dense_mask(starts, anchors, context, sizes.block_size)[some]
    exact = _exact(q[some, :group], k[:, :1], v[:, :1], mask, checked[:, :group])
    errors = [
        float((one[:, : other.shape[1]].float() - other).norm() / other.norm())
        for one, other in zip(found, exact, strict=True)
    ]
    return {"forward_ms": forward, "backward_ms": backward, "errors": errors}


def _by_head(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    """Head after head, as FlexAttention is used elsewhere."""
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    out: Any = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1)  # type: ignore[no-any-return]


def _exact(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, slope: Tensor) -> list[Tensor]:
    """Output and gradients in float32 with the dense mask."""
    q, k, v = (t.detach().float().requires_grad_() for t in (q, k, v))
    turned = [t.transpose(0, 1)[None] for t in (q, k, v)]
    wide = F.scaled_dot_product_attention(turned[0], turned[1], turned[2], attn_mask=mask, enable_gqa=True)
    out = wide[0].transpose(0, 1)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), slope.float())]


def _timed(run: Any, inputs: tuple[Tensor, ...], slope: Tensor) -> tuple[float, float]:
    times = []
    for _ in range(13):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        events[0].record()
        out = run(*inputs)
        events[1].record()
        torch.autograd.grad(out, inputs, slope)
        events[2].record()
        torch.cuda.synchronize()
        times.append((events[0].elapsed_time(events[1]), events[1].elapsed_time(events[2])))
    return statistics.median(t[0] for t in times[3:]), statistics.median(t[1] for t in times[3:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=[s for s in SHAPES if s != "tiny"], default="8b")
    parser.add_argument("--variants", type=json.loads, default=VARIANTS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--lock", type=Path, default=Path(tempfile.gettempdir()) / "bench-attention.lock")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for one variant")
    parser.add_argument("--flash", action="store_true")
    parser.add_argument("--launches", type=int, default=300)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    if arguments.flash:
        flash.compare(arguments.shape, arguments.launches, arguments.profile)
        return
    if arguments.one is not None:
        print(json.dumps(measure(arguments.shape, json.loads(arguments.one), arguments.lock)))
        return

    def one(options: dict[str, Any]) -> dict[str, Any]:
        command = [sys.executable, "-m", "bench.attention", "--shape", arguments.shape]
        command += ["--lock", str(arguments.lock), "--one", json.dumps(options)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=arguments.limit, check=False
            )
        except subprocess.TimeoutExpired:
            return {"options": options, "failure": f"not done after {arguments.limit:.0f} s"}
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "Error" in line]
            return {"options": options, "failure": (lines or ["no reason given"])[-1][:300]}
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return {"options": options} | found

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for result in pool.map(one, arguments.variants):
            if arguments.json:
                with arguments.json.open("a") as file:
                    file.write(json.dumps(result) + "\n")
            shown = result.get("failure") or (
                f"forward {result['forward_ms']:6.3f} ms  backward {result['backward_ms']:6.3f} ms"
                f"  errors {' '.join(f'{e:.1e}' for e in result['errors'])}"
            )
            print(f"{shown}  {json.dumps(result['options'])}", flush=True)


if __name__ == "__main__":
    main()
