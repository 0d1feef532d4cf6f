"""A run directory in the rig's container with a process that writes it, and its mirror folder here.

The writer is the payload's own record code without a trainer: status and progress as a run has them, a log
and events at a rate. For the tests of the mirror and its bench.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from controller import paths
from controller.mirror_files import MIRROR
from controller.run_place import RunPlace
from remote_payload import rundir
from tests.rig.rig import Rig
from tests.waiting import until

ROOT = Path(__file__).parents[2]
_NUMBERS = itertools.count(1)

WRITER = """
import json, os, random, sys, threading, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from remote_payload import identity, rundir
run, rate, crashes = Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "crashes"
def status(state, **fields):
    who = identity.identity(os.getpid())
    record = rundir.stamp("status", {"attempt": 1, "state": state, "boot_id": identity.boot_id()})
    record |= {"supervisor": who, "trainer": who, **fields}
    rundir.write_whole(run / "status.json", rundir.encode(record))
def stopped():
    return (run / "control" / "stop").exists()
def beat():  # the small files of a run that does nothing else
    for second in range(1, 1 << 30):
        rundir.write_whole(run / "progress.json", rundir.encode(rundir.stamp("progress", {"step": second})))
        if second % 2 == 0:
            status("running")
        for _ in range(20):
            time.sleep(0.05)
            if stopped():
                return
status("running")
dice = random.Random(1)
events = rundir.RecordWriter(run / "events.jsonl", attempt=1)
log = open(run / "train.log", "ab", buffering=0)
beating = threading.Thread(target=beat)
beating.start()
step = 0
while not stopped():
    if not rate:
        time.sleep(0.1)
        continue
    step += 1
    log.write(dice.randbytes(rate // 50) + f" step {step} größe\\n".encode())
    events.write("step", step=step)
    if crashes and step % 50 == 0:
        (run / "crash" / f"thread-{step}.json").write_bytes(dice.randbytes(3000))
    time.sleep(0.02)
beating.join()
status("finished", exit_code=0)
"""


class MirroredRun:
    """A run in `rig` whose writer logs `rate` bytes a second (0: only what others write), and its folder
    `local`, under the state root, so that the command line knows it as `id`. `crashes`: one more report in
    `crash/` with every 50 steps.

    The caller has the variables of `rig.laptop_env()` in its environment.
    """

    def __init__(self, rig: Rig, rate: int, *, crashes: bool = True) -> None:
        self.rig = rig
        self.id = f"mirror-{os.getpid()}-{next(_NUMBERS)}"
        self.there = f"{rig.workspace}/runs/{self.id}"
        self.payload = payload_in(rig)
        for name in ("crash", "control"):
            (self.remote / name).mkdir(parents=True)
        (self.remote / "gpu.jsonl").touch()
        (self.remote / "run.json").write_text(json.dumps({"id": self.id}))
        rig.container_path(f"{rig.workspace}/writer.py").write_text(WRITER)
        argv = [rig.python, "-S", f"{rig.workspace}/writer.py", self.payload, self.there, str(rate)]
        argv.append("crashes" if crashes else "none")
        self.writer = subprocess.Popen(rig.container_argv(argv), cwd="/")
        self.local = paths.make_mirror_dir(self.id, rig.host)
        place = place_of(rig, self.id, self.there)
        (self.local / paths.PLACE).write_text(place.model_dump_json())

    @property
    def remote(self) -> Path:
        """The run directory as this process finds it; another path after a restart of the container."""
        return self.rig.container_path(self.there)

    def record(self) -> dict[str, Any]:
        """`mirror.json` as it is."""
        return rundir.read_whole(self.local / MIRROR) or {}

    def wait_for_beat(self, since: float = 0.0) -> None:
        """Until something was heard after this call, by a connection that was made after `since`."""
        called = time.time()

        def heard() -> bool:
            record = self.record()
            connected = record.get("state") == "connected" and record["since"] > since
            return connected and record["last_heard"] > called

        until(heard, "a beat", seen=self.record)

    def stop_writing(self) -> None:
        """Let the run finish."""
        (self.remote / "control" / "stop").touch()
        assert self.writer.wait(60) == 0

    def compare(self) -> None:
        """Assert that every mirrored file equals the container's, by sha256."""
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
        return feeds_of(self.rig, self.there)

    def close(self) -> None:
        """End the writer; the container's processes that serve the run end by themselves."""
        self.writer.kill()
        self.writer.wait()
        for pid in self.rig.container_processes():  # lxc-attach's death leaves what it started
            if {b"-S", self.there.encode()} <= set(words_of(pid)) and b"feed" not in words_of(pid):
                os.kill(pid, 9)


def place_of(rig: Rig, run_id: str, run_dir: str) -> RunPlace:
    """The place.json of a run in the rig's container, whose payload `payload_in` made."""
    from controller.inventory import load

    return RunPlace(
        host=load().hosts["rig"],
        run_id=run_id,
        run_dir=run_dir,
        payload_dir=payload_in(rig),
        digest="0" * 64,
        python=rig.python,
        created=time.time(),
        job_name="tiny",
    )


def payload_in(rig: Rig) -> str:
    """A copy of the payload in the container: a checkout below /tmp is not in there."""
    payload = f"{rig.workspace}/payload"
    if not (copy := rig.container_path(f"{payload}/remote_payload")).exists():
        ignored = shutil.ignore_patterns("__pycache__", "*.arrow", "train", "tools")
        shutil.copytree(ROOT / "remote_payload", copy, ignore=ignored)
    return payload


def feeds_of(rig: Rig, served: str) -> list[int]:
    """Host pids of the feeds in the container that serve the run directory or log file `served`."""
    found = []
    for pid in rig.container_processes():
        words = words_of(pid)
        if served.encode() in words and b"-S" in words[:2] and {b"feed", b"feed-log"} & set(words):
            found.append(pid)
    return found


def words_of(pid: int) -> list[bytes]:
    """The command line of a process; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []
