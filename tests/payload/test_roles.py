"""The split of N GPUs into targets and drafters, from measured times."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote_payload.job import JobError
from remote_payload.train.roles import TIE, RoleTimes, Split, splits

GPUS = [1, 2, 3, 4, 8]


def times(target: float, row: float, step: float = 0.0, **memory: float) -> RoleTimes:
    return RoleTimes(target_s=target, tokens=8192, row_s=row, step_s=step, **memory)


def shape(split: Split) -> tuple[int, int, int]:
    return split.targets, split.drafters, split.shared


def best(gpus: int, measured: RoleTimes, rows: int = 840) -> tuple[int, int, int]:
    return shape(splits(gpus, measured, rows)[0])


@pytest.mark.parametrize(
    ("gpus", "target", "drafter", "expected"),
    [
        (1, 0.16, 0.10, (1, 1, 1)),  # one GPU is shared, whatever the times
        (2, 0.10, 0.10, (1, 1, 0)),
        (2, 0.164, 0.104, (2, 1, 1)),  # 2 / 0.268 by one drafter beside a target: the bound
        (2, 0.08, 0.16, (2, 2, 2)),  # and by two where a drafter is the longer half
        (3, 0.10, 0.10, (3, 2, 2)),
        (3, 0.20, 0.10, (2, 1, 0)),
        (3, 0.10, 0.20, (1, 2, 0)),
        (4, 0.10, 0.10, (2, 2, 0)),
        (4, 0.30, 0.10, (3, 1, 0)),
        (8, 0.10, 0.30, (2, 6, 0)),
        (8, 0.35, 0.05, (7, 1, 0)),
        (8, 10.0, 0.001, (8, 1, 1)),  # a drafter that takes nothing leaves its GPU to a target
    ],
)
def test_the_best_split_of_known_times(
    gpus: int, target: float, drafter: float, expected: tuple[int, int, int]
) -> None:
    assert best(gpus, times(target, drafter)) == expected


@pytest.mark.parametrize("gpus", GPUS)
def test_all_splits_use_every_gpu_have_both_sides_and_are_no_faster_than_gpu_time_allows(gpus: int) -> None:
    measured = times(0.13, 0.1)
    for split in splits(gpus, measured, 840):
        assert split.targets + split.drafters - split.shared == gpus
        assert 1 <= split.targets <= gpus and 1 <= split.drafters <= gpus and split.shared >= 0
        assert split.batches_per_s <= gpus / 0.23 + 1e-9
        targets, drafters = split.devices([f"cuda:{n}" for n in range(gpus)])
        assert len(targets) == split.targets and len(drafters) == split.drafters
        assert len({*targets, *drafters}) == gpus and len({*targets} & {*drafters}) == split.shared


@given(st.integers(1, 8), st.floats(0.01, 1), st.floats(0.01, 1), st.integers(0, 99))
def test_the_formula_is_the_rate_of_the_pipeline_played_through(
    gpus: int, target: float, drafter: float, seed: int
) -> None:
    """An independent count, slice by slice of time: drafters first, and the rest of a GPU for targets."""
    every = splits(gpus, times(target, drafter), 840)
    split = random.Random(seed).choice(every)
    slices, dt = 4000, min(target, drafter) / 7
    features = rows = 0.0
    for _ in range(slices):
        wish = min(split.drafters * dt / drafter, features)  # rows that all replicas could make now
        busy = wish * drafter / split.drafters  # of each replica's GPU, in seconds
        features += (split.targets * dt - split.shared * busy) / target - wish
        rows += wish
    assert rows / (slices * dt) == pytest.approx(split.batches_per_s, rel=0.05)


def test_the_steps_own_time_is_shared_by_the_rows_that_a_replica_brings() -> None:
    measured = times(0.1, 0.08, step=0.04)
    (alone,) = [s for s in splits(2, measured, 4) if shape(s) == (1, 1, 0)]
    assert alone.batches_per_s == pytest.approx(min(1 / (0.08 + 0.04 / 4), 1 / 0.1))
    (both,) = [s for s in splits(2, measured, 4) if shape(s) == (2, 2, 2)]
    assert both.batches_per_s == pytest.approx(2 / (0.1 + 0.08 + 0.04 * 2 / 4))


def test_replicas_divide_the_rows_of_a_step() -> None:
    assert {s.drafters for s in splits(8, times(0.1, 0.3), 4)} == {1, 2, 4}
    assert {s.drafters for s in splits(3, times(0.1, 0.3), 1)} == {1}
    assert best(4, times(0.01, 1.0), rows=1) == (3, 1, 0)


def test_splits_that_are_about_as_fast_are_taken_by_fewest_shared_gpus_then_fewest_replicas() -> None:
    found = splits(2, times(0.1, 0.1 * (1 + TIE / 2)), 840)
    assert shape(found[0]) == (1, 1, 0)
    assert found[0].batches_per_s < max(split.batches_per_s for split in found)
    assert best(2, times(0.1, 0.1 * (1 + 3 * TIE))) != (1, 1, 0)
    assert best(4, times(0.3, 0.1 * (1 + TIE / 2))) == (3, 1, 0)


@pytest.mark.parametrize("gpus", GPUS)
def test_the_order_is_by_rate_but_for_ties_and_always_the_same(gpus: int) -> None:
    found = splits(gpus, times(0.17, 0.11), 840)
    rates = [split.batches_per_s for split in found]
    rest = [rate for rate in rates if rate < (1 - TIE) * max(rates)]
    assert rest == sorted(rest, reverse=True) and rates[-len(rest) or len(rates) :] == rest
    assert found == splits(gpus, times(0.17, 0.11), 840)


def test_a_target_and_a_drafter_that_do_not_fit_together_share_no_gpu() -> None:
    big = {"target_gib": 60.0, "drafter_gib": 50.0, "free_gib": 100.0}
    found = splits(4, times(0.17, 0.11, **big), 840)
    assert found and all(split.shared == 0 for split in found)
    assert best(4, times(0.17, 0.11, **big | {"free_gib": 120.0})) != shape(found[0])
    with pytest.raises(JobError, match=r"do not fit on the one GPU: a target needs 60.0 GiB .* 100.0 free"):
        splits(1, times(0.17, 0.11, **big), 840)


def test_features_that_wait_for_many_drafters_count_as_memory_of_few_targets() -> None:
    memory = {"target_gib": 40.0, "drafter_gib": 10.0, "free_gib": 80.0, "features_gib": 12.0}
    found = splits(8, times(0.01, 0.5, **memory), 840)
    assert min(split.targets for split in found) > 1
    with pytest.raises(
        JobError, match="no split of 2 GPUs fits, with replicas that divide rows_per_step = 1"
    ):
        splits(2, times(0.1, 0.1, **memory | {"drafter_gib": 79.0}), 1)


def test_the_arithmetic_is_said_with_its_numbers() -> None:
    said = {shape(s): s.arithmetic for s in splits(2, times(0.164, 0.104), 2)}
    assert said[1, 1, 0] == "1 target + 1 drafter: min(1 / 0.1040, 1 / 0.1640) = 6.10 batches/s"
    assert said[2, 1, 1] == (
        "2 targets + 1 drafter, 1 GPU shared: min(1 / 0.1040, 2 / (0.1640 + 0.1040 x 1/1)) = 7.46 batches/s"
    )
