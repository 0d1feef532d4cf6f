"""The order of a run's batches: starting anywhere continues with the very next one, and reads none before."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remote_payload.train.batch import Batch, BatchMaker, RowShape
from remote_payload.train.buckets import EpochPlan, bucket_of, epochs_from, plan_epoch
from remote_payload.train.dataset import Dataset
from remote_payload.train.unusable import DataError, Findings, Skipped
from tests.payload.tiny import MASK, VOCABULARY, random_samples, write_arrow

SHAPE = RowShape(token_budget=128, anchors=16, block_size=4, mask_token_id=MASK, gamma=4.0)
EDGES = [0, 24, 40, 64]


def plans_of(lengths: np.ndarray, seed: int, most: int = 3) -> Callable[[int], EpochPlan]:
    buckets = bucket_of(lengths, EDGES)
    return lambda epoch: plan_epoch(
        lengths, buckets, token_budget=128, max_batch=most, seed=seed, epoch=epoch
    )


def positions(plan: Callable[[int], EpochPlan], first: int) -> Iterator[tuple[int, int, list[int]]]:
    """(sequence, epoch, samples) of every batch from number `first` on."""
    for epoch, this, at in epochs_from(plan, first):
        for number in range(max(0, first - at), len(this.batches)):
            yield at + number, epoch, this.batches[number].tolist()


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 63), min_size=1, max_size=40).map(np.asarray),
    seed=st.integers(0, 2**32 - 1),
    first=st.integers(0, 120),
    most=st.integers(1, 5),
)
def test_from_any_position_the_order_is_the_tail_of_the_uninterrupted_one(
    lengths: np.ndarray, seed: int, first: int, most: int
) -> None:
    plan = plans_of(lengths, seed, most)
    whole = list(itertools.islice(positions(plan, 0), first + 50))
    assert [sequence for sequence, _, _ in whole] == list(range(first + 50))
    assert list(itertools.islice(positions(plan, first), 50)) == whole[first:]


def same(a: Batch, b: Batch) -> bool:
    """Whether two batches are equal in everything, tensors included."""
    plain = [
        {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch) if f.name not in ("ids", "row")}
        for batch in (a, b)
    ]
    rows = zip(a.row.tensors().values(), b.row.tensors().values(), strict=True)
    return plain[0] == plain[1] and a.ids.equal(b.ids) and all(x.equal(y) for x, y in rows)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Forty samples, every fifth of them with an id outside the vocabulary."""
    samples, prompts = random_samples(40, high=60)
    for number in range(0, 40, 5):
        samples[number][-1] = VOCABULARY
    return Dataset.open(write_arrow(tmp_path_factory.mktemp("order") / "a.arrow", samples, prompts))


def maker_of(dataset: Dataset, seed: int, findings: Findings | None = None) -> BatchMaker:
    return BatchMaker(dataset, SHAPE, seed=seed, vocabulary=VOCABULARY, pad_id=0, findings=findings)


@settings(deadline=None, max_examples=12)
@given(seed=st.integers(0, 2**32 - 1), first=st.integers(0, 70))
def test_a_resumed_reader_makes_the_batches_of_the_uninterrupted_one_to_the_last_anchor(
    dataset: Dataset, seed: int, first: int
) -> None:
    plan = functools.cache(plans_of(dataset.lengths, seed))
    whole = itertools.islice(maker_of(dataset, seed).batches_from(plan, 0), first, first + 30)
    resumed = itertools.islice(maker_of(dataset, seed).batches_from(plan, first), 30)
    assert all(same(a, b) for a, b in zip(whole, resumed, strict=True))


@settings(deadline=None, max_examples=12)
@given(seed=st.integers(0, 1000), stop=st.integers(1, 60), ahead=st.integers(0, 20))
def test_counts_of_unusable_samples_after_a_resume_are_those_of_the_uninterrupted_run(
    dataset: Dataset, tmp_path_factory: pytest.TempPathFactory, seed: int, stop: int, ahead: int
) -> None:
    """The reader was `ahead` of the checkpoint when the run was killed: those batches are read again."""
    plan = functools.cache(plans_of(dataset.lengths, seed))
    file = tmp_path_factory.mktemp("seen") / "samples.seen"
    whole = maker_of(dataset, seed)
    list(itertools.islice(whole.batches_from(plan, 0), stop + 25))
    killed = maker_of(dataset, seed, Findings(len(dataset), file))
    list(itertools.islice(killed.batches_from(plan, 0), stop + ahead))
    resumed = maker_of(dataset, seed, Findings(len(dataset), file))
    list(itertools.islice(resumed.batches_from(plan, stop), 25))
    assert (resumed.skipped.count, resumed.skipped.first) == (whole.skipped.count, whole.skipped.first)


def test_unusable_samples_are_found_again_where_the_file_of_findings_was_lost(dataset: Dataset) -> None:
    plan = functools.cache(plans_of(dataset.lengths, 3))
    maker = maker_of(dataset, 3)
    list(itertools.islice(maker.batches_from(plan, 5), 2 * len(plan(0).batches)))
    assert list(maker.skipped.count.values()) == [8]


def test_findings_of_another_dataset_size_are_not_used(tmp_path: Path) -> None:
    file = tmp_path / "samples.seen"
    Findings(3, file).set(1, None)
    assert Findings(3, file).known(1)
    assert not any(Findings(4, file).known(sample) for sample in range(4))


def test_a_full_disk_refuses_the_file_of_findings_before_anything_is_written_through_a_map(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: int) -> None:
        raise OSError(28, "No space left on device")

    Findings(9, tmp_path / "good.seen")
    assert (tmp_path / "good.seen").stat().st_blocks > 0  # no hole, whose first write could fail
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DataError, match=r"samples\.seen: cannot be written \(No space left on device\)"):
        Findings(9, tmp_path / "samples.seen")


def test_starting_late_touches_no_sample_of_the_batches_before(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched: list[int] = []
    plan = functools.cache(plans_of(dataset.lengths, 1))
    first = len(plan(0).batches) + 2
    read = Dataset.ids
    monkeypatch.setattr(Dataset, "ids", lambda self, sample: touched.append(sample) or read(self, sample))
    batch = next(maker_of(dataset, 1).batches_from(plan, first))
    assert batch.sequence == first and set(touched) <= set(batch.samples)


def test_each_epoch_is_announced_once_with_its_plan_before_its_first_batch(dataset: Dataset) -> None:
    plan = functools.cache(plans_of(dataset.lengths, 1))
    told: list[EpochPlan] = []
    first = len(plan(0).batches) - 1
    batches = maker_of(dataset, 1).batches_from(plan, first, told.append)
    assert next(batches).epoch == 0 and told == [plan(0)]
    assert next(batches).epoch == 1 and told == [plan(0), plan(1)]


def test_skipped_names_the_first_ten_of_a_reason_and_counts_them_all() -> None:
    skipped = Skipped()
    assert skipped.add("x", list(range(7))) == list(range(7))
    assert skipped.add("x", list(range(7, 30))) == [7, 8, 9]
    assert skipped.add("x", [99]) == [] and skipped.add("y", []) == []
    assert str(skipped) == "31 x" and skipped.first == {"x": list(range(10))}
