"""Packing, anchors and labels: what a row says against the documents it was made of."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remote_payload.train.batch import Batch, BatchMaker, RowShape, empty_row
from remote_payload.train.buckets import EpochPlan
from remote_payload.train.dataset import Dataset
from remote_payload.train.unusable import MASK_TOKEN, NO_ANSWER, OUTSIDE_VOCABULARY
from tests.payload.tiny import MASK, VOCABULARY, random_samples, write_arrow

SHAPE = RowShape(token_budget=128, anchors=16, block_size=4, mask_token_id=MASK, gamma=4.0)


def maker_of(
    folder: Path, samples: list[list[int]], prompts: list[int], shape: RowShape = SHAPE, seed: int = 0
) -> BatchMaker:
    dataset = Dataset.open(write_arrow(folder / "a.arrow", samples, prompts))
    return BatchMaker(dataset, shape, seed=seed, vocabulary=VOCABULARY, pad_id=0)


def masked_maker(folder: Path, samples: list[list[int]], masks: list[list[int]]) -> BatchMaker:
    table = pa.table({"input_ids": pa.array(samples), "loss_mask": pa.array(masks)})
    path = folder / "masked.arrow"
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return BatchMaker(Dataset.open(path), SHAPE, seed=0, vocabulary=VOCABULARY, pad_id=0)


def make(maker: BatchMaker, *samples: int, epoch: int = 0) -> Batch:
    return maker.make(np.asarray(samples), 0, epoch, 0)


def anchors_of(batch: Batch) -> list[tuple[int, int]]:
    """(sample, place in the document) of each drawn anchor, found from where documents lie in the row."""
    starts = np.cumsum([0, *batch.lengths])
    found = []
    for slot in range(batch.drawn):
        anchor = int(batch.row.anchors[slot])
        document = int(np.searchsorted(starts, anchor, side="right")) - 1
        assert int(batch.row.starts[slot]) == starts[document]
        found.append((batch.samples[document], anchor - int(starts[document])))
    return found


def test_the_targets_rows_are_the_samples_padded_on_the_right(tmp_path: Path) -> None:
    samples, prompts = random_samples(3, high=40)
    batch = make(maker_of(tmp_path, samples, prompts), 2, 0, 1)
    assert batch.samples == [2, 0, 1] and batch.lengths == [len(samples[s]) for s in (2, 0, 1)]
    assert batch.ids.shape == (3, max(map(len, samples)))
    for row, sample in zip(batch.ids.tolist(), (2, 0, 1), strict=True):
        assert row == samples[sample] + [0] * (len(row) - len(samples[sample]))
    assert batch.tokens == sum(map(len, samples))
    assert batch.padding_share == pytest.approx(1 - batch.tokens / batch.ids.numel())


def test_a_row_has_every_document_once_and_positions_that_begin_again_in_each(tmp_path: Path) -> None:
    samples, prompts = random_samples(3, high=40)
    batch = make(maker_of(tmp_path, samples, prompts), 0, 1, 2)
    positions = [place for sample in samples for place in range(len(sample))]
    assert batch.row.positions.tolist() == positions + [0] * (128 - len(positions))


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10_000), block=st.integers(2, 9), slots=st.integers(1, 40))
def test_every_block_holds_its_anchor_and_masks_and_is_labelled_with_the_tokens_that_follow(
    tmp_path_factory: pytest.TempPathFactory, seed: int, block: int, slots: int
) -> None:
    samples, prompts = random_samples(2, seed)
    shape = RowShape(token_budget=128, anchors=slots, block_size=block, mask_token_id=MASK, gamma=3.0)
    batch = make(maker_of(tmp_path_factory.mktemp("row"), samples, prompts, shape, seed), 0, 1)
    row = batch.row
    for slot, (sample, place) in enumerate(anchors_of(batch)):
        ids, prompt = samples[sample], prompts[sample]
        assert prompt <= place < len(ids) - 1
        assert row.block_tokens[slot].tolist() == [ids[place]] + [MASK] * (block - 1)
        assert row.block_positions[slot].tolist() == list(range(place, place + block))
        for k in range(1, block):
            weight = math.exp(-(k - 1) / 3.0) if place + k < len(ids) else 0.0
            assert float(row.weights[slot, k - 1]) == pytest.approx(weight, rel=1e-6)
            assert int(row.labels[slot, k - 1]) == (ids[place + k] if weight else 0)
    empty = empty_row(shape)
    for name, tensor in row.tensors().items():
        if name != "positions":
            assert tensor[batch.drawn :].equal(empty.tensors()[name][batch.drawn :]), name
    assert row.anchors[: batch.drawn].tolist() == sorted(set(row.anchors[: batch.drawn].tolist()))
    assert batch.weight == pytest.approx(float(row.weights.double().sum()))


def test_a_label_behind_a_gap_in_the_supervision_carries_no_loss(tmp_path: Path) -> None:
    ids = [7, 8, 9, 10, 11, 12, 13]
    maker = masked_maker(tmp_path, [ids], [[0, 1, 1, 0, 1, 1, 1]])
    batch = make(maker, 0)
    assert sorted(place for _, place in anchors_of(batch)) == [1, 4, 5]
    found = {place: slot for slot, (_, place) in enumerate(anchors_of(batch))}
    assert [bool(w) for w in batch.row.weights[found[1]]] == [True, False, False]
    assert batch.row.labels[found[4]].tolist() == [12, 13, 0]


def test_a_document_draws_the_same_anchors_in_any_company_and_more_slots_only_add_to_them(
    tmp_path: Path,
) -> None:
    samples, prompts = random_samples(12, low=30)
    maker = maker_of(tmp_path, samples, prompts)
    alone = [place for _, place in anchors_of(make(maker, 5))]
    for company in ((5, 1), (0, 5), (2, 5, 3)):
        shared = [place for sample, place in anchors_of(make(maker, *company)) if sample == 5]
        assert 0 < len(shared) <= len(alone) and set(shared) <= set(alone)
        again = [place for sample, place in anchors_of(make(maker, *reversed(company))) if sample == 5]
        assert again == shared


def test_anchors_are_drawn_again_in_every_epoch_and_with_another_seed(tmp_path: Path) -> None:
    samples, _ = random_samples(1, low=59, high=60)
    maker, other = maker_of(tmp_path, samples, [2]), maker_of(tmp_path, samples, [2], seed=1)
    drawn = [anchors_of(make(maker, 0, epoch=epoch)) for epoch in range(3)]
    assert drawn[0] != drawn[1] != drawn[2] != drawn[0]
    assert anchors_of(make(other, 0)) != drawn[0]
    assert anchors_of(make(maker, 0)) == drawn[0]


def test_over_many_epochs_every_candidate_is_drawn_about_equally_often(tmp_path: Path) -> None:
    samples, _ = random_samples(1, low=34, high=35)
    maker = maker_of(tmp_path, samples, [2])
    count = np.zeros(34)
    for epoch in range(400):
        for _, place in anchors_of(make(maker, 0, epoch=epoch)):
            count[place] += 1
    assert count[:2].sum() == 0 and count[33] == 0
    expected = 400 * 16 / 31
    assert np.all(np.abs(count[2:33] - expected) < 6 * math.sqrt(expected))


def test_slots_are_shared_per_document_and_coverage_is_counted(tmp_path: Path) -> None:
    samples = [[5] * 60, [6] * 8, [7] * 50]
    batch = make(maker_of(tmp_path, samples, [2, 2, 2]), 0, 1, 2)
    by_sample = [sum(sample == wanted for sample, _ in anchors_of(batch)) for wanted in range(3)]
    assert by_sample == [6, 5, 5]  # the short document has only five candidates
    assert (batch.supervised, batch.drawn) == (57 + 5 + 47, 16)


def test_ids_outside_the_vocabulary_are_counted_once_never_reach_the_target_and_draw_nothing(
    tmp_path: Path,
) -> None:
    samples = [[5] * 20, [5] * 19 + [VOCABULARY], [-1] + [5] * 19]
    maker = maker_of(tmp_path, samples, [2, 2, 2])
    for epoch in range(2):
        batch = make(maker, 0, 1, 2, epoch=epoch)
        assert {sample for sample, _ in anchors_of(batch)} == {0}
        assert int(batch.ids.min()) >= 0 and int(batch.ids.max()) < VOCABULARY
    assert maker.skipped.count == {OUTSIDE_VOCABULARY: 2}
    assert maker.skipped.first == {OUTSIDE_VOCABULARY: [1, 2]}


def test_an_answer_that_holds_the_mask_token_is_counted_and_draws_nothing(tmp_path: Path) -> None:
    maker = maker_of(tmp_path, [[5] * 20, [5] * 10 + [MASK] + [5] * 9, [MASK] + [5] * 19], [2, 2, 2])
    batch = make(maker, 0, 1, 2)
    assert {sample for sample, _ in anchors_of(batch)} == {0, 2}
    assert MASK not in batch.row.labels and maker.skipped.first == {MASK_TOKEN: [1]}


def test_a_sample_without_two_supervised_tokens_in_a_row_is_counted_and_draws_nothing(tmp_path: Path) -> None:
    maker = masked_maker(tmp_path, [[5] * 6, [6] * 6], [[0, 1, 0, 1, 0, 1], [0, 0, 1, 1, 1, 1]])
    batch = make(maker, 0, 1)
    assert {sample for sample, _ in anchors_of(batch)} == {1}
    assert maker.skipped.count == {NO_ANSWER: 1} and maker.skipped.first == {NO_ANSWER: [0]}


def test_an_epoch_numbers_its_batches_on_from_the_first(tmp_path: Path) -> None:
    samples, prompts = random_samples(4)
    maker = maker_of(tmp_path, samples, prompts)
    plan = EpochPlan([np.asarray([1]), np.asarray([0, 3]), np.asarray([2])], np.asarray([2, 0, 1]))
    batches = list(maker.epoch(plan, 7, 10))
    assert [(b.sequence, b.epoch, b.bucket, b.samples) for b in batches] == [
        (10, 7, 2, [1]),
        (11, 7, 0, [0, 3]),
        (12, 7, 1, [2]),
    ]


@settings(deadline=None, max_examples=30)
@given(chosen=st.sets(st.integers(0, 19), min_size=1, max_size=2), epoch=st.integers(0, 3))
def test_every_row_has_the_one_shape_and_holds_nothing_of_its_batch_but_numbers(
    tmp_path_factory: pytest.TempPathFactory, chosen: set[int], epoch: int
) -> None:
    """SpecForge's "late OOM", recompiles, captured graphs: the drafter never sees another shape."""
    samples, prompts = random_samples(20)
    maker = maker_of(tmp_path_factory.mktemp("shape"), samples, prompts)
    batch = make(maker, *sorted(chosen), epoch=epoch)
    for (name, tensor), empty in zip(
        batch.row.tensors().items(), empty_row(SHAPE).tensors().values(), strict=True
    ):
        assert (tensor.shape, tensor.dtype) == (empty.shape, empty.dtype), name
        assert tensor.is_contiguous(), name
    assert batch.tokens <= SHAPE.token_budget and batch.documents == batch.covered == len(chosen)
