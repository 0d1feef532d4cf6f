"""A payload with a trainer of a few lines, for tests of the controller that need a run and no torch."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from controller.inventory import Host
from controller.launch import LaunchedRun
from controller.ship import PACKAGE, pack
from remote_payload import rundir
from tests.waiting import until

STEPS = """\
import os, signal, time
from remote_payload import rundir

def main(run_dir, attempt):
    asked = {"stop": False, "checkpoint": False}
    events = rundir.RecordWriter(run_dir / "events.jsonl", attempt=attempt)
    signal.signal(signal.SIGTERM, lambda *_: asked.update(stop=True))
    signal.signal(signal.SIGUSR2, lambda *_: asked.update(checkpoint=True))
    folder = run_dir / "checkpoints"
    folder.mkdir(exist_ok=True)
    step = max([int(path.name[5:]) for path in folder.iterdir()], default=0)
    print("attempt", attempt, "from step", step, flush=True)
    def save():
        (folder / f"step-{step}").mkdir(exist_ok=True)
        (folder / f"step-{step}" / "model.safetensors").write_bytes(b"weights of step %d" % step)
        events.write("checkpoint", step=step, path=f"checkpoints/step-{step}", bytes=9, seconds=0.1)
    devices = [{"device": "cuda:0", "uuid": os.environ["UUID"]}] if "UUID" in os.environ else []
    while not asked["stop"]:
        step += 1
        record = {"attempt": attempt, "step": step, "phase": "training", "devices": devices}
        rundir.write_whole(run_dir / "progress.json", rundir.encode(rundir.stamp("progress", record)))
        events.write("step", step=step, loss=2.0 + attempt)
        if asked["checkpoint"]:
            asked["checkpoint"] = False
            save()
        if step == int(os.environ.get("CRASH_AT", 0)) * attempt:
            raise RuntimeError(f"boom {attempt}")
        time.sleep(0.02)
    save()
    record = {"attempt": attempt, "outcome": "stopped", "exit_code": 3, "step": step}
    rundir.write_whole(run_dir / "exit.json", rundir.encode(rundir.stamp("exit", record)))
    return 3
"""
"""Counts steps until it is told to stop; crashes at step CRASH_AT x attempt if that is set."""

HUNG = """\
import threading
from remote_payload import crash, rundir

def main(run_dir, attempt):
    crash.install(run_dir)
    held = threading.Lock()
    held.acquire()
    def waits_for_a_lock_that_nobody_gives_back():
        held.acquire()
    threads = [threading.Thread(target=waits_for_a_lock_that_nobody_gives_back) for _ in range(2)]
    for thread in threads:
        thread.start()
    record = {"attempt": attempt, "step": 7, "phase": "training"}
    rundir.write_whole(run_dir / "progress.json", rundir.encode(rundir.stamp("progress", record)))
    for thread in threads:
        thread.join()
"""
"""Writes one progress, then hangs: two threads wait for a lock, and the main one for them."""


def use_trainer(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have launches ship a payload whose trainer is `text`; returns the payload's folder."""
    copy = tmp_path / "source" / "remote_payload"
    ignored = shutil.ignore_patterns("train", "tools", "jobs", "__pycache__")
    shutil.copytree(PACKAGE, copy, ignore=ignored)
    (copy / "train").mkdir()
    (copy / "train" / "__init__.py").write_text("")
    (copy / "train" / "main.py").write_text(text)
    for module in ("launch", "resuming"):
        monkeypatch.setattr(f"controller.{module}.pack", lambda: pack(copy))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("DFLASHCTL_TIME_SCALE", "0.3")  # 4.5 s are silence: more than a busy machine takes
    return copy


def local_host(tmp_path: Path, **env: str) -> Host:
    """This machine, with a workspace of its own."""
    return Host.model_validate(
        {"name": "here", "kind": "local", "workspace": str(tmp_path / "w"), "env": env}
    )


def status_of(run: LaunchedRun) -> dict[str, object]:
    return rundir.read_whole(Path(run.run_dir) / rundir.STATUS) or {}


def wait_for_state(run: LaunchedRun, state: str) -> dict[str, object]:
    """Its status when it said `state` first."""
    status: dict[str, object] = {}

    def says_so() -> bool:
        nonlocal status
        status = status_of(run)
        return status.get("state") == state

    until(says_so, seen=lambda: status)
    return status
