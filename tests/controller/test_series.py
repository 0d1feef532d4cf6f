from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from controller.series import LIMIT, Ema, Series, segments

VALUES = st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True))


@given(st.lists(VALUES, max_size=80))
def test_a_series_has_only_finite_values_and_gaps(values: list[float | None]) -> None:
    series = Series().extended(enumerate(values))
    assert all(y is None or math.isfinite(y) for _, y in series.all_points)
    assert all(math.isfinite(y) for run in segments(series.all_points) for _, y in run)


@settings(max_examples=10)
@given(st.integers(1, 6 * LIMIT), st.integers(40, 900))
def test_a_series_is_bounded_uniform_and_ends_with_its_newest_value(total: int, batch: int) -> None:
    series = Series()
    for start in range(0, total, batch):
        series = series.extended((x, float(x)) for x in range(start, min(total, start + batch)))
    assert len(series.points) < LIMIT
    assert series.last == total - 1
    steps = {b[0] - a[0] for a, b in zip(series.points, series.points[1:], strict=False)}
    assert steps <= {series.stride}


def test_a_gap_splits_the_curve_and_survives_merging() -> None:
    points = [(float(x), None if x == 700 else 1.0) for x in range(3 * LIMIT)]
    series = Series().extended(points)
    runs = segments(series.all_points)
    assert len(runs) == 2
    assert all(len(run) > 1 for run in runs)


def test_a_resumed_run_replaces_what_the_attempt_before_wrote_after_its_checkpoint() -> None:
    series = Series().extended((x, 1.0) for x in range(100)).extended((x, 2.0) for x in range(60, 80))
    assert [y for x, y in series.points if x < 60] == [1.0] * 60
    assert [x for x, y in series.points if y == 2.0] == list(range(60, 80))


def test_the_average_is_debiased_and_ignores_gaps() -> None:
    average = Ema(0.9)
    assert average.value is None
    for value in (3.0, None, math.nan, 3.0):
        average = average.updated(value)
    assert average.value is not None
    assert math.isclose(average.value, 3.0)


def test_a_mean_of_several_steps_counts_for_as_many() -> None:
    one_by_one, together = Ema(), Ema().updated(5.0)
    for value in (5.0, 3.0, 3.0, 3.0):
        one_by_one = one_by_one.updated(value)
    together = together.updated(3.0, steps=3)
    assert one_by_one.value is not None
    assert together.value is not None
    assert math.isclose(one_by_one.value, together.value)
