"""Whatever stands in the records of a run, no control character of them leaves a panel, a page or a line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text

from controller.changes import change_line
from controller.issue_report import issue_report
from controller.plots import PLOTS, Look
from controller.report.page import report_page
from controller.run_reader import RunReader
from controller.run_state import RunState
from controller.status import status_lines
from controller.tui import bucket_panel, gpu_panel, overview, thread_panel, thread_tab
from controller.tui.curves import Drawn
from controller.tui.run_list import run_rows, run_table
from tests.tui import golden
from tests.tui.conftest import Open, screen_text
from tests.tui.test_run_actions import known

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b1m\u202e"
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]")
WORDS = ("kind", "phase", "uuid", "boot_id")
"""What is compared and not shown."""


def poisoned(value: Any, key: str = "", kept: tuple[str, ...] = WORDS) -> Any:
    """`value` with the codes behind every text in it."""
    if isinstance(value, dict):
        return {name: poisoned(each, name, kept) for name, each in value.items()}
    if isinstance(value, list):
        return [poisoned(each, key, kept) for each in value]
    return value + HOSTILE if isinstance(value, str) and key not in kept else value


def hostile(name: str, *kept: str) -> golden.Run:
    run = golden.SITUATIONS[name]()
    for records in ("status", "progress", "exit", "mirror", "events", "gpu", "supervisor", "crashes"):
        setattr(run, records, poisoned(getattr(run, records), kept=WORDS + kept))
    # A run's id and hosts are paths here too.
    run.run = poisoned(run.run, kept=(*WORDS, "id", "host", "hosts"))
    return run


def shown(state: RunState, width: int) -> dict[str, list[Text] | list[str]]:
    events = [None, *state.events]
    return {
        "overview": [
            overview.status_line(state, width),
            *overview.detail_lines(state, width),
            overview.learning_line(state, width),
            overview.speed_line(state, width),
            overview.flow_line(state, width),
        ],
        "buckets": bucket_panel.bucket_lines(state, width),
        "gpus": [*gpu_panel.gpu_lines(state, width), gpu_panel.gpu_summary(state, width)],
        "threads": thread_tab.thread_tab_lines(state, width),
        "events": thread_panel.event_lines(state, width),
        "curves": [text for plot in PLOTS for text in Drawn().panel(state, plot, width, 8, Look())],
        "status": status_lines(state),
        "watch": [change_line(state, event) for event in events],
        "issue": issue_report(state, state.last_words).split("\n"),
        "report": report_page(state, state.last_words).split("\n"),
    }


@pytest.mark.parametrize(
    "kept", [(), ("state", "role", "device", "supervisor", "trainer")], ids=["all", "some"]
)
@pytest.mark.parametrize("name", ["healthy", "dead_thread", "killed", "no_news", "gpu_lost", "finished"])
def test_no_control_character_of_a_record_is_shown(name: str, kept: tuple[str, ...], tmp_path: Path) -> None:
    state = RunReader(hostile(name, *kept).write(tmp_path), scale=1.0).poll(golden.NOW)
    for width in (60, 160):
        for where, lines in shown(state, width).items():
            for each in lines:
                text = each.plain if isinstance(each, Text) else each
                assert not CONTROL.search(text), (where, text)


def test_no_control_character_of_a_record_is_in_the_list_of_runs() -> None:
    known(hostile("killed", "state"))
    names, rows = run_table(run_rows(golden.NOW), 160)
    assert len(rows) == 1
    assert not any(CONTROL.search(each.plain) for each in (names, *rows))


def test_a_run_that_was_launched_at_a_time_that_no_calendar_has_is_listed() -> None:
    run = golden.healthy()
    run.run["created"] = 1e20
    known(run)
    _, rows = run_table(run_rows(golden.NOW), 160)
    assert [run.run["id"] in row.plain and "--:--" in row.plain for row in rows] == [True]


@pytest.mark.slow
async def test_no_control_character_of_a_record_is_in_what_the_key_line_says(open_run: Open) -> None:
    async with open_run(hostile("killed", "state")) as pilot:
        await pilot.press("S")
        await pilot.pause()
        assert "it has ended already: KILLED SIGKILL" in screen_text(pilot)
        assert not CONTROL.search(screen_text(pilot).replace("\n", " "))
