"""Length buckets and the order of an epoch's batches."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from remote_payload.train.buckets import EpochPlan, bucket_of, plan_epoch, widest_batches

EDGES = [0, 770, 1216, 1728, 2432, 3296, 8193]


def plan_of(
    lengths: list[int], edges: list[int], *, budget: int = 8192, most: int = 64, seed: int = 0, epoch: int = 0
) -> EpochPlan:
    array = np.asarray(lengths, np.int64)
    return plan_epoch(
        array, bucket_of(array, edges), token_budget=budget, max_batch=most, seed=seed, epoch=epoch
    )


def batches_of(plan: EpochPlan) -> list[list[int]]:
    return [batch.tolist() for batch in plan.batches]


def test_a_bucket_begins_at_its_edge_and_ends_before_the_next() -> None:
    lengths = [0, 769, 770, 1215, 1216, 8192, 8193, 10**6]
    assert bucket_of(np.asarray(lengths), EDGES).tolist() == [0, 0, 1, 1, 2, 5, -1, -1]
    assert bucket_of(np.asarray([9, 10]), [10, 20]).tolist() == [-1, 0]


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=60),
    most=st.integers(1, 9),
    budget=st.integers(64, 300),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_sample_of_a_bucket_comes_once_and_no_batch_exceeds_rows_budget_or_bucket(
    lengths: list[int], most: int, budget: int, seed: int
) -> None:
    edges = [1, 20, 40, 65]
    plan = plan_of(lengths, edges, budget=budget, most=most, seed=seed)
    wanted = [number for number, length in enumerate(lengths) if length < 65]
    assert sorted(itertools.chain(*batches_of(plan))) == wanted
    for batch, bucket in zip(batches_of(plan), plan.buckets.tolist(), strict=True):
        inside = [lengths[sample] for sample in batch]
        assert 1 <= len(batch) <= most
        assert len(batch) * max(inside) <= budget
        assert all(edges[bucket] <= length < edges[bucket + 1] for length in inside)
    assert plan.counts(3) == [plan.buckets.tolist().count(bucket) for bucket in range(3)]


def test_an_epoch_is_a_function_of_seed_and_epoch_alone() -> None:
    lengths = np.random.default_rng(5).integers(1, 2000, 300).tolist()
    first = batches_of(plan_of(lengths, EDGES, seed=3, epoch=1))
    batches_of(plan_of(lengths, EDGES, seed=9, epoch=4))
    assert batches_of(plan_of(lengths, EDGES, seed=3, epoch=1)) == first
    assert batches_of(plan_of(lengths, EDGES, seed=3, epoch=2)) != first
    assert batches_of(plan_of(lengths, EDGES, seed=4, epoch=1)) != first


def test_batches_are_filled_as_long_as_one_more_sample_fits() -> None:
    plan = plan_of([100] * 50, [0, 101], budget=1000, most=64)
    assert [len(batch) for batch in plan.batches] == [10] * 5
    plan = plan_of([100] * 50, [0, 101], budget=10**6, most=7)
    assert sorted(len(batch) for batch in plan.batches) == [1] + [7] * 7


def test_batches_of_all_buckets_are_mixed() -> None:
    plan = plan_of([10] * 100 + [1000] * 100, EDGES, most=2)
    changes = np.count_nonzero(np.diff(plan.buckets))
    assert plan.counts(6)[:2] == [50, 50]
    assert changes > 25  # sorted by bucket it would be one


def test_a_dataset_without_a_sample_in_any_bucket_has_no_batches() -> None:
    plan = plan_of([9000, 9001], EDGES)
    assert plan.batches == [] and plan.counts(6) == [0] * 6


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 80), min_size=1, max_size=60),
    most=st.integers(1, 9),
    budget=st.integers(64, 300),
    seed=st.integers(0, 1000),
)
def test_no_batch_of_any_epoch_asks_more_of_a_target_than_the_widest(
    lengths: list[int], most: int, budget: int, seed: int
) -> None:
    edges = [1, 20, 40, 65]
    assume(min(lengths) < 65)
    plans = [plan_of(lengths, edges, budget=budget, most=most, seed=seed, epoch=epoch) for epoch in range(4)]
    widest = widest_batches(plans[0], np.asarray(lengths), token_budget=budget, max_batch=most)
    assert 1 <= len(widest) <= 2
    assert all(rows <= most and rows * tokens <= budget for rows, tokens in widest)
    usable = [length for length in lengths if length < 65]
    assert max(tokens for _, tokens in widest) == max(usable)
    for batch in itertools.chain(*map(batches_of, plans)):
        longest = max(lengths[sample] for sample in batch)
        assert longest <= max(tokens for _, tokens in widest)
        assert len(batch) * longest <= max(rows * tokens for rows, tokens in widest)
