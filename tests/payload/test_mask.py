"""The strict mask against a rule applied to one query and one key at a time."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

from remote_payload.train.drafter import attend
from remote_payload.train.mask import TILE, block_mask, dense_mask, mask_mod, tiles_fit


@dataclasses.dataclass(frozen=True)
class Packed:
    """Documents in a row of `context` tokens, and blocks at some of their tokens."""

    lengths: list[int]
    anchors: list[int]
    slots: int
    context: int
    block: int

    def document(self, index: int) -> int | None:
        """The document of a context token; None in the padding."""
        ends = list(itertools.accumulate(self.lengths))
        return next((number for number, end in enumerate(ends) if index < end), None)

    def sees(self, query: int, key: int) -> bool:
        """The rule in the paper's words."""
        slot = query // self.block
        if key >= self.context:  # a block token
            return (key - self.context) // self.block == slot
        if slot >= len(self.anchors):
            return False
        anchor = self.anchors[slot]
        return key < anchor and self.document(key) == self.document(anchor)

    def oracle(self) -> Tensor:
        queries = self.slots * self.block
        return torch.tensor(
            [[self.sees(q, k) for k in range(self.context + queries)] for q in range(queries)]
        )

    def tensors(self) -> tuple[Tensor, Tensor]:
        """`starts` and `anchors` as a row has them: rising, empty slots last."""
        begins = [0, *itertools.accumulate(self.lengths)]
        empty = self.slots - len(self.anchors)
        starts = [begins[self.document(a) or 0] for a in self.anchors] + [self.context] * empty
        return torch.tensor(starts), torch.tensor(self.anchors + [0] * empty)


@st.composite
def packed_rows(draw: st.DrawFn, context: int, slots: int, block: int) -> Packed:
    """Random documents (short, long, bordering on tiles) with random anchors, often with empty slots."""
    cuts = draw(st.lists(st.integers(1, context), max_size=6))
    near_tiles = draw(st.lists(st.sampled_from(range(TILE, context + 1, TILE) or [context]), max_size=2))
    borders = sorted({*cuts, *near_tiles})
    lengths = [b - a for a, b in itertools.pairwise([0, *borders])]
    total = sum(lengths)
    anchors = draw(st.sets(st.integers(0, max(0, total - 1)), max_size=slots)) if total else set()
    return Packed(lengths, sorted(anchors), slots, context, block)


@settings(deadline=None, max_examples=60)
@given(packed_rows(context=24, slots=5, block=3))
def test_the_dense_mask_is_the_rule_for_every_query_and_key(row: Packed) -> None:
    starts, anchors = row.tensors()
    assert dense_mask(starts, anchors, row.context, row.block).equal(row.oracle())


@settings(deadline=None, max_examples=20)
@given(packed_rows(context=24, slots=5, block=3))
def test_the_flex_rule_is_the_dense_mask(row: Packed) -> None:
    starts, anchors = row.tensors()
    queries = row.slots * row.block
    q, k = torch.arange(queries)[:, None], torch.arange(row.context + queries)[None]
    sees = mask_mod(starts, anchors, row.context, row.block)
    nothing = torch.tensor(0)
    assert sees(nothing, nothing, q, k).equal(dense_mask(starts, anchors, row.context, row.block))


def tiles_of(row: Packed) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Full and partial tiles of `block_mask`, and where the dense mask has tiles all and any true."""
    starts, anchors = row.tensors()
    rule = mask_mod(starts, anchors, row.context, row.block)
    mask = block_mask(starts, anchors, row.context, row.block, rule)
    dense = dense_mask(starts, anchors, row.context, row.block)
    tiled = dense.view(dense.shape[0] // TILE, TILE, dense.shape[1] // TILE, TILE)

    def listed(count: Tensor | None, columns: Tensor | None) -> Tensor:
        assert count is not None and columns is not None
        found = torch.zeros(tiled.shape[0], tiled.shape[2], dtype=torch.int64)
        for number in range(tiled.shape[0]):
            used = columns[0, 0, number, : int(count[0, 0, number])].tolist()
            assert len(used) == len(set(used))
            found[number, used] = 1
        return found.bool()

    return (
        listed(mask.full_kv_num_blocks, mask.full_kv_indices),
        listed(mask.kv_num_blocks, mask.kv_indices),
        tiled.all(3).all(1),
        tiled.any(3).any(1),
    )


@settings(deadline=None, max_examples=60)
@given(packed_rows(context=4 * TILE, slots=TILE // 4, block=8))
def test_no_tile_is_called_full_that_is_not_and_none_that_somebody_sees_is_left_out(row: Packed) -> None:
    full, partial, every, some = tiles_of(row)
    assert not (full & ~every).any()
    assert not (full & partial).any()
    assert not (some & ~(full | partial)).any()


@pytest.mark.parametrize("border", [0, 1, 100, TILE - 1, TILE, TILE + 1, 2 * TILE, 300])
def test_tiles_are_full_exactly_where_every_query_sees_every_key_around_all_borders(border: int) -> None:
    """Two query tiles of 16 blocks each, their anchors side by side, walked over the borders of tiles."""
    lengths = [border, 4 * TILE - border] if border else [4 * TILE]
    edges, steps = (border, TILE, 2 * TILE, 3 * TILE), (-8, -3, 0, 1, 8, 97)
    for first in sorted({edge + step for edge in edges for step in steps}):
        for second in (first + 16, 3 * TILE - 1, 3 * TILE, 3 * TILE + 1):
            anchors = sorted({first + n for n in range(16)} | {second + n for n in range(16)})
            if first < 0 or len(anchors) < 32 or anchors[-1] >= 4 * TILE:
                continue
            full, partial, every, some = tiles_of(Packed(lengths, anchors, 32, 4 * TILE, 8))
            assert full.equal(every), (first, second)
            assert (full | partial).equal(some), (first, second)


@st.composite
def tiled_rows(draw: st.DrawFn) -> Packed:
    """Rows of up to four query tiles and five of context, with blocks of every size that divides a tile."""
    block = draw(st.sampled_from([4, 8, 16, 64, TILE]))
    slots = draw(st.integers(1, 4)) * TILE // block
    return draw(packed_rows(draw(st.integers(1, 5)) * TILE, slots, block))


def structure(mask: BlockMask) -> dict[str, Tensor]:
    """Which tiles `mask` lists as partial and as full, by query tile and by key tile, bool each."""
    rows, columns = mask.seq_lengths[0] // TILE, mask.seq_lengths[1] // TILE
    found = {}
    for name, shape in (("kv", (rows, columns)), ("q", (columns, rows))):
        for kind in ("", "full_"):
            count, index = (getattr(mask, f"{kind}{name}_{what}") for what in ("num_blocks", "indices"))
            tiles = torch.zeros(shape, dtype=torch.bool)
            for row in range(shape[0]):
                used = index[0, 0, row, : int(count[0, 0, row])].long()
                assert len(used.unique()) == len(used)
                tiles[row, used] = True
            found[f"{kind}{name}"] = tiles
    return found


def allowed(mask: BlockMask) -> Tensor:
    """The pairs that FlexAttention computes: all of a full tile, what the rule says of a partial one."""
    tiles = structure(mask)
    queries, keys = mask.seq_lengths
    rule = mask.mask_mod(torch.tensor(0), torch.tensor(0), torch.arange(queries)[:, None], torch.arange(keys))
    wide = {name: t.repeat_interleave(TILE, 0).repeat_interleave(TILE, 1) for name, t in tiles.items()}
    return wide["full_kv"] | (wide["kv"] & rule)


@settings(deadline=None, max_examples=50)
@given(tiled_rows())
def test_the_block_mask_is_the_one_that_torch_finds_tile_by_tile_and_pair_by_pair(row: Packed) -> None:
    starts, anchors = row.tensors()
    rule = mask_mod(starts, anchors, row.context, row.block)
    queries = row.slots * row.block
    theirs = create_block_mask(rule, None, None, queries, row.context + queries, device="cpu")
    mine = block_mask(starts, anchors, row.context, row.block, rule)
    mine_tiles, their_tiles = structure(mine), structure(theirs)
    for name, tiles in their_tiles.items():
        assert mine_tiles[name].equal(tiles), name
    assert mine.BLOCK_SIZE == theirs.BLOCK_SIZE
    pairs = allowed(mine)
    assert pairs.equal(allowed(theirs))
    assert pairs.equal(dense_mask(starts, anchors, row.context, row.block))
    for name in ("kv", "full_kv", "q", "full_q"):
        for what in ("num_blocks", "indices"):
            a, b = (getattr(mask, f"{name}_{what}") for mask in (mine, theirs))
            assert (a.dtype, a.shape) == (b.dtype, b.shape), f"{name}_{what}"
            assert a.is_contiguous()


@settings(deadline=None, max_examples=20)
@given(packed_rows(context=4 * TILE, slots=32, block=8))
def test_the_blocks_own_tile_is_the_first_that_is_listed(row: Packed) -> None:
    starts, anchors = row.tensors()
    mask = block_mask(
        starts, anchors, row.context, row.block, mask_mod(starts, anchors, row.context, row.block)
    )
    assert mask.kv_indices[0, 0, :, 0].tolist() == [4, 5]


class Watched(TorchDispatchMode):
    """Notes the largest tensor that is made, and every operation that would wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.waited: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "item", "masked_select", "unique", "_unique2", "equal"):
            self.waited.append(name)
        for made in result if isinstance(result, tuple | list) else [result]:
            if isinstance(made, Tensor):
                self.largest = max(self.largest, made.numel())
        return result


def test_the_block_mask_is_built_without_a_dense_mask_and_without_waiting_for_the_device() -> None:
    context, slots, block = 64 * TILE, 512, 16
    starts = torch.arange(slots) // 8 * 128
    anchors = starts + 17 + torch.arange(slots) % 8
    rule = mask_mod(starts, anchors, context, block)
    with Watched() as watched:
        block_mask(starts, anchors, context, block, rule)
    assert watched.waited == []
    tiles = (context + slots * block) // TILE
    assert 0 < watched.largest <= slots * tiles  # a flag for each block and tile: 1/2048 of the dense mask
    with Watched() as watched:
        dense_mask(starts[:8], anchors[:8], TILE, block)[0, 0].item()
    assert watched.waited and watched.largest >= 8 * block * (TILE + 8 * block)


@settings(deadline=None, max_examples=40)
@given(packed_rows(context=3 * TILE, slots=TILE // 4, block=8))
def test_the_backward_lists_are_the_forward_ones_turned_around_as_torch_turns_them(row: Packed) -> None:
    starts, anchors = row.tensors()
    rule = mask_mod(starts, anchors, row.context, row.block)
    mine = block_mask(starts, anchors, row.context, row.block, rule)
    theirs = BlockMask.from_kv_blocks(
        mine.kv_num_blocks,
        mine.kv_indices,
        mine.full_kv_num_blocks,
        mine.full_kv_indices,
        BLOCK_SIZE=TILE,
        mask_mod=rule,
        seq_lengths=mine.seq_lengths,
    )
    for kind in ("q", "full_q"):
        count, found = getattr(mine, f"{kind}_num_blocks"), getattr(mine, f"{kind}_indices")
        assert count.equal(getattr(theirs, f"{kind}_num_blocks"))
        expected = getattr(theirs, f"{kind}_indices")
        assert found.shape == expected.shape and found.dtype == expected.dtype
        for column, used in enumerate(count.flatten().tolist()):
            assert found[0, 0, column, :used].equal(expected[0, 0, column, :used])


def test_the_blocks_own_tile_comes_first_so_that_no_query_meets_an_empty_tile_first() -> None:
    row = Packed([300, 84], [3 + 10 * n for n in range(32)], 32, 3 * TILE, 8)
    starts, anchors = row.tensors()
    mask = block_mask(starts, anchors, row.context, row.block, mask_mod(starts, anchors, row.context, 8))
    assert mask.kv_indices[0, 0, :, 0].tolist() == [3, 4]


@pytest.mark.parametrize("filled", [0, 1, 3])
def test_empty_slots_see_only_themselves_and_give_no_nan_forward_or_backward(filled: int) -> None:
    row = Packed([9, 7], [3, 9, 12][:filled], 4, 24, 3)
    starts, anchors = row.tensors()
    mask = dense_mask(starts, anchors, row.context, row.block)
    for slot in range(filled, 4):
        for query in range(slot * 3, slot * 3 + 3):
            assert mask[query].nonzero().flatten().tolist() == [24 + slot * 3 + k for k in range(3)]
    queries, keys, values = (torch.randn(n, 2, 8, requires_grad=True) for n in (12, 36, 36))
    out = attend(queries, keys, values, mask)
    out.sum().backward()
    assert out.isfinite().all()
    for tensor in (queries, keys, values):
        assert tensor.grad is not None and tensor.grad.isfinite().all()


def test_an_anchor_that_begins_its_document_sees_no_context() -> None:
    row = Packed([4, 6], [0, 4, 5], 3, 16, 2)
    mask = dense_mask(*row.tensors(), row.context, row.block)[:, :16]
    assert mask.sum(1).tolist() == [0, 0, 0, 0, 1, 1]
    assert mask[4].nonzero().flatten().tolist() == [4]


@pytest.mark.parametrize(
    ("context", "slots", "block", "fits"),
    [(8192, 256, 16, True), (8192, 512, 10, False), (8200, 256, 16, False), (8192, 4, 16, False)],
)
def test_tiles_fit_only_shapes_that_cut_evenly(context: int, slots: int, block: int, fits: bool) -> None:
    assert tiles_fit(context, slots, block) is fits


def test_refilling_the_buffers_changes_the_rule_without_a_new_function() -> None:
    first, second = Packed([24], [5, 9], 5, 24, 3), Packed([8, 16], [3, 20], 5, 24, 3)
    starts, anchors = first.tensors()
    sees = mask_mod(starts, anchors, 24, 3)
    q, k = torch.arange(15)[:, None], torch.arange(39)[None]
    nothing = torch.tensor(0)
    assert sees(nothing, nothing, q, k).equal(first.oracle())
    for buffer, value in zip((starts, anchors), second.tensors(), strict=True):
        buffer.copy_(value)
    assert sees(nothing, nothing, q, k).equal(second.oracle())
