"""A place's answers of `probe` as a person reads them."""

from __future__ import annotations

import pytest

from controller.probe_table import HEADER, line

WORKS = {
    "mode": "graph",
    "trees": None,
    "where": "threads",
    "passes": "forward + backward",
    "torch": "2.11.0+cu130",
    "works": True,
    "failure": None,
    "step_ms": 1.234,
    "refused": None,
}


def test_a_mode_that_works_shows_its_time_under_the_headings() -> None:
    shown = line(WORKS)
    assert shown.endswith("works") and "2.11.0+cu130" in shown and "1.23" in shown
    for word, heading in (("threads", "where"), ("forward + backward", "passes"), ("2.11.0", "torch")):
        assert shown.index(word) == HEADER.index(heading)


def test_a_mode_that_fails_shows_the_first_line_of_its_failure_and_what_training_does() -> None:
    failing = WORKS | {
        "mode": "reduce-overhead",
        "trees": False,
        "works": False,
        "failure": "AssertionError: TLS",
        "step_ms": None,
        "refused": "below torch 2.13 ...",
    }
    assert line(failing).endswith("-  fails: AssertionError: TLS; training refuses it")
    assert " off " in line(failing)


@pytest.mark.parametrize("name", WORKS)
def test_a_record_of_another_version_is_shown_as_far_as_it_goes(name: str) -> None:
    assert line({key: value for key, value in WORKS.items() if key != name})


def test_what_a_place_says_cannot_move_the_terminals_cursor() -> None:
    assert "\x1b" not in line(WORKS | {"works": False, "failure": "bad \x1b[2J"})
