"""Attention under the training mask by Triton kernels made for it: no lists of tiles, no folding copies.

FlexAttention's backward pass makes seven products where five do, and asks of each tile what the anchors say
in closed form: a query tile sees one stretch of context, a key tile is seen by one stretch of queries
(`block_attention_forward`, `block_attention_backward`). Tensors keep their order [tokens, heads, size].

The operator is opaque to torch.compile and makes no use of the device's state, so that it can be captured in
a graph. Under Triton's interpreter (TRITON_INTERPRET=1) it runs on a CPU, slowly: that is how it is tested.

Shapes: C context tokens, A anchor slots, B block size, Q = A*B queries, K = C + Q keys, h query heads, g
key/value heads, G = h / g, D their size.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from remote_payload.train import block_attention_backward as backward_kernels
from remote_payload.train import block_attention_forward as forward_kernels

DETERMINISTIC, BY_REGISTERS, BY_DESCRIPTOR = "deterministic", "registers", "descriptor"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tiling:
    """How one kernel is cut: rows and keys of a tile, stages of its pipeline, warps."""

    rows: int
    keys: int
    stages: int
    warps: int
    tma: bool = False
    """Load by tensor descriptors: keys and values in a loop over keys, queries in a loop over queries."""
    specialize: bool = False
    hopper: bool = False
    """The Gluon kernel; of the backward pass the one that makes dq as well, `slopes` then says nothing."""
    registers: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Launch options."""
        return {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.registers}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How both passes are cut, and where dq is made."""

    forward: Tiling = Tiling(rows=128, keys=128, stages=2, warps=8)
    by_keys: Tiling = Tiling(rows=64, keys=128, stages=2, warps=8)
    by_queries: Tiling = Tiling(rows=128, keys=64, stages=2, warps=8)
    slopes: str = BY_DESCRIPTOR
    """DETERMINISTIC: dq in a pass of its own; BY_REGISTERS, BY_DESCRIPTOR: added up in float32."""


HOPPER = Plan(
    forward=Tiling(rows=128, keys=128, stages=2, warps=8, hopper=True),
    by_keys=Tiling(rows=64, keys=128, stages=2, warps=8, hopper=True),
)
"""The kernels for Hopper, where `hopper_fits`."""

PLAN = Plan()
"""What is used; read at each call, so set it before anything is captured."""

_SMALL_ROWS = 64


def fits(heads: int, kv_heads: int, head_dim: int, context: int, slots: int, block_size: int) -> bool:
    """Whether rows of this shape can be cut into the kernels' tiles: powers of two, whole tiles."""
    group = heads // kv_heads
    sizes = (group, head_dim, block_size)
    powers = all(size & (size - 1) == 0 for size in sizes) and 16 <= head_dim <= 128 and group <= 16
    return powers and context % 128 == 0 and (slots * block_size) % 128 == 0 and block_size <= 128


def hopper_fits(heads: int, kv_heads: int, head_dim: int, block_size: int) -> bool:
    """Whether a query tile of `HOPPER` is at most one block, and its rows 128 or 256 bytes."""
    group = heads // kv_heads
    return head_dim in (64, 128) and group * block_size >= HOPPER.by_keys.rows and group <= 64


def block_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    anchors: Tensor,
    context: int,
    block_size: int,
) -> Tensor:
    """Grouped-query attention under the mask of `mask.dense_mask`, differentiable.

    Args:
        queries: [Q, h, D]. keys, values: [K, g, D], those of the context first.
        starts: first context index of each anchor's document, [A]; C in an empty slot.
        anchors: context index of each anchor, rising, [A]; 0 in an empty slot, which come last.
        context: C. block_size: B.

    Returns:
        [Q, h, D] in the inputs' type.
    """
    out: Tensor = _forward(queries, keys, values, starts, anchors, context, block_size)[0]
    return out


def _tensor_map(tensor: Tensor, shape: list[int], block: list[int]) -> Any:
    """A descriptor of `tensor` seen as `shape`."""
    from triton.tools.tensor_descriptor import TensorDescriptor  # type: ignore[import-not-found]

    seen = tensor.view(shape)
    return TensorDescriptor(seen, list(seen.shape), list(seen.stride()), block)


def _gluon_map(tensor: Tensor, shape: list[int], block: list[int], swizzle: int = 128) -> Any:
    """The same for a Gluon kernel, which is told how a tile lies in shared memory."""
    from triton.experimental.gluon.language import NVMMASharedLayout  # type: ignore[import-not-found]
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # type: ignore[import-not-found]

    seen = tensor.view(shape)
    layout = NVMMASharedLayout(swizzle, 8 * tensor.element_size(), rank=len(block))
    return TensorDescriptor(seen, list(seen.shape), list(seen.stride()), block, layout)


def hopper_forward() -> Any:
    """The module of the forward kernel for Hopper; imported when used, since Gluon is Triton's experiment."""
    from remote_payload.train import block_attention_hopper_forward

    return block_attention_hopper_forward


def hopper_backward() -> Any:
    """The module of the backward kernel for Hopper."""
    from remote_payload.train import block_attention_hopper_backward

    return block_attention_hopper_backward


@torch.library.custom_op("dflash::block_attention", mutates_args=())
def _forward(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    anchors: Tensor,
    context: int,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    """Output [Q, h, D], and the logarithm (base 2) of each packed row's sum, [g, Q G] float32."""
    queries, keys, values = queries.contiguous(), keys.contiguous(), values.contiguous()
    (count, heads, size), kv_heads = queries.shape, keys.shape[1]
    cut, group = PLAN.forward, heads // kv_heads
    out = torch.empty_like(queries)
    sums = queries.new_empty(kv_heads, count * group, dtype=torch.float32)
    rows = min(cut.rows, count * group)
    tiles = count * group // rows
    if cut.hopper:
        tokens = rows // group
        own = max(tokens, block_size, 16)
        wide = [len(keys), kv_heads * size]
        hopper_forward().forward_kernel[(tiles * kv_heads,)](
            _gluon_map(queries, [count, heads, size], [tokens, group, size]),
            *(_gluon_map(t, wide, [length, size]) for length in (own, cut.keys) for t in (keys, values)),
            out, sums, starts, anchors, context, tiles, _bits(size),
            G_KV=kv_heads, G=group, D=size, B=block_size, M=rows, N=cut.keys, OWN=own, STAGES=cut.stages,
            num_warps=cut.warps,
        )  # fmt: skip
        return out, sums
    loops: Any = (keys, values)
    if cut.tma:
        wide, block = [len(keys), kv_heads * size], [cut.keys, size]
        loops = tuple(_tensor_map(t, wide, block) for t in loops)
    forward_kernels.forward_kernel[(tiles * kv_heads,)](
        queries, keys, values, *loops, out, sums, starts, anchors, context, tiles,
        _bits(size), G_KV=kv_heads, G=group, D=size, B=block_size, M=rows, N=cut.keys,
        TMA=cut.tma, STAGES=cut.stages, WS=cut.specialize, **cut.options,
    )  # fmt: skip
    return out, sums


@_forward.register_fake
def _(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    anchors: Tensor,
    context: int,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    count, heads, _ = queries.shape
    sums = queries.new_empty(keys.shape[1], count * heads // keys.shape[1], dtype=torch.float32)
    return queries.new_empty(queries.shape), sums


@torch.library.custom_op("dflash::block_attention_backward", mutates_args=())
def _backward(
    slope: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    sums: Tensor,
    starts: Tensor,
    anchors: Tensor,
    context: int,
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv by the output's gradient `slope` [Q, h, D]."""
    slope, queries, keys, values = (t.contiguous() for t in (slope, queries, keys, values))
    plan, (count, heads, size), kv_heads = PLAN, queries.shape, keys.shape[1]
    group, rows = heads // kv_heads, _SMALL_ROWS
    by_query, by_key, by_value = (torch.empty_like(t) for t in (queries, keys, values))
    cut = plan.by_keys
    added = plan.slopes != DETERMINISTIC or cut.hopper
    delta = torch.empty_like(sums)
    summed = delta.new_empty((kv_heads * count * group, size) if added else (1, 1))
    shape: dict[str, Any] = {"G_KV": kv_heads, "G": group, "D": size}
    small = count * group // rows
    backward_kernels.delta_kernel[(small * kv_heads,)](
        out, slope, delta, summed, small, **shape, M=rows, ZERO=added, num_warps=4
    )
    slots, scale = len(starts), size**-0.5
    ranges = starts.new_empty(len(keys) // cut.keys, 4, dtype=torch.int32)
    backward_kernels.ranges_kernel[(len(ranges),)](
        ranges, starts, anchors, context, slots,
        SLOTS=_power_above(slots), T=cut.rows // group, B=block_size, N=cut.keys, num_warps=1,
    )  # fmt: skip
    tiles = count * group // cut.rows
    if cut.hopper:
        wide, flat = [len(keys), kv_heads * size], [kv_heads * tiles, cut.rows]
        block = [cut.rows // group, group, size]
        hopper_backward().keys_kernel[(len(ranges) * kv_heads,)](
            *(_gluon_map(t, [count, heads, size], block) for t in (queries, slope)),
            *(_gluon_map(t, wide, [cut.keys, size]) for t in (keys, values)),
            by_key, by_value, _gluon_map(summed, list(summed.shape), [cut.rows, size]),
            *(_gluon_map(t, flat, [1, cut.rows], swizzle=0) for t in (sums, delta)),
            starts, anchors, ranges, context, tiles, _bits(size), scale,
            **shape, B=block_size, M=cut.rows, N=cut.keys, STAGES=cut.stages, num_warps=cut.warps,
        )  # fmt: skip
        return _unpacked(summed, by_query, shape), by_key, by_value
    pair: Any = (queries, slope)
    if cut.tma:
        block = [cut.rows // group, group, size]
        pair = tuple(_tensor_map(t, [count, heads, size], block) for t in pair)
    sink: Any = summed
    if plan.slopes == BY_DESCRIPTOR:
        sink = _tensor_map(summed, list(summed.shape), [cut.rows, size])
    how = {DETERMINISTIC: 0, BY_REGISTERS: 1, BY_DESCRIPTOR: 2}[plan.slopes]
    backward_kernels.keys_kernel[(len(ranges) * kv_heads,)](
        *pair, keys, values, by_key, by_value, sink, sums, delta, starts, anchors, ranges, context, tiles,
        _bits(size), scale, **shape, B=block_size, M=cut.rows, N=cut.keys,
        TMA=cut.tma, DQ=how, STAGES=cut.stages, **cut.options,
    )  # fmt: skip
    if added:
        return _unpacked(summed, by_query, shape), by_key, by_value
    cut = plan.by_queries
    tiles = count * group // cut.rows
    loops: Any = (keys, values)
    if cut.tma:
        wide, block = [len(keys), kv_heads * size], [cut.keys, size]
        loops = tuple(_tensor_map(t, wide, block) for t in loops)
    backward_kernels.queries_kernel[(tiles * kv_heads,)](
        queries, slope, keys, values, *loops, by_query, sums, delta, starts, anchors, context, tiles,
        _bits(size), scale, **shape, B=block_size, M=cut.rows, N=cut.keys,
        TMA=cut.tma, STAGES=cut.stages, **cut.options,
    )  # fmt: skip
    return by_query, by_key, by_value


def _unpacked(summed: Tensor, by_query: Tensor, shape: dict[str, Any]) -> Tensor:
    tiles = by_query.numel() // shape["D"] // shape["G_KV"] // _SMALL_ROWS
    backward_kernels.unpack_kernel[(tiles * shape["G_KV"],)](
        summed, by_query, tiles, shape["D"] ** -0.5, **shape, M=_SMALL_ROWS, num_warps=4
    )
    return by_query


@_backward.register_fake
def _(
    slope: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    sums: Tensor,
    starts: Tensor,
    anchors: Tensor,
    context: int,
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    by_query, by_key, by_value = (t.new_empty(t.shape) for t in (queries, keys, values))
    return by_query, by_key, by_value


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    queries, keys, values, starts, anchors, context, block_size = inputs
    ctx.save_for_backward(queries, keys, values, *output, starts, anchors)
    ctx.sizes = (context, block_size)
    ctx.set_materialize_grads(False)


def _slopes(ctx: Any, slope: Tensor, _sums: Tensor | None) -> tuple[Any, ...]:
    return (*_backward(slope, *ctx.saved_tensors, *ctx.sizes), None, None, None, None)


_forward.register_autograd(_slopes, setup_context=_save)


def _bits(size: int) -> float:
    """What a product of query and key is multiplied by to be an exponent of 2."""
    return math.log2(math.e) / math.sqrt(size)


def _power_above(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()
