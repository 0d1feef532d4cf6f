"""docs/rundir.md against the trainer: what it writes stands there, and what stands there is written."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from remote_payload.train import alarm

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "rundir.md").read_text()


def section(title: str) -> str:
    """The text under the heading that begins with `title`."""
    found = re.search(rf"(?ms)^## {re.escape(title)}.*?$(.*?)(?=^#)", PAGE)
    assert found is not None
    return found[1]


def calls(method: str) -> Iterator[ast.Call]:
    """Calls of `something.method(...)` in the trainer."""
    for path in sorted((ROOT / "remote_payload" / "train").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == method
            ):
                yield node


def first_words(node: ast.expr) -> str:
    """What a string in the source begins with, up to its first value."""
    part = node.values[0] if isinstance(node, ast.JoinedStr) else node
    assert isinstance(part, ast.Constant) and isinstance(part.value, str)
    return part.value.strip()


def written_kinds() -> set[str]:
    def is_events(call: ast.Call) -> bool:
        assert isinstance(call.func, ast.Attribute)
        owner = call.func.value
        name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
        return name.strip("_") == "events"

    return {first_words(call.args[0]) for call in calls("write") if is_events(call)}


def test_every_kind_of_event_has_its_row_and_every_row_its_event() -> None:
    rows = re.findall(r"(?m)^\| `([a-z_]+)`", section("events.jsonl"))
    assert set(rows) == written_kinds() and len(written_kinds()) > 15


def test_both_reasons_of_an_alarm_have_their_row() -> None:
    reasons = re.findall(r"(?m)^\| `alarm`, reason `([a-z_]+)`", section("events.jsonl"))
    assert sorted(reasons) == sorted([alarm.REASON, "not_lossless"])
    (row,) = re.findall(rf"(?m)^\| `alarm`, reason `{alarm.REASON}` \|(.*)\|$", PAGE)
    documented = set(re.findall(r"`([a-z_]+)`", re.sub(r"\([^()]*\)", "", row)))
    assert documented == alarm.Alarm(1, 1.0, 3.0).record().keys()


def test_phases_and_states_of_threads_are_those_that_are_entered() -> None:
    text = section("progress.json")
    phases = re.search(r"(?m)^- `phase`: (.*)$", text)
    states = re.search(r"(?s)`state` is (.*?)\n- `devices`", text)
    assert phases is not None and states is not None
    set_phases = {
        node.value.value
        for path in (ROOT / "remote_payload" / "train").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Attribute)
        and node.targets[0].attr == "phase"
        and isinstance(node.value, ast.Constant)
    }
    assert set(re.findall(r"`([a-z_]+)`", phases[1])) == set_phases
    entered = {first_words(call.args[0]) for call in calls("enter")} | {"starting"}
    named = {state for state in entered if not state.startswith("waiting for")} | {"waiting for ..."}
    assert {state.split(" N/M")[0] for state in re.findall(r"`([a-zA-Z/. ]+)`", states[1])} == named
