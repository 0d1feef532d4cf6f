"""Every large product of a drafter's step alone, in 16 and in 8 bits, and what making 8-bit matrices costs.

    python -m bench.fp8_products [--shape 8b|4b] [--seconds S] [--json FILE]

A product runs for S seconds without a pause, so that the clock comes down as in a step. `fast`: partial sums
may be rounded, as they are forward; `exact`: they are not. The last rows are a whole MLP, forward and
backward, by 16 bits compiled and by our operators, and the passes that make 8-bit matrices.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.shapes import SHAPES, Shape
from remote_payload.train import execution, fp8
from remote_payload.train.objective import chunk_blocks, most_rows

DEVICE = torch.device("cuda:0")


def check_machine() -> None:
    """Raises SystemExit, with one line about what our kernels need and this machine lacks."""
    lacks = []
    if importlib.util.find_spec("triton") is None:
        lacks.append("the package triton")
    if not torch.cuda.is_available():
        lacks.append(f"an NVIDIA GPU (torch {torch.__version__} sees none)")
    if lacks:
        raise SystemExit(f"error: this bench needs {' and '.join(lacks)}")


def products(shape: Shape) -> dict[str, tuple[int, int, int, bool]]:
    """Rows, columns and summed side of each product of a layer and of a chunk of the head; and if forward."""
    n, d, f, v = shape.queries, shape.width, shape.ffn, shape.vocabulary
    places = shape.block_size - 1
    head = torch.empty(v, d, dtype=torch.bfloat16, device=DEVICE)
    rows = chunk_blocks(shape.anchors, places, most_rows(head)) * places
    heads, kv = shape.heads * shape.head_dim, 2 * shape.layers * shape.kv_heads * shape.head_dim
    return {
        "head": (rows, v, d, True),
        "head by hidden": (rows, d, v, False),
        "gate and up": (n, 2 * f, d, True),
        "gate and up by input": (n, d, 2 * f, False),
        "gate and up by weight": (2 * f, d, n, False),
        "down": (n, d, f, True),
        "down by input": (n, f, d, False),
        "down by weight": (d, f, n, False),
        "features": (shape.context, d, shape.taps * d, True),
        "features by weight": (d, shape.taps * d, shape.context, False),
        "keys and values": (shape.context, kv, d, True),
        "queries": (n, heads, d, True),
    }


def seconds_of(work: Callable[[], Any], seconds: float) -> float:
    """Seconds of one call, of as many as fit into `seconds`."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(10):
        work()
    torch.cuda.synchronize()
    calls = max(10, int(seconds / ((time.perf_counter() - start) / 10)))
    start = time.perf_counter()
    for _ in range(calls):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


def timed_product(rows: int, columns: int, summed: int, forward: bool, seconds: float) -> dict[str, float]:
    """Milliseconds in 16 bits and in 8, and TFLOP/s."""
    a = torch.randn(rows, summed, device=DEVICE, dtype=torch.bfloat16)
    b = torch.randn(columns, summed, device=DEVICE, dtype=torch.bfloat16)
    times = {"bf16": seconds_of(lambda: a @ b.t(), seconds)}
    small, scale = fp8.quantised(a, fp8.FORWARD if forward else fp8.SLOPE, a.abs().amax())
    other, other_scale = fp8.quantised(b, fp8.FORWARD, b.abs().amax())
    for name, fast in (("fast", True), ("exact", False)):

        def work(fast: bool = fast) -> Tensor:
            return torch._scaled_mm(
                small,
                other.t(),
                scale_a=scale,
                scale_b=other_scale,
                out_dtype=torch.bfloat16,
                use_fast_accum=fast,
            )

        times[name] = seconds_of(work, seconds)
    found = {f"{name}_ms": value * 1e3 for name, value in times.items()}
    return found | {f"{name}_tflops": 2e-12 * rows * columns * summed / t for name, t in times.items()}


def timed_mlp(shape: Shape, seconds: float) -> dict[str, float]:
    """Milliseconds of a whole MLP, forward and backward, in 16 bits compiled and in 8."""
    n, d, f = shape.queries, shape.width, shape.ffn
    x, slope = (torch.randn(n, d, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    gate_up = torch.randn(2 * f, d, device=DEVICE, dtype=torch.bfloat16) * d**-0.5
    down = torch.randn(d, f, device=DEVICE, dtype=torch.bfloat16) * f**-0.5
    inputs = [t.requires_grad_() for t in (x, gate_up, down)]

    def plain(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = F.linear(x, gate_up).chunk(2, -1)
        return F.linear(F.silu(gate) * up, down)

    ways = {
        "bf16": execution.build(plain, execution.COMPILED, "bench"),
        "fp8": functools.partial(fp8.mlp, kernels=True),
    }
    return {
        f"{name}_ms": 1e3
        * seconds_of(lambda way=way: torch.autograd.grad(way(*inputs), inputs, slope), seconds)  # type: ignore[misc]
        for name, way in ways.items()
    }


def timed_casts(shape: Shape, seconds: float) -> dict[str, dict[str, float]]:
    """Milliseconds and GB/s of the kernels that make 8-bit matrices."""
    from remote_payload.train import fp8_kernels

    n, d, f = shape.queries, shape.width, shape.ffn
    found = {}

    def measure(name: str, size: tuple[int, int], dtype: torch.dtype, moved: int, kernel: Any) -> None:
        values, turned = fp8.room(size, dtype, DEVICE)
        slot = torch.zeros(fp8_kernels.SLOT, device=DEVICE)
        top = torch.finfo(dtype).max
        took = seconds_of(lambda: kernel(values, turned, slot, top, fp8.LEAST), seconds)
        found[name] = {"ms": took * 1e3, "gb_per_s": moved / took / 1e9}

    x = torch.randn(n, d, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.randn(2 * f, d, device=DEVICE, dtype=torch.bfloat16)
    for name, matrix in (("input", x), ("gate and up's weight", weight)):
        size = (len(matrix), matrix.shape[1])
        measure(name, size, fp8.FORWARD, 6 * matrix.numel(), lambda *a, m=matrix: fp8_kernels.cast(m, *a))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="8b")
    parser.add_argument("--seconds", type=float, default=0.25, help="for each number (0.25)")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    check_machine()
    shape = SHAPES[given.shape]
    result: dict[str, Any] = {"shape": given.shape, "device": torch.cuda.get_device_name(DEVICE)}
    columns = ("bf16", "fast", "exact")
    print(f"{'product':<24}" + "".join(f"{name + ' ms':>10}{'TFLOP/s':>9}" for name in columns))
    for name, (rows, wide, summed, forward) in products(shape).items():
        found = timed_product(rows, wide, summed, forward, given.seconds)
        result[name] = found
        shown = "".join(f"{found[c + '_ms']:>10.3f}{found[c + '_tflops']:>9.0f}" for c in columns)
        print(f"{name:<24}{shown}", flush=True)
    result["mlp"] = found = timed_mlp(shape, given.seconds)
    print(f"an MLP, forward and backward: bf16 {found['bf16_ms']:.3f} ms, fp8 {found['fp8_ms']:.3f} ms")
    result["casts"] = timed_casts(shape, given.seconds)
    for name, cast in result["casts"].items():
        print(f"8-bit {name:<24}{cast['ms']:>8.3f} ms{cast['gb_per_s']:>8.0f} GB/s")
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + os.linesep)


if __name__ == "__main__":
    main()
