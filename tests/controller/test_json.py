"""docs/json.md against the code: every key that is printed is on the page, and the other way round."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from controller.changes import change_record
from controller.checkup import Report
from controller.commands.launch import launch_record
from controller.doctor import Check
from controller.exporting import Exported
from controller.inventory import Host
from controller.launch import LaunchedRun
from controller.listing import Row
from controller.pull import Pulled
from controller.resuming import Resumed
from controller.run_state import RunState
from controller.status import state_record
from remote_payload.pruning import Item

PAGE = (Path(__file__).parents[2] / "docs" / "json.md").read_text()


def documented(section: str) -> set[str]:
    """The keys in the table under `## section`."""
    body = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in body.splitlines() if line.startswith("| `")]
    return {key for cell in cells for key in re.findall(r"`(\w+)`", cell)}


def fields(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


HOST = Host.model_validate({"name": "here", "kind": "local"})
RUN = LaunchedRun("id", "/run", "/payload", "digest", Path("/mirror"))


@pytest.mark.parametrize(
    ("section", "printed"),
    [
        ("launch", set(launch_record(RUN, HOST))),
        ("resume", fields(Resumed)),
        ("pull", fields(Pulled)),
        ("doctor", set(Report(HOST, [], None).to_json())),
        ("doctor checks", fields(Check)),
        ("prune items", fields(Item)),
        ("export", fields(Exported)),
        ("runs", fields(Row)),
        ("watch", set(change_record(RunState(), None))),
        ("status", set(state_record(RunState()))),
    ],
)
def test_the_page_about_json_has_exactly_the_keys_that_are_printed(section: str, printed: set[str]) -> None:
    assert documented(section) == printed
