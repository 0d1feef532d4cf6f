"""What a block may know: nothing at or after its anchor, of other documents or blocks (SpecForge #455)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from remote_payload.train.batch import Batch, BatchMaker, RowShape
from remote_payload.train.dataset import Dataset
from remote_payload.train.drafter import Drafter
from remote_payload.train.features import pack
from remote_payload.train.mask import dense_mask
from remote_payload.train.target import Target
from tests.payload.test_drafter import CONFIG, random_drafter
from tests.payload.test_target import write_target
from tests.payload.tiny import write_arrow

SHAPE = RowShape(token_budget=48, anchors=8, block_size=4, mask_token_id=49, gamma=4.0)


@dataclasses.dataclass
class Packed:
    """A packed row of two documents with random features, and the drafter over it."""

    batch: Batch
    features: Tensor
    embedding: Tensor
    drafter: Drafter

    def run(self, features: Tensor | None = None, x: Tensor | None = None) -> Tensor:
        row = self.batch.row
        mask = dense_mask(row.starts, row.anchors, SHAPE.token_budget, SHAPE.block_size)
        x = self.x if x is None else x
        with torch.no_grad():
            hidden: Tensor = self.drafter(
                self.features if features is None else features,
                row.positions,
                x,
                row.block_positions.flatten(),
                mask,
            )
        return hidden.view(SHAPE.anchors, SHAPE.block_size, -1)

    @property
    def x(self) -> Tensor:
        return self.embedding[self.batch.row.block_tokens.flatten()]


@pytest.fixture
def packed(tmp_path: Path) -> Packed:
    dice = np.random.default_rng(3)
    samples = [dice.integers(2, 49, n).tolist() for n in (17, 23)]
    dataset = Dataset.open(write_arrow(tmp_path / "a.arrow", samples, [2, 3]))
    maker = BatchMaker(dataset, SHAPE, seed=0, vocabulary=50, pad_id=0)
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(SHAPE.token_budget, 72, generator=generator, dtype=torch.float64)
    embedding = torch.randn(50, CONFIG.width, generator=generator, dtype=torch.float64)
    return Packed(maker.make(np.asarray([0, 1]), 0, 0, 0), features, embedding, random_drafter())


def changed_slots(before: Tensor, after: Tensor) -> list[int]:
    return [slot for slot in range(len(before)) if not before[slot].equal(after[slot])]


def test_a_blocks_output_depends_on_exactly_the_features_of_its_document_before_its_anchor(
    packed: Packed,
) -> None:
    before = packed.run()
    row, ends = packed.batch.row, np.cumsum([0, *packed.batch.lengths])
    assert packed.batch.drawn == SHAPE.anchors
    for index in range(SHAPE.token_budget):
        features = packed.features.clone()
        features[index] += 1.0
        document = int(np.searchsorted(ends, index, side="right"))
        expected = [
            slot
            for slot, anchor in enumerate(row.anchors.tolist())
            if index < anchor and int(np.searchsorted(ends, anchor, side="right")) == document
        ]
        assert changed_slots(before, packed.run(features)) == expected, index
    assert int(row.anchors[0]) > 0  # so that the loop above saw a change do something


def test_a_blocks_output_depends_on_all_of_its_own_tokens_and_on_no_other_blocks(packed: Packed) -> None:
    before = packed.run()
    for slot in range(SHAPE.anchors):
        for place in range(SHAPE.block_size):
            x = packed.x.clone()
            x[slot * SHAPE.block_size + place] += 1.0
            after = packed.run(x=x)
            assert changed_slots(before, after) == [slot]
            assert all(not before[slot, k].equal(after[slot, k]) for k in range(SHAPE.block_size))


def test_a_packed_row_says_of_each_document_what_that_document_says_alone(packed: Packed) -> None:
    together, row = packed.run(), packed.batch.row
    for slot, (start, anchor) in enumerate(zip(row.starts.tolist(), row.anchors.tolist(), strict=True)):
        length = anchor - start
        context = packed.drafter.context(packed.features[start:anchor], torch.arange(length))
        x = packed.embedding[row.block_tokens[slot]]
        with torch.no_grad():
            alone = packed.drafter.blocks(x, torch.arange(length, length + SHAPE.block_size), context, None)
        torch.testing.assert_close(together[slot], alone, atol=1e-10, rtol=1e-10)


def test_the_feature_below_an_anchor_is_that_of_the_token_below_it_in_a_padded_batch_of_two(
    tmp_path: Path,
) -> None:
    """From tokens to the row: hidden[t] belongs to token[t], whatever the padding (SpecForge #471, #473)."""
    torch.manual_seed(0)
    target = Target.load(
        write_target(tmp_path / "model"), (1, 3), device=torch.device("cpu"), dtype=torch.float32
    )
    dice = np.random.default_rng(8)
    samples = [dice.integers(3, 66, n).tolist() for n in (9, 21)]
    dataset = Dataset.open(write_arrow(tmp_path / "a.arrow", samples, [2, 2]))
    batch = BatchMaker(dataset, SHAPE, seed=0, vocabulary=67, pad_id=0).make(np.asarray([0, 1]), 0, 0, 0)
    packed = pack(target.features(batch.ids), batch.lengths)
    for slot in range(batch.drawn):
        start, anchor = int(batch.row.starts[slot]), int(batch.row.anchors[slot])
        ids = samples[0] if start == 0 else samples[1]
        place = anchor - start
        assert int(batch.row.block_tokens[slot, 0]) == ids[place]
        assert batch.row.labels[slot, 0] == ids[place + 1]
        alone = target.features(torch.tensor([ids[:place]]))[0]
        torch.testing.assert_close(packed[start:anchor], alone, atol=1e-5, rtol=1e-5)
