"""Heads folded into the sequence: the same attention, its tiles in another order."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from remote_payload.train.drafter import attend
from remote_payload.train.folded import fold_keys, fold_mask, fold_queries, folded_rule, unfold
from remote_payload.train.mask import TILE, block_mask, dense_mask, mask_mod
from tests.payload.test_mask import Packed, packed_rows


def folded_of(row: Packed, heads: int, kv_heads: int) -> tuple[BlockMask, BlockMask]:
    """The plain and the folded mask of a row."""
    starts, anchors = row.tensors()
    rule = mask_mod(starts, anchors, row.context, row.block)
    plain = block_mask(starts, anchors, row.context, row.block, rule)
    queries = row.slots * row.block
    return plain, fold_mask(plain, heads, kv_heads, folded_rule(rule, queries, heads, kv_heads))


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 1), (2, 2)])
@settings(deadline=None, max_examples=5)
@given(row=packed_rows(context=2 * TILE, slots=32, block=8))
def test_attention_under_the_folded_mask_is_attention_under_the_dense_one(
    heads: int, kv_heads: int, row: Packed
) -> None:
    starts, anchors = row.tensors()
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(2 * TILE, heads, 16, generator=generator)
    keys, values = (torch.randn(4 * TILE, kv_heads, 16, generator=generator) for _ in range(2))
    _, folded = folded_of(row, heads, kv_heads)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # flex_attention warns that it is not compiled here
        sparse = attend(queries, keys, values, folded)
    dense = attend(queries, keys, values, dense_mask(starts, anchors, row.context, row.block))
    torch.testing.assert_close(sparse, dense, atol=1e-5, rtol=1e-5)


def test_folding_and_unfolding_are_inverse_and_keep_every_head_together() -> None:
    queries = torch.arange(2 * TILE * 3 * 4).view(2 * TILE, 3, 4)
    assert unfold(fold_queries(queries), 3).equal(queries)
    tiles = fold_queries(queries)[0, 0].view(2, 3, TILE, 4)
    for head in range(3):
        assert tiles[0, head].equal(queries[TILE:, head])  # the last tile first
        assert tiles[1, head].equal(queries[:TILE, head])
    keys = fold_keys(queries)[0, 0].view(2, 3, TILE, 4)
    assert keys[0, 2].equal(queries[:TILE, 2]) and keys[1, 0].equal(queries[TILE:, 0])


@settings(deadline=None, max_examples=30)
@given(row=packed_rows(context=3 * TILE, slots=TILE // 4, block=8))
def test_the_folded_lists_name_the_same_tiles_forward_and_backward(row: Packed) -> None:
    heads, kv_heads = 4, 2
    plain, folded = folded_of(row, heads, kv_heads)
    rows, columns = 2, 5
    for kind in ("", "full_"):
        count, index = (getattr(plain, f"{kind}kv_{name}")[0, 0] for name in ("num_blocks", "indices"))
        wanted = {
            ((rows - 1 - r) * heads + head, int(column) * kv_heads + head // 2)
            for r in range(rows)
            for column in index[r, : int(count[r])]
            for head in range(heads)
        }
        assert listed(folded, f"{kind}kv") == wanted
        assert {(query, key) for key, query in listed(folded, f"{kind}q")} == wanted
    assert folded.kv_num_blocks.shape == (1, 1, rows * heads)
    assert folded.q_num_blocks is not None and folded.q_num_blocks.shape == (1, 1, columns * kv_heads)
    for kind in ("kv", "full_kv", "q", "full_q"):
        assert getattr(folded, f"{kind}_indices").dtype == torch.int32
        assert getattr(folded, f"{kind}_indices").is_contiguous()


def listed(mask: BlockMask, kind: str) -> set[tuple[int, int]]:
    """All pairs of tiles that a list of the mask names, none of them twice."""
    count: Tensor = getattr(mask, f"{kind}_num_blocks")[0, 0]
    index: Tensor = getattr(mask, f"{kind}_indices")[0, 0]
    pairs = [(i, int(other)) for i, number in enumerate(count.tolist()) for other in index[i, :number]]
    assert len(pairs) == len(set(pairs))
    return set(pairs)


def test_the_longest_programs_come_first() -> None:
    """One long document: the last query tile sees most, the first tile of context is seen by most."""
    row = Packed([4 * TILE], [30 + 15 * n for n in range(32)], 32, 4 * TILE, 8)
    _, folded = folded_of(row, 4, 2)

    def seen(kind: str) -> list[int]:
        full = getattr(folded, f"full_{kind}_num_blocks")[0, 0]
        return (getattr(folded, f"{kind}_num_blocks")[0, 0] + full).tolist()

    assert seen("kv") == sorted(seen("kv"), reverse=True)
    assert seen("q") == sorted(seen("q"), reverse=True)
