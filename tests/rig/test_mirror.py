"""The mirror through a real sshd, pct and container: cut, frozen, refused, restarted; equal in the end."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from controller import paths
from controller.inventory import load
from controller.mirror import Mirror, ask_for_whole_log
from controller.mirror_files import MIRROR
from controller.place import open_place
from controller.timing import Timing
from remote_payload import rundir
from tests.rig.rig import Rig

ROOT = Path(__file__).parents[2]
TIMING = Timing.scaled(0.05)
NUMBERS = itertools.count(1)

ACTOR = """
import os, random, sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from remote_payload import identity, rundir
run, rate = Path(sys.argv[1]), int(sys.argv[2])
def status(state, **fields):
    who = identity.identity(os.getpid())
    record = rundir.stamp("status", {{"attempt": 1, "state": state, "boot_id": identity.boot_id()}})
    record |= {{"supervisor": who, "trainer": who, **fields}}
    rundir.write_whole(run / "status.json", rundir.encode(record))
status("running")
dice = random.Random(1)
events = rundir.RecordWriter(run / "events.jsonl", attempt=1)
step = 0
with open(run / "train.log", "ab", buffering=0) as log:
    while not (run / "control" / "stop").exists():
        step += 1
        log.write(dice.randbytes(rate // 50) + f" step {{step}} größe\\n".encode())
        events.write("step", step=step)
        rundir.write_whole(run / "progress.json", rundir.encode({{"step": step}}))
        if step % 50 == 0:
            (run / "crash" / f"thread-{{step}}.json").write_bytes(dice.randbytes(3000))
        time.sleep(0.02)
status("finished", exit_code=0)
"""


class Run:
    """A run directory in the container with a process that writes it, and its mirror folder here."""

    def __init__(self, rig: Rig, base: Path, rate: int) -> None:
        self.rig = rig
        self.id = f"mirror-{next(NUMBERS)}"
        self.there = f"{rig.workspace}/runs/{self.id}"
        self.payload = f"{rig.workspace}/payload"  # a copy: a checkout in /tmp is not in the container
        if not (copy := rig.container_path(f"{self.payload}/remote_payload")).exists():
            shutil.copytree(
                ROOT / "remote_payload", copy, ignore=shutil.ignore_patterns("__pycache__", "*.arrow")
            )
        for name in ("crash", "control"):
            (self.remote / name).mkdir(parents=True)
        (self.remote / "gpu.jsonl").touch()
        (self.remote / "run.json").write_text(json.dumps({"id": self.id}))
        script = rig.container_path(f"{rig.workspace}/actor.py")
        script.write_text(ACTOR.format(root=self.payload))
        argv = [rig.python, "-S", f"{rig.workspace}/actor.py", self.there, str(rate)]
        self.actor = subprocess.Popen(rig.container_argv(argv))
        self.local = base / "mirror"
        self.local.mkdir()
        place = {
            "run_id": self.id, "python": rig.python, "payload_dir": self.payload, "run_dir": self.there,
            "created": 1.0, "job_name": "tiny",
        }  # fmt: skip
        (self.local / paths.PLACE).write_text(json.dumps(place))
        ask_for_whole_log(self.local)
        host = load().hosts["rig"]
        self.mirror = Mirror(self.local, place_opener=lambda: open_place(host), timing=TIMING)
        self.mirror.start()

    @property
    def remote(self) -> Path:
        """The run directory as this process finds it; another path after a restart of the container."""
        return self.rig.container_path(self.there)

    def record(self) -> dict[str, Any]:
        return rundir.read_whole(self.local / MIRROR) or {}

    def wait_for_beat(self) -> None:
        """Until a beat came of a connection that was made after this call."""
        called = time.time()
        until(
            lambda: self.record().get("state") == "connected" and self.record()["last_heard"] > called,
            "a beat",
        )

    def end(self) -> None:
        """Let the writer end, wait for the mirror's end, and compare every byte."""
        (self.remote / "control" / "stop").touch()
        assert self.actor.wait(20) == 0
        until(lambda: not self.mirror.running, "the mirror's end")
        assert self.record()["state"] == "ended"
        self.compare()

    def compare(self) -> None:
        names = {
            path.relative_to(self.remote).as_posix() for path in self.remote.rglob("*") if path.is_file()
        }
        names = {name for name in names if rundir.is_mirrored(name)}
        assert names >= {"train.log", "events.jsonl", "status.json", "progress.json", "run.json"}
        for name in names:
            local = hashlib.sha256((self.local / name).read_bytes()).hexdigest()
            assert local == self.rig.container_sha256(f"{self.there}/{name}"), name

    def feeds(self) -> list[int]:
        """Host pids of this run's feeds in the container."""
        sought = {b"feed", self.there.encode()}
        return [pid for pid in self.rig.container_processes() if sought <= set(words_of(pid))]


def until(condition: Callable[[], object], what: str, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        time.sleep(0.02)


@pytest.fixture
def run(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    for name, value in rig.laptop_env().items():
        monkeypatch.setenv(name, value)
    made = Run(rig, tmp_path, rate=2_000_000)
    yield made
    made.mirror.stop(5.0)
    made.actor.kill()
    made.actor.wait()
    rig.thaw_connections()
    until(lambda: not made.feeds(), "the feeds to be gone")


def words_of(pid: int) -> list[bytes]:
    """The command line of a process; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def test_cuts_of_every_kind_under_a_fast_writer_lose_nothing(rig: Rig, run: Run) -> None:
    dice = random.Random(7)
    for how in ("cut", "freeze", "feed", "cut", "feed", "cut"):
        run.wait_for_beat()
        time.sleep(dice.uniform(0.0, 0.3))
        if how == "cut":
            assert rig.kill_connections() == 1
        elif how == "freeze":
            assert rig.freeze_connections() == 1
        else:
            for pid in run.feeds():
                os.kill(pid, signal.SIGKILL)
        until(lambda: run.record().get("state") == "reconnecting", "the break to be noticed")
        if how == "freeze":
            assert "nothing was heard for 0.75 s" in run.record()["error"]
            run.wait_for_beat()  # by a connection of its own, while the frozen one still hangs
            rig.thaw_connections()
    run.end()
    until(lambda: not run.feeds(), "the feeds to be gone")


def test_a_feed_whose_reader_fell_silent_ends_by_itself(rig: Rig, run: Run) -> None:
    run.wait_for_beat()
    (feed,) = run.feeds()
    assert rig.freeze_connections() == 1
    until(lambda: feed not in run.feeds(), "the old feed to end", 10)  # 60 s, scaled: 3 s
    rig.thaw_connections()
    run.end()


def test_a_server_that_is_gone_is_waited_for_and_a_changed_key_is_refused(rig: Rig, run: Run) -> None:
    run.wait_for_beat()
    rig.stop_sshd()
    until(lambda: run.record().get("tries", 0) >= 2, "a second try")
    assert run.record()["state"] == "reconnecting"
    assert str(rig.port) in run.record()["error"]
    rig.rotate_host_key()
    until(lambda: run.record().get("state") == "refused", "the changed key to be refused")
    assert "key" in run.record()["error"]
    assert "known_hosts" in run.record()["hint"]
    rig.trust_host_key()
    run.mirror.poke()
    run.wait_for_beat()
    run.end()


def test_a_login_that_talks_does_not_disturb_the_feed(rig: Rig, run: Run) -> None:
    run.wait_for_beat()
    rig.login_noise('{"frame":"hello"}\nWelcome to the machine\n')
    assert rig.kill_connections() == 1
    run.wait_for_beat()
    run.end()


def test_a_container_that_was_restarted_under_the_run_is_lost_not_failed(rig: Rig, run: Run) -> None:
    run.wait_for_beat()
    rig.stop_container()
    until(lambda: "stopped" in str(run.record().get("error")), "pct's word on it")
    assert run.record()["state"] == "reconnecting"
    rig.start_container()
    until(lambda: not run.mirror.running, "the mirror's end")
    assert run.record()["state"] == "ended"
    assert run.record()["beat"]["supervisor"] in ("gone", "reused")
    run.compare()
