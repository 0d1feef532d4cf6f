"""The learning rate by step, worked out by hand, and what holds for any job."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from remote_payload.job import Job, JobError
from remote_payload.train.schedule import learning_rate


def job_of(**changes: Any) -> Job:
    values = {"target": "t", "dataset": "d", "mask_token_id": 1, "learning_rate": 2.0, **changes}
    return Job.from_mapping(values, "test")


def rates(steps: int, **changes: Any) -> list[float]:
    job = job_of(**changes)
    return [learning_rate(step, steps, job) for step in range(steps)]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_the_rate_rises_to_its_peak_over_the_warm_up(schedule: str) -> None:
    assert rates(100, schedule=schedule, warmup=0.1)[:10] == pytest.approx([0.2 * (t + 1) for t in range(10)])


def test_cosine_falls_along_half_a_wave() -> None:
    found = rates(100, warmup=0.1)
    assert found[10] == 2.0 and found[55] == pytest.approx(1.0)
    assert found[40] == pytest.approx(1.5)  # a third of the way: (1 + cos 60 degrees) / 2 of 2
    assert found[99] == pytest.approx(1 + math.cos(math.pi * 89 / 90))


def test_linear_falls_by_the_same_amount_every_step() -> None:
    found = rates(12, schedule="linear", warmup=2 / 12)
    assert found == pytest.approx([1.0, 2.0, *(2.0 - 0.2 * t for t in range(10))])


def test_wsd_stays_and_falls_by_the_square_root() -> None:
    found = rates(20, schedule="wsd", warmup=0.1, decay=0.2)
    assert found == pytest.approx([1.0, 2.0, *[2.0] * 15, 1.0, 2 - math.sqrt(2), 2 - math.sqrt(3)])


def test_wsd_without_a_decay_stays_to_the_end() -> None:
    assert rates(10, schedule="wsd", warmup=0.0, decay=0.0) == [2.0] * 10


def test_rise_and_fall_longer_than_the_run_are_refused() -> None:
    with pytest.raises(JobError, match=r"warmup = 0.7 and decay = 0.5: expected no more than 1 together"):
        job_of(schedule="wsd", warmup=0.7, decay=0.5)


def test_a_decay_without_wsd_is_refused_since_nothing_would_read_it() -> None:
    with pytest.raises(JobError, match=r"decay = 0.5 is read only with schedule = 'wsd', and it is 'cosine'"):
        job_of(decay=0.5)


@example(schedule="wsd", steps=7, warmup=0.5, decay=1.0)
@given(
    schedule=st.sampled_from(["cosine", "linear", "wsd"]),
    steps=st.integers(1, 300),
    warmup=st.floats(0, 1),
    decay=st.floats(0, 1),
)
def test_rates_are_within_0_and_the_peak_rise_then_fall_and_never_jump(
    schedule: str, steps: int, warmup: float, decay: float
) -> None:
    changes = {"decay": min(decay, 1 - warmup)} if schedule == "wsd" else {}
    found = rates(steps, schedule=schedule, warmup=warmup, **changes)
    assert all(0 < rate <= 2.0 for rate in found)
    peak = found.index(max(found))
    assert all(a <= b for a, b in itertools.pairwise(found[: peak + 1]))
    assert all(a >= b for a, b in itertools.pairwise(found[peak:]))
    rise = max(1, round(warmup * steps))
    fall = round(changes["decay"] * steps) if schedule == "wsd" else steps
    fall = max(1, min(fall, steps - rise))  # the rise comes first, also where both were rounded up
    steepest = {"cosine": math.pi, "linear": 2.0, "wsd": 2.0 * math.sqrt(fall)}[schedule] / fall
    assert all(abs(a - b) <= max(2.0 / rise, steepest) + 1e-9 for a, b in itertools.pairwise(found))
