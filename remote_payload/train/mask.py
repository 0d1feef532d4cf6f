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
    some of it. `starts`, `anchors` as in `dense_mask`, of a shape for which `tiles_fit`.
    """
    queries = len(anchors) * block_size
    rows, columns = queries // TILE, (context + queries) // TILE
    by_tile = (rows, TILE // block_size)
    first, latest_start = (f(starts.view(by_tile), 1)[:, None] for f in (torch.amin, torch.amax))
    least, last = (f(anchors.view(by_tile), 1)[:, None] for f in (torch.amin, torch.amax))
    begin = torch.arange(columns, device=anchors.device)[None] * TILE
    row = torch.arange(rows, device=anchors.device)[:, None]
    in_context = begin < context
    full = in_context & (begin >= latest_start) & (begin + TILE <= least)
    touched = in_context & (begin < last) & (begin + TILE > first)
    own = ~in_context & ((begin - context) // TILE == row)
    partial = (touched & ~full) | own
    return BlockMask.from_kv_blocks(
        *_counted(partial),
        *_counted(full),
        BLOCK_SIZE=TILE,
        mask_mod=rule,
        seq_lengths=(queries, context + queries),
    )


def _counted(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """How many tiles of each row are set [1, 1, rows], and their columns first [1, 1, rows, columns]."""
    count = tiles.sum(-1, dtype=torch.int32)
    columns = tiles.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return count[None, None], columns[None, None]
