"""Forward attention under the training mask: one program for each tile of queries of one key/value head.

The queries of a key/value head's whole group are packed into the rows of a tile: row r is token r // G, head
r % G of the group. A tile of 128 rows is then two anchors and not eight, so that its stretch of context, from
its documents' first token to its last anchor, ends within one tile of keys; everything before is seen by all
rows and needs no mask. The own keys come first, so that no row ever meets an empty sum.

Shapes: Q queries, K = C + Q keys, g key/value heads, G query heads to each, D their size, B block size;
a tile has M rows, T = M / G tokens, and N keys. Scores are in bits: exp2 of (score * scale * log2 e).
"""

# Triton reads the annotations of kernels: only its own may stand there.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-calls=False
# ruff: noqa: N803

from __future__ import annotations

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]


@triton.jit
def load_keys(keys, first, head, G_KV: tl.constexpr, D: tl.constexpr, N: tl.constexpr, TMA: tl.constexpr):
    """Keys or values `first` .. + N of a head, [N, D], of [K, g, D] (`TMA`: a descriptor of [K, g D])."""
    if TMA:
        loaded = keys.load([first, head * D])
    else:
        rows = first + tl.arange(0, N)
        loaded = tl.load(keys + (rows[:, None] * G_KV + head) * D + tl.arange(0, D)[None, :])
    return loaded


@triton.jit
def row_offsets(first, head, G_KV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, M: tl.constexpr):
    """Offsets [M, D] of packed rows `first` .. + M of a key/value head in a tensor [Q, g G, D]."""
    rows = first + tl.arange(0, M)
    return (((rows // G) * G_KV + head) * G + rows % G)[:, None] * D + tl.arange(0, D)[None, :]


@triton.jit
def stretch(
    starts,
    anchors,
    token,
    T: tl.constexpr,
    B: tl.constexpr,
    N: tl.constexpr,
):
    """Context of the T tokens from `token` on: its first key, how many whole tiles all see, and its end."""
    AT: tl.constexpr = T // B if T > B else 1
    slots = token // B + tl.arange(0, AT)
    start = tl.load(starts + slots).to(tl.int32)
    anchor = tl.load(anchors + slots).to(tl.int32)
    first = tl.min(start, 0)
    end = tl.max(anchor, 0)
    shared = tl.maximum(tl.min(anchor, 0) - first, 0) // N
    whole = tl.where(tl.max(start, 0) == first, shared, 0)
    return first, whole, end


@triton.jit
def _step(acc, total, top, q, k, v, bits, seen, MASKED: tl.constexpr):
    """One tile of keys into the running sums."""
    scores = tl.dot(q, tl.trans(k))
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    above = tl.maximum(top, tl.max(scores, 1) * bits)
    p = tl.exp2(scores * bits - above[:, None])
    shrink = tl.exp2(top - above)
    total = total * shrink + tl.sum(p, 1)
    acc = acc * shrink[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc)
    return acc, total, above


@triton.jit
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
    G_KV: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    B: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    TMA: tl.constexpr,
    STAGES: tl.constexpr,
    WS: tl.constexpr,
):
    """`own_keys`, `own_values` are pointers to the same tensors as `keys`, `values` (see `load_keys`)."""
    T: tl.constexpr = M // G
    OWN: tl.constexpr = max(T, B, 16)
    head = tl.program_id(0) % G_KV
    tile = tiles - 1 - tl.program_id(0) // G_KV  # those with most context first
    token = tile * T
    rows = tile * M + tl.arange(0, M)
    block = rows // (G * B)
    at = row_offsets(tile * M, head, G_KV, G, D, M)
    q = tl.load(queries + at)
    begin, whole, end = stretch(starts, anchors, token, T, B, N)

    own = token // OWN * OWN
    own_k = load_keys(own_keys, context + own, head, G_KV, D, OWN, False)
    own_v = load_keys(own_values, context + own, head, G_KV, D, OWN, False)
    scores = tl.dot(q, tl.trans(own_k)) * bits
    if OWN > B:
        scores = tl.where(((own + tl.arange(0, OWN)) // B)[None, :] == block[:, None], scores, float("-inf"))
    top = tl.max(scores, 1)
    p = tl.exp2(scores - top[:, None])
    total = tl.sum(p, 1)
    acc = tl.dot(p.to(own_v.dtype), own_v)

    low = tl.load(starts + block).to(tl.int32)
    high = tl.load(anchors + block).to(tl.int32)
    for first in tl.range(begin + whole * N, end, N, num_stages=1):
        k = load_keys(keys, first, head, G_KV, D, N, TMA)
        v = load_keys(values, first, head, G_KV, D, N, TMA)
        place = first + tl.arange(0, N)
        seen = (place[None, :] >= low[:, None]) & (place[None, :] < high[:, None])
        acc, total, top = _step(acc, total, top, q, k, v, bits, seen, True)
    for first in tl.range(begin, begin + whole * N, N, num_stages=STAGES, warp_specialize=WS):
        k = load_keys(keys, first, head, G_KV, D, N, TMA)
        v = load_keys(values, first, head, G_KV, D, N, TMA)
        acc, total, top = _step(acc, total, top, q, k, v, bits, None, False)

    tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty))
    tl.store(sums + head * tiles * M + rows, top + tl.log2(total))
