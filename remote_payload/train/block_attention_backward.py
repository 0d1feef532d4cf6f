"""Backward attention under the training mask; names, packed rows and tiles as in `block_attention_forward`.

With P = exp2(S * bits - sums), delta = rowsum(out * dout), dP = dout V^T and dS = P * (dP - delta):

    dv = P^T dout        dk = scale * dS^T Q        dq = scale * dS K

`keys_kernel` is one program for each tile of keys of one key/value head. It walks the tiles of queries that
see a key of it: since documents are contiguous and anchors rise, that is one stretch, and those that see all
of it are one stretch within. What is summed over a group's heads is summed over packed rows. dq comes either
out of the same pass, added in float32 to a buffer (five products; the order of additions is not fixed), or
from `queries_kernel`, which computes scores and slopes again (seven products; the same to the bit each time).
"""

# Triton reads the annotations of kernels: only its own may stand there.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False
# ruff: noqa: N803

from __future__ import annotations

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]

from remote_payload.train.block_attention_forward import load_keys, row_offsets, stretch


@triton.jit
def delta_kernel(
    out,
    slope,
    delta,
    summed,
    tiles,
    G_KV: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    ZERO: tl.constexpr,
):
    """delta [g, Q G], and zeros for `summed` [g, Q G, D] where dq is added up."""
    head, tile = tl.program_id(0) % G_KV, tl.program_id(0) // G_KV
    at = row_offsets(tile * M, head, G_KV, G, D, M)
    rows = (head * tiles + tile) * M + tl.arange(0, M)
    product = tl.load(out + at).to(tl.float32) * tl.load(slope + at).to(tl.float32)
    tl.store(delta + rows, tl.sum(product, 1))
    if ZERO:
        places = rows[:, None].to(tl.int64) * D + tl.arange(0, D)[None, :]
        tl.store(summed + places, tl.zeros([M, D], tl.float32))


@triton.jit
def unpack_kernel(
    summed,
    by_query,
    tiles,
    scale,
    G_KV: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
):
    """dq [Q, g G, D] from what was added up, [g, Q G, D] float32."""
    head, tile = tl.program_id(0) % G_KV, tl.program_id(0) // G_KV
    rows = (head * tiles + tile) * M + tl.arange(0, M)
    found = tl.load(summed + rows[:, None].to(tl.int64) * D + tl.arange(0, D)[None, :])
    at = row_offsets(tile * M, head, G_KV, G, D, M)
    tl.store(by_query + at, (found * scale).to(by_query.dtype.element_ty))


@triton.jit
def ranges_kernel(
    ranges,
    starts,
    anchors,
    context,
    slots,
    SLOTS: tl.constexpr,
    T: tl.constexpr,
    B: tl.constexpr,
    N: tl.constexpr,
):
    """For each N keys the tiles of T tokens that see a key: from, to; that see all: from, to; [K / N, 4]."""
    first = tl.program_id(0) * N
    slot = tl.arange(0, SLOTS)
    start = tl.load(starts + slot, mask=slot < slots, other=context).to(tl.int32)
    anchor = tl.load(anchors + slot, mask=slot < slots, other=0).to(tl.int32)
    some = (start < first + N) & (anchor > first) & (anchor > start)
    every = (start <= first) & (anchor >= first + N)
    low = tl.min(tl.where(some, slot, SLOTS), 0) * B // T
    high = tl.maximum((tl.max(tl.where(some, slot + 1, 0), 0) * B + T - 1) // T, low)
    whole_low = (tl.min(tl.where(every, slot, SLOTS), 0) * B + T - 1) // T
    whole_high = tl.max(tl.where(every, slot + 1, 0), 0) * B // T
    if first >= context:
        low = (first - context) // T
        high = (first - context + N + T - 1) // T
        whole_high = whole_low
    if whole_low >= whole_high:
        whole_low = low
        whole_high = low
    at = ranges + tl.program_id(0) * 4
    tl.store(at, low)
    tl.store(at + 1, high)
    tl.store(at + 2, whole_low)
    tl.store(at + 3, whole_high)


@triton.jit
def _load_rows(
    rows,
    first,
    head,
    G_KV: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    TMA: tl.constexpr,
):
    if TMA:
        loaded = tl.reshape(rows.load([first // G, head * G, 0]), [M, D])
    else:
        loaded = tl.load(rows + row_offsets(first, head, G_KV, G, D, M))
    return loaded


@triton.jit
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
    G_KV: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    B: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    TMA: tl.constexpr,
    DQ: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dk and dv of N keys. `DQ`: 0 no dq, 1 added by registers, 2 added by a descriptor of [g Q G, D]."""
    head = tl.program_id(0) % G_KV
    number = tl.program_id(0) // G_KV
    first = number * N  # the context's first tiles are seen by most queries
    k = load_keys(keys, first, head, G_KV, D, N, False)
    v = load_keys(values, first, head, G_KV, D, N, False)
    place = first + tl.arange(0, N)
    dk = tl.zeros([N, D], tl.float32)
    dv = tl.zeros([N, D], tl.float32)
    low = tl.load(ranges + number * 4)
    high = tl.load(ranges + number * 4 + 1)
    whole_low = tl.load(ranges + number * 4 + 2)
    whole_high = tl.load(ranges + number * 4 + 3)
    ahead = head * tiles * M
    left = whole_low - low
    for i in tl.range(0, left + high - whole_high, num_stages=1):
        tile = tl.where(i < left, low + i, whole_high + i - left)
        q = _load_rows(queries, tile * M, head, G_KV, G, D, M, TMA)
        do = _load_rows(slope, tile * M, head, G_KV, G, D, M, TMA)
        row = tile * M + tl.arange(0, M)
        block = row // (G * B)
        own = first >= context
        begin = tl.where(own, context + block * B, tl.load(starts + block).to(tl.int32))
        end = tl.where(own, context + block * B + B, tl.load(anchors + block).to(tl.int32))
        seen = (place[:, None] >= begin[None, :]) & (place[:, None] < end[None, :])
        p = tl.exp2(tl.dot(k, tl.trans(q)) * bits - tl.load(sums + ahead + row)[None, :])
        p = tl.where(seen, p, 0.0)
        dv = tl.dot(p.to(do.dtype), do, dv)
        dp = tl.dot(v, tl.trans(do))
        ds = (p * (dp - tl.load(delta + ahead + row)[None, :])).to(q.dtype)
        dk = tl.dot(ds, q, dk)
        if DQ != 0:
            _add(summed, tl.dot(tl.trans(ds), k), ahead + tile * M, D, M, DQ)
    for tile in tl.range(whole_low, whole_high, num_stages=STAGES):
        q = _load_rows(queries, tile * M, head, G_KV, G, D, M, TMA)
        do = _load_rows(slope, tile * M, head, G_KV, G, D, M, TMA)
        row = tile * M + tl.arange(0, M)
        p = tl.exp2(tl.dot(k, tl.trans(q)) * bits - tl.load(sums + ahead + row)[None, :])
        dv = tl.dot(p.to(do.dtype), do, dv)
        dp = tl.dot(v, tl.trans(do))
        ds = (p * (dp - tl.load(delta + ahead + row)[None, :])).to(q.dtype)
        dk = tl.dot(ds, q, dk)
        if DQ != 0:
            _add(summed, tl.dot(tl.trans(ds), k), ahead + tile * M, D, M, DQ)
    at = (place[:, None] * G_KV + head) * D + tl.arange(0, D)[None, :]
    tl.store(by_value + at, dv.to(by_value.dtype.element_ty))
    tl.store(by_key + at, (dk * scale).to(by_key.dtype.element_ty))


@triton.jit
def _add(summed, found, row, D: tl.constexpr, M: tl.constexpr, DQ: tl.constexpr):
    if DQ == 2:
        summed.atomic_add([row, 0], found)
    else:
        places = (row + tl.arange(0, M))[:, None].to(tl.int64) * D + tl.arange(0, D)[None, :]
        tl.atomic_add(summed + places, found, sem="relaxed")


@triton.jit
def _slope_step(
    dq,
    q,
    do,
    k,
    v,
    sums,
    delta,
    bits,
    seen,
    MASKED: tl.constexpr,
):
    p = tl.exp2(tl.dot(q, tl.trans(k)) * bits - sums[:, None])
    if MASKED:
        p = tl.where(seen, p, 0.0)
    ds = p * (tl.dot(do, tl.trans(v)) - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, dq)


@triton.jit
def queries_kernel(
    queries,
    slope,
    own_keys,
    own_values,
    keys,
    values,
    by_query,
    sums,
    delta,
    starts,
    anchors,
    context,
    tiles,
    bits,
    scale,
    G_KV: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    B: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    TMA: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dq of M packed rows, tile of keys after tile."""
    T: tl.constexpr = M // G
    OWN: tl.constexpr = max(T, B, 16)
    head = tl.program_id(0) % G_KV
    tile = tiles - 1 - tl.program_id(0) // G_KV
    token = tile * T
    rows = tile * M + tl.arange(0, M)
    block = rows // (G * B)
    at = row_offsets(tile * M, head, G_KV, G, D, M)
    q = tl.load(queries + at)
    do = tl.load(slope + at)
    lse = tl.load(sums + head * tiles * M + rows)
    di = tl.load(delta + head * tiles * M + rows)
    begin, whole, end = stretch(starts, anchors, token, T, B, N)

    own = token // OWN * OWN
    own_k = load_keys(own_keys, context + own, head, G_KV, D, OWN, False)
    own_v = load_keys(own_values, context + own, head, G_KV, D, OWN, False)
    dq = tl.zeros([M, D], tl.float32)
    own_seen = ((own + tl.arange(0, OWN)) // B)[None, :] == block[:, None]
    dq = _slope_step(dq, q, do, own_k, own_v, lse, di, bits, own_seen, OWN > B)

    low = tl.load(starts + block).to(tl.int32)
    high = tl.load(anchors + block).to(tl.int32)
    for first in tl.range(begin + whole * N, end, N, num_stages=1):
        k = load_keys(keys, first, head, G_KV, D, N, TMA)
        v = load_keys(values, first, head, G_KV, D, N, TMA)
        place = first + tl.arange(0, N)
        seen = (place[None, :] >= low[:, None]) & (place[None, :] < high[:, None])
        dq = _slope_step(dq, q, do, k, v, lse, di, bits, seen, True)
    for first in tl.range(begin, begin + whole * N, N, num_stages=STAGES):
        k = load_keys(keys, first, head, G_KV, D, N, TMA)
        v = load_keys(values, first, head, G_KV, D, N, TMA)
        dq = _slope_step(dq, q, do, k, v, lse, di, bits, None, False)
    tl.store(by_query + at, (dq * scale).to(by_query.dtype.element_ty))
