"""The strict attention mask of DFlash training, as a dense matrix and as a FlexAttention block mask.

Keys are the C context tokens of a row and after them the A*B tokens of its blocks. A query in the block of
anchor a sees the context of the same document **strictly below a** (when serving, the feature at a does not
exist yet: a mask that shows it trains to 70 % accuracy and drafts nothing, SpecForge #455) and every token of
its own block, both ways; nothing of other blocks. An empty slot sees only itself, since a fully masked row
gives NaN (NeMo #2826).

A document is contiguous in its row, so `starts <= context index < anchors` says all of it, and the packed
padding is seen by nobody. The dense matrix is the oracle in tests and what a CPU runs; the block mask is
built from the sorted anchors alone: fixed shapes, no dense matrix, no sync with the device.

Shapes: C context tokens, A anchor slots, B block size, Q = A*B queries.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

TILE = 128
"""Side of a FlexAttention tile; C and Q must be multiples of it, and it of B."""

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def dense_mask(starts: Tensor, anchors: Tensor, context: int, block_size: int) -> Tensor:
    """Which key each query sees, [Q, C + Q] bool.

    Args:
        starts: first context index of each anchor's document, [A]; C in an empty slot.
        anchors: context index of each anchor, [A]; 0 in an empty slot.
        context: C.
        block_size: B.
    """
    index = torch.arange(context, device=anchors.device)
    seen = (index >= starts[:, None]) & (index < anchors[:, None])
    own = torch.eye(len(anchors), dtype=torch.bool, device=anchors.device)
    return torch.cat([seen, own.repeat_interleave(block_size, 1)], 1).repeat_interleave(block_size, 0)


def mask_mod(starts: Tensor, anchors: Tensor, context: int, block_size: int) -> MaskMod:
    """The same rule for FlexAttention, over buffers that are refilled in place for every row.

    Define it once for each replica: a new function every step would be a recompile every step.
    """

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block = query // block_size
        in_context = (key >= starts[block]) & (key < anchors[block])
        in_block = (key >= context) & ((key - context) // block_size == block)
        return in_context | in_block

    return sees


def tiles_fit(context: int, slots: int, block_size: int) -> bool:
    """Whether a row of this shape can be cut into FlexAttention tiles."""
    return context % TILE == 0 and (slots * block_size) % TILE == 0 and TILE % block_size == 0


def block_mask(starts: Tensor, anchors: Tensor, context: int, block_size: int, rule: MaskMod) -> BlockMask:
    """The BlockMask of `rule` from the least and greatest anchor of each query tile.

    A tile of context is full when every block of the query tile sees all of it, partial when some may see
    some of it. Of the context both are found in one stretch each, so their places are counted and not sorted.
    The blocks' own tile comes first among the partial ones: in it no query's row is empty.

    `starts`, `anchors` as in `dense_mask`, of a shape for which `tiles_fit`.
    """
    queries = len(anchors) * block_size
    rows, columns, edge = queries // TILE, (context + queries) // TILE, context // TILE
    by_tile = (rows, TILE // block_size)
    first, latest_start = (f(starts.view(by_tile), 1) for f in (torch.amin, torch.amax))
    least, last = (f(anchors.view(by_tile), 1) for f in (torch.amin, torch.amax))
    low, high = first // TILE, (last + TILE - 1) // TILE  # tiles low..high-1 are touched
    full_low = (latest_start + TILE - 1) // TILE
    full_count = (least // TILE - full_low).clamp(min=0)
    before = torch.where(
        full_count > 0, full_low - low, (high - low).clamp(min=0)
    )  # partial, before the full
    after = torch.where(full_count > 0, high - full_low - full_count, 0)
    place = torch.arange(columns, device=anchors.device)
    row = torch.arange(rows, device=anchors.device)
    turn = (place - 1)[None]
    left, right = low[:, None] + turn, (full_low + full_count - before)[:, None] + turn
    partial = torch.where(turn < before[:, None], left, right)
    partial[:, 0] = edge + row
    full = full_low[:, None] + place
    begin = full_low[:, None]
    is_full = (place >= begin) & (place < begin + full_count[:, None])
    touched = (place >= low[:, None]) & (place < high[:, None]) | (place == (edge + row)[:, None])
    numbers = [
        (1 + before + after, partial),
        (full_count, full),
        _by_column(touched & ~is_full),
        _by_column(is_full),
    ]
    kv, full_kv, q, full_q = (
        (count.to(torch.int32)[None, None], index.clamp(0, columns - 1).to(torch.int32)[None, None])
        for count, index in numbers
    )
    return BlockMask(
        seq_lengths=(queries, context + queries),
        kv_num_blocks=kv[0],
        kv_indices=kv[1],
        full_kv_num_blocks=full_kv[0],
        full_kv_indices=full_kv[1],
        q_num_blocks=q[0],
        q_indices=q[1],
        full_q_num_blocks=full_q[0],
        full_q_indices=full_q[1],
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=rule,
    )


def _by_column(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Of `tiles` [rows, columns] bool: set ones of each column [columns], and their rows [columns, rows]."""
    rows, columns = tiles.shape
    by_column = tiles.T
    place = torch.where(by_column, by_column.cumsum(1) - 1, rows)
    index = torch.zeros(columns, rows + 1, dtype=torch.int64, device=tiles.device)
    index.scatter_(1, place, torch.arange(rows, device=tiles.device).expand(columns, rows))
    return by_column.sum(1), index[:, :rows]
