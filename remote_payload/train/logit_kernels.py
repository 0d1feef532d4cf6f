"""Triton kernels over a chunk of logits: what a loss from labels needs to know of them, and their slopes.

The compiler's code for the same takes about 100 instructions a logit and is bound by them; these take 6 to 8
and are bound by memory: two bytes are read, and once more to be read and written as slopes. `scan` keeps a
greatest logit and a sum for every few neighbours, so that nothing is exchanged between threads before the
row's end. Exponents are of 2, and of one fused multiply-add against a greatest logit that was rounded once:
sum, label's logarithm and slopes agree, however far from zero the logits are.

A NaN is in the sum, and so in all that follows; an infinite logit makes one. Shapes: N rows, V vocabulary.
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
needs 32 registers, so that an H200 works on 2,112 rows at once and a chunk of 1,920 has no second wave."""
_PIECE = 8192
"""Logits that one program of `slopes` reads."""


@triton.jit
def _fold(value, top, base, total):
    """Take `value` [groups, neighbours] into the greatest, its exponent's base and the sum, [groups] each."""
    new_top = tl.maximum(top, tl.max(value, 1))
    new_base = new_top * _LOG2_E
    odds = tl.exp2(tl.fma(value, _LOG2_E, -new_base[:, None]))
    return new_top, new_base, total * tl.exp2(base - new_base) + tl.sum(odds, 1)


@triton.jit
def _scan(
    logits,
    labels,
    log_label,
    hits,
    bases,
    totals,
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
    whole: tl.constexpr = width // block * block
    for start in range(0, whole, block):
        value = tl.load(x + start + place).to(tl.float32)
        top, base, total = _fold(value, top, base, total)
        before = tl.where(start + block <= label, top, before)
    if whole < width:
        at = whole + place
        value = tl.load(x + at, mask=at < width, other=float("-inf")).to(tl.float32)
        top, base, total = _fold(value, top, base, total)
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


@triton.jit
def _slopes(logits, labels, bases, totals, weights, slopes, width: tl.constexpr, piece: tl.constexpr):
    pieces: tl.constexpr = tl.cdiv(width, piece)
    row = (tl.program_id(0) // pieces).to(tl.int64)
    at = tl.program_id(0) % pieces * piece + tl.arange(0, piece)
    label = tl.load(labels + row).to(tl.int32)
    weight = tl.load(weights + row)
    factor = weight / tl.load(totals + row)
    base = tl.load(bases + row)
    inside = at < width
    value = tl.load(logits + row * width + at, mask=inside, other=0.0).to(tl.float32)
    slope = tl.exp2(tl.fma(value, _LOG2_E, -base)) * factor - tl.where(at == label, weight, 0.0)
    tl.store(slopes + row * width + at, slope.to(slopes.dtype.element_ty), mask=inside)


def scan(
    logits: Tensor, labels: Tensor, log_label: Tensor, hits: Tensor, bases: Tensor, totals: Tensor
) -> None:
    """Fill [N] each from `logits` [N, V] and `labels` [N] int64.

    Args:
        log_label: log-probability of each label, float32.
        hits: whether the label is the first of the greatest logits, bool.
        bases, totals: the greatest logit times log2(e), and the sum of 2^(logit log2(e) - base), float32.
    """
    rows, width = logits.shape
    _scan[(rows,)](
        *(logits, labels, log_label, hits, bases, totals, width, _GROUPS, _NEIGHBOURS),
        num_warps=4,
        # A base is a product: a difference of two would be fused with the one that is not rounded yet, and
        # probabilities be wrong by a thousandth where logits are in the thousands (seen on an H200).
        enable_fp_fusion=False,
    )


def slopes(
    logits: Tensor, labels: Tensor, bases: Tensor, totals: Tensor, weights: Tensor, slopes: Tensor
) -> None:
    """Fill `slopes` [N, V] with weight * (probability - onehot), from what `scan` found; `weights` [N]."""
    rows, width = logits.shape
    programs = rows * triton.cdiv(width, _PIECE)
    _slopes[(programs,)](logits, labels, bases, totals, weights, slopes, width, _PIECE, num_warps=8)
