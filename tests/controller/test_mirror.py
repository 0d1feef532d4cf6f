import dataclasses
import errno
import fcntl
import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from controller import mirror as mirror_module
from controller import mirror_files
from controller.errors import (
    ConnectionLostError,
    HostKeyError,
    LocalStateError,
    UnreachableError,
)
from controller.extents import Extents
from controller.mirror import LOG_TAIL_BYTES, Mirror, ask_for_whole_log
from controller.mirror_files import LOCK, MIRROR
from controller.place import Place
from controller.watching import wait_for
from remote_payload import rundir
from tests.controller.fake_feed import RUN_ID, TIMING, FakeProcess, HandClock, Line, Remote, mirror_folder
from tests.waiting import until


@pytest.fixture
def remote() -> Remote:
    return Remote()


@pytest.fixture
def mirrors(tmp_path: Path) -> Iterator[Callable[..., Mirror]]:
    """Makes mirrors of one folder; stops them all at the end."""
    made: list[Mirror] = []
    directory = mirror_folder(tmp_path / "mirror")

    def make(line: Line, **options: Any) -> Mirror:
        opener: Callable[[], Place] = line.open
        mirror = Mirror(directory, place_opener=opener, timing=options.pop("timing", TIMING), **options)
        made.append(mirror)
        return mirror

    yield make
    for mirror in made:
        mirror.stop(60.0)
        assert not mirror.running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "mirror"


def record(folder: Path) -> dict[str, Any]:
    return rundir.read_whole(folder / MIRROR) or {}


def assert_equal(folder: Path, remote: Remote, *, holes: bool = False) -> None:
    """Every extent equals the remote's bytes, and nothing is there besides; without holes, all is there."""
    files = record(folder)["files"]
    for name, content in remote.files.items():
        extents = Extents.from_json(files[name]["extents"])
        local = (folder / name).read_bytes()
        assert len(local) == extents.end <= len(content), name
        for start, stop in extents:
            assert local[start:stop] == content[start:stop], name
        if not holes:
            assert local == bytes(content), name
    for name, small in remote.small.items():
        assert (folder / name).read_bytes() == small


def test_a_run_is_copied_and_the_mirror_ends_with_it(
    remote: Remote, mirrors: Callable[..., Mirror], folder: Path
) -> None:
    remote.files["train.log"] += b"line 1\nhalf"
    remote.files["crash/thread-a.json"] = bytearray(b"{}")
    line = Line(remote)
    mirror = mirrors(line)
    mirror.start()
    until(lambda: record(folder).get("state") == "connected" and record(folder).get("beat"))
    assert record(folder)["pid"] == os.getpid()
    assert 90 < record(folder)["clock_difference_s"] <= 101
    remote.files["train.log"] += " a line ü".encode()
    remote.files["events.jsonl"] += b'{"kind":"step"}\n'
    until(lambda: remote.pings > 1)
    assert mirror.running
    remote.finish()
    until(lambda: not mirror.running)
    assert record(folder)["state"] == "ended"
    assert record(folder)["error"] is None
    assert line.attempts == 1
    assert_equal(folder, remote)
    assert (folder / "gpu.jsonl").read_bytes() == b""


def test_the_command_of_the_feed_names_run_and_scale(remote: Remote, mirrors: Callable[..., Mirror]) -> None:
    line = Line(remote)
    mirrors(line).start()
    until(lambda: line.argvs)
    argv = list(line.argvs[0])
    assert argv[:2] == ["env", "DFLASHCTL_TIME_SCALE=0.01"]
    assert argv[2:7] == ["/w/python", "-S", "/w/payloads/d/remote_payload", "feed", "/w/runs/run-1"]


@pytest.mark.parametrize("seed", range(8))
def test_random_breaks_lose_nothing_and_send_nothing_twice(
    seed: int,
    remote: Remote,
    mirrors: Callable[..., Mirror],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(mirror_module, "awake_and_asleep", lambda: now)
    dice = random.Random(seed)
    line = Line(remote, chunk=dice.choice([7, 300, 5000]))

    def fate(_: int) -> Callable[[], str | None]:
        left = dice.randrange(1, 12_000) // line.chunk + 1
        how = dice.choice(["lost", "ended", "silent", "lost"])

        def ask() -> str | None:
            nonlocal left, now
            left -= 1
            if left >= 0 or len(line.processes) >= 12 or not any(remote.files.values()):
                return None
            if how == "silent":  # and time passes
                now += TIMING.silence_s + 1.0
            return how

        return ask

    line.fate = fate
    mirror = mirrors(line)
    mirror.start()
    for number in range(40):
        name = dice.choice(rundir.APPENDED)
        remote.files[name] += dice.randbytes(dice.randrange(0, 900)) + b"\n"
        if number % 13 == 12:
            remote.replace_file(name, dice.randbytes(50))
        if number % 9 == 8:
            remote.files[f"crash/c{number}"] = bytearray(dice.randbytes(2000))
        remote.small["progress.json"] = b'{"step":%d}' % number
        time.sleep(0.004)
    until(lambda: len(line.processes) > 1)
    remote.finish()
    until(lambda: not mirror.running)
    assert_equal(folder, remote)
    told = [have["have"] for have in remote.haves]
    assert any(entry["size"] for have in told for entry in have.values())


def test_a_dead_peer_is_noticed_by_its_silence(
    remote: Remote, mirrors: Callable[..., Mirror], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = HandClock()
    monkeypatch.setattr(mirror_module, "awake_and_asleep", clock)
    line = Line(remote)
    line.fate = lambda number: lambda: "silent" if number == 0 and record(folder).get("beat") else None
    mirror = mirrors(line)
    mirror.start()
    until(lambda: line.processes and line.processes[0]._broken)
    for passed in (0.0, 0.99):
        clock.show(passed * TIMING.silence_s)
        until(clock.was_read)
        assert len(line.processes) == 1
    clock.show(1.01 * TIMING.silence_s)
    until(lambda: len(line.processes) == 2)
    until(lambda: record(folder)["state"] == "connected")
    assert line.processes[0].closed
    assert mirror.error is None


def test_waits_grow_and_are_visible_and_poke_ends_one(
    remote: Remote, mirrors: Callable[..., Mirror], folder: Path
) -> None:
    line = Line(remote)
    line.error = UnreachableError("no route to 10.1.2.6", "is the VPN up?")
    begun = time.time()
    timing = type(TIMING)(backoff=(0.001, 0.002, 60.0), jitter=0.0, poll_s=0.005, beat_s=0.02)
    mirror = mirrors(line, timing=timing)
    mirror.start()
    until(lambda: record(folder).get("tries") == 3)
    shown = record(folder)
    assert shown["state"] == "reconnecting"
    assert (shown["error"], shown["hint"]) == ("no route to 10.1.2.6", "is the VPN up?")
    assert begun + 60 < shown["next_try"] < time.time() + 60
    until(lambda: record(folder)["t"] > shown["t"])  # the writer shows that it lives
    time.sleep(0.05)
    assert line.attempts == 3
    line.error = None
    mirror.poke()
    until(lambda: record(folder)["state"] == "connected" and record(folder)["tries"] == 0)
    assert record(folder)["error"] is None


def test_a_refusal_that_a_person_can_lift_is_said_and_tried_again_slowly(
    remote: Remote, mirrors: Callable[..., Mirror], folder: Path
) -> None:
    line = Line(remote)
    line.error = HostKeyError("the host key changed", "remove line 3 of known_hosts")
    mirror = mirrors(line)
    mirror.start()
    until(lambda: line.attempts >= 2)
    assert record(folder)["state"] == "refused"
    assert record(folder)["hint"] == "remove line 3 of known_hosts"
    line.error = None
    until(lambda: record(folder)["state"] == "connected")


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (b'{"frame":"error","text":"no run \\u001b[31mrun-1"}\n', "no run run-1"),
        (b'{"frame":"hello","protocol":9,"schema":1,"run":"run-1"}\n', "protocol version 9"),
        (b'{"frame":"hello","protocol":1,"schema":1,"run":"run-2"}\n', "serves 'run-2'"),
    ],
)
def test_a_feed_that_refuses_for_good_is_not_asked_again(
    reply: bytes, said: str, remote: Remote, mirrors: Callable[..., Mirror], folder: Path
) -> None:
    remote.frames = lambda told, **_: iter([reply, *[b""] * 1000])  # type: ignore[method-assign]
    line = Line(remote)
    mirror = mirrors(line)
    mirror.start()
    until(lambda: not mirror.running)
    assert record(folder)["state"] == "refused"
    assert said in record(folder)["error"]
    assert line.attempts == 1


@pytest.mark.parametrize("noise", [b"", b"bash: /w/python: No such file or directory\n"])
def test_a_command_that_ends_before_the_feed_began_is_quoted(
    noise: bytes, remote: Remote, mirrors: Callable[..., Mirror], folder: Path
) -> None:
    line = Line(remote)
    opened = line._start

    def start(argv: Any) -> FakeProcess:
        process = opened(argv)
        process._buffer = noise
        process.send = lambda data: None  # type: ignore[method-assign]
        process.stderr = b"" if noise else b"one\ncontainer '200' not running!\n"
        process.status = 255
        process.fate = lambda: None if process._buffer else "ended"
        return process

    line._start = start  # type: ignore[method-assign]
    mirrors(line).start()
    until(lambda: record(folder).get("tries"))
    last = "bash: /w/python: No such file" if noise else "container '200' not running!"
    assert "ended with status 255: " + last in record(folder)["error"]
    assert record(folder)["last_heard"] is None  # noise is no news of the run


def test_a_login_that_talks_for_ever_is_given_up(
    remote: Remote, mirrors: Callable[..., Mirror], folder: Path
) -> None:
    line = Line(remote)
    opened = line._start

    def start(argv: Any) -> FakeProcess:
        process = opened(argv)
        process.receive = lambda timeout: time.sleep(0.01) or b"you have mail\n"  # type: ignore[func-returns-value]
        return process

    line._start = start  # type: ignore[method-assign]
    mirrors(line, timing=dataclasses.replace(TIMING, hello_s=0.4)).start()
    until(lambda: record(folder).get("tries"))
    assert "did not start within 0.4 s" in record(folder)["error"]


def test_only_the_holder_of_the_lock_writes_and_the_next_takes_over(
    remote: Remote, mirrors: Callable[..., Mirror], folder: Path
) -> None:
    first_line, second_line = Line(remote), Line(remote)
    first, second = mirrors(first_line), mirrors(second_line)
    first.start()
    until(lambda: first.holds_lock)
    second.start()
    remote.files["train.log"] += b"x" * 5000
    until(lambda: (folder / "train.log").exists() and (folder / "train.log").stat().st_size == 5000)
    time.sleep(0.05)
    assert second.running
    assert second_line.attempts == 0
    first.stop(60.0)
    until(lambda: second.holds_lock)
    remote.files["train.log"] += b"y" * 10
    remote.finish()
    until(lambda: not second.running)
    assert_equal(folder, remote)
    assert remote.haves[-1]["have"]["train.log"]["size"] == 5000


def test_a_mirror_that_only_reads_does_not_touch_a_byte(
    remote: Remote, mirrors: Callable[..., Mirror], folder: Path
) -> None:
    with (folder / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        mirror = mirrors(Line(remote))
        mirror.start()
        time.sleep(0.05)
        assert mirror.running
        assert sorted(path.name for path in folder.iterdir()) == [LOCK, "place.json"]
    until(lambda: (folder / MIRROR).exists())


def left_behind(folder: Path, log: bytes, extents: list[list[int]], generation: int = 1) -> None:
    (folder / "train.log").write_bytes(log)
    files = {"train.log": {"generation": generation, "size": len(log), "extents": extents}}
    (folder / MIRROR).write_text(json.dumps({"kind": "mirror", "state": "connected", "files": files}))


@pytest.mark.parametrize(
    ("log", "extents", "asked"),
    [
        (b"0123456789garbage", [[0, 10]], 10),  # written, never claimed
        (b"01234", [[0, 10]], 5),  # claimed, and gone
        (b"garbage", [], 0),
        (b"\0\0\0\0\x0056789", [[5, 10]], 10),  # a tail
    ],
)
def test_what_a_dead_writer_left_is_used_only_as_far_as_it_was_claimed(
    log: bytes,
    extents: list[list[int]],
    asked: int,
    remote: Remote,
    mirrors: Callable[..., Mirror],
    folder: Path,
) -> None:
    remote.files["train.log"] += b"0123456789 and more"
    left_behind(folder, log, extents)
    mirror = mirrors(Line(remote))
    mirror.start()
    remote.finish()
    until(lambda: not mirror.running)
    assert remote.haves[0]["have"]["train.log"]["size"] == asked
    assert_equal(folder, remote, holes=True)


@pytest.mark.parametrize("spoilt", [b"", b"{half", b"[]", b'{"files":[1]}', b'{"files":{"train.log":{}}}',
                                    b'{"files":{"../x":{"generation":1,"extents":[[0,3]]}}}'])  # fmt: skip
def test_a_spoilt_mirror_record_costs_a_new_copy_and_nothing_else(
    spoilt: bytes, remote: Remote, mirrors: Callable[..., Mirror], folder: Path
) -> None:
    remote.files["train.log"] += b"right"
    (folder / "train.log").write_bytes(b"wrong bytes of old")
    (folder / MIRROR).write_bytes(spoilt)
    mirror = mirrors(Line(remote))
    mirror.start()
    remote.finish()
    until(lambda: not mirror.running)
    assert_equal(folder, remote)


def test_a_spoilt_status_of_a_run_that_has_ended_is_fetched_anew(
    remote: Remote, mirrors: Callable[..., Mirror], folder: Path
) -> None:
    remote.finish()
    first, second = mirrors(Line(remote)), mirrors(Line(remote))
    first.start()
    until(lambda: not first.running)
    (folder / "status.json").write_bytes(b"{half")
    second.start()
    until(lambda: not second.running)
    assert_equal(folder, remote)


def test_a_file_replaced_while_nobody_watched_is_taken_anew(
    remote: Remote, mirrors: Callable[..., Mirror], folder: Path
) -> None:
    remote.files["events.jsonl"] += b"new content, longer than what was there"
    (folder / "events.jsonl").write_bytes(b"old content")
    files = {"events.jsonl": {"generation": 4, "size": 11, "extents": [[0, 11]]}}
    (folder / MIRROR).write_text(json.dumps({"files": files}))
    mirror = mirrors(Line(remote))
    mirror.start()
    remote.finish()
    until(lambda: not mirror.running)
    assert_equal(folder, remote)
    assert record(folder)["files"]["events.jsonl"]["generation"] == 5


def test_a_new_generation_is_in_the_record_before_the_file_is_replaced(
    remote: Remote, mirrors: Callable[..., Mirror], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced: list[tuple[int, int, int]] = []
    replace = os.replace

    def watched(new: Path, path: Path) -> None:
        listed = record(folder).get("files", {}).get(path.name)
        if listed:
            replaced.append((listed["generation"], len(listed["extents"]), path.stat().st_size))
        replace(new, path)

    remote.files["train.log"] += b"first life" * 100
    mirror = mirrors(Line(remote))
    mirror.start()
    until(lambda: (folder / "train.log").exists() and (folder / "train.log").stat().st_size == 1000)
    monkeypatch.setattr(os, "replace", watched)
    remote.replace_file("train.log", b"second")
    until(lambda: (folder / "train.log").read_bytes() == b"second")
    assert replaced == [(2, 0, 1000)]


def test_a_file_cut_to_nothing_is_cut_here_too_and_does_not_hold_up_the_end(
    remote: Remote, mirrors: Callable[..., Mirror], folder: Path
) -> None:
    remote.files["gpu.jsonl"] += b"samples"
    mirror = mirrors(Line(remote))
    mirror.start()
    until(lambda: (folder / "gpu.jsonl").exists() and (folder / "gpu.jsonl").read_bytes() == b"samples")
    remote.replace_file("gpu.jsonl", b"")
    remote.finish()
    until(lambda: not mirror.running)
    assert_equal(folder, remote)


def test_a_large_log_attached_late_gives_its_tail_first_and_the_rest_on_request(
    remote: Remote, mirrors: Callable[..., Mirror], folder: Path
) -> None:
    remote.files["train.log"] += random.Random(1).randbytes(LOG_TAIL_BYTES + 3_000_000)
    remote.files["events.jsonl"] += b"e" * 2_000_000
    line = Line(remote, chunk=1 << 20)
    mirror = mirrors(line)
    mirror.start()
    until(lambda: record(folder).get("beat"))
    assert record(folder)["files"]["train.log"]["extents"] == [[3_000_000, LOG_TAIL_BYTES + 3_000_000]]
    assert record(folder)["files"]["events.jsonl"]["extents"] == [[0, 2_000_000]]
    assert (folder / "train.log").stat().st_blocks * 512 < LOG_TAIL_BYTES + 1_000_000
    remote.finish()
    until(lambda: not mirror.running)
    assert_equal(folder, remote, holes=True)
    again = mirrors(line)
    again.start()
    until(lambda: not again.running)
    assert line.attempts == 2 and not remote.fills  # it was asked, and what was wanted of it is here
    ask_for_whole_log(folder)
    whole = mirrors(line)
    whole.start()
    until(lambda: not whole.running)
    assert remote.haves[-1]["have"]["train.log"]["size"] == LOG_TAIL_BYTES + 3_000_000
    assert remote.fills == [{"train.log": {"generation": 1, "ranges": [[0, 3_000_000]]}}]
    assert_equal(folder, remote)


def test_whoever_writes_the_folder_fills_the_log_when_another_process_asks(
    remote: Remote, mirrors: Callable[..., Mirror], folder: Path
) -> None:
    remote.files["train.log"] += random.Random(1).randbytes(LOG_TAIL_BYTES + 300_000)
    mirror = mirrors(Line(remote, chunk=1 << 20))
    mirror.start()
    until(lambda: record(folder).get("complete"))
    (folder / "whole-log").touch()
    until(lambda: record(folder)["files"]["train.log"]["extents"] == [[0, LOG_TAIL_BYTES + 300_000]])
    remote.files["train.log"] += b"and on\n"
    remote.finish()
    until(lambda: not mirror.running)
    assert len(remote.fills) == 1
    assert_equal(folder, remote)


def copy_of_an_ended_run(remote: Remote, mirrors: Callable[..., Mirror]) -> None:
    remote.files["train.log"] += b"attempt 1\n"
    remote.finish()
    first = mirrors(Line(remote))
    first.start()
    until(lambda: not first.running)


def resumed(remote: Remote) -> None:
    """By somebody else: nothing of this machine was told of it."""
    remote.status("running", attempt=2)
    remote.supervisor = remote.trainer = "alive"
    remote.files["train.log"] += b"attempt 2\n"


def test_a_run_that_somebody_else_resumed_is_followed_again_once_its_place_is_asked(
    remote: Remote, mirrors: Callable[..., Mirror], folder: Path
) -> None:
    copy_of_an_ended_run(remote, mirrors)
    resumed(remote)
    mirror = mirrors(Line(remote))
    mirror.start()
    state = wait_for(folder, mirror, lambda state: state.attempt == 2, limit_s=60, what="attempt 2")
    assert not state.ended and record(folder)["state"] == "connected"
    remote.finish()
    until(lambda: not mirror.running)
    assert record(folder)["state"] == "ended"
    assert_equal(folder, remote)


def test_a_copy_of_an_ended_run_stays_as_it_is_while_its_place_is_asked_and_when_it_cannot_be(
    remote: Remote, mirrors: Callable[..., Mirror], folder: Path
) -> None:
    copy_of_an_ended_run(remote, mirrors)
    before = (folder / MIRROR).read_bytes()
    line = Line(remote)
    line.hang.clear()
    line.error = UnreachableError("no route")
    mirror = mirrors(line)
    mirror.start()
    until(lambda: line.attempts)
    assert mirror.is_asking and (folder / MIRROR).read_bytes() == before
    line.hang.set()
    until(lambda: not mirror.running)
    assert isinstance(mirror.error, UnreachableError)
    assert line.attempts == 1 and not mirror.is_asking
    assert (folder / MIRROR).read_bytes() == before
    gone = Line(remote)
    remote.run_id = "another-run"
    refused = mirrors(gone)
    refused.start()
    until(lambda: not refused.running)
    assert refused.error is not None and "serves 'another-run'" in refused.error.message
    assert (folder / MIRROR).read_bytes() == before


def test_once_takes_what_is_there_and_ends(
    remote: Remote, mirrors: Callable[..., Mirror], folder: Path
) -> None:
    remote.files["train.log"] += b"so far\n"
    mirror = mirrors(Line(remote), once=True)
    mirror.start()
    until(lambda: not mirror.running)
    assert_equal(folder, remote)
    line = Line(remote)
    line.error = UnreachableError("no route")
    failing = mirrors(line, once=True)
    failing.start()
    until(lambda: not failing.running)
    assert line.attempts == 1
    assert isinstance(failing.error, UnreachableError)
    assert record(folder)["state"] == "reconnecting"


def test_a_run_is_over_only_when_the_container_has_said_so_long_enough(
    remote: Remote, mirrors: Callable[..., Mirror], folder: Path
) -> None:
    mirror = mirrors(Line(remote))
    mirror.start()
    until(lambda: record(folder).get("beat"))
    remote.supervisor = "gone"  # the trainer checkpoints
    time.sleep(0.1)
    assert mirror.running
    remote.status("running")
    remote.small["status.json"] = line_of_status(time.time() + 100.0)
    remote.trainer = "gone"
    until(lambda: record(folder)["beat"]["trainer"] == "gone")
    assert mirror.running or record(folder)["beat"]["t"] - time.time() > 0
    until(lambda: not mirror.running)
    assert record(folder)["state"] == "ended"
    status = json.loads((folder / "status.json").read_bytes())
    assert record(folder)["beat"]["t"] - status["t"] >= 0.06


def line_of_status(t: float) -> bytes:
    return json.dumps({"kind": "status", "state": "running", "t": t}).encode()


def test_stop_does_not_wait_for_a_place_that_hangs(
    remote: Remote, mirrors: Callable[..., Mirror], folder: Path
) -> None:
    line = Line(remote)
    line.hang.clear()
    mirror = mirrors(line)
    mirror.start()
    until(lambda: line.attempts == 1)
    first = record(folder)["t"]
    until(lambda: record(folder)["t"] > first)  # and meanwhile shows that it lives
    mirror.stop(60.0)
    assert not mirror.running
    line.hang.set()
    until(lambda: line.processes and line.processes[0].closed)


def test_stop_ends_a_connected_mirror_at_once_and_frees_the_lock(
    remote: Remote, mirrors: Callable[..., Mirror], folder: Path
) -> None:
    line = Line(remote)
    mirror = mirrors(line)
    mirror.start()
    until(lambda: record(folder).get("state") == "connected")
    mirror.stop(TIMING.silence_s / 2)
    assert not mirror.running
    assert line.processes[0].closed
    with (folder / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_stopped_mirror_can_be_started_again(
    remote: Remote, mirrors: Callable[..., Mirror], folder: Path
) -> None:
    remote.files["train.log"] += b"one\n"
    mirror = mirrors(Line(remote))
    for number in range(3):
        mirror.start()
        until(lambda n=number: len(remote.haves) == n + 1 and record(folder).get("complete"))
        mirror.stop(60.0)
        assert not mirror.holds_lock
        remote.files["train.log"] += b"more\n"
    assert [have["have"].get("train.log", {}).get("size") for have in remote.haves] == [None, 4, 9]
    mirror.start()
    remote.finish()
    until(lambda: not mirror.running)
    assert_equal(folder, remote)


def test_bytes_left_out_by_a_feed_are_asked_for_again(
    remote: Remote, mirrors: Callable[..., Mirror], folder: Path
) -> None:
    honest = remote.frames
    remote.files["train.log"] += b"0123456789"

    def lying(told: dict[str, Any], **_: Any) -> Iterator[bytes]:
        stream = honest(told)
        if len(remote.haves) == 1:
            yield next(stream)
            header = {"frame": "append", "file": "train.log", "generation": 1, "size": 2}
            yield json.dumps(header | {"offset": 0}).encode() + b"\n01"
            yield json.dumps(header | {"offset": 5}).encode() + b"\n56"
        yield from stream

    remote.frames = lying  # type: ignore[method-assign]
    mirror = mirrors(Line(remote))
    mirror.start()
    remote.finish()
    until(lambda: not mirror.running)
    assert remote.haves[1]["have"]["train.log"]["size"] == 2
    assert_equal(folder, remote)


def test_a_defect_in_the_thread_is_said_and_survived(
    remote: Remote, mirrors: Callable[..., Mirror], folder: Path
) -> None:
    line = Line(remote)
    line.error = ZeroDivisionError("oops")
    mirror = mirrors(line)
    mirror.start()
    until(lambda: "unexpected ZeroDivisionError: oops" in str(record(folder).get("error")))
    line.error = None
    until(lambda: record(folder)["state"] == "connected")


def test_a_full_disk_is_said_and_the_mirror_goes_on_when_there_is_room(
    remote: Remote, mirrors: Callable[..., Mirror], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.pwrite
    full = threading.Event()
    full.set()

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        if full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[:3], offset)  # and short writes are finished

    monkeypatch.setattr(os, "pwrite", pwrite)
    remote.files["train.log"] += b"some bytes"
    mirror = mirrors(Line(remote))
    mirror.start()
    until(lambda: "train.log: No space left" in str(mirror.error))  # it tries again, and fails again
    full.clear()
    remote.finish()
    until(lambda: not mirror.running)
    assert_equal(folder, remote)


def test_the_disk_begins_before_it_is_waited_for_and_its_failure_then_is_no_end(
    remote: Remote, mirrors: Callable[..., Mirror], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, begun = os.fsync, []

    def fsync(descriptor: int) -> None:
        if threading.current_thread().name == "write-behind":
            begun.append(Path(f"/proc/self/fd/{descriptor}").readlink())
            raise OSError(errno.EIO, "Input/output error")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(mirror_files, "_WRITTEN_BEHIND", 50_000)
    remote.files["train.log"] += random.Random(1).randbytes(300_000)
    mirror = mirrors(Line(remote))
    mirror.start()
    until(lambda: begun)
    remote.finish()
    until(lambda: not mirror.running)
    assert set(begun) == {folder / "train.log"}
    assert_equal(folder, remote)


def test_readers_are_woken_by_news(remote: Remote, mirrors: Callable[..., Mirror], folder: Path) -> None:
    mirror = mirrors(Line(remote))
    mirror.start()
    until(lambda: record(folder).get("beat"))
    mirror.stop(60.0)
    seen = mirror.news_count
    start = time.monotonic()
    assert mirror.wait_for_news(seen, 80.0) == seen  # a mirror that has ended makes nobody wait
    assert time.monotonic() - start < 60.0


def test_without_a_place_file_the_folder_is_named(
    remote: Remote, mirrors: Callable[..., Mirror], folder: Path
) -> None:
    (folder / "place.json").unlink()
    mirror = mirrors(Line(remote), once=True)
    mirror.start()
    until(lambda: not mirror.running)
    assert isinstance(mirror.error, LocalStateError)
    assert "place.json" in str(mirror.error)


def test_the_run_id_of_the_fixture_is_the_one_of_the_place() -> None:
    assert rundir.is_run_id(RUN_ID)
    assert issubclass(UnreachableError, ConnectionLostError)
