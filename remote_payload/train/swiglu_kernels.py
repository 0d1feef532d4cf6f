"""Triton kernels of SwiGLU over gate and up as one product leaves them, side by side: [N, 2F].

The arithmetic is in float32 between one reading and one writing; `fp8_kernels` writes its results in 8 bits.
Shapes: N rows, F width of the MLP.
"""

# Triton reads the annotations of kernels: only its own may stand there.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

_OPTIONS: dict[str, int] = {"tall": 16, "wide": 256, "num_warps": 4}
"""A tile: 512 bytes of 16 rows."""


@triton.jit
def places(rows, columns, tall: tl.constexpr, wide: tl.constexpr):
    """Rows, columns and which of the program's tile are inside."""
    row = tl.program_id(0).to(tl.int64) * tall + tl.arange(0, tall)
    column = tl.program_id(1) * wide + tl.arange(0, wide)
    return row, column, (row < rows)[:, None] & (column < columns)[None, :]


@triton.jit
def read(x, row, column, stride, inside):
    """A tile in float32."""
    return tl.load(x + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def swiglu(between, row, column, ffn, inside):
    """silu(gate) * up of a tile."""
    gate = read(between, row, column, 2 * ffn, inside)
    up = read(between + ffn, row, column, 2 * ffn, inside)
    return gate * _sigmoid(gate) * up


@triton.jit
def swiglu_slopes(between, slope, row, column, ffn, inside):
    """Slopes of gate and up from that of SwiGLU's output."""
    gate = read(between, row, column, 2 * ffn, inside)
    up = read(between + ffn, row, column, 2 * ffn, inside)
    by_output = read(slope, row, column, ffn, inside)
    share = _sigmoid(gate)
    return by_output * up * share * (1.0 + gate * (1.0 - share)), by_output * gate * share


@triton.jit
def _write(x, value, row, column, stride, inside):
    tl.store(x + row[:, None] * stride + column[None, :], value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _forward(between, hidden, rows, ffn, tall: tl.constexpr, wide: tl.constexpr):
    row, column, inside = places(rows, ffn, tall, wide)
    _write(hidden, swiglu(between, row, column, ffn, inside), row, column, ffn, inside)


@triton.jit
def _backward(between, slope, slopes, rows, ffn, tall: tl.constexpr, wide: tl.constexpr):
    row, column, inside = places(rows, ffn, tall, wide)
    by_gate, by_up = swiglu_slopes(between, slope, row, column, ffn, inside)
    _write(slopes, by_gate, row, column, 2 * ffn, inside)
    _write(slopes + ffn, by_up, row, column, 2 * ffn, inside)


def forward(between: Tensor, hidden: Tensor) -> None:
    """Fill `hidden` [N, F] with silu(gate) * up of `between` [N, 2F]."""
    rows, ffn = hidden.shape
    _forward[_tiles(rows, ffn)](between, hidden, rows, ffn, **_OPTIONS)


def backward(between: Tensor, slope: Tensor, slopes: Tensor) -> None:
    """Fill `slopes` [N, 2F] with those of gate and up, from `slope` [N, F], that of their product."""
    rows, ffn = slope.shape
    _backward[_tiles(rows, ffn)](between, slope, slopes, rows, ffn, **_OPTIONS)


def _tiles(rows: int, columns: int) -> tuple[int, int]:
    return triton.cdiv(rows, _OPTIONS["tall"]), triton.cdiv(columns, _OPTIONS["wide"])
