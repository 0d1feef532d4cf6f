"""How runs end before their last step: by request, or because a thread failed."""

from __future__ import annotations

import functools
import importlib
import io
import multiprocessing.util
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from remote_payload import rundir
from remote_payload.train import checkpoint
from remote_payload.train.main import Trainer
from remote_payload.train.run import Run
from remote_payload.train.run_control import ThreadStatus
from tests.payload.trial import Trial

pytestmark = pytest.mark.slow

LONG = 100_000
"""Steps of a run that is not meant to reach its end."""


class Broken(RuntimeError):
    """What a fault raises."""


def fail_at(module: str, name: str, call: int, what: Callable[[], None]) -> None:
    """Make `module.name` do `what` instead of its work, the `call`-th time it is called."""
    owner: Any = importlib.import_module(module)
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    real, calls = getattr(owner, last), []

    @functools.wraps(real)
    def faulty(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            what()
        return real(*args, **kwargs)

    setattr(owner, last, faulty)


def raise_broken() -> None:
    raise Broken("on purpose") from ValueError("the cause")


def hang() -> None:
    time.sleep(600)


PACKAGE = "remote_payload.train"
FAULTS = {
    "reader": (f"{PACKAGE}.batch", "BatchMaker.make", 30),
    "target-0": (f"{PACKAGE}.pipeline", "compute_features", 3),
    "drafter-0": (f"{PACKAGE}.replica", "block_loss", 5),
    "evaluator": (f"{PACKAGE}.evaluation", "Decoder.speculative", 2),
}


@pytest.mark.parametrize("thread", FAULTS)
def test_a_failure_in_any_thread_ends_the_run_at_once_with_its_traceback_and_every_threads_stack(
    tmp_path: Path, thread: str
) -> None:
    trial = Trial(tmp_path, steps=LONG, targets=["cpu"] * 2, drafters=["cpu"] * 2, crash_grace=180.0)
    started = time.time()
    assert trial.fork(functools.partial(fail_at, *FAULTS[thread], raise_broken)) == 1
    (crash,) = trial.crashes()
    role = thread.split("-")[0]
    if role in ("target", "drafter"):  # there are two of each; either may come to the faulty call
        assert crash["thread"] in (f"{role}-0", f"{role}-1")
    else:
        assert crash["thread"] == thread
    assert (crash["role"], crash["first"], crash["attempt"]) == (role, True, 1)
    assert crash["error"].endswith("Broken: on purpose")
    assert "ValueError: the cause" in crash["traceback"] and "raise_broken" in crash["traceback"]
    assert started < crash["t"] < time.time()
    stacks = (trial.run_dir / rundir.CRASH / f"stacks-{crash['thread']}-failed.txt").read_text()
    assert stacks.count("Thread 0x") >= 6
    end = trial.exit
    assert (end["outcome"], end["exit_code"]) == ("crashed", 1) and end["error"].endswith("on purpose")
    assert end["t"] - crash["t"] < 150, "nobody waited for the grace to be over"
    (event,) = trial.events("crash")
    assert event["first"] is True and event["file"].startswith("thread-")
    assert event["thread"] == crash["thread"] and event["error"] == crash["error"]
    (last,) = trial.events("end")
    assert (last["outcome"], last["exit_code"]) == ("crashed", 1)
    states = {entry["name"]: entry["state"] for entry in trial.progress["threads"]}
    assert states.pop(crash["thread"]) == "failed" and set(states.values()) == {"ended"}
    assert f"{crash['thread']} failed in" in trial.log


def test_a_failed_run_whose_gpus_add_up_by_nccl_leaves_at_once(tmp_path: Path) -> None:
    """A GPU may be in a sum that another one never began, and NCCL's own end waits for that for ever."""
    trial = Trial(tmp_path, steps=LONG, held_out="")
    assert trial.fork(fail_by_nccl) == 1
    assert trial.exit["outcome"] == "crashed" and len(trial.crashes()) == 1


def fail_by_nccl() -> None:
    """A failure in a run that looks as if NCCL were there; the process's own end hangs."""
    from remote_payload.train import main

    multiprocessing.util.Finalize(None, hang, exitpriority=0)
    real = main.summary

    def summary(run: Run) -> dict[str, Any]:
        run.reduction.threaded = True
        return real(run)

    vars(main)["summary"] = summary
    fail_at(f"{PACKAGE}.replica", "block_loss", 5, raise_broken)


def test_a_failure_of_the_thread_that_reports_is_a_failure_of_the_run(tmp_path: Path) -> None:
    """Else the run would go on unseen, and be taken for stalled."""
    trial = Trial(tmp_path, steps=LONG, held_out="")
    fault = functools.partial(fail_at, f"{PACKAGE}.progress", "Progress.snapshot", 2, raise_broken)
    assert trial.fork(fault) == 1
    (crash,) = trial.crashes()
    assert (crash["thread"], crash["first"]) == ("progress", True)
    assert trial.exit["outcome"] == "crashed"


def test_of_two_failures_the_first_is_called_first_and_both_are_kept(tmp_path: Path) -> None:
    trial = Trial(tmp_path, steps=LONG, targets=["cpu"] * 2)
    assert trial.fork(break_both_targets) == 1
    crashes = sorted(trial.crashes(), key=lambda crash: not crash["first"])
    assert [crash["first"] for crash in crashes] == [True, False]
    assert sorted(crash["error"].rsplit(" ", 1)[1] for crash in crashes) == ["target-0", "target-1"]
    assert trial.exit["error"] == crashes[0]["error"]


def break_both_targets() -> None:
    """Both targets fail at the same moment."""
    import threading

    from remote_payload.train import pipeline

    meeting = threading.Barrier(2, timeout=60)

    def failing(*_: Any) -> None:
        meeting.wait()
        raise Broken(threading.current_thread().name)

    vars(pipeline)["compute_features"] = failing


@pytest.mark.slow
def test_a_thread_that_will_not_end_is_left_behind_after_the_grace_with_its_stack(tmp_path: Path) -> None:
    trial = Trial(tmp_path, steps=LONG, targets=["cpu"] * 2, crash_grace=10.0, held_out="")
    assert trial.fork(hang_and_fail) == 1
    assert trial.exit["outcome"] == "crashed"
    stacks = (trial.run_dir / rundir.CRASH / "stacks-threads-did-not-end.txt").read_text()
    assert "in hang" in stacks
    assert "These threads did not end after the crash and are left behind: target-" in trial.log
    assert "progress" not in trial.log


def hang_and_fail() -> None:
    fail_at(f"{PACKAGE}.pipeline", "compute_features", 3, hang)
    fail_at(f"{PACKAGE}.pipeline", "compute_features", 4, raise_broken)


@pytest.mark.slow
def test_a_checkpoint_that_a_disk_never_takes_is_left_behind_too(tmp_path: Path) -> None:
    trial = Trial(tmp_path, steps=LONG, crash_grace=10.0, held_out="", checkpoint_every=2)
    assert trial.fork(hang_while_saving_and_fail) == 1
    assert trial.exit["outcome"] == "crashed" and trial.exit["error"].endswith("on purpose")
    assert "are left behind: saver" in trial.log
    stacks = (trial.run_dir / rundir.CRASH / "stacks-threads-did-not-end.txt").read_text()
    assert "in hang" in stacks and rundir.checkpoint_steps(trial.run_dir) == []


def hang_while_saving_and_fail() -> None:
    """Written beside training, as on a GPU; the target fails only once the disk hangs."""
    import threading

    from remote_payload.train import pipeline, saving

    vars(saving)["goes_beside"] = lambda _device: True
    hangs, compute = threading.Event(), pipeline.compute_features

    def begin_to_hang() -> None:
        hangs.set()
        hang()

    def compute_or_fail(*given: Any) -> Any:
        if hangs.is_set():
            raise_broken()
        return compute(*given)

    fail_at(f"{PACKAGE}.checkpoint", "_write", 1, begin_to_hang)
    vars(pipeline)["compute_features"] = compute_or_fail


@pytest.mark.parametrize("where", [f"{PACKAGE}.pipeline compute_features", f"{PACKAGE}.main prepare"])
def test_a_failure_whose_record_cannot_be_written_ends_the_run_all_the_same(
    where: str, tmp_path: Path
) -> None:
    trial = Trial(tmp_path, steps=LONG, held_out="")
    assert trial.fork(functools.partial(fail_with_a_full_disk, *where.split())) == 1
    assert trial.exit["outcome"] == "crashed" and trial.exit["error"].endswith("on purpose")
    assert trial.crashes() == [] and "No space left on device" in trial.log


def fail_with_a_full_disk(module: str, name: str) -> None:
    from remote_payload import crash

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    crash.write_thread = full  # type: ignore[assignment]
    fail_at(module, name, 1, raise_broken)


def test_a_failure_on_a_gpu_that_says_nothing_of_its_memory_any_more_has_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: GPU is lost")

    monkeypatch.setattr(torch.cuda, "memory_summary", lost)
    trial = Trial(tmp_path)
    Trainer(trial.run_dir, 1)._fail(Broken("on purpose"), ThreadStatus("drafter-0", "drafter", "cuda:0"))
    (crash,) = trial.crashes()
    assert crash["memory"] == "not known (RuntimeError: CUDA error: GPU is lost)"


def test_a_run_whose_log_and_events_find_no_room_trains_to_its_end(tmp_path: Path) -> None:
    trial = Trial(tmp_path, held_out="")
    for name in (rundir.EVENTS, rundir.TRAIN_LOG):
        (trial.run_dir / name).symlink_to("/dev/full")
    assert trial.fork(write_at_once) == 0
    assert trial.exit["outcome"] == "finished" and trial.exit["step"] == 6
    assert checkpoint.damage(trial.run_dir / trial.exit["checkpoint"]) is None


def write_at_once() -> None:
    """Output without a buffer, as the supervisor has it (PYTHONUNBUFFERED)."""
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)


def test_a_run_that_finished_has_its_exit_code_also_where_its_last_word_finds_no_room(tmp_path: Path) -> None:
    trial = Trial(tmp_path, held_out="")
    (trial.run_dir / rundir.EXIT).mkdir()  # no file can take its place
    assert trial.fork() == 0
    assert trial.last_line.endswith("exit.json could not be written: Is a directory")
    assert trial.events("end")[0]["outcome"] == "finished"


def test_a_failure_before_the_threads_start_is_a_crash_of_main(tmp_path: Path) -> None:
    trial = Trial(tmp_path)
    assert trial.fork(functools.partial(fail_at, f"{PACKAGE}.main", "prepare", 1, raise_broken)) == 1
    (crash,) = trial.crashes()
    assert (crash["thread"], crash["first"]) == ("main", True)
    assert trial.exit["outcome"] == "crashed"


def test_sigterm_stops_after_the_step_with_a_complete_checkpoint_and_says_so(tmp_path: Path) -> None:
    trial = Trial(tmp_path, steps=LONG, targets=["cpu"] * 2, drafters=["cpu"] * 2)
    trial.start()
    trial.wait_for(lambda: trial.events("step"))
    for _ in range(20):  # a second one inside the handler of the first must not hang it
        trial.signal(signal.SIGTERM)
    assert trial.finish() == 3
    end = trial.exit
    assert (end["outcome"], end["exit_code"], end["error"]) == ("stopped", 3, None)
    step = end["step"]
    assert 0 < step < LONG and end["checkpoint"] == f"checkpoints/step-{step}"
    assert len(trial.tensors(step)) == 11 + 3
    training = trial.tensors(step, "training")
    assert int(training["adam_step"][0]) == step
    assert training["masters"].numel() == sum(value.numel() for value in trial.tensors(step).values())
    assert [(event["request"], event["step"]) for event in trial.events("request")] == [("stop", step)]
    assert trial.events("end")[0]["outcome"] == "stopped" and not trial.events("crash")
    assert f"{step} of {LONG} (stopped on request)" in trial.log


def test_sigterm_while_models_load_ends_the_run_cleanly(tmp_path: Path) -> None:
    trial = Trial(tmp_path, steps=LONG)
    trial.start()
    trial.wait_for(lambda: trial.events("dataset"))
    trial.signal(signal.SIGTERM)
    assert trial.finish() == 3
    assert trial.exit["outcome"] == "stopped" and "Traceback" not in trial.log


def test_a_checkpoint_is_written_on_sigusr2_and_stacks_on_sigusr1_and_training_goes_on(
    tmp_path: Path,
) -> None:
    trial = Trial(tmp_path, steps=LONG, held_out="")
    trial.start()
    trial.wait_for(lambda: trial.events("step"))
    trial.signal(signal.SIGUSR2)
    trial.wait_for(lambda: trial.events("checkpoint"))
    (event,) = trial.events("checkpoint")
    assert event["bytes"] > 0 and len(trial.tensors(event["step"])) == 14
    trial.signal(signal.SIGUSR1)
    request = trial.run_dir / rundir.CRASH / "stacks-request.txt"
    trial.wait_for(lambda: request.exists() and request.read_text().count("Thread 0x") >= 3)
    progress = trial.run_dir / rundir.PROGRESS  # written once a second
    trial.wait_for(lambda: progress.exists() and trial.progress["step"] > event["step"])
    trial.signal(signal.SIGTERM)
    assert trial.finish() == 3
    assert [event["request"] for event in trial.events("request")] == ["checkpoint", "stop"]
    assert trial.exit["step"] > event["step"]


def test_a_killed_run_leaves_no_half_checkpoint_and_no_word_of_its_own(tmp_path: Path) -> None:
    trial = Trial(tmp_path, steps=LONG, held_out="", checkpoint_every=1)
    trial.start()
    trial.wait_for(lambda: len(trial.events("checkpoint")) > 3)
    trial.signal(signal.SIGKILL)
    assert trial.finish() == -signal.SIGKILL
    assert not (trial.run_dir / rundir.EXIT).exists()
    for path in (trial.run_dir / rundir.CHECKPOINTS).iterdir():
        if path.name.startswith("step-"):
            assert len(trial.tensors(int(path.name[5:]))) == 14
            assert checkpoint.damage(path) is None
