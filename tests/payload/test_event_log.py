"""events.jsonl of a run whose disk has no room for a while."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from remote_payload import rundir
from remote_payload.train.event_log import EventLog, events_of


def test_events_without_room_are_left_out_and_counted_when_there_is_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    events = EventLog(tmp_path / rundir.EVENTS, attempt=1, log=said.append)

    def full(_descriptor: int, _line: bytes) -> int:
        raise OSError(28, "No space left on device")

    events.write("step", step=1)
    with monkeypatch.context() as disk:
        disk.setattr(os, "write", full)
        events.write("step", step=2)
        events.write("step", step=3)
    events.write("step", step=4)
    events.close()
    records, broken = rundir.read_records((tmp_path / rundir.EVENTS).read_bytes().splitlines())
    assert ([record["step"] for record in records], broken) == ([1, 4], 0)
    assert said == [
        "events.jsonl cannot be written: No space left on device; the run goes on without it",
        "events.jsonl is written again; 2 events are lost",
    ]


def test_events_of_a_kind_are_found_among_others_that_name_it_and_among_cut_lines(tmp_path: Path) -> None:
    events = EventLog(tmp_path / rundir.EVENTS, attempt=1, log=print)
    events.write("eval", step=3)
    events.write("step", what="eval", step=4)
    with (tmp_path / rundir.EVENTS).open("ab") as file:
        file.write(b'{"kind": "eval", "st\n')
    events.write("eval", step=9)
    events.close()
    assert [record["step"] for record in events_of(tmp_path, "eval")] == [3, 9]
    assert list(events_of(tmp_path, "roles")) == []
