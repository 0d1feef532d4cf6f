"""A mirrored run under a slow writer, watched for minutes: nothing grows, and both ends are equal.

Not among the tests that are found by name: `make soak` runs it, for DFLASHCTL_SOAK_MINUTES (10). What is
measured is the feed in the container, `logs --follow`, which keeps the mirror, and a `tui` that only reads.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pty
import statistics
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.dflashctl import command, environment
from tests.rig.mirrored_run import MirroredRun
from tests.rig.rig import Rig
from tests.waiting import until

MINUTES = float(os.environ.get("DFLASHCTL_SOAK_MINUTES", "10"))
RATE = 50_000
"""Bytes of log a second, beside 50 events."""
GROWTH = {"feed": 2.0, "mirror": 4.0, "view": 12.0}
"""MiB by which resident memory may rise from the second quarter of the time to the last: meanwhile the view
fills curves, lists and what Rich remembers of the widths of lines, each up to its bound."""


def resident_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


class Soak:
    """The three processes, and what two of them print."""

    def __init__(self, rig: Rig) -> None:
        self.run = MirroredRun(rig, rate=RATE, crashes=False)
        env = environment(rig.laptop_env() | {"TERM": "xterm-256color", "DFLASHCTL_TIME_SCALE": "1"})
        self.follower = subprocess.Popen(
            command("logs", "--follow", "--all", self.run.id),
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        self.printed, self.size = hashlib.sha256(), 0
        self.reading = threading.Thread(target=self._read, daemon=True)
        self.reading.start()
        self.run.wait_for_beat()
        self.screen, side = pty.openpty()
        fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        self.view = subprocess.Popen(
            command("tui", self.run.id), env=env, stdin=side, stdout=side, stderr=side, start_new_session=True
        )
        os.close(side)
        self.drawn = 0
        self.drawing = threading.Thread(target=self._draw, daemon=True)
        self.drawing.start()

    def _read(self) -> None:
        assert self.follower.stdout is not None
        while data := self.follower.stdout.read1(1 << 16):  # type: ignore[attr-defined]
            self.printed.update(data)
            self.size += len(data)

    def _draw(self) -> None:
        with suppress(OSError):  # the view has ended
            while data := os.read(self.screen, 1 << 16):
                self.drawn += len(data)

    def pids(self) -> dict[str, int]:
        (feed,) = self.run.feeds()
        return {"feed": feed, "mirror": self.follower.pid, "view": self.view.pid}

    def close(self) -> None:
        for process, thread in ((self.follower, self.reading), (self.view, self.drawing)):
            process.kill()
            process.wait()
            thread.join(5)
        assert self.follower.stdout is not None
        self.follower.stdout.close()
        os.close(self.screen)
        self.run.close()


@pytest.fixture
def soak(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Iterator[Soak]:
    for name, value in rig.laptop_env().items():
        monkeypatch.setenv(name, value)
    made = Soak(rig)
    yield made
    made.close()


@pytest.mark.timeout(120 + 60 * MINUTES)
def test_after_minutes_under_a_slow_writer_nothing_has_grown_and_both_ends_are_equal(soak: Soak) -> None:
    time.sleep(min(10.0, 15 * MINUTES))  # the screen is there, and all modules are loaded
    pids = soak.pids()
    memory: dict[str, list[float]] = {name: [] for name in pids}
    opened: dict[str, list[int]] = {name: [] for name in pids}
    drawn, until_then = soak.drawn, time.monotonic() + 60 * MINUTES
    while time.monotonic() < until_then:
        for name, pid in pids.items():
            memory[name].append(resident_mib(pid))
            opened[name].append(descriptors(pid))
        time.sleep(0.5)
    assert soak.pids() == pids, "a process was exchanged: its numbers say nothing"
    assert soak.drawn > drawn, "the view drew nothing"
    soak.run.stop_writing()
    assert soak.follower.wait(30) == 0
    until(lambda: soak.run.record().get("state") == "ended", "the mirror to have everything")
    soak.run.compare()
    log = (soak.run.local / "train.log").read_bytes()
    until(lambda: soak.size == len(log), "the last bytes")
    assert soak.printed.digest() == hashlib.sha256(log).digest()
    grown = []
    for name in pids:
        quarter = len(memory[name]) // 4
        early, late = memory[name][quarter : 2 * quarter], memory[name][-quarter:]
        rise = statistics.median(late) - statistics.median(early)
        files = max(opened[name][quarter : 2 * quarter]), max(opened[name][-quarter:])
        print(
            f"{name:7} {statistics.median(late):6.1f} MiB, {rise:+5.2f} since the second quarter;"
            f" at most {files[1]} descriptors, {files[0]} before"
        )
        if rise > GROWTH[name] or files[1] > files[0] + 1:  # a small file may be open in one look alone
            grown.append(name)
    print(f"{MINUTES:g} min; {len(log) / 1e6:.1f} MB of log, {soak.drawn / 1e6:.1f} MB drawn")
    assert not grown
