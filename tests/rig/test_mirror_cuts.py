"""The mirror's promise as a property: whatever is cut, when and how often, both ends are equal in the end.

Connections die, freeze or lose their packets, feeds and views are killed, under a writer of 5 MB/s. A view
is a process that keeps the mirror; two of them wait for each other, and a third reads what they write and
prints it. DFLASHCTL_CUTS says how many cuts there are (`make faults`: 200), DFLASHCTL_SEED repeats a run.
"""

from __future__ import annotations

import hashlib
import io
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from controller import paths
from controller.inventory import load
from controller.logs import follow_log
from controller.mirror import ask_for_whole_log
from remote_payload import rundir
from tests.rig.cable import Cable
from tests.rig.mirrored_run import ROOT, MirroredRun, place_of
from tests.rig.rig import Rig
from tests.waiting import until

CUTS = int(os.environ.get("DFLASHCTL_CUTS", "20"))
SEED = int(os.environ.get("DFLASHCTL_SEED", str(random.SystemRandom().randrange(1_000_000))))
KINDS = ("connection", "freeze", "packets", "feed", "view")
SCALE = "0.05"

VIEW = """
import sys
from pathlib import Path
from controller.watching import new_mirror
mirror = new_mirror(Path(sys.argv[1]))
mirror.start()
while mirror.running:
    mirror.wait_for_news(mirror.news_count, 1.0)
"""


class Printed(io.RawIOBase):
    """Standard output of a follower: only what was printed, as a digest."""

    def __init__(self) -> None:
        self.sha256, self.size = hashlib.sha256(), 0

    def write(self, data: object) -> int:
        content = bytes(data)  # type: ignore[call-overload]
        self.sha256.update(content)
        self.size += len(content)
        return len(content)


class Scene:
    """A run behind a cable, two views of it that write its mirror, and a follower that only reads."""

    def __init__(self, rig: Rig, cable: Cable) -> None:
        self.rig, self.cable = rig, cable
        self.run = MirroredRun(rig, rate=5_000_000)
        place = place_of(rig, self.run.id, self.run.there)
        host = load().hosts["rig"].model_dump()
        host |= {"address": "cable", "port": None, "connect_timeout": 3.0}
        place = place.model_copy(update={"host": type(place.host)(**host)})
        (self.run.local / paths.PLACE).write_text(place.model_dump_json())
        ask_for_whole_log(self.run.local)
        self.views = [self.view(), self.view()]
        self.out, self.notes, self.code = Printed(), io.StringIO(), None
        self.follower = threading.Thread(target=self.follow, daemon=True)
        self.follower.start()

    def view(self) -> subprocess.Popen[bytes]:
        env = os.environ | {"DFLASHCTL_TIME_SCALE": SCALE, "PYTHONPATH": str(ROOT)}
        return subprocess.Popen([sys.executable, "-c", VIEW, str(self.run.local)], env=env)

    def follow(self) -> None:
        self.code = follow_log(
            self.run.local,
            follow=True,
            tail=None,
            whole=True,
            out=self.out,  # type: ignore[arg-type]
            notes=self.notes,
        )

    def cut(self, kind: str) -> None:
        """Do one of `KINDS`, and undo what would not end by itself once it was noticed."""
        if kind == "connection":
            self.rig.kill_connections()
        elif kind == "freeze":
            began = time.time()
            self.rig.freeze_connections()
            self.wait_until_noticed(began)
            self.rig.kill_connections()
        elif kind == "packets":
            began = time.time()
            self.cable.cut()
            self.wait_until_noticed(began)
            self.cable.mend()
        elif kind == "feed":
            for pid in self.run.feeds():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        else:
            holder = self.run.record().get("pid")
            for view in self.views:
                if view.pid == holder:
                    view.kill()
                    view.wait()
                    self.views.remove(view)
                    self.views.append(self.view())
                    return

    def wait_until_noticed(self, began: float) -> None:
        def noticed() -> bool:  # and perhaps connected again since
            record = self.run.record()
            return record.get("state") != "connected" or record["since"] > began

        until(noticed, "the silence to be noticed")

    def close(self) -> None:
        for view in self.views:
            view.kill()
            view.wait()
        self.run.close()
        self.rig.thaw_connections()
        self.follower.join(60)
        until(lambda: not self.run.feeds(), "the feeds to be gone")


@pytest.fixture
def scene(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    for name, value in (rig.laptop_env() | {"DFLASHCTL_TIME_SCALE": SCALE}).items():
        monkeypatch.setenv(name, value)
    with Cable(rig.port) as cable:
        cable.introduce(rig)
        made = Scene(rig, cable)
        yield made
        cable.mend()
        made.close()


@pytest.mark.timeout(60 + 12 * CUTS)
def test_after_any_cuts_under_a_fast_writer_both_ends_are_equal(scene: Scene) -> None:
    print(f"{CUTS} cuts; DFLASHCTL_SEED={SEED}")
    run, dice = scene.run, random.Random(SEED)
    counts = dict.fromkeys(KINDS, 0)
    last = 0.0
    for number in range(CUTS):
        run.wait_for_beat(since=last)
        time.sleep(dice.uniform(0.0, 0.3))
        kind = KINDS[number] if number < len(KINDS) else dice.choice(KINDS)
        counts[kind] += 1
        last = time.time()
        scene.cut(kind)
    run.wait_for_beat(since=last)
    run.stop_writing()
    until(lambda: run.record().get("state") == "ended", "the mirror to have everything")
    run.compare()
    scene.follower.join(60)
    assert scene.code == 0, scene.notes.getvalue()
    log = (run.local / "train.log").read_bytes()
    assert (scene.out.size, scene.out.sha256.digest()) == (len(log), hashlib.sha256(log).digest())
    events = [rundir.decode(line) for line in (run.local / "events.jsonl").read_bytes().splitlines()]
    steps = [event["step"] for event in events if event is not None]
    assert steps == list(range(1, len(steps) + 1))
    until(lambda: not run.feeds(), "the feeds to be gone")
    print(f"{counts}; {len(log) / 1e6:.0f} MB of log, {len(steps)} events")
