"""The mirror through a real sshd, pct and container: cut, frozen, refused, restarted; equal in the end."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from controller.inventory import Host, load
from controller.mirror import LOG_TAIL_BYTES, Mirror, ask_for_whole_log
from controller.place import open_place
from controller.timing import Timing
from tests.dflashctl import command, dflashctl, environment
from tests.rig.cable import Cable
from tests.rig.mirrored_run import MirroredRun, feeds_of
from tests.rig.rig import Rig
from tests.waiting import until

TIMING = Timing.scaled(0.05)
PATIENT = dataclasses.replace(TIMING, silence_s=60.0)
"""For all tests that wait for no silence: a stall of a busy machine is no break."""


class Run(MirroredRun):
    """A run whose mirror runs in this process."""

    def __init__(self, rig: Rig, rate: int, timing: Timing) -> None:
        super().__init__(rig, rate)
        ask_for_whole_log(self.local)
        self.host = load().hosts["rig"]
        self.mirror = Mirror(self.local, place_opener=lambda: open_place(self.host), timing=timing)
        self.mirror.start()

    def end(self) -> None:
        """Let the writer end, wait for the mirror's end, and compare every byte."""
        self.stop_writing()
        until(lambda: not self.mirror.running, "the mirror's end")
        assert self.record()["state"] == "ended"
        self.compare()


@pytest.fixture
def laptop(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    for name, value in rig.laptop_env().items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def run(rig: Rig, laptop: None, request: pytest.FixtureRequest) -> Iterator[Run]:
    made = Run(rig, rate=2_000_000, timing=getattr(request, "param", PATIENT))
    yield made
    made.mirror.stop(60.0)
    made.close()
    rig.thaw_connections()
    until(lambda: not made.feeds(), "the feeds to be gone")


by_silence = pytest.mark.parametrize(
    "run", [dataclasses.replace(TIMING, silence_s=3.0)], indirect=True, ids=["impatient"]
)


@by_silence
def test_dropped_packets_are_noticed_by_silence_and_cost_nothing_but_time(rig: Rig, run: Run) -> None:
    with Cable(rig.port) as cable:
        cable.introduce(rig)
        run.wait_for_beat()
        run.host = Host(**run.host.model_dump() | {"address": "cable", "port": None, "connect_timeout": 2.0})
        killed = time.time()
        until(rig.kill_connections, "a connection to break")
        run.wait_for_beat(since=killed)  # through the cable
        cable.cut()
        until(lambda: "nothing was heard for 3 s" in str(run.record()["error"]), "the cut to be noticed")
        assert run.record()["state"] == "reconnecting"
        until(lambda: run.record().get("tries", 0) >= 2, "a second try")
        cable.mend()
        run.wait_for_beat()
        run.end()


@by_silence
def test_a_dead_jump_host_is_noticed_by_silence(rig: Rig, run: Run) -> None:
    run.wait_for_beat()
    with rig.ssh_config.open("a") as file:
        file.write(f"\nHost behind\n  HostName 127.0.0.1\n  Port {rig.port}\n  User {rig.user}\n")
        file.write(f"  IdentityFile {rig.identity}\n  IdentitiesOnly yes\n  ProxyJump rig\n")
        file.write(f"  UserKnownHostsFile {rig.known_hosts}\n")
    direct = run.host
    run.host = Host(**direct.model_dump() | {"address": "behind", "port": None})
    killed = time.time()
    until(rig.kill_connections, "a connection to break")
    run.wait_for_beat(since=killed)
    hop = min(rig.sshd_children())
    os.kill(hop, signal.SIGSTOP)
    until(lambda: "nothing was heard" in str(run.record().get("error")), "the dead hop to be noticed")
    run.wait_for_beat()  # by a new hop
    os.kill(hop, signal.SIGKILL)
    run.end()


def test_of_a_log_of_two_gigabytes_only_the_tail_is_copied_and_printed(rig: Rig, laptop: None) -> None:
    run = MirroredRun(rig, rate=0)
    try:
        last = b"".join(b"last line %d\n" % number for number in range(100_000))
        with (run.remote / "train.log").open("wb") as file:
            file.truncate((2 << 30) - len(last))  # a hole: reading it costs what reading a file costs
            file.seek(0, os.SEEK_END)
            file.write(last)
        env = rig.laptop_env() | {"DFLASHCTL_TIME_SCALE": "1"}
        done = dflashctl("logs", "--tail", "3", run.id, env=env)
        assert done.stdout == "last line 99997\nlast line 99998\nlast line 99999\n", done.stderr
        log = run.record()["files"]["train.log"]
        assert log["size"] == 2 << 30
        assert log["extents"][0][0] >= (2 << 30) - LOG_TAIL_BYTES
        assert (run.local / "train.log").stat().st_blocks * 512 < 2 * LOG_TAIL_BYTES
        done = dflashctl("logs", run.id, env=env)
        assert "older bytes were not copied and are left out here; --all gets them" in done.stderr
        assert last.endswith(done.stdout.encode())
    finally:
        run.close()


def test_a_log_that_we_did_not_start_is_followed_across_cuts(rig: Rig, laptop: None, tmp_path: Path) -> None:
    log = f"{rig.workspace}/elsewhere/train.log"
    there = rig.container_path(log)
    there.parent.mkdir()
    first = b"Bucket 0 [   0,  770):   2283 batches (  3.8%)\nTarget 0 on cuda:0...\n"
    there.write_bytes(first)
    env = environment(rig.laptop_env() | {"DFLASHCTL_TIME_SCALE": "0.05"})
    out, err = tmp_path / "out", tmp_path / "err"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        argv = command("logs", "--host", "rig", "--path", log, "--follow")
        process = subprocess.Popen(argv, env=env, stdout=stdout, stderr=stderr)
    try:
        until(lambda: out.read_bytes() == first, "the log")
        written = first
        for number in range(3):
            cut = rig.freeze_connections if number == 1 else rig.kill_connections
            until(cut, "a connection to break")
            more = b"".join(b"step %d loss 2.0\n" % (1000 * number + step) for step in range(1000))
            with there.open("ab") as file:
                file.write(more)
            written += more
            until(lambda w=written: out.read_bytes() == w, "what was written meanwhile")
            rig.thaw_connections()
        # The breaks above may each be over before the follower looks; this one waits until it is told.
        before = err.read_text().count("no connection")
        rig.stop_sshd()
        until(lambda: err.read_text().count("no connection") > before, "the word of a break")
        again = err.read_text().count("connected again")
        rig.start_sshd()
        until(lambda: err.read_text().count("connected again") > again, "the word of its end")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 80
        assert out.read_bytes() == written
    finally:
        process.kill()
        process.wait()
    until(lambda: not feeds_of(rig, log), "the feeds to be gone")


def test_a_feed_whose_reader_fell_silent_ends_by_itself(rig: Rig, run: Run) -> None:
    run.wait_for_beat()
    (feed,) = run.feeds()
    assert rig.freeze_connections() == 1
    until(lambda: feed not in run.feeds(), "the old feed to end")  # 60 s, scaled: 3 s
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
    killed = time.time()
    assert until(rig.kill_connections, "a connection to break") == 1
    run.wait_for_beat(since=killed)
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
