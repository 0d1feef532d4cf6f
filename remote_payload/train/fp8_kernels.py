"""Triton kernels that make 8-bit matrices: the greatest magnitude, then both layouts in one pass.

A product of 8-bit matrices on Hopper reads both of them along the summed side, so training needs every
matrix twice: as it lies and turned. The second kernel reads a tile once and writes it both ways; SwiGLU and
its slope are computed where they are read and never written in 16 bits. The greatest magnitude is found by
an atomic maximum over the bits of |x|, whose order is that of the numbers, with NaN above all of them: it
does not depend on the order of programs, and a NaN anywhere makes the scale, and so every product, a NaN.

A slot is SLOT float32: [0] the greatest magnitude, 0 before; [SCALE] what an 8-bit number is multiplied by.
Shapes: N rows, K columns, F width of the MLP. Only a GPU of compute capability 8.9 or more runs them.
"""

# Triton reads the annotations of kernels: only its own may stand there.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from remote_payload.train.swiglu_kernels import places, read, swiglu, swiglu_slopes

SLOT = 64
"""Numbers of a slot: 256 bytes, so that what cuBLASLt reads is aligned as an allocation is."""
SCALE = 32

_BLOCK, _ROUNDS = 4096, 4
_ROWS, _COLUMNS = 128, 64
"""A tile: turned, its rows are 128 bytes of memory."""


@triton.jit
def _magnitude(x):
    """The bits of |x| as int32; those of a NaN are greater than all others."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _greatest(x, slot, size, block: tl.constexpr, rounds: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * (block * rounds)
    most = tl.zeros((block,), tl.int32)
    for part in tl.static_range(rounds):
        at = start + part * block + tl.arange(0, block)
        value = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32)
        most = tl.maximum(most, _magnitude(value))
    tl.atomic_max(slot, tl.max(most, 0))


@triton.jit
def _write_both(
    value,
    row,
    column,
    inside,
    columns,
    stride,
    padded,
    values,
    turned,
    slot,
    top: tl.constexpr,
    least: tl.constexpr,
    place: tl.constexpr,
):
    """Store a tile of `columns` as it lies, in rows of `stride`, and turned, in rows of `padded`."""
    greatest = tl.load(slot)
    greatest = tl.where(greatest < least, least, greatest)  # a NaN stays
    scaled = tl.minimum(tl.maximum(value * (top / greatest), -top), top)
    small = scaled.to(values.dtype.element_ty)
    tl.store(values + row[:, None] * stride + column[None, :], small, mask=inside)
    room = (column < columns)[:, None] & (row < padded)[None, :]
    tl.store(turned + column.to(tl.int64)[:, None] * padded + row[None, :], tl.trans(small), mask=room)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(slot + place, greatest / top)


@triton.jit
def _cast(
    x,
    values,
    turned,
    slot,
    rows,
    columns,
    padded,
    top: tl.constexpr,
    least: tl.constexpr,
    place: tl.constexpr,
    tall: tl.constexpr,
    wide: tl.constexpr,
):
    row, column, inside = places(rows, columns, tall, wide)
    value = read(x, row, column, columns, inside)
    _write_both(value, row, column, inside, columns, columns, padded, values, turned, slot, top, least, place)


@triton.jit
def _swiglu_greatest(between, slot, rows, ffn, tall: tl.constexpr, wide: tl.constexpr):
    row, column, inside = places(rows, ffn, tall, wide)
    value = swiglu(between, row, column, ffn, inside)
    tl.atomic_max(slot, tl.max(tl.max(_magnitude(value), 1), 0))


@triton.jit
def _swiglu_cast(
    between,
    values,
    turned,
    slot,
    rows,
    ffn,
    padded,
    top: tl.constexpr,
    least: tl.constexpr,
    place: tl.constexpr,
    tall: tl.constexpr,
    wide: tl.constexpr,
):
    row, column, inside = places(rows, ffn, tall, wide)
    value = swiglu(between, row, column, ffn, inside)
    _write_both(value, row, column, inside, ffn, ffn, padded, values, turned, slot, top, least, place)


@triton.jit
def _slopes_greatest(between, slope, slot, rows, ffn, tall: tl.constexpr, wide: tl.constexpr):
    row, column, inside = places(rows, ffn, tall, wide)
    by_gate, by_up = swiglu_slopes(between, slope, row, column, ffn, inside)
    most = tl.maximum(_magnitude(by_gate), _magnitude(by_up))
    tl.atomic_max(slot, tl.max(tl.max(most, 1), 0))


@triton.jit
def _slopes_cast(
    between,
    slope,
    values,
    turned,
    slot,
    rows,
    ffn,
    padded,
    top: tl.constexpr,
    least: tl.constexpr,
    place: tl.constexpr,
    tall: tl.constexpr,
    wide: tl.constexpr,
):
    row, column, inside = places(rows, ffn, tall, wide)
    by_gate, by_up = swiglu_slopes(between, slope, row, column, ffn, inside)
    _write_both(by_gate, row, column, inside, ffn, 2 * ffn, padded, values, turned, slot, top, least, place)
    values += ffn
    turned += ffn.to(tl.int64) * padded
    _write_both(by_up, row, column, inside, ffn, 2 * ffn, padded, values, turned, slot, top, least, place)


def cast(x: Tensor, values: Tensor, turned: Tensor, slot: Tensor, top: float, least: float) -> None:
    """Fill `values` [N, K] and `turned` [K, N'] (N' >= N, zeros behind N) from `x` [N, K], and the slot."""
    grid = (triton.cdiv(x.numel(), _BLOCK * _ROUNDS),)
    _greatest[grid](x, slot.view(torch.int32), x.numel(), block=_BLOCK, rounds=_ROUNDS, num_warps=8)
    rows, columns = x.shape
    _cast[_tiles(turned.shape[1], columns)](
        x, values, turned, slot, rows, columns, turned.shape[1], top, least, **_OPTIONS, place=SCALE
    )


def cast_swiglu(
    between: Tensor, values: Tensor, turned: Tensor, slot: Tensor, top: float, least: float
) -> None:
    """As `cast`, of silu(gate) * up, [N, F]; `between` is gate and up side by side, [N, 2F]."""
    rows, ffn = values.shape
    _swiglu_greatest[_tiles(rows, ffn)](between, slot.view(torch.int32), rows, ffn, **_OPTIONS)
    _swiglu_cast[_tiles(turned.shape[1], ffn)](
        between, values, turned, slot, rows, ffn, turned.shape[1], top, least, **_OPTIONS, place=SCALE
    )


def cast_slopes(
    between: Tensor, slope: Tensor, values: Tensor, turned: Tensor, slot: Tensor, top: float, least: float
) -> None:
    """As `cast`, of the slopes of gate and up side by side, [N, 2F], from that of their product, [N, F]."""
    rows, ffn = slope.shape
    _slopes_greatest[_tiles(rows, ffn)](between, slope, slot.view(torch.int32), rows, ffn, **_OPTIONS)
    _slopes_cast[_tiles(turned.shape[1], ffn)](
        between, slope, values, turned, slot, rows, ffn, turned.shape[1], top, least, **_OPTIONS, place=SCALE
    )


_OPTIONS: dict[str, int] = {"tall": _ROWS, "wide": _COLUMNS, "num_warps": 8}


def _tiles(rows: int, columns: int) -> tuple[int, int]:
    return triton.cdiv(rows, _ROWS), triton.cdiv(columns, _COLUMNS)
