"""Attention with its heads folded into the sequence, so that a GPU's longest programs start first.

FlexAttention starts its programs head after head, and within a head tile after tile. Under this mask the
first tile of context is seen by every block and the last by few, so that the last head's longest program
begins when all others are about to end: by a count of its inner loops a backward pass then takes 1.11 and a
forward pass 1.08 of what evenly spread work would. As one head whose sequence is

    keys      tile 0 of every key/value head, tile 1 of every one, ...       (long programs first)
    queries   the last tile of every head, the last but one of every one, ...  (likewise)

the same tiles are worked through in another order: 1.00 of it in both. What each tile computes is the same.

Shapes: Q queries and K keys in tiles of `TILE`, R = Q / TILE, J = K / TILE, h heads, g key/value heads, d
their size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from remote_payload.train.mask import TILE, MaskMod, assemble


def fold_queries(queries: Tensor) -> Tensor:
    """[Q, h, d] to [1, 1, Q h, d]."""
    tiles: Tensor = queries.unflatten(0, (-1, TILE)).flip(0)
    return tiles.transpose(1, 2).reshape(1, 1, -1, queries.shape[-1])


def fold_keys(keys: Tensor) -> Tensor:
    """Keys or values, [K, g, d] to [1, 1, K g, d]."""
    tiles: Tensor = keys.unflatten(0, (-1, TILE))
    return tiles.transpose(1, 2).reshape(1, 1, -1, keys.shape[-1])


def unfold(attended: Tensor, heads: int) -> Tensor:
    """What attention gave, [1, 1, Q h, d] to [Q, h, d]."""
    tiles = attended.reshape(-1, heads, TILE, attended.shape[-1])
    return tiles.flip(0).transpose(1, 2).flatten(0, 1)


def folded_rule(rule: MaskMod, queries: int, heads: int, kv_heads: int) -> MaskMod:
    """`rule` by folded places; define it once for each replica, as `rule` itself."""
    last, group = queries // TILE - 1, heads // kv_heads

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        query_tile, key_tile = query // TILE, key // TILE
        same_head = (query_tile % heads) // group == key_tile % kv_heads
        plain_query = (last - query_tile // heads) * TILE + query % TILE
        plain_key = key_tile // kv_heads * TILE + key % TILE
        return same_head & rule(batch, head, plain_query, plain_key)

    return sees


def fold_mask(mask: BlockMask, heads: int, kv_heads: int, rule: MaskMod) -> BlockMask:
    """The folded `mask` of one head for all of them; `rule` is its `folded_rule`."""
    queries, keys = mask.seq_lengths
    rows, group = queries // TILE, heads // kv_heads
    device = mask.kv_indices.device
    head = torch.arange(heads, device=device, dtype=torch.int32)

    def by_query(count: Tensor | None, index: Tensor | None) -> tuple[Tensor, Tensor]:
        assert count is not None and index is not None
        turned = index.flip(2)[:, :, :, None] * kv_heads + (head // group)[:, None]
        return count.flip(2).repeat_interleave(heads, 2), turned.flatten(2, 3)

    def by_key(count: Tensor | None, index: Tensor | None) -> tuple[Tensor, Tensor]:
        assert count is not None and index is not None
        tile = (rows - 1 - index)[:, :, :, None, :, None] * heads
        turned = tile + head.view(kv_heads, 1, group)  # [1, 1, J, g, R, group]
        return (count * group).repeat_interleave(kv_heads, 2), turned.flatten(4).flatten(2, 3)

    kv = by_query(mask.kv_num_blocks, mask.kv_indices)
    full_kv = by_query(mask.full_kv_num_blocks, mask.full_kv_indices)
    q = by_key(mask.q_num_blocks, mask.q_indices)
    full_q = by_key(mask.full_q_num_blocks, mask.full_q_indices)
    return assemble((queries * heads, keys * kv_heads), kv, full_kv, q, full_q, rule)
