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
    """The BlockMask of `rule`, exactly what `create_block_mask` finds, from each block's stretch of context.

    A tile is full when every query of it sees every key of it, partial when some query sees some key. Both
    are told by block and tile and not by query and key, and listed by counting and not by sorting. The own
    tile of a query tile's blocks comes first among the partial ones: in it no query's row is empty.

    `starts`, `anchors` as in `dense_mask`, of a shape for which `tiles_fit`.
    """
    queries = len(anchors) * block_size
    rows, columns, edge = queries // TILE, (context + queries) // TILE, context // TILE
    place = torch.arange(columns, device=anchors.device)

    def between(low: Tensor, high: Tensor) -> Tensor:
        """Which tiles lie in each block's low..high-1, [rows, blocks of a tile, columns]."""
        inside = (place >= low[:, None]) & (place < high[:, None])
        return inside.view(rows, TILE // block_size, columns)

    end = torch.where(anchors > starts, (anchors + TILE - 1) // TILE, 0)
    touched = between(starts // TILE, end).any(1)
    full = between((starts + TILE - 1) // TILE, anchors // TILE).all(1)
    own = place == torch.arange(edge, edge + rows, device=anchors.device)[:, None]
    if block_size == TILE:  # one block is a tile: all of it sees all of it
        full = full | own
        partial = touched & ~full
        kv = _listed(partial)
    else:
        partial = (touched & ~full) | own
        kv = _listed(partial, own)
    full_kv, q, full_q = _listed(full), _listed(partial.T), _listed(full.T)
    return assemble((queries, context + queries), kv, full_kv, q, full_q, rule)


Tiles = tuple[Tensor, Tensor]
"""How many tiles each row has, and which."""


def assemble(
    lengths: tuple[int, int], kv: Tiles, full_kv: Tiles, q: Tiles, full_q: Tiles, rule: MaskMod
) -> BlockMask:
    """A mask of `lengths` (queries, keys): partial and full tiles by query tile, then by key tile."""
    return BlockMask(
        seq_lengths=lengths,
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


def _listed(tiles: Tensor, first: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Of `tiles` [rows, columns] bool: how many each row has [1, 1, rows], and which [1, 1, rows, columns].

    Rising, but for the one of `first` (one a row, part of `tiles`), which comes first; then nothing of use.
    """
    rows, columns = tiles.shape
    rank = tiles.cumsum(1) - 1 if first is None else torch.where(first, 0, (tiles & ~first).cumsum(1))
    listed = torch.zeros(rows, columns + 1, dtype=torch.int32, device=tiles.device)
    places = torch.arange(columns, dtype=torch.int32, device=tiles.device).expand(rows, columns)
    listed.scatter_(1, torch.where(tiles, rank, columns), places)
    return tiles.sum(1, dtype=torch.int32)[None, None], listed[None, None, :, :columns].contiguous()
