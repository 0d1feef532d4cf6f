"""`keys_kernel` of `block_attention_backward` for Hopper, in Gluon: all three gradients with five products.

One program for N keys of a key/value head walks the tiles of queries that see them. Its two warpgroups hold
64 keys each: dk and dv stay in registers, 128 of them a thread. Per tile, what runs beside what:

    dP = V dout^T                 P = exp2(S * bits - sums)
    dv += P^T dout                dS = P * (dP - delta), into shared memory
    dk += dS^T Q, dq = dS K, S of the next tile       dq goes out, added to memory by TMA

A tile is the queries of one block at most, so that keys are seen by all of its rows or none. What is never
done: see `block_attention_hopper_forward`. `k`, `v` and `slopes` are indexed by a number that is 0: the
compiler would else keep the 28 descriptors of their parts in registers over the whole loop, and spill.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False
# ruff: noqa: N803

from __future__ import annotations

from triton._C.libtriton import ir  # type: ignore[import-not-found]
from triton.experimental import gluon  # type: ignore[import-not-found]
from triton.experimental.gluon import language as gl  # type: ignore[import-not-found]
from triton.experimental.gluon.language._core import builtin  # type: ignore[import-not-found]
from triton.experimental.gluon.language.nvidia.hopper import (  # type: ignore[import-not-found]
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@builtin
def add_from_shared(tensor_desc, coord, src, _semantic=None):
    """Add `src` in shared memory to memory by TMA; Gluon has no name for it in Triton 3.6."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle
    )


@gluon.jit
def _fetch(
    queries,
    slope,
    sums,
    delta,
    q_stage,
    do_stage,
    lse_stage,
    di_stage,
    full,
    tile,
    stage,
    pred,
    head,
    rows_ahead,
    G: gl.constexpr,
    D: gl.constexpr,
    M: gl.constexpr,
):
    bar = full.index(stage)
    mbarrier.expect(bar, 2 * M * D * 2 + 2 * M * 4, pred)
    at = [tile * (M // G), head * G, 0]
    tma.async_copy_global_to_shared(queries, at, bar, q_stage.index(stage), pred)
    tma.async_copy_global_to_shared(slope, at, bar, do_stage.index(stage), pred)
    tma.async_copy_global_to_shared(sums, [rows_ahead + tile, 0], bar, lse_stage.index(stage), pred)
    tma.async_copy_global_to_shared(delta, [rows_ahead + tile, 0], bar, di_stage.index(stage), pred)


@gluon.jit
def keys_kernel(
    queries,
    slope,
    keys,
    values,
    by_key,
    by_value,
    summed,
    sums,
    delta,
    starts,
    anchors,
    ranges,
    context,
    tiles,
    bits,
    scale,
    G_KV: gl.constexpr,
    G: gl.constexpr,
    D: gl.constexpr,
    B: gl.constexpr,
    M: gl.constexpr,
    N: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Arguments as of the plain kernel, those but for results and anchors by descriptor."""
    W: gl.constexpr = gl.num_warps()
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, M, 16])
    wide_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, D, 16])
    query_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, W // 4], [16, D // (W // 4), 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, wide_layout, 2)
    dtype: gl.constexpr = keys.dtype
    head = gl.program_id(0) % G_KV
    number = gl.program_id(0) // G_KV
    first = number * N
    low = gl.load(ranges + number * 4)
    high = gl.load(ranges + number * 4 + 1)
    whole_low = gl.load(ranges + number * 4 + 2)
    whole_high = gl.load(ranges + number * 4 + 3)
    count = high - low
    rows_ahead = head * tiles

    k_once = gl.allocate_shared_memory(dtype, [1, N, D], keys.layout)
    v_once = gl.allocate_shared_memory(dtype, [1, N, D], keys.layout)
    q_stage = gl.allocate_shared_memory(dtype, [STAGES, M // G, G, D], queries.layout)
    do_stage = gl.allocate_shared_memory(dtype, [STAGES, M // G, G, D], queries.layout)
    lse_stage = gl.allocate_shared_memory(gl.float32, [STAGES, 1, M], sums.layout)
    di_stage = gl.allocate_shared_memory(gl.float32, [STAGES, 1, M], sums.layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, M], dtype)
    ds_once = gl.allocate_shared_memory(dtype, [1, N, M], ds_layout)
    dq_shared = gl.allocate_shared_memory(gl.float32, [M, D], summed.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, 1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), 1)
    fence_async_shared()
    gl.thread_barrier()

    mbarrier.expect(ready, 2 * N * D * 2)
    tma.async_copy_global_to_shared(keys, [first, head * D], ready, k_once.index(0))
    tma.async_copy_global_to_shared(values, [first, head * D], ready, v_once.index(0))
    for stage in gl.static_range(STAGES):
        _fetch(
            queries,
            slope,
            sums,
            delta,
            q_stage,
            do_stage,
            lse_stage,
            di_stage,
            full,
            low + stage,
            stage,
            stage < count,
            head,
            rows_ahead,
            G,
            D,
            M,
        )
    mbarrier.wait(ready, 0)
    mbarrier.wait(full.index(0), 0, count > 0)

    dk = gl.zeros([N, D], gl.float32, wide_layout)
    dv = gl.zeros([N, D], gl.float32, wide_layout)
    zero = gl.zeros([N, M], gl.float32, scores_layout)
    zero_q = gl.zeros([M, D], gl.float32, query_layout)
    s = warpgroup_mma(
        k_once.index(0), q_stage.index(0).reshape([M, D]).permute((1, 0)), zero, use_acc=False, is_async=True
    )
    scores = warpgroup_mma_wait(0, deps=(s,))
    stage = 0
    phase = 0
    for i in range(count):
        tile = low + i
        nothing = i >> 24
        k = k_once.index(nothing)
        v = v_once.index(nothing)
        ds_shared = ds_once.index(nothing)
        q = q_stage.index(stage).reshape([M, D])
        do = do_stage.index(stage).reshape([M, D])
        dp = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
        p = gl.exp2(scores * bits - lse_stage.index(stage).load(scores_layout))
        if (tile < whole_low) | (tile >= whole_high):
            block = tile * M // (G * B)
            begin = context + block * B
            end = begin + B
            if first < context:
                begin = gl.load(starts + block).to(gl.int32)
                end = gl.load(anchors + block).to(gl.int32)
            place = first + gl.arange(0, N, gl.SliceLayout(1, scores_layout))
            p = gl.where(((place >= begin) & (place < end))[:, None], p, 0.0)
        dv_next = warpgroup_mma(gl.convert_layout(p.to(dtype), operand), do, dv, is_async=True)
        slopes = warpgroup_mma_wait(1, deps=(dp,))
        ds = (p * (slopes - di_stage.index(stage).load(scores_layout))).to(dtype)
        ds_shared.store(ds)
        dk_next = warpgroup_mma(gl.convert_layout(ds, operand), q, dk, is_async=True)
        fence_async_shared()
        gl.thread_barrier()
        dq = warpgroup_mma(ds_shared.permute((1, 0)), k, zero_q, use_acc=False, is_async=True)
        following = stage + 1
        next_phase = phase
        if following == STAGES:
            following = 0
            next_phase = phase ^ 1
        mbarrier.wait(full.index(following), next_phase, i + 1 < count)
        s_next = warpgroup_mma(
            k, q_stage.index(following).reshape([M, D]).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        dv, dk, by_query = warpgroup_mma_wait(1, deps=(dv_next, dk_next, dq))
        tma.store_wait(0)
        gl.thread_barrier()
        dq_shared.store(by_query)
        fence_async_shared()
        gl.thread_barrier()
        add_from_shared(summed, [(rows_ahead + tile) * M, 0], dq_shared)
        _fetch(
            queries,
            slope,
            sums,
            delta,
            q_stage,
            do_stage,
            lse_stage,
            di_stage,
            full,
            tile + STAGES,
            stage,
            i + STAGES < count,
            head,
            rows_ahead,
            G,
            D,
            M,
        )
        scores = warpgroup_mma_wait(0, deps=(s_next,))
        stage = following
        phase = next_phase
    tma.store_wait(0)
    at_row = first + gl.arange(0, N, gl.SliceLayout(1, wide_layout))
    at_column = gl.arange(0, D, gl.SliceLayout(0, wide_layout))
    at = ((at_row * G_KV + head) * D)[:, None] + at_column[None, :]
    gl.store(by_value + at, dv.to(dtype))
    gl.store(by_key + at, (dk * scale).to(dtype))
