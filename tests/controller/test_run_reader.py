from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

from controller import run_reader, run_records
from controller.run_reader import LineCursor, RunReader
from tests.tui import golden
from tests.tui.golden import NOW


def line(**record: Any) -> bytes:
    return json.dumps(record).encode() + b"\n"


def step(number: int) -> bytes:
    return line(kind="step", t=NOW, step=number, loss=1.0)


@pytest.fixture
def reader(tmp_path: Path) -> RunReader:
    return RunReader(tmp_path, scale=1.0)


@pytest.mark.parametrize("name", golden.SITUATIONS)
def test_every_golden_run_directory_is_read(name: str, tmp_path: Path) -> None:
    golden.SITUATIONS[name]().write(tmp_path)
    state = RunReader(tmp_path, scale=1.0).catch_up(NOW)
    words = {
        "dead_thread": "FAILED", "killed": "KILLED", "lost": "LOST", "no_news": "STALE",
        "reconnecting": "RECONNECTING", "stalled": "STALLED", "stale_heartbeat": "STALLED",
        "finished": "FINISHED", "stopped": "STOPPED",
    }  # fmt: skip
    assert state.state == words.get(name, "LIVE")
    assert bool(state.curves["loss"].points) is (name != "first_minute")


def test_an_empty_or_absent_folder_is_a_run_of_which_nothing_was_heard(tmp_path: Path) -> None:
    assert RunReader(tmp_path / "absent", scale=1.0).poll(NOW).state == "UNKNOWN"
    assert RunReader(tmp_path, scale=1.0).poll(NOW).state == "UNKNOWN"


@pytest.mark.parametrize("beyond", [1e308, -1e308, 10**400, math.nan, True, "1", None, [1]])
def test_a_number_with_which_no_plot_could_reckon_is_none(beyond: Any) -> None:
    assert run_records.number({"loss": beyond}, "loss") is None
    assert run_records.number({"loss": 10**18}, "loss") == 1e18


def test_a_run_of_which_nothing_was_heard_has_the_names_that_the_launch_gave_it(tmp_path: Path) -> None:
    place = {"host": {"name": "gpubox", "address": "10.1.2.6"}, "run_id": "mine-1130", "job_name": "mine"}
    (tmp_path / "place.json").write_text(json.dumps({**place, "created": NOW - 5, "log_path": None}))
    state = RunReader(tmp_path, scale=1.0).poll(NOW)
    assert (state.run_id, state.job_name, state.place, state.state) == (
        "mine-1130", "mine", "gpubox", "UNKNOWN",
    )  # fmt: skip
    golden.healthy().write(tmp_path)
    assert RunReader(tmp_path, scale=1.0).poll(NOW).run_id == "1129-a7f3"


def test_half_a_line_is_left_alone_until_it_is_whole(reader: RunReader, tmp_path: Path) -> None:
    whole = step(7)
    path = tmp_path / "events.jsonl"
    path.write_bytes(whole[:20])
    assert not reader.poll(NOW).curves["loss"].points
    path.write_bytes(whole)
    state = reader.poll(NOW)
    assert state.curves["loss"].points == ((7.0, 1.0),)
    assert state.unparsable == {}


def test_each_record_is_read_once(reader: RunReader, tmp_path: Path) -> None:
    with (tmp_path / "events.jsonl").open("ab", buffering=0) as file:
        for number in range(1, 30):
            file.write(line(kind="recompile", t=NOW, replica=number))
            reader.poll(NOW)
    assert len(reader.state.events) == 29
    assert reader.state.history.records == 29


def test_lines_that_hold_no_record_are_counted_by_file(reader: RunReader, tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(b"{half\n" + step(1) + b"[1]\n\n\xff\xfe\n")
    (tmp_path / "gpu.jsonl").write_bytes(b"no\n")
    state = reader.poll(NOW)
    assert state.unparsable == {"events.jsonl": 3, "gpu.jsonl": 1}
    assert len(state.curves["loss"].points) == 1
    assert reader.poll(NOW).unparsable == {"events.jsonl": 3, "gpu.jsonl": 1}


def test_a_truncated_file_is_read_anew(reader: RunReader, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"".join(map(step, range(1, 50))))
    reader.poll(NOW)
    path.write_bytes(step(1) + step(2))
    assert [x for x, _ in reader.poll(NOW).curves["loss"].points] == [1.0, 2.0]


def test_a_file_of_a_new_generation_is_read_anew_even_when_it_is_longer(
    reader: RunReader, tmp_path: Path
) -> None:
    path, mirror = tmp_path / "events.jsonl", tmp_path / "mirror.json"
    mirror.write_bytes(line(kind="mirror", files={"events.jsonl": {"generation": 1}}))
    path.write_bytes(step(90))
    reader.poll(NOW)
    mirror.write_bytes(line(kind="mirror", files={"events.jsonl": {"generation": 2}}))
    with path.open("wb") as file:
        file.write(step(1) + step(2) + step(3))
    assert [x for x, _ in reader.poll(NOW).curves["loss"].points] == [1.0, 2.0, 3.0]


def test_a_small_file_that_is_half_written_keeps_its_last_good_record(
    reader: RunReader, tmp_path: Path
) -> None:
    path = tmp_path / "progress.json"
    path.write_bytes(line(kind="progress", t=NOW, step=5))
    reader.poll(NOW)
    path.write_bytes(b'{"kind": "prog')
    progress = reader.poll(NOW).progress
    assert progress is not None
    assert progress.step == 5


def test_a_line_longer_than_any_record_is_passed_over_and_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_reader, "SLICE", 100)
    monkeypatch.setattr(run_reader, "LONGEST_LINE", 1000)
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"x" * 5000 + b"\n" + step(3))
    cursor = LineCursor(path)
    lines, too_long = [], 0
    while True:
        new, bad, _ = cursor.read()
        lines += new
        too_long += bad
        if not cursor.unread:
            break
    assert (lines, too_long) == ([step(3).rstrip()], 1)


def test_a_poll_does_a_bounded_amount_of_work_and_says_what_is_left(tmp_path: Path) -> None:
    """A night's events: no poll may block a screen, and the overview is there from the first."""
    golden.healthy().write(tmp_path)
    record = golden.healthy().events[-2]
    block = b"".join(line(**record | {"step": number}) for number in range(1000))
    (tmp_path / "events.jsonl").write_bytes(block * 60)
    reader = RunReader(tmp_path, scale=1.0)
    for poll in range(1, 4):
        began = time.process_time()
        state = reader.poll(NOW)
        assert time.process_time() - began < 1.0, "1 MiB takes about 0.05 s on one slow core"
        assert state.progress is not None
        assert state.total_bytes - state.unread_bytes <= poll * (run_reader.SLICE + 65536)
    assert state.unread_bytes > 5 << 20


def test_the_newest_crash_is_known_also_where_earlier_attempts_left_a_hundred(tmp_path: Path) -> None:
    run = golden.dead_thread()
    assert run.status is not None
    run.status["attempt"] = 7
    run.write(tmp_path)
    for number in range(100):
        old = {"kind": "crash", "attempt": 1 + number % 6, "thread": "drafter-0", "first": True}
        (tmp_path / "crash" / f"thread-drafter-0-{number}.json").write_bytes(line(**old))
    newest = {"kind": "crash", "attempt": 7, "thread": "target-1", "first": True, "error": "boom"}
    (tmp_path / "crash" / "thread-target-1.json").write_bytes(line(**newest))
    (tmp_path / "crash" / "thread-huge.json").write_bytes(b" " * run_reader.LONGEST_LINE + line(**newest))
    state = RunReader(tmp_path, scale=1.0).poll(NOW)
    assert [(crash.thread, crash.error) for crash in state.crashes] == [("target-1", "boom")]


def test_catching_up_ends_also_where_the_rest_is_gone(tmp_path: Path, reader: RunReader) -> None:
    events = tmp_path / "events.jsonl"
    events.write_bytes(step(7) * (3 * run_reader.SLICE // len(step(7))))
    assert reader.poll(NOW).unread_bytes
    events.unlink()
    assert reader.catch_up(NOW).unread_bytes
    assert RunReader(tmp_path, scale=1.0).catch_up(NOW).unread_bytes == 0


def test_crashes_of_this_attempt_are_ordered_with_the_first_to_fail_in_front(tmp_path: Path) -> None:
    run = golden.dead_thread()
    assert run.status is not None
    run.status["attempt"] = 2
    run.crashes = [{**crash, "attempt": 2} for crash in run.crashes]
    run.crashes.append({**run.crashes[0], "thread": "old", "attempt": 1})
    run.write(tmp_path)
    (tmp_path / "crash" / "thread-half.json").write_bytes(b'{"kind": "cra')
    (tmp_path / "crash" / "stacks-request.txt").write_text("Thread 1")
    state = RunReader(tmp_path, scale=1.0).poll(NOW)
    assert [crash.thread for crash in state.crashes] == ["drafter-1", "drafter-0"]
    assert state.first_crash is not None
    assert "cudagraph_trees.py" in state.first_crash.traceback
    assert state.diagnosis is not None
    assert state.diagnosis.name == "cudagraph-trees-thread"
    assert state.stacks == ("stacks-request.txt",)


def test_a_run_that_ended_without_a_traceback_has_the_logs_last_lines(tmp_path: Path) -> None:
    run = golden.healthy()
    run.end("failed", code=1, reason="the trainer ended with exit code 1")
    run.log.append("ModuleNotFoundError: No module named 'pyarrow'")
    run.write(tmp_path)
    state = RunReader(tmp_path, scale=1.0).poll(NOW)
    assert state.last_words[-1].endswith("'pyarrow'")
    assert state.diagnosis is not None
    assert state.diagnosis.name == "missing-package"


def test_a_run_that_is_lost_has_the_logs_last_lines_too_and_what_that_mostly_means(tmp_path: Path) -> None:
    golden.lost().write(tmp_path)
    state = RunReader(tmp_path, scale=1.0).catch_up(NOW)
    assert state.state == "LOST"
    assert "step  12345" in state.last_words[-1]
    assert state.diagnosis is not None
    assert state.diagnosis.name == "vanished"


def test_the_job_is_read_and_a_broken_one_does_no_harm(reader: RunReader, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text("block_size = 8\n")
    assert reader.poll(NOW).job == {"block_size": 8}
    (tmp_path / "job.toml").write_text("block_size = = 8 # broken\n")
    assert reader.poll(NOW).job == {"block_size": 8}
