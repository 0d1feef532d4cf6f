"""Curves as text: sizes, gaps, scales, and where a point is drawn."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.plots import Look, Window, nearest, promised
from controller.run_records import BOUND
from controller.series import Point, Series
from controller.tui.palette import OKABE_ITO, SKY
from controller.tui.plot import (
    LABEL_COLUMNS,
    Curve,
    log_ticks,
    plot_lines,
    strip,
    ticks,
)

values = st.floats(-1e12, 1e12, allow_nan=False) | st.floats(-BOUND, BOUND) | st.none()


def drawn(points: list[Point], width: int = 47, height: int = 9, **kwargs: Any) -> list[str]:
    window = Window(points[0][0], points[-1][0])
    return [t.plain for t in plot_lines([Curve(points, SKY)], width, height, window, **kwargs)]


@given(st.lists(values, min_size=1, max_size=60), st.integers(0, 90), st.integers(0, 30), st.booleans())
def test_a_plot_has_the_size_it_was_given_whatever_the_values(
    ys: list[float | None], width: int, height: int, log: bool
) -> None:
    points: list[Point] = [(float(n), y) for n, y in enumerate(ys)]
    lines = plot_lines(
        [Curve(points, SKY)], width, height, Window(0.0, float(len(ys) - 1)), log=log, cursor=0.5
    )
    assert len(lines) == height
    assert all(text.cell_len == width for text in lines)


def test_a_curve_that_leaves_the_picture_towards_almost_infinity_is_drawn() -> None:
    points: list[Point] = [(0.0, 1e-300), (1.0, BOUND)]
    assert len(plot_lines([Curve(points, SKY)], 47, 9, Window(0.0, 0.5))) == 9


def columns_with_dots(lines: list[str]) -> set[int]:
    return {
        n - LABEL_COLUMNS
        for text in lines[:-1]
        for n, character in enumerate(text)
        if 0x2800 < ord(character) < 0x2900
    }


def test_a_gap_is_not_drawn_across_and_is_marked_on_the_axis() -> None:
    points: list[Point] = [(float(n), None if 40 <= n <= 60 else 1.0 + n % 2) for n in range(101)]
    lines = drawn(points)
    dots = columns_with_dots(lines)
    empty = set(range(17, 24))
    assert not dots & empty
    assert {0, 39} <= dots
    assert "×" in lines[-2][LABEL_COLUMNS + 17 : LABEL_COLUMNS + 24]


@given(st.integers(0, 999), st.floats(2.0, 1e6))
def test_a_spike_among_a_thousand_points_is_seen(place: int, height: float) -> None:
    points: list[Point] = [(float(n), 1.0 + (height if n == place else 0.0)) for n in range(1000)]
    top = drawn(points)[0][LABEL_COLUMNS:]
    assert any(0x2800 < ord(character) < 0x2900 for character in top)


def test_an_exponential_is_a_straight_line_on_a_logarithmic_scale() -> None:
    lines = drawn(
        [(float(n), 10.0 ** (n / 20)) for n in range(81)], width=LABEL_COLUMNS + 40, height=11, log=True
    )
    rows = [next(r for r, text in enumerate(lines[:-1]) if 0x2800 < ord(text[LABEL_COLUMNS + c]) < 0x2900)
            for c in range(40)]  # fmt: skip
    assert rows == sorted(rows, reverse=True)
    assert all(abs(row - 9 * (1 - c / 39)) <= 1 for c, row in enumerate(rows))


def test_what_is_not_positive_is_a_gap_on_a_logarithmic_scale() -> None:
    assert "no positive values" in "".join(drawn([(0.0, -1.0), (1.0, 0.0)], log=True))


def test_the_cursor_stands_in_its_column() -> None:
    lines = drawn([(0.0, 0.0), (100.0, 1.0)], cursor=0.5)
    assert all(
        text[LABEL_COLUMNS + 20] in "│" or ord(text[LABEL_COLUMNS + 20]) > 0x2800 for text in lines[:-1]
    )


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.integers(2, 8))
def test_ticks_are_round_and_inside(low: float, span: float, most: int) -> None:
    span = max(span, abs(low) * 1e-6)  # nearer ones no axis can tell apart
    found = ticks(low, low + span, most)
    assert all(low - span * 1e-6 <= tick <= low + span * (1 + 1e-6) for tick in found)
    assert len(found) <= most + 2


@given(st.floats(1e-9, 1e6), st.floats(1.2, 1e6), st.integers(2, 6))
def test_logarithmic_ticks_lie_inside(low: float, factor: float, most: int) -> None:
    found = log_ticks(low, low * factor, most)
    assert found
    assert all(low * 0.999 <= tick <= low * factor * 1.001 for tick in found)


def test_a_strip_shows_shares_gaps_and_where_nothing_was_measured() -> None:
    points: list[Point] = [(10.0, 0.0), (11.0, 1.0), (12.0, None), (13.0, 0.5)]
    assert strip(points, 5, Window(9.0, 13.9)) == " ▁▇×▄"


@given(
    st.lists(st.sampled_from(["nearer", "farther", "left", "right"]), max_size=40),
)
def test_zoom_and_cursor_never_leave_the_run(moves: list[str]) -> None:
    look = Look()
    for move in moves:
        look = {
            "nearer": lambda one: one.zoomed(0.5), "farther": lambda one: one.zoomed(2.0),
            "left": lambda one: one.moved(-0.3), "right": lambda one: one.moved(0.3),
        }[move](look)  # fmt: skip
        assert 0.0 <= look.start < look.end <= 1.0
        assert look.cursor is None or 0.0 <= look.cursor <= 1.0


def test_zooming_keeps_the_step_under_the_cursor() -> None:
    look = Look(cursor=0.25).zoomed(0.5).zoomed(0.5)
    assert look.start + look.cursor * (look.end - look.start) == pytest.approx(0.25)  # type: ignore[operator]


def test_the_value_at_the_cursor_is_that_of_the_nearest_point() -> None:
    points: tuple[Point, ...] = ((0.0, 1.0), (10.0, 2.0), (20.0, None))
    assert [nearest(points, x) for x in (-5, 4, 6, 19, 99)] == [1.0, 1.0, 2.0, None, None]
    assert nearest((), 1.0) is None


def test_what_training_promises_is_the_product_of_its_conditional_accuracies() -> None:
    assert promised([0.8, 0.5, None, 0.9]) == pytest.approx([0.8, 0.4])


def test_a_resumed_attempt_replaces_the_steps_it_makes_again() -> None:
    series = Series().extended([(float(n), 5.0) for n in range(100)]).extended([(50.0, 1.0), (51.0, 1.0)])
    lines = [t.plain for t in plot_lines([Curve(series.all_points, SKY)], 47, 9, Window(0.0, 51.0))]
    assert series.points[-1] == (51.0, 1.0)
    assert max(columns_with_dots(lines)) == 39


def test_a_series_of_a_month_holds_no_more_than_one_of_a_minute() -> None:
    series = Series()
    for start in range(0, 100_000, 10_000):
        series = series.extended([(float(n), math.sin(n)) for n in range(start, start + 10_000)])
    assert len(series.all_points) <= 1025


def test_all_colours_of_curves_are_of_the_set_of_okabe_and_ito_or_grey() -> None:
    from controller.tui.palette import CURVE_COLOURS, GREY, ROLE_COLOURS

    assert {*CURVE_COLOURS.values(), *ROLE_COLOURS.values()} <= {*OKABE_ITO, GREY}
