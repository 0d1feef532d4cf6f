"""The life of a run on this machine: stop, checkpoint, resume, restart; real processes, a fake trainer."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controller import paths
from controller.errors import (
    CheckpointError,
    ConnectionLostError,
    GpusInUseError,
    LaunchError,
    LocalStateError,
    NotInTimeError,
    RunLostError,
    UsageError,
)
from controller.inventory import Host
from controller.launch import LaunchedRun, launch
from controller.place import Completed
from controller.resuming import resume
from controller.run_place import RunPlace
from controller.run_reader import RunReader
from controller.ship import Session
from controller.status import status_lines
from controller.stopping import checkpoint, stacks, stop
from controller.watching import last_state
from remote_payload import rundir
from remote_payload.job import Job
from tests.controller.test_json import documented
from tests.controller.trainer import (
    HUNG,
    STEPS,
    local_host,
    status_of,
    use_trainer,
    wait_for_state,
)
from tests.waiting import until

JOB = Job.from_mapping({"target": "t", "dataset": "d", "mask_token_id": 1, "steps": 100}, "test")
UUID = "GPU-aa"


@pytest.fixture(autouse=True)
def payload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use_trainer(STEPS, tmp_path, monkeypatch)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return local_host(tmp_path)


@pytest.fixture
def run(host: Host) -> Iterator[LaunchedRun]:
    run = launch(host, JOB, "tiny")
    wait_for_state(run, "running")
    yield run
    end(run)


def end(run: LaunchedRun) -> None:
    if status_of(run)["state"] not in rundir.ENDED:
        stop(run.local_dir, grace_s=1, say=lambda text: None)


def quiet(text: str) -> None:
    del text


def fake_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apps: str = "") -> Path:
    """One GPU, and a file whose lines are its processes."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "apps").write_text(apps)
    (folder / "nvidia-smi").write_text(
        '#!/bin/sh\ncase "$1" in\n'
        f"-L) echo 'GPU 0: NVIDIA H200 (UUID: {UUID})';;\n"
        f"--query-compute*) cat {folder}/apps;;\n"
        f"--query-gpu=index,uuid,name,memory.used*) echo '0, {UUID}, NVIDIA H200, 500, 143771';;\n"
        "*) exit 1;; esac\n"
    )
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder / "apps"


def test_a_checkpoint_is_asked_for_waited_for_and_named(run: LaunchedRun) -> None:
    written = checkpoint(run.local_dir, limit_s=60, say=quiet)
    assert Path(str(written["path"])).is_dir()
    assert written["path"] == f"{run.run_dir}/checkpoints/step-{written['step']}"
    assert set(written) == documented("checkpoint")
    again = checkpoint(run.local_dir, limit_s=60, say=quiet)
    assert again["step"] > written["step"]


@pytest.mark.slow
def test_a_checkpoint_that_does_not_come_in_time_or_ever_is_an_error_of_its_own(
    tmp_path: Path, host: Host, payload: Path
) -> None:
    (payload / "train" / "main.py").write_text(STEPS.replace("asked.update(checkpoint=True)", "None"))
    run = launch(host, JOB, "deaf")
    wait_for_state(run, "running")
    with pytest.raises(NotInTimeError, match=r"a checkpoint did not come within 1 s \([A-Z]+.*\)"):
        checkpoint(run.local_dir, limit_s=1, say=quiet)
    end(run)
    with pytest.raises(RunLostError, match="the run has ended"):
        checkpoint(run.local_dir, limit_s=1, say=quiet)


@pytest.mark.slow
def test_a_trainer_whose_threads_all_hang_shows_where_each_of_them_is_and_lives_on(
    host: Host, payload: Path
) -> None:
    (payload / "train" / "main.py").write_text(HUNG)
    run = launch(host, JOB, "hung")
    wait_for_state(run, "running")
    trainer = status_of(run)["trainer"]
    for asked in (1, 2):  # the second answer is not the first one again
        shown = stacks(run.local_dir, limit_s=60, say=quiet)
        assert set(shown) == documented("stacks")
        assert shown["stacks"].count("in waits_for_a_lock_that_nobody_gives_back") == 2
        assert "most recent call first" in shown["stacks"] and "in main" in shown["stacks"]
        whole = Path(str(shown["path"])).read_text()
        assert whole.count("UTC: asked for") == asked and whole.endswith(shown["stacks"])
    assert status_of(run)["trainer"] == trainer
    end(run)
    with pytest.raises(RunLostError, match="the run has ended"):
        stacks(run.local_dir, limit_s=60, say=quiet)


@pytest.mark.slow
def test_a_trainer_that_is_stopped_gives_no_stacks_and_its_kernel_stacks_are_named_instead(
    run: LaunchedRun, payload: Path
) -> None:
    trainer = status_of(run)["trainer"]
    assert isinstance(trainer, dict)
    with pytest.raises(NotInTimeError, match=r"the stacks did not come within 1 s") as caught:
        stacks(run.local_dir, limit_s=1, say=quiet)  # this trainer has no handler for them
    assert "still starting" in caught.value.hint
    end(run)
    (payload / "train" / "main.py").write_text(HUNG)
    hung = launch(local_host(payload.parents[1]), JOB, "frozen")
    wait_for_state(hung, "running")
    pid = status_of(hung)["trainer"]["pid"]  # type: ignore[index]
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(NotInTimeError) as caught:
            stacks(hung.local_dir, limit_s=1, say=quiet)
        assert f"ps -L -o tid,stat,wchan:32,comm -p {pid}" in caught.value.hint
    finally:
        os.kill(pid, signal.SIGCONT)
    end(hung)


def test_a_stop_tells_how_the_run_ended_and_a_second_one_the_same(run: LaunchedRun) -> None:
    stopped = stop(run.local_dir, grace_s=60, say=quiet)
    assert (stopped["state"], stopped["exit_code"], stopped["held"]) == ("STOPPED", 3, [])
    assert set(stopped) == documented("stop")
    assert stop(run.local_dir, grace_s=60, say=quiet) == stopped


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_written_is_said_at_once(tmp_path: Path, payload: Path) -> None:
    broken = STEPS.replace(
        "            save()\n        if step",
        "            events.write('checkpoint_failed', step=step, error='disk full')\n        if step",
    )
    assert broken != STEPS
    (payload / "train" / "main.py").write_text(broken)
    run = launch(local_host(tmp_path), JOB, "full")
    wait_for_state(run, "running")
    with pytest.raises(CheckpointError, match=r"checkpoint of step \d+ not written: disk full"):
        checkpoint(run.local_dir, limit_s=60, say=quiet)
    end(run)


@pytest.mark.slow
def test_a_stop_names_who_still_holds_memory_of_the_runs_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apps = fake_nvidia_smi(tmp_path, monkeypatch)
    run = launch(local_host(tmp_path, UUID=UUID), JOB, "tiny")
    wait_for_state(run, "running")
    apps.write_text(f"{UUID}, 4711, python, 9000\n")
    said: list[str] = []
    stopped = stop(run.local_dir, grace_s=60, say=said.append)
    assert stopped["held"] == ["GPU 0: pid 4711 (python) 8.8 GiB"]
    assert said[-1] == f"warning: {run.run_id}: GPU 0: pid 4711 (python) 8.8 GiB"


@pytest.mark.slow
def test_a_launch_on_gpus_in_use_is_refused_and_names_run_and_process_unless_forced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apps = fake_nvidia_smi(tmp_path, monkeypatch)
    host = local_host(tmp_path)
    first = launch(host, JOB, "first")  # its devices are auto: all there are
    apps.write_text(f"{UUID}, 4711, python, 9000\n")
    with pytest.raises(GpusInUseError) as caught:
        launch(host, JOB, "second")
    assert f"GPU 0: run {first.run_id} (" in caught.value.message
    assert "GPU 0: pid 4711 (python) 8.8 GiB" in caught.value.message
    assert "--force" in caught.value.hint
    assert [known.run_id for known in paths.known_runs()] == [first.run_id]
    on_cpu = Job.from_mapping({"target": "t", "dataset": "d", "mask_token_id": 1, "targets": ["cpu"],
                               "drafters": ["cpu"]}, "test")  # fmt: skip
    said: list[str] = []
    others = [launch(host, on_cpu, "cpu"), launch(host, JOB, "forced", say=said.append, force=True)]
    assert any("shared because of --force: GPU 0: run" in line for line in said)
    for run in (first, *others):
        end(run)


def test_a_resumed_run_goes_on_from_its_checkpoint_in_the_same_mirror(run: LaunchedRun) -> None:
    stop(run.local_dir, grace_s=60, say=quiet)
    before = RunReader(run.local_dir).catch_up(time.time())
    assert before.history.curves["loss"].last == 3.0
    said: list[str] = []
    resumed = resume(run.local_dir, ["steps=900"], say=said.append)
    assert (resumed.run, resumed.attempt, resumed.changes) == (run.run_id, 2, {"steps": [100, 900]})
    assert resumed.checkpoint == max(dict(before.curves["loss"].all_points))
    assert resumed.payload == resumed.payload_before == run.digest
    assert "steps: 100 becomes 900" in said
    wait_for_state(run, "running")
    state = last_state(run.local_dir)
    assert (state.attempt, state.ended) == (2, False)
    assert [(a.number, a.begun_by, a.state) for a in state.attempts] == [
        (1, "launch", "finished"),
        (2, "resume", ""),
    ]
    until(lambda: last_state(run.local_dir).curves["loss"].last == 4.0, "a step of the second attempt")
    assert any(line.startswith("  attempt 1: stopped on request at step ") for line in status_lines(state))
    log = (run.local_dir / rundir.TRAIN_LOG).read_text().splitlines()
    assert log == ["attempt 1 from step 0", f"attempt 2 from step {resumed.checkpoint}"]


@pytest.mark.slow
def test_a_resume_whose_answer_is_lost_is_seen_all_the_same(
    run: LaunchedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop(run.local_dir, grace_s=60, say=quiet)
    assert last_state(run.local_dir).ended
    ask = Session.ask

    def cut(session: Session, *order: Any, **options: Any) -> Completed:
        ask(session, *order, **options)
        raise ConnectionLostError("cut")

    monkeypatch.setattr(Session, "ask", cut)
    with pytest.raises(ConnectionLostError) as caught:
        resume(run.local_dir, [], say=quiet)
    assert caught.value.hint == f"Whether it goes on says: dflashctl status {run.run_id}"
    wait_for_state(run, "running")
    state = last_state(run.local_dir)
    assert (state.attempt, state.ended) == (2, False)


def test_a_resume_that_cannot_be_noted_here_begins_no_attempt(
    run: LaunchedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop(run.local_dir, grace_s=60, say=quiet)

    def full(place: RunPlace, directory: Path) -> None:
        raise LocalStateError(f"{directory}: cannot be written (No space left on device)")

    with monkeypatch.context() as patched:
        patched.setattr(RunPlace, "write", full)
        with pytest.raises(LocalStateError, match="cannot be written"):
            resume(run.local_dir, [], say=quiet)
    assert last_state(run.local_dir).attempt == 1


@pytest.mark.slow
def test_a_resume_under_another_payload_says_so_and_is_followed_with_it(
    run: LaunchedRun, payload: Path
) -> None:
    stop(run.local_dir, grace_s=60, say=quiet)
    (payload / "train" / "main.py").write_text(STEPS + "# newer\n")
    resumed = resume(run.local_dir, [], say=quiet)
    assert resumed.payload != resumed.payload_before == run.digest
    place = RunPlace.read(run.local_dir)
    assert place.digest == resumed.payload
    assert place.payload_dir.endswith(resumed.payload)
    assert last_state(run.local_dir).attempts[-1].payload == resumed.payload


def test_a_resume_that_cannot_be_is_refused_before_anything_is_sent_or_by_the_payload(
    run: LaunchedRun,
) -> None:
    last_state(run.local_dir)
    said: list[str] = []
    with pytest.raises(UsageError, match="a resumed run keeps its job; seed cannot change"):
        resume(run.local_dir, ["seed=4", "steps=7"], say=said.append)
    assert said == ["steps: 100 becomes 7", "seed: 0 becomes 4  (not allowed)"]
    with pytest.raises(UsageError, match="unknown key 'sted'"):
        resume(run.local_dir, ["sted=4"], say=quiet)
    with pytest.raises(LaunchError, match="not resumed: the run is alive"):
        resume(run.local_dir, [], say=quiet)


@pytest.mark.slow
def test_a_crashing_run_is_restarted_and_its_attempts_are_seen_from_here(tmp_path: Path) -> None:
    values = {"target": "t", "dataset": "d", "mask_token_id": 1, "restart": "on-crash", "restart_limit": 2}
    waiting = Job.from_mapping(values | {"restart_wait": 600.0}, "test")
    run = launch(local_host(tmp_path, CRASH_AT="3"), waiting, "waiting")
    wait_for_state(run, "restarting")
    state = last_state(run.local_dir)
    assert state.state == "RESTARTING"
    assert state.health.detail == "attempt 1 failed at step 3: RuntimeError: boom 1"
    end(run)
    run = launch(local_host(tmp_path, CRASH_AT="3"), Job.from_mapping(values, "test"), "crashing")
    wait_for_state(run, "failed")
    state = last_state(run.local_dir)
    assert (state.attempt, state.exit_code) == (3, 1)
    assert [(a.number, a.begun_by, a.state, a.step) for a in state.attempts] == [
        (1, "launch", "failed", 3),
        (2, "restart", "failed", 6),
        (3, "restart", "failed", 9),
    ]
    assert "restarted 2 times already" in state.health.detail
