"""Triton kernels over a chunk of logits: what a loss needs to know of each row, and the slopes of the logits.

The compiler's code for the same takes about 100 instructions a logit and is bound by them; these take 7 to
11, twice that where a loss compares with the target's logits, and are bound by memory: two bytes are read,
and once more to be read and written as slopes, and the target's beside them. `scan` keeps a greatest logit
and sums for every few neighbours, so that nothing is exchanged between threads before the row's end.
Exponents are of 2, and of one fused multiply-add against a greatest logit that was rounded once: sums,
label's logarithm and slopes agree, however far from zero the logits are.

A NaN is in the sum, and so in all that follows; an infinite logit makes one. What concerns the target is
compiled only where its logits are given: None is a constant. Shapes: N rows, V vocabulary.
"""

# Triton reads the annotations of kernels: only its own may stand there.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

_LOWEST = tl.constexpr(-1e38)
"""Below any logit, and finite, since the difference of two infinities is a NaN."""
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)

_GROUPS, _NEIGHBOURS = 256, 8
"""A pass of `scan`'s loop reads this many groups of neighbours, 16 bytes each in bfloat16. With 256 a thread
needs 32 registers, so that an H200 works on 2,112 rows at once and a chunk of 1,920 has no second wave. With
the target's logits it needs up to 64: half as many rows, of twice the bytes."""
_PIECE = 8192
"""Logits that one program of `slopes` reads."""


@triton.jit
def _odds(value, base):
    return tl.exp2(tl.fma(value, _LOG2_E, -base))


@triton.jit
def _raise(value, top, base):
    """Take `value` [groups, neighbours] into the greatest, [groups].

    Returns it, its exponent's base, by what sums until now shrink, and the odds of `value`.
    """
    new_top = tl.maximum(top, tl.max(value, 1))
    new_base = new_top * _LOG2_E
    return new_top, new_base, tl.exp2(base - new_base), _odds(value, new_base[:, None])


@triton.jit
def _fold(value, top, base, total):
    """Take `value` [groups, neighbours] into the greatest, its exponent's base and the sum, [groups] each."""
    top, base, shrink, odds = _raise(value, top, base)
    return top, base, total * shrink + tl.sum(odds, 1)


@triton.jit
def _fold_taught(value, above, top, base, total, apart):
    """`_fold` of the target's logits; `apart` sums the odds times what they are `above` the drafter's."""
    top, base, shrink, odds = _raise(value, top, base)
    return top, base, total * shrink + tl.sum(odds, 1), apart * shrink + tl.sum(odds * above, 1)


@triton.jit
def _scan(
    logits,
    labels,
    log_label,
    hits,
    bases,
    totals,
    taught,
    kl,
    taught_bases,
    taught_totals,
    width: tl.constexpr,
    groups: tl.constexpr,
    neighbours: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x = logits + row * width
    label = tl.load(labels + row).to(tl.int32)
    of_label = tl.load(x + label).to(tl.float32)
    block: tl.constexpr = groups * neighbours
    place = tl.arange(0, groups)[:, None] * neighbours + tl.arange(0, neighbours)[None, :]
    top = tl.full((groups,), _LOWEST, tl.float32)
    base = top * _LOG2_E
    total = tl.zeros((groups,), tl.float32)
    before = top  # the greatest of the whole passes before the label's
    if taught is not None:
        y = taught + row * width
        y_top, y_base, y_total, apart = top, base, total, total
    whole: tl.constexpr = width // block * block
    for start in range(0, whole, block):
        value = tl.load(x + start + place).to(tl.float32)
        top, base, total = _fold(value, top, base, total)
        before = tl.where(start + block <= label, top, before)
        if taught is not None:
            other = tl.load(y + start + place).to(tl.float32)
            y_top, y_base, y_total, apart = _fold_taught(other, other - value, y_top, y_base, y_total, apart)
    if whole < width:
        at = whole + place
        value = tl.load(x + at, mask=at < width, other=float("-inf")).to(tl.float32)
        top, base, total = _fold(value, top, base, total)
        if taught is not None:
            other = tl.load(y + at, mask=at < width, other=float("-inf")).to(tl.float32)
            above = tl.where(at < width, other - value, 0.0)
            y_top, y_base, y_total, apart = _fold_taught(other, above, y_top, y_base, y_total, apart)
    greatest = tl.max(top, 0)
    row_base = greatest * _LOG2_E
    row_total = tl.sum(total * tl.exp2(base - row_base), 0)
    at = label // block * block + place
    beside = tl.load(x + at, mask=at < label, other=float("-inf")).to(tl.float32)
    earlier = tl.maximum(tl.max(before, 0), tl.max(tl.max(beside, 1), 0))
    hit = (of_label >= greatest) & (earlier < of_label) & (row_total == row_total)
    tl.store(hits + row, hit)
    tl.store(log_label + row, (tl.fma(of_label, _LOG2_E, -row_base) - tl.log2(row_total)) * _LN_2)
    tl.store(bases + row, row_base)
    tl.store(totals + row, row_total)
    if taught is not None:
        y_row_base = tl.max(y_top, 0) * _LOG2_E
        shrink = tl.exp2(y_base - y_row_base)
        y_row_total = tl.sum(y_total * shrink, 0)
        above = tl.sum(apart * shrink, 0) / y_row_total
        bits = tl.fma(above, _LOG2_E, row_base - y_row_base) + tl.log2(row_total) - tl.log2(y_row_total)
        tl.store(kl + row, bits * _LN_2)
        tl.store(taught_bases + row, y_row_base)
        tl.store(taught_totals + row, y_row_total)


@triton.jit
def _overlap(
    logits,
    bases,
    totals,
    taught,
    taught_bases,
    taught_totals,
    accepted,
    short,
    width: tl.constexpr,
    groups: tl.constexpr,
    neighbours: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x, y = logits + row * width, taught + row * width
    base, total = tl.load(bases + row), tl.load(totals + row)
    y_base, y_total = tl.load(taught_bases + row), tl.load(taught_totals + row)
    block: tl.constexpr = groups * neighbours
    place = tl.arange(0, groups)[:, None] * neighbours + tl.arange(0, neighbours)[None, :]
    both = tl.zeros((groups,), tl.float32)
    below = both
    for start in range(0, width, block):
        inside = start + place < width
        value = tl.load(x + start + place, mask=inside, other=float("-inf")).to(tl.float32)
        other = tl.load(y + start + place, mask=inside, other=float("-inf")).to(tl.float32)
        # Multiplied by both totals, as `slopes` compares them.
        q, p = _odds(value, base) * y_total, _odds(other, y_base) * total
        both += tl.sum(tl.minimum(q, p), 1)
        below += tl.sum(tl.where(q < p, q, 0.0), 1)
    whole = total * y_total
    tl.store(accepted + row, tl.sum(both, 0) / whole)
    tl.store(short + row, tl.sum(below, 0) / whole)


@triton.jit
def _slopes(
    logits,
    labels,
    bases,
    totals,
    own,
    of_label,
    slopes,
    taught,
    taught_bases,
    taught_totals,
    of_taught,
    of_short,
    width: tl.constexpr,
    piece: tl.constexpr,
):
    pieces: tl.constexpr = tl.cdiv(width, piece)
    row = (tl.program_id(0) // pieces).to(tl.int64)
    at = tl.program_id(0) % pieces * piece + tl.arange(0, piece)
    label = tl.load(labels + row).to(tl.int32)
    total = tl.load(totals + row)
    factor = tl.load(own + row) / total
    base = tl.load(bases + row)
    inside = at < width
    value = tl.load(logits + row * width + at, mask=inside, other=0.0).to(tl.float32)
    odds = _odds(value, base)
    slope = odds * factor - tl.where(at == label, tl.load(of_label + row), 0.0)
    if taught is not None:
        other = tl.load(taught + row * width + at, mask=inside, other=0.0).to(tl.float32)
        y_odds, y_total = _odds(other, tl.load(taught_bases + row)), tl.load(taught_totals + row)
        slope -= y_odds * (tl.load(of_taught + row) / y_total)
        if of_short is not None:
            less = odds * (tl.load(of_short + row) / total)
            slope -= tl.where(odds * y_total < y_odds * total, less, 0.0)
    tl.store(slopes + row * width + at, slope.to(slopes.dtype.element_ty), mask=inside)


def scan(
    logits: Tensor,
    labels: Tensor,
    log_label: Tensor,
    hits: Tensor,
    bases: Tensor,
    totals: Tensor,
    taught: Tensor | None = None,
    kl: Tensor | None = None,
    taught_bases: Tensor | None = None,
    taught_totals: Tensor | None = None,
) -> None:
    """Fill [N] each from `logits` [N, V] and `labels` [N] int64, and from `taught`, the target's logits.

    Args:
        log_label: log-probability of each label, float32.
        hits: whether the label is the first of the greatest logits, bool.
        bases, totals: the greatest logit times log2(e), and the sum of 2^(logit log2(e) - base), float32.
        kl: KL(p || q), float32. taught_bases, taught_totals: of the target's logits.
    """
    rows, width = logits.shape
    _scan[(rows,)](
        *(logits, labels, log_label, hits, bases, totals, taught, kl, taught_bases, taught_totals),
        *(width, _GROUPS, _NEIGHBOURS),
        num_warps=4,
        # A base is a product: a difference of two would be fused with the one that is not rounded yet, and
        # probabilities be wrong by a thousandth where logits are in the thousands (seen on an H200).
        enable_fp_fusion=False,
    )


def overlap(
    logits: Tensor,
    bases: Tensor,
    totals: Tensor,
    taught: Tensor,
    taught_bases: Tensor,
    taught_totals: Tensor,
    accepted: Tensor,
    short: Tensor,
) -> None:
    """Fill [N] each from both logits and what `scan` found of them.

    Args:
        accepted: the sum of min(p, q), float32. short: the sum of q where q < p, float32.
    """
    rows, width = logits.shape
    _overlap[(rows,)](
        *(logits, bases, totals, taught, taught_bases, taught_totals, accepted, short),
        *(width, _GROUPS, _NEIGHBOURS),
        num_warps=4,
    )


def slopes(
    logits: Tensor,
    labels: Tensor,
    bases: Tensor,
    totals: Tensor,
    own: Tensor,
    of_label: Tensor,
    slopes: Tensor,
    taught: Tensor | None = None,
    taught_bases: Tensor | None = None,
    taught_totals: Tensor | None = None,
    of_taught: Tensor | None = None,
    of_short: Tensor | None = None,
) -> None:
    """Fill `slopes` [N, V] with own q - of_label onehot - of_taught p - of_short (q where q < p).

    All but logits and slopes are [N]: what `scan` found, and factors.
    """
    rows, width = logits.shape
    programs = rows * triton.cdiv(width, _PIECE)
    _slopes[(programs,)](
        *(logits, labels, bases, totals, own, of_label, slopes),
        *(taught, taught_bases, taught_totals, of_taught, of_short, width, _PIECE),
        num_warps=8,
    )
