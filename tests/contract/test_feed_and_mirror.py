"""The real feed, as a process in the place `local`, and the real mirror: whatever breaks, equal bytes."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from controller import paths
from controller.extents import Extents
from controller.inventory import Host
from controller.mirror import LOG_TAIL_BYTES, Mirror, ask_for_whole_log
from controller.mirror_files import MIRROR
from controller.place import Place, open_place
from controller.timing import Timing
from remote_payload import identity, rundir
from tests.waiting import until

ROOT = Path(__file__).parents[2]
TIMING = dataclasses.replace(Timing.scaled(0.05), silence_s=60.0, fill_s=60.0, scale=0.2)
"""Quick, but for the waits that only a break or an old feed lets end: a busy machine is neither."""

HOLDER = """
import dataclasses, os, sys, time
from pathlib import Path
from controller.inventory import Host
from controller.mirror import Mirror
from controller.place import open_place
from controller.timing import Timing
host = Host(name="local", kind="local")
timing = dataclasses.replace(Timing.from_environment(), silence_s=60.0, fill_s=60.0, scale=0.2)
mirror = Mirror(Path(sys.argv[1]), place_opener=lambda: open_place(host), timing=timing)
mirror.start()
while mirror.running:
    time.sleep(0.05)
"""

PAUSING_HOLDER = (
    """
import os, threading
write, left = os.pwrite, 10 << 20
def pwrite(descriptor, data, offset):
    global left
    left -= len(data)
    if left < 0:
        threading.Event().wait()
    return write(descriptor, data, offset)
os.pwrite = pwrite
"""
    + HOLDER
)
"""It stands still after ten megabytes: it is never through before somebody kills it."""

FOLLOWER = """
import dataclasses, sys
from pathlib import Path
from controller.inventory import Host
from controller.logs import follow_log
from controller.mirror import Mirror
from controller.place import open_place
from controller.timing import Timing
host = Host(name="local", kind="local")
timing = dataclasses.replace(Timing.from_environment(), silence_s=60.0, fill_s=60.0, scale=0.2)
mirror = Mirror(Path(sys.argv[1]), place_opener=lambda: open_place(host), timing=timing)
mirror.start()
code = follow_log(Path(sys.argv[1]), follow=True, tail=None, out=sys.stdout.buffer, mirror=mirror)
mirror.stop()
sys.exit(code)
"""

WATCHER = FOLLOWER.replace("controller.logs import follow_log", "controller.changes import print_changes")
WATCHER = WATCHER.replace(
    "follow_log(Path(sys.argv[1]), follow=True, tail=None, out=sys.stdout.buffer, mirror=mirror)",
    "print_changes(Path(sys.argv[1]), mirror, as_json=False, out=sys.stdout)",
)


class Run:
    """A run directory on `the container`, and its mirror folder on `the laptop`."""

    def __init__(self, base: Path) -> None:
        self.remote = base / "workspace" / "runs" / "run-1"
        self.remote.mkdir(parents=True)
        (self.remote / "crash").mkdir()
        self.local = base / "mirror"
        self.local.mkdir()
        place = {
            "run_id": "run-1", "python": sys.executable, "payload_dir": str(ROOT),
            "run_dir": str(self.remote), "created": 1.0, "job_name": "tiny",
        }  # fmt: skip
        (self.local / paths.PLACE).write_text(json.dumps(place))
        self.host = Host(name="local", kind="local", workspace=str(base / "workspace"))
        self.actor = subprocess.Popen(["sleep", "600"])  # plays supervisor and trainer
        self.status("running")
        rundir.write_whole(self.remote / rundir.RUN, b'{"id":"run-1"}\n')
        for name in rundir.APPENDED:
            (self.remote / name).touch()
        self.mirrors: list[Mirror] = []
        self.holders: list[subprocess.Popen[bytes]] = []

    def status(self, state: str, **fields: Any) -> None:
        who = identity.identity(self.actor.pid)
        record = rundir.stamp("status", {"attempt": 1, "state": state, "boot_id": identity.boot_id()})
        record |= {"supervisor": who, "trainer": who, **fields}
        rundir.write_whole(self.remote / rundir.STATUS, rundir.encode(record))

    def append(self, name: str, data: bytes) -> None:
        with (self.remote / name).open("ab") as file:
            file.write(data)

    def end(self) -> None:
        self.status("finished", exit_code=0)
        self.kill_actor()

    def kill_actor(self) -> None:
        self.actor.kill()
        self.actor.wait()

    def mirror(self, *, whole_log: bool = False, timing: Timing = TIMING, **options: Any) -> Mirror:
        if whole_log:
            ask_for_whole_log(self.local)
        opener: Callable[[], Place] = lambda: open_place(self.host)  # noqa: E731
        made = Mirror(self.local, place_opener=opener, timing=timing, **options)
        self.mirrors.append(made)
        return made

    def holder(self, program: str = HOLDER) -> subprocess.Popen[bytes]:
        """A mirror in a process of its own."""
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(self.local)],
            env=os.environ | {"DFLASHCTL_TIME_SCALE": "0.05", "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            process_group=0,  # as a shell starts a job: it can be stopped
        )
        self.holders.append(process)
        return process

    def feeds(self) -> list[int]:
        """Pids of the feeds of this run."""
        found = []
        for path in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                words = (path / "cmdline").read_bytes().split(b"\0") if path.name.isdigit() else []
                if b"feed" in words and str(self.remote).encode() in words and b"-S" in words[:2]:
                    found.append(int(path.name))
        return found

    def record(self) -> dict[str, Any]:
        return rundir.read_whole(self.local / MIRROR) or {}

    def names(self) -> list[str]:
        crash = [f"crash/{path.name}" for path in (self.remote / "crash").iterdir()]
        return [*rundir.APPENDED, *crash]

    def assert_extents_hold(self, *, whole: bool = True) -> None:
        """Every extent equals the remote's bytes; `whole`: and all of them are here."""
        listed = self.record()["files"]
        for name in self.names():
            remote = (self.remote / name).read_bytes()
            extents = Extents.from_json(listed.get(name, {}).get("extents"))
            local = (self.local / name).read_bytes() if (self.local / name).exists() else b""
            for start, stop in extents:
                assert local[start:stop] == remote[start:stop], name
            if whole:
                assert hashlib.sha256(local).digest() == hashlib.sha256(remote).digest(), name
        if whole:
            for name in rundir.REPLACED:
                if (self.remote / name).exists():
                    assert (self.local / name).read_bytes() == (self.remote / name).read_bytes()

    def clean(self) -> None:
        for mirror in self.mirrors:
            mirror.stop(60.0)
        for holder in self.holders:
            holder.kill()
            holder.wait()
            assert holder.stdout is not None
            holder.stdout.close()
        self.kill_actor()
        until(lambda: not self.feeds())


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.clean()


def signal_feeds(run: Run, number: int) -> list[int]:
    """Send a signal to the feeds there are, and say to which: a newer one may have begun beside an older."""
    reached = []
    for pid in run.feeds():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            reached.append(pid)
    return reached


class Writer(threading.Thread):
    """Writes a log and events at `rate` bytes a second until told to end."""

    def __init__(self, run: Run, rate: int, seed: int) -> None:
        super().__init__(daemon=True)
        self.run_, self.rate, self.dice = run, rate, random.Random(seed)
        self.pause = threading.Lock()
        self.over = threading.Event()

    def run(self) -> None:
        step = 0
        while not self.over.wait(0.01):
            with self.pause:
                step += 1
                part = self.dice.randbytes(self.rate // 100)
                self.run_.append("train.log", part + f"step {step} größe\n".encode())
                self.run_.append("events.jsonl", rundir.encode({"kind": "step", "step": step}))
                if step % 5 == 0:
                    rundir.write_whole(self.run_.remote / rundir.PROGRESS, rundir.encode({"step": step}))
                if step % 40 == 0:
                    self.run_.append(f"crash/thread-{step}.json", part)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_killed_and_frozen_feeds_cost_nothing_but_time(run: Run, seed: int) -> None:
    dice = random.Random(seed)
    writer = Writer(run, 2_000_000, seed)
    writer.start()
    mirror = run.mirror(whole_log=True, timing=Timing.scaled(0.05))
    mirror.start()
    for _ in range(4):
        until(run.feeds)
        time.sleep(dice.uniform(0.0, 0.4))
        signal_feeds(run, signal.SIGKILL)
    killed = time.time()
    until(lambda: run.record().get("state") == "connected" and run.record()["since"] > killed)
    frozen: set[int] = set()

    def is_noticed() -> bool:  # freezes also one that took the place of another just now
        frozen.update(signal_feeds(run, signal.SIGSTOP))
        return bool(frozen) and "nothing was heard for 0.75 s" in str(run.record().get("error"))

    until(is_noticed)
    signal_feeds(run, signal.SIGKILL)
    writer.over.set()
    writer.join()
    run.end()
    until(lambda: not mirror.running)
    assert run.record()["state"] == "ended"
    run.assert_extents_hold()
    until(lambda: not run.feeds())


@pytest.mark.slow
def test_truncation_and_replacement_under_a_writer_are_followed(run: Run) -> None:
    writer = Writer(run, 500_000, 3)
    writer.start()
    mirror = run.mirror(whole_log=True)
    mirror.start()
    for number in range(6):
        until(lambda: run.record().get("files", {}).get("train.log", {}).get("size", 0) > 20_000)
        generation = run.record()["files"]["train.log"]["generation"]
        with writer.pause:
            log = run.remote / "train.log"
            match number % 3:
                case 0:
                    os.truncate(log, 0)
                case 1:
                    (run.remote / "new").write_bytes(b"another file\n" * (5000 if number > 3 else 1))
                    (run.remote / "new").replace(log)
                case 2:
                    signal_feeds(run, signal.SIGKILL)
                    os.truncate(log, 17)
        until(lambda g=generation: run.record()["files"]["train.log"]["generation"] > g)
    writer.over.set()
    writer.join()
    run.end()
    until(lambda: not mirror.running)
    run.assert_extents_hold()


@pytest.mark.parametrize("how", ["another inode", "rewritten in place", "cut and grown again"])
def test_a_file_replaced_by_one_of_the_same_size_while_nobody_watched_is_noticed(run: Run, how: str) -> None:
    log = run.remote / "train.log"
    first = random.Random(4).randbytes(50_000)
    run.append("train.log", first)
    mirror = run.mirror(whole_log=True)
    mirror.start()
    until(lambda: run.record().get("complete"))
    mirror.stop(60.0)
    if how == "another inode":  # with the same beginning and the same end
        (run.remote / "new").write_bytes(first[:20_000] + b"x" * 100 + first[20_100:])
        (run.remote / "new").replace(log)
    elif how == "rewritten in place":
        with log.open("r+b") as file:
            file.seek(-100, os.SEEK_END)
            file.write(b"y" * 100)
    else:
        log.write_bytes(random.Random(5).randbytes(50_000))
    mirror.start()
    until(lambda: run.record()["files"]["train.log"]["generation"] == 2)
    run.end()
    until(lambda: not mirror.running)
    run.assert_extents_hold()


def test_a_killed_writer_of_the_folder_is_replaced_by_one_that_waited(run: Run) -> None:
    writer = Writer(run, 2_000_000, 5)
    first = run.holder()
    until(lambda: run.record().get("pid") == first.pid and run.record().get("beat"))
    writer.start()
    second, third = run.mirror(), run.mirror()
    second.start()
    third.start()
    time.sleep(0.2)
    assert not second.holds_lock
    assert not third.holds_lock
    first.kill()
    first.wait()
    until(lambda: second.holds_lock or third.holds_lock)
    assert second.holds_lock != third.holds_lock
    holder, other = (second, third) if second.holds_lock else (third, second)
    holder.stop()
    until(lambda: other.holds_lock)
    writer.over.set()
    writer.join()
    run.end()
    until(lambda: not other.running)
    run.assert_extents_hold()


@pytest.mark.slow
def test_a_writer_killed_in_the_middle_of_a_large_copy_leaves_only_true_extents(run: Run) -> None:
    dice = random.Random(9)
    run.append("events.jsonl", dice.randbytes(1 << 20) * 40)
    run.append("train.log", dice.randbytes(1 << 20) * 3)
    seen = []
    for _ in range(3):
        size = (run.local / "events.jsonl").stat().st_size if (run.local / "events.jsonl").exists() else 0
        holder = run.holder(PAUSING_HOLDER)
        until(lambda s=size: (run.local / "events.jsonl").exists()
              and (run.local / "events.jsonl").stat().st_size > s + 100_000)  # fmt: skip
        holder.kill()
        holder.wait()
        if run.record():
            run.assert_extents_hold(whole=False)
        seen.append((run.local / "events.jsonl").stat().st_size)
        with (run.local / "events.jsonl").open("ab") as file:
            file.write(b"torn")  # as a power cut may leave it
    run.end()
    mirror = run.mirror(whole_log=True)
    mirror.start()
    until(lambda: not mirror.running)
    run.assert_extents_hold()
    assert 0 < seen[0] < 40 << 20


@pytest.mark.slow
def test_a_follower_that_is_suspended_gives_the_lock_away_and_misses_nothing(run: Run) -> None:
    run.append("train.log", b"before\n")
    follower = run.holder(FOLLOWER)
    assert follower.stdout is not None
    assert follower.stdout.readline() == b"before\n"
    os.kill(follower.pid, signal.SIGTSTP)
    stopped, status = os.waitpid(follower.pid, os.WUNTRACED)
    assert stopped == follower.pid
    assert os.WIFSTOPPED(status)
    other = run.mirror()
    other.start()
    until(lambda: other.holds_lock)
    run.append("train.log", b"meanwhile\n")
    until(lambda: (run.local / "train.log").read_bytes().endswith(b"meanwhile\n"))
    other.stop()
    os.kill(follower.pid, signal.SIGCONT)
    assert follower.stdout.readline() == b"meanwhile\n"
    until(lambda: run.record().get("pid") == follower.pid and run.record()["state"] == "connected")
    run.append("train.log", b"after\n")
    run.end()
    assert follower.stdout.read() == b"after\n"
    assert follower.wait(60) == 0
    run.assert_extents_hold()


def test_a_watch_that_is_suspended_gives_the_lock_away_too(run: Run) -> None:
    watcher = run.holder(WATCHER)
    assert watcher.stdout is not None
    assert b" run-1 " in watcher.stdout.readline()
    os.kill(watcher.pid, signal.SIGTSTP)
    stopped, status = os.waitpid(watcher.pid, os.WUNTRACED)
    assert (stopped, os.WIFSTOPPED(status)) == (watcher.pid, True)
    other = run.mirror()
    other.start()
    until(lambda: other.holds_lock)
    other.stop()
    os.kill(watcher.pid, signal.SIGCONT)
    run.end()
    assert b" FINISHED" in watcher.stdout.read()
    assert watcher.wait(60) == 0


def test_a_log_that_is_renamed_away_is_printed_to_its_last_byte_before_the_new_one(run: Run) -> None:
    run.append("train.log", b"before\n")
    follower = run.holder(FOLLOWER)
    assert follower.stdout is not None
    assert follower.stdout.readline() == b"before\n"
    for number in range(5):
        pid = run.feeds()[0]
        os.kill(pid, signal.SIGSTOP)  # all of it comes at once
        words = [b"last words %d\n" % n for n in range(2000)]
        run.append("train.log", b"".join(words))
        (run.remote / "train.log").rename(run.remote / f"train.log.{number}")
        run.append("train.log", b"new %d\n" % number)
        os.kill(pid, signal.SIGCONT)
        for line in (*words, b"new %d\n" % number):
            assert follower.stdout.readline() == line
    run.end()
    assert follower.stdout.read() == b""
    assert follower.wait(60) == 0
    run.assert_extents_hold()


def test_a_large_log_is_attached_at_its_tail_to_a_line_start(run: Run) -> None:
    line = b"a line of the log with its newline\n"
    run.append("train.log", line * (3 * LOG_TAIL_BYTES // len(line)))
    mirror = run.mirror()
    mirror.start()
    until(lambda: run.record().get("complete"))
    ((start, stop),) = run.record()["files"]["train.log"]["extents"]
    size = (run.remote / "train.log").stat().st_size
    assert stop == size
    assert size - LOG_TAIL_BYTES <= start < size - LOG_TAIL_BYTES + len(line)
    assert start % len(line) == 0
    run.end()
    until(lambda: not mirror.running)
    run.assert_extents_hold(whole=False)
    whole = run.mirror(whole_log=True)
    whole.start()
    until(lambda: not whole.running)
    run.assert_extents_hold()


def test_one_look_at_a_living_run_takes_all_that_there_is(run: Run) -> None:
    """The first beat is sent while the feed still catches up."""
    run.append("events.jsonl", random.Random(3).randbytes(1 << 20) * 12)
    run.append("train.log", b"line\n" * 1_000_000)
    mirror = run.mirror(whole_log=True, once=True)
    mirror.start()
    until(lambda: not mirror.running)
    assert mirror.error is None
    run.assert_extents_hold()


@pytest.mark.slow
def test_a_run_whose_supervisor_vanished_is_lost_and_the_mirror_ends(run: Run) -> None:
    run.append("train.log", b"last words")
    mirror = run.mirror()
    mirror.start()
    until(lambda: run.record().get("beat"))
    run.kill_actor()
    until(lambda: not mirror.running)
    assert run.record()["state"] == "ended"
    assert run.record()["beat"]["supervisor"] == "gone"
    run.assert_extents_hold()


def test_a_run_directory_that_does_not_exist_is_refused_with_its_name(run: Run) -> None:
    moved = run.remote.rename(run.remote.parent / "elsewhere")
    mirror = run.mirror()
    mirror.start()
    until(lambda: not mirror.running)
    moved.rename(run.remote)
    assert run.record()["state"] == "refused"
    assert "run-1: no run directory" in run.record()["error"]


def test_an_interpreter_that_is_missing_is_quoted_and_waited_for(run: Run) -> None:
    place = json.loads((run.local / paths.PLACE).read_text())
    broken = json.dumps(place | {"python": "/nonexistent/python"})
    (run.local / paths.PLACE).write_text(broken)
    mirror = run.mirror()
    mirror.start()
    until(lambda: "/nonexistent/python" in str(run.record().get("error")))
    (run.local / paths.PLACE).write_text(json.dumps(place))
    mirror.poke()
    until(lambda: run.record().get("state") == "connected")


def test_a_stopped_mirror_leaves_no_feed_behind(run: Run) -> None:
    mirror = run.mirror()
    mirror.start()
    until(lambda: run.record().get("state") == "connected")
    assert len(run.feeds()) == 1
    mirror.stop()
    until(lambda: not run.feeds())
