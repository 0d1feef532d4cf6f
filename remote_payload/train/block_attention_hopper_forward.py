"""The forward kernel of `block_attention_forward` for Hopper, in Gluon: its products are issued by hand.

Triton waits for every product before the next instruction reads anything, so that tensor cores rest while
exponentials are computed. Here the scores of the next tile are asked for first and the weighted values of
this one after them; while the latter run, the next tile's weights are made of the former. Tiles come by TMA,
`STAGES` ahead, keys and values apart, since keys are read one tile earlier.

What is never done: a product in flight at a loop's turn whose result is read after it. ptxas then makes all
of them wait for each other (its warning C7514).
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False
# ruff: noqa: N803

from __future__ import annotations

from triton.experimental import gluon  # type: ignore[import-not-found]
from triton.experimental.gluon import language as gl  # type: ignore[import-not-found]
from triton.experimental.gluon.language.nvidia.hopper import (  # type: ignore[import-not-found]
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def _fetch(
    source, shared, bars, first, number, count, head, N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr
):
    stage = number % STAGES
    bar = bars.index(stage)
    mbarrier.expect(bar, N * D * 2, number < count)
    tma.async_copy_global_to_shared(
        source, [first + number * N, head * D], bar, shared.index(stage), number < count
    )


@gluon.jit
def _masked(
    scores,
    first,
    starts,
    anchors,
    rows,
    G: gl.constexpr,
    B: gl.constexpr,
    N: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    place = first + gl.arange(0, N, gl.SliceLayout(0, LAYOUT))
    block = rows // (G * B)
    low = gl.load(starts + block).to(gl.int32)
    high = gl.load(anchors + block).to(gl.int32)
    seen = (place[None, :] >= low[:, None]) & (place[None, :] < high[:, None])
    return gl.where(seen, scores, float("-inf"))


@gluon.jit
def forward_kernel(
    queries,
    own_keys,
    own_values,
    keys,
    values,
    out,
    sums,
    starts,
    anchors,
    context,
    tiles,
    bits,
    G_KV: gl.constexpr,
    G: gl.constexpr,
    D: gl.constexpr,
    B: gl.constexpr,
    M: gl.constexpr,
    N: gl.constexpr,
    OWN: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Arguments but for pointers as of the plain kernel, by descriptor; `OWN`: a tile's own keys."""
    W: gl.constexpr = gl.num_warps()
    T: gl.constexpr = M // G
    own_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, OWN, 16])
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, N, 16])
    wide_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, wide_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, scores_layout)
    wide_row: gl.constexpr = gl.SliceLayout(1, wide_layout)
    dtype: gl.constexpr = keys.dtype
    AT: gl.constexpr = T // B if T > B else 1
    head = gl.program_id(0) % G_KV
    tile = tiles - 1 - gl.program_id(0) // G_KV
    token = tile * T
    begin = gl.load(starts + token // B).to(gl.int32)
    final_start = begin
    low_anchor = gl.load(anchors + token // B).to(gl.int32)
    end = low_anchor
    for n in gl.static_range(1, AT):
        start = gl.load(starts + token // B + n).to(gl.int32)
        anchor = gl.load(anchors + token // B + n).to(gl.int32)
        begin = min(begin, start)
        final_start = max(final_start, start)
        low_anchor = min(low_anchor, anchor)
        end = max(end, anchor)
    whole = 0
    if final_start == begin:
        whole = max(low_anchor - begin, 0) // N
    count = (max(end - begin, 0) + N - 1) // N
    own = token // OWN * OWN

    q = gl.allocate_shared_memory(dtype, [T, G, D], queries.layout)
    k_own = gl.allocate_shared_memory(dtype, [OWN, D], own_keys.layout)
    v_own = gl.allocate_shared_memory(dtype, [OWN, D], own_keys.layout)
    k = gl.allocate_shared_memory(dtype, [STAGES, N, D], keys.layout)
    v = gl.allocate_shared_memory(dtype, [STAGES, N, D], keys.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, 1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), 1)
        mbarrier.init(v_full.index(stage), 1)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.expect(ready, (M + 2 * OWN) * D * 2)
    tma.async_copy_global_to_shared(queries, [token, head * G, 0], ready, q)
    tma.async_copy_global_to_shared(own_keys, [context + own, head * D], ready, k_own)
    tma.async_copy_global_to_shared(own_values, [context + own, head * D], ready, v_own)
    for stage in gl.static_range(STAGES):
        _fetch(keys, k, k_full, begin, stage, count, head, N, D, STAGES)
        _fetch(values, v, v_full, begin, stage, count, head, N, D, STAGES)
    mbarrier.wait(ready, 0)
    q_rows = q.reshape([M, D])

    zero_own = gl.zeros([M, OWN], gl.float32, own_layout)
    s_own = warpgroup_mma(q_rows, k_own.permute((1, 0)), zero_own, use_acc=False) * bits
    if OWN > B:
        own_rows = tile * M + gl.arange(0, M, gl.SliceLayout(1, own_layout))
        own_places = own + gl.arange(0, OWN, gl.SliceLayout(0, own_layout))
        s_own = gl.where((own_places // B)[None, :] == (own_rows // (G * B))[:, None], s_own, float("-inf"))
    own_top = gl.max(s_own, 1)
    own_p = gl.exp2(s_own - own_top[:, None])
    total = gl.convert_layout(gl.sum(own_p, 1), row_layout)
    top = gl.convert_layout(own_top, row_layout)
    acc = gl.zeros([M, D], gl.float32, wide_layout)
    acc = warpgroup_mma(gl.convert_layout(own_p.to(dtype), operand), v_own, acc)

    rows = tile * M + gl.arange(0, M, row_layout)
    zero = gl.zeros([M, N], gl.float32, scores_layout)
    if count > 0:
        mbarrier.wait(k_full.index(0), 0)
        scores = warpgroup_mma(q_rows, k.index(0).permute((1, 0)), zero, use_acc=False)
        if whole == 0:
            scores = _masked(scores, begin, starts, anchors, rows, G, B, N, scores_layout)
        gl.thread_barrier()
        _fetch(keys, k, k_full, begin, STAGES, count, head, N, D, STAGES)
        above = gl.maximum(top, gl.max(scores, 1) * bits)
        p32 = gl.exp2(scores * bits - above[:, None])
        shrink = gl.exp2(top - above)
        total = total * shrink + gl.sum(p32, 1)
        top = above
        acc = acc * gl.convert_layout(shrink, wide_row)[:, None]
        p = gl.convert_layout(p32.to(dtype), operand)
        for i in range(count - 1):
            ahead = i + 1
            mbarrier.wait(k_full.index(ahead % STAGES), ahead // STAGES & 1)
            s = warpgroup_mma(
                q_rows, k.index(ahead % STAGES).permute((1, 0)), zero, use_acc=False, is_async=True
            )
            mbarrier.wait(v_full.index(i % STAGES), i // STAGES & 1)
            longer = warpgroup_mma(p, v.index(i % STAGES), acc, is_async=True)
            scores = warpgroup_mma_wait(1, deps=(s,))
            if ahead >= whole:
                scores = _masked(scores, begin + ahead * N, starts, anchors, rows, G, B, N, scores_layout)
            above = gl.maximum(top, gl.max(scores, 1) * bits)
            p32 = gl.exp2(scores * bits - above[:, None])
            shrink = gl.exp2(top - above)
            total = total * shrink + gl.sum(p32, 1)
            top = above
            acc = warpgroup_mma_wait(0, deps=(longer,))
            acc = acc * gl.convert_layout(shrink, wide_row)[:, None]
            p = gl.convert_layout(p32.to(dtype), operand)
            gl.thread_barrier()
            _fetch(keys, k, k_full, begin, ahead + STAGES, count, head, N, D, STAGES)
            _fetch(values, v, v_full, begin, i + STAGES, count, head, N, D, STAGES)
        last = count - 1
        mbarrier.wait(v_full.index(last % STAGES), last // STAGES & 1)
        acc = warpgroup_mma(p, v.index(last % STAGES), acc)

    gl.store(sums + head * tiles * M + rows, top + gl.log2(total))
    out_rows = tile * M + gl.arange(0, M, wide_row)
    columns = gl.arange(0, D, gl.SliceLayout(0, wide_layout))
    at = ((((out_rows // G) * G_KV + head) * G + out_rows % G) * D)[:, None] + columns[None, :]
    gl.store(out + at, (acc / gl.convert_layout(total, wide_row)[:, None]).to(dtype))
