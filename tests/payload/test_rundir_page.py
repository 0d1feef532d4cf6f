"""docs/rundir.md against the trainer: what it writes stands there, and what stands there is written."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

from remote_payload import crash
from remote_payload.gpu_rows import unknown
from remote_payload.run_status import RunStatus
from remote_payload.train import alarm
from remote_payload.train.progress import Progress

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "rundir.md").read_text()


HEAD = {"v", "t", "mono", "attempt", "kind"}
"""Keys of every record."""


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


def documented(text: str) -> set[str]:
    """Names in backticks, but for those in parentheses: values, or parts of what stands before."""
    while (without := re.sub(r"\([^()]*\)|`\{[^`]*\}`", "", text)) != text:
        text = without
    return set(re.findall(r"`([a-z0-9_]+)`", text))


def row_of(call: ast.Call) -> str:
    """The word that names the row of a written event: its kind, and of an alarm the reason."""
    kind = first_words(call.args[0])
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    if kind != "alarm" or "reason" not in given:
        return kind
    reason = given["reason"]
    return str(getattr(alarm, reason.id)) if isinstance(reason, ast.Name) else first_words(reason)


def test_an_event_has_the_fields_of_its_row() -> None:
    found = re.findall(r"(?m)^\| (?:`alarm`, reason )?`([a-z_]+)`[^|]*\|(.*)\|$", section("events.jsonl"))
    rows = dict(found)
    written: dict[str, set[str]] = {}
    for call in calls("write"):
        names = {keyword.arg for keyword in call.keywords}
        if names and None not in names and call.args and (row := row_of(call)) in rows:
            written.setdefault(row, set()).update(name for name in names if name)
    assert {kind: documented(rows[kind]) for kind in written} == written
    assert len(written) > 15


def test_every_reason_of_an_alarm_has_its_row() -> None:
    reasons = re.findall(r"(?m)^\| `alarm`, reason `([a-z_]+)`", section("events.jsonl"))
    assert sorted(reasons) == sorted([alarm.REASON, alarm.OUT_OF_MEMORY, "not_lossless"])
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


def words(text: str) -> set[str]:
    """Every name in backticks or quotes."""
    return set(re.findall(r"[`\"]([a-z0-9_]+)[`\"]", text))


def test_progress_has_the_keys_of_its_section() -> None:
    progress = Progress([0, 8])
    progress.thread("drafter-0", "drafter", "cpu")
    record = progress.snapshot()
    text = section("progress.json")
    for inner in ("buckets", "threads", "devices"):
        (entry,) = record[inner]
        named = re.search(rf"(?s)- `{inner}`: list of `\{{(.*?)\}}`", text)
        assert named is not None and words(named[1]) == entry.keys()
    assert record.keys() <= words(text)


def test_a_failed_threads_record_has_the_keys_of_its_section(tmp_path: Path) -> None:
    name = crash.write_thread(
        tmp_path, thread="t", role="reader", device=None, step=None, bucket=None, samples=(),
        error=ValueError(), first=True, memory=None, attempt=1,
    )  # fmt: skip
    record = json.loads((tmp_path / "crash" / name).read_text())
    assert documented(section("crash/")) == record.keys() - HEAD


def test_a_status_has_the_keys_of_its_section(tmp_path: Path) -> None:
    status = RunStatus(tmp_path, 1, 2.0)
    status.write()
    record = json.loads((tmp_path / "status.json").read_text())
    assert record.keys() - HEAD <= words(section("status.json"))


def test_the_supervisors_records_are_those_that_it_notes() -> None:
    text = section("supervisor.jsonl")
    noted = {
        node.args[0].value
        for path in (ROOT / "remote_payload").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("note", "write")
        and node.args
        and isinstance(node.args[0], ast.Constant)
        and path.stem in ("supervisor", "attempt", "resume")
    }
    assert documented(text) == noted


def test_the_trainers_last_word_has_the_keys_of_its_section() -> None:
    source = ast.parse((ROOT / "remote_payload" / "train" / "main.py").read_text())
    functions = [node for node in ast.walk(source) if isinstance(node, ast.FunctionDef)]
    keys = {
        key.value
        for function in functions
        if function.name in ("summary", "_end")
        for node in ast.walk(function)
        if isinstance(node, ast.Dict)
        for key in node.keys
        if isinstance(key, ast.Constant)
    }
    values = {"kind", "exit", "finished", "stopped", "crashed", "refused"}
    assert words(section("exit.json")) - values == keys - HEAD


def test_samples_of_gpus_have_the_keys_of_their_section() -> None:
    text, row = section("gpu.jsonl"), unknown("0", "no answer")
    constants, samples = (
        words(part.partition("}`")[0]) for part in re.split(r"`gpu(?:_constants)?` \(", text)[1:]
    )
    assert constants - {"gpus"} == row.constants("u").keys() - {"why"}
    assert samples - {"gpus"} == row.sample().keys() - {"why"}
