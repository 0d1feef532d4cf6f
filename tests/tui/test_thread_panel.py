"""Threads and events as lines: whole, aligned, and by this machine's clock."""

from __future__ import annotations

import dataclasses

from rich.cells import cell_len

from controller.run_events import Event, Level
from controller.run_state import RunState
from controller.tui.thread_panel import event_lines, thread_lines
from tests.tui import golden
from tests.tui.test_screens import reduced

DAY = 86_400.0


def told(*lines: tuple[float, str], ahead: float = 0.0) -> RunState:
    """A state whose events are `lines`, times of the container, which is `ahead` seconds ahead."""
    events = tuple(Event(t=t, kind="x", level=Level.INFO, line=text) for t, text in lines)
    return RunState(now=golden.NOW, clock_difference_s=ahead, supervisor_events=events)


def test_a_long_event_is_folded_below_itself_and_nothing_of_it_is_lost() -> None:
    text = "step 3,010: waits of targets for batches 1%, targets for room 40%; bottleneck: drafters"
    _, *rows = (row.plain for row in event_lines(told((golden.NOW, text)), 60))
    assert len(rows) == 2
    assert all(cell_len(row) <= 60 for row in rows)
    assert rows[0].startswith("00:53:20 · step 3,010")
    assert rows[1].startswith(" " * 11)
    assert " ".join(row[11:].strip() for row in rows) == text


def test_events_of_another_day_stand_below_its_date() -> None:
    state = told((golden.NOW - DAY, "a"), (golden.NOW - DAY + 1, "b"), (golden.NOW, "c"))
    assert [row.plain for row in event_lines(state, 80)] == [
        "Sun 2026-11-29", "00:53:20 · a", "00:53:21 · b", "Mon 2026-11-30", "00:53:20 · c",
    ]  # fmt: skip


def test_the_time_of_an_event_is_of_this_machines_clock_and_one_that_no_calendar_has_is_none() -> None:
    state = told((golden.NOW + 7.5, "a"), (1e300, "b"), ahead=7.5)
    assert [row.plain for row in event_lines(state, 80)] == [
        "Mon 2026-11-30", "00:53:20 · a", "--:--:--", "--:--:-- · b",
    ]  # fmt: skip


def test_the_rows_of_threads_are_of_one_width_and_a_wide_screen_cuts_no_name() -> None:
    state = reduced(golden.healthy())
    assert state.progress is not None
    long = dataclasses.replace(
        state.progress.threads[1],
        name="replica-of-the-目標-0",
        state="waiting for its turn to warm up",
        step=7,
    )
    progress = dataclasses.replace(state.progress, threads=(*state.progress.threads, long))
    state = dataclasses.replace(state, progress=progress)
    for width in (75, 90, 120):
        _, names, *rows = thread_lines(state, width)
        assert {row.cell_len for row in (names, *rows)} <= set(range(75, width + 1))
        assert len({row.cell_len for row in (names, *rows)}) == 1
    assert "replica-of-the-目標-0 cuda:0  waiting for its turn to warm up        7" in rows[-1].plain
    assert "replica-o…" in thread_lines(state, 75)[-1].plain
