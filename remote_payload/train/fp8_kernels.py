"""Triton kernels that make 8-bit matrices: the greatest magnitude, then both layouts in one pass.

A product of 8-bit matrices on Hopper reads both of them along the summed side, so training needs every
matrix twice: as it lies and turned. The second kernel reads a tile once and writes it both ways. The greatest
magnitude is found by an atomic maximum over the bits of |x|, whose order is that of the numbers, with NaN
above all of them: it does not depend on the order of programs, and a NaN anywhere makes the scale, and so
every product, a NaN.

A slot is SLOT float32: [0] the greatest magnitude, 0 before; [SCALE] what an 8-bit number is multiplied by.
Shapes: N rows, K columns. Only a GPU of compute capability 8.9 or more runs them.
"""

# Triton reads the annotations of kernels: only its own may stand there.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from remote_payload.train.swiglu_kernels import places

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
def _small(x, scale, top: tl.constexpr, kind: tl.constexpr):
    return tl.minimum(tl.maximum(x.to(tl.float32) * scale, -top), top).to(kind)


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
    tile = tl.load(x + row[:, None] * columns + column[None, :], mask=inside, other=0.0)
    greatest = tl.load(slot)
    greatest = tl.where(greatest < least, least, greatest)  # a NaN stays
    kind: tl.constexpr = values.dtype.element_ty
    small = _small(tile, top / greatest, top, kind)
    tl.store(values + row[:, None] * columns + column[None, :], small, mask=inside)
    # Turned as it was read, in 16 bits: of a tile that it turns in 8, Triton 3.6 makes other numbers (seen on
    # an H200, when SwiGLU was computed in this kernel and the compiler had only the 8-bit tile to turn).
    small = _small(tl.trans(tile), top / greatest, top, kind)
    room = (column < columns)[:, None] & (row < padded)[None, :]
    tl.store(turned + column.to(tl.int64)[:, None] * padded + row[None, :], small, mask=room)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(slot + place, greatest / top)


def cast(x: Tensor, values: Tensor, turned: Tensor, slot: Tensor, top: float, least: float) -> None:
    """Fill `values` [N, K] and `turned` [K, N'] (N' >= N, zeros behind N) from `x` [N, K], and the slot."""
    grid = (triton.cdiv(x.numel(), _BLOCK * _ROUNDS),)
    _greatest[grid](x, slot.view(torch.int32), x.numel(), block=_BLOCK, rounds=_ROUNDS, num_warps=8)
    rows, columns = x.shape
    _cast[triton.cdiv(turned.shape[1], _ROWS), triton.cdiv(columns, _COLUMNS)](
        *(x, values, turned, slot, rows, columns, turned.shape[1], top, least),
        place=SCALE,
        tall=_ROWS,
        wide=_COLUMNS,
        num_warps=8,
    )
