from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote_payload import rundir

ROOT = Path(__file__).parents[2]

plain = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text()
finite = st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    plain | finite,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), values, max_size=6))
def test_a_record_comes_back_as_it_was_from_one_line(record: dict[str, Any]) -> None:
    line = rundir.encode(record)
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert line.isascii(), "half a character can never be cut"
    assert rundir.decode(line) == record


@given(st.dictionaries(st.text(min_size=1), st.floats(), min_size=1, max_size=5))
def test_a_float_that_is_not_finite_is_null_and_named(record: dict[str, float]) -> None:
    back = rundir.decode(rundir.encode(record))
    assert back is not None
    lost = [key for key, value in record.items() if not math.isfinite(value)]
    if "nonfinite" not in record:
        assert back.get("nonfinite", []) == sorted(lost)
    assert all(back[key] is None for key in lost if key != "nonfinite")
    assert all(back[key] == value for key, value in record.items() if key not in [*lost, "nonfinite"])


def test_a_float_deep_inside_is_named_by_its_path() -> None:
    line = rundir.encode({"loss": 1.0, "buckets": [{"loss": math.nan}], "wait": {"share": math.inf}})
    record = rundir.decode(line)
    assert record is not None
    assert record["buckets"] == [{"loss": None}] and record["wait"] == {"share": None}
    assert record["nonfinite"] == ["buckets.loss", "wait.share"]
    assert "NaN" not in line.decode()


@pytest.mark.parametrize(
    "line", [b"", b"\n", b"null", b"[1]", b"1", b'"x"', b'{"a":', b"\xff\xfe", b"[" * 100_000]
)
def test_what_is_no_record_is_none_and_never_an_error(line: bytes) -> None:
    assert rundir.decode(line) is None


@given(st.binary(max_size=200))
def test_any_bytes_are_a_record_or_none(line: bytes) -> None:
    assert rundir.decode(line) is None or isinstance(rundir.decode(line), dict)


@given(st.lists(st.binary(max_size=20).filter(lambda part: b"\n" not in part)), st.integers(0, 300))
def test_lines_are_whole_and_none_is_lost_wherever_the_data_is_cut(parts: list[bytes], cut: int) -> None:
    data = b"".join(part + b"\n" for part in parts)
    first, taken = rundir.complete_lines(data[:cut])
    rest, taken_later = rundir.complete_lines(data[taken:])
    assert first + rest == parts
    assert taken + taken_later == len(data)


def test_records_and_lines_that_hold_none_are_told_apart() -> None:
    records, bad = rundir.read_records([b'{"a":1}', b"", b"   ", b"nonsense", b"[2]", b'{"b":2}'])
    assert (records, bad) == ([{"a": 1}, {"b": 2}], 2)


def test_every_record_has_the_common_head_and_says_its_attempt_and_rank(tmp_path: Path) -> None:
    writer = rundir.RecordWriter(tmp_path / "events.jsonl", attempt=3, rank=1)
    writer.write("step", step=7)
    writer.close()
    record = json.loads((tmp_path / "events.jsonl").read_bytes())
    assert record.pop("t") > 1.7e9 and record.pop("mono") > 0
    assert record == {"v": 1, "kind": "step", "attempt": 3, "rank": 1, "step": 7}
    assert (tmp_path / "events.jsonl").stat().st_mode & 0o777 == 0o600


def test_records_of_many_threads_are_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    writer = rundir.RecordWriter(path, attempt=1)

    def write(thread: int) -> None:
        for number in range(200):
            writer.write("step", thread=thread, number=number, text="x" * (number * 7 % 500))

    threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    records, bad = rundir.read_records(path.read_bytes().splitlines())
    assert bad == 0
    for thread_number in range(4):
        numbers = [r["number"] for r in records if r["thread"] == thread_number]
        assert numbers == list(range(200)), "each thread's records in its own order"


def test_records_of_two_processes_in_one_file_are_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    code = (
        "import sys; from pathlib import Path; from remote_payload.rundir import RecordWriter;"
        "w = RecordWriter(Path(sys.argv[1]), attempt=1);"
        "[w.write('step', who=sys.argv[2], text='x' * 3000) for _ in range(300)]"
    )
    processes = [
        subprocess.Popen([sys.executable, "-S", "-c", code, str(path), who], cwd=ROOT) for who in "ab"
    ]
    assert [process.wait(100) for process in processes] == [0, 0]
    records, bad = rundir.read_records(path.read_bytes().splitlines())
    assert bad == 0 and len(records) == 600


@pytest.mark.parametrize("before", [b"", b'{"a":1}\n', b'{"a":1}\n{"half', b"x"])
def test_a_half_line_of_a_killed_writer_stays_one_line_of_its_own(tmp_path: Path, before: bytes) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(before)
    writer = rundir.RecordWriter(path, attempt=2)
    writer.write("start")
    writer.write("end")
    writer.close()
    content = path.read_bytes()
    assert content.startswith(before)
    lines = content[len(before) :].removeprefix(b"\n").splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["start", "end"]
    assert b"\n\n" not in content and not content.startswith(b"\n")


def test_a_small_file_is_replaced_whole_and_its_folder_kept_clean(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    rundir.write_whole(path, b"one")
    rundir.write_whole(path, b"two")
    assert path.read_bytes() == b"two"
    assert [entry.name for entry in tmp_path.iterdir()] == ["status.json"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_reader_never_sees_a_half_written_small_file(tmp_path: Path) -> None:
    path = tmp_path / "progress.json"
    rundir.write_whole(path, b"0" * 50_000)
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            rundir.write_whole(path, str(number % 10).encode() * 50_000)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(300):
            content = path.read_bytes()
            assert len(content) == 50_000 and len(set(content)) == 1
    finally:
        stop.set()
        writer.join()


def test_a_failed_replacement_leaves_the_old_file_and_no_temporary_one(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    path.mkdir()  # cannot be replaced by a file
    with pytest.raises(OSError):
        rundir.write_whole(path, b"new")
    assert [entry.name for entry in tmp_path.iterdir()] == ["status.json"] and path.is_dir()


def test_a_small_file_that_is_absent_or_holds_no_record_is_none(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    assert rundir.read_whole(path) is None
    path.write_bytes(b"[]")
    assert rundir.read_whole(path) is None
    path.write_bytes(b'{"state":"running"}')
    assert rundir.read_whole(path) == {"state": "running"}


@pytest.mark.parametrize(
    "name",
    [
        *rundir.APPENDED,
        *rundir.REPLACED,
        "crash/thread-target-0.json",
        "crash/stacks-request.txt",
        "crash/0",
    ],
)
def test_the_files_of_a_run_are_mirrored(name: str) -> None:
    assert rundir.is_mirrored(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "crash",
        "crash/",
        "crash/..",
        "crash/.hidden",
        "crash/-x",
        "crash/a/b",
        "crash/../train.log",
        "../train.log",
        "/etc/passwd",
        "train.log\n",
        "crash/x\n",
        "crash/x y",
        "crash/ü",
        "Train.log",
        "control/stop",
        "checkpoints/step-1/weights",
        "train.log/",
        "./train.log",
        "crash/x\0",
    ],
)
def test_no_other_name_is_ever_mirrored(name: str) -> None:
    assert not rundir.is_mirrored(name)


@given(st.text(max_size=80))
def test_a_mirrored_name_stays_inside_the_run(name: str) -> None:
    if rundir.is_mirrored(name):
        assert os.path.normpath(name) == name
        assert not name.startswith(("/", ".")) and ".." not in name.split("/")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("demo-20261130-0240-ab12", True),
        ("a", True),
        ("0", True),
        ("a" * 63, True),
        ("a" * 64, False),
        ("", False),
        ("-a", False),
        ("A", False),
        ("a_b", False),
        ("a/b", False),
        ("..", False),
        ("a\n", False),
        ("é", False),
    ],
)
def test_a_run_id_is_a_harmless_name(text: str, expected: bool) -> None:
    assert rundir.is_run_id(text) is expected


def test_which_states_end_an_attempt() -> None:
    ended = set(rundir.ENDED)
    assert ended == {rundir.State.FINISHED, rundir.State.FAILED, rundir.State.KILLED}


def test_the_trainers_exit_codes_stay_below_those_of_dflashctl() -> None:
    assert [(code.name, int(code)) for code in rundir.TrainerExit] == [
        ("FINISHED", 0),
        ("CRASHED", 1),
        ("REFUSED", 2),
        ("STOPPED", 3),
    ]


def test_a_record_that_a_full_disk_cut_short_costs_no_other_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = rundir.RecordWriter(tmp_path / "events.jsonl", attempt=1)
    write = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda descriptor, line: write(descriptor, line[:20]))
        writer.write("cut", step=1)
    writer.write("next", step=2)
    lines, _ = rundir.complete_lines((tmp_path / "events.jsonl").read_bytes())
    records, broken = rundir.read_records(lines)
    assert ([record["kind"] for record in records], broken) == (["next"], 1)
