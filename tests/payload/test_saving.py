"""A disk that refuses a checkpoint costs that checkpoint, and not the run but when it was the last."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

import pytest

from remote_payload import rundir
from remote_payload.train import checkpoint, checkpoint_index
from tests.payload.trial import Trial

pytestmark = pytest.mark.slow


def full_at(*steps: int) -> None:
    """No space left in the middle of writing the checkpoints of `steps`."""
    write = checkpoint._write

    def write_or_not(folder: Path, step: int, *rest: Any) -> None:
        if step in steps:
            (folder / "model.safetensors").write_bytes(b"half of it")
            raise OSError(28, "No space left on device", str(folder / "model.safetensors"))
        write(folder, step, *rest)

    vars(checkpoint)["_write"] = write_or_not


def names(trial: Trial) -> list[str]:
    return sorted(path.name for path in (trial.run_dir / rundir.CHECKPOINTS).iterdir())


def test_a_full_disk_is_said_the_old_checkpoints_stay_and_the_run_trains_on(tmp_path: Path) -> None:
    trial = Trial(tmp_path, steps=12, checkpoint_every=3, held_out="", checkpoint_keep=3)
    assert trial.fork(functools.partial(full_at, 6, 9)) == 0, trial.log
    assert [event["step"] for event in trial.events("checkpoint")] == [3, 12]
    assert [event["step"] for event in trial.events("checkpoint_failed")] == [6, 9]
    assert all("No space left on device" in event["error"] for event in trial.events("checkpoint_failed"))
    assert names(trial) == ["index.json", "step-12", "step-3"]
    line = "The checkpoint of step 6 could not be written: [Errno 28] No space left on device"
    assert line in trial.log and "(the newest is step-3); training goes on" in trial.log
    assert trial.progress["checkpoint_error"] is None  # the last one was written
    assert trial.exit["outcome"] == "finished" and "Traceback" not in trial.log


def test_when_the_last_checkpoint_cannot_be_written_the_run_does_not_end_as_finished(tmp_path: Path) -> None:
    trial = Trial(tmp_path, steps=6, checkpoint_every=3, held_out="")
    assert trial.fork(functools.partial(full_at, 6)) == 1
    end = trial.exit
    assert (end["outcome"], end["step"], end["checkpoint"]) == ("crashed", 6, "checkpoints/step-3")
    assert "SaveError: The checkpoint of step 6 could not be written" in end["error"]
    assert trial.progress["checkpoint_error"].startswith("step 6: [Errno 28] No space left on device")
    assert names(trial) == ["index.json", "step-3"]
    # With space again, the next attempt goes on from the older one and ends well.
    assert trial.fork(attempt=2) == 0, trial.log
    assert trial.events("resume")[0]["from_step"] == 3 and trial.exit["outcome"] == "finished"
    assert names(trial) == ["index.json", "step-3", "step-6"]


def test_every_evaluated_step_is_saved_and_only_the_best_and_the_newest_stay(tmp_path: Path) -> None:
    trial = Trial(tmp_path, steps=12, eval_every=2, checkpoint_keep=1)
    taus = {2: 1.5, 4: 3.0, 6: 2.0, 8: 2.5, 10: 1.0, 12: 2.9}
    assert trial.fork(functools.partial(say_taus, taus)) == 0, trial.log
    assert [event["step"] for event in trial.events("checkpoint")] == [2, 4, 6, 8, 10, 12]
    assert names(trial) == ["index.json", "step-12", "step-4"]
    assert [(event["step"], event["tau"]) for event in trial.events("best")] == [(2, 1.5), (4, 3.0)]
    assert trial.progress["best"] == {"step": 4, "tau": 3.0}
    end = trial.exit
    assert (end["best_step"], end["best_tau"], end["best_checkpoint"]) == (4, 3.0, "checkpoints/step-4")
    assert (end["checkpoint"], end["tau_after"]) == ("checkpoints/step-12", 2.9)
    assert f"tau 3.000 at step 4, {trial.run_dir / 'checkpoints/step-4'}" in trial.log


def test_without_checkpoint_best_evaluated_steps_are_not_saved(tmp_path: Path) -> None:
    trial = Trial(tmp_path, steps=12, eval_every=2, checkpoint_every=6, checkpoint_best=False)
    assert trial.fork() == 0, trial.log
    assert [event["step"] for event in trial.events("checkpoint")] == [6, 12]
    assert names(trial) == ["index.json", "step-12", "step-6"]


def test_a_run_without_held_out_prompts_saves_as_the_job_says_and_has_no_best(tmp_path: Path) -> None:
    trial = Trial(
        tmp_path, steps=9, checkpoint_every=2, checkpoint_keep_every=4, checkpoint_keep=1, held_out=""
    )
    assert trial.fork() == 0, trial.log
    assert names(trial) == ["index.json", "step-4", "step-8", "step-9"]
    assert trial.exit["best_tau"] is None and trial.exit["best_checkpoint"] is None
    assert trial.progress["best"] is None and not trial.events("best")


def say_taus(taus: dict[int, float]) -> None:
    """Evaluations that say what a test wants to hear, of every snapshot."""
    from remote_payload.train import evaluating
    from remote_payload.train.evaluation import Evaluation, Report

    run = Evaluation.run
    vars(evaluating)["MOST_WAITING"] = 99

    def run_and_say(self: Any, target: Any, drafter: Any, step: int = 0, *rest: Any) -> Any:
        report = run(self, target, drafter, step, *rest)
        assert report is not None
        tau = taus.get(step, 1.0)
        return Report(tau=tau, record={**report.record, "tau": tau}, not_lossless=())

    Evaluation.run = run_and_say  # type: ignore[method-assign]


def beside_and_slow(failing: tuple[int, ...] = ()) -> None:
    """As on a GPU: written beside training, and by a disk slower than a few steps."""
    from remote_payload.train import evaluating, saving

    vars(saving)["goes_beside"] = lambda _device: True
    vars(evaluating)["MOST_WAITING"] = 99
    full_at(*failing)
    write = checkpoint._write

    def write_slowly(folder: Path, step: int, *rest: Any) -> None:
        time.sleep(0.2)
        write(folder, step, *rest)

    vars(checkpoint)["_write"] = write_slowly


def test_what_is_written_beside_training_is_of_its_own_step_and_known_before_its_verdict(
    tmp_path: Path,
) -> None:
    changes: dict[str, Any] = {"steps": 24, "eval_every": 6, "checkpoint_every": 6, "checkpoint_keep": 9}
    once = Trial(tmp_path, "once", **changes)
    assert once.fork() == 0, once.log
    beside = Trial(tmp_path, "beside", **changes)
    assert beside.fork(beside_and_slow) == 0, beside.log
    assert names(beside) == ["index.json", "step-12", "step-18", "step-24", "step-6"]
    for step in (6, 12, 18, 24):
        assert checkpoint.damage(checkpoint.folder_of(beside.run_dir, step)) is None
        for file in ("model", "training"):
            for name, value in once.tensors(step, file).items():
                assert beside.tensors(step, file)[name].equal(value), f"{step} {name}"
    events = beside.events("checkpoint")
    assert [event["step"] for event in events] == [6, 12, 18, 24]
    assert events[0]["seconds"] - events[0]["waited_s"] > 0.19, "the disk's 0.2 s were not waited for"
    assert events[-1]["waited_s"] == events[-1]["seconds"]
    assert [event["step"] for event in beside.events("eval")] == [0, 6, 12, 18, 24]
    best = checkpoint_index.best_of(checkpoint_index.entries(beside.run_dir))
    assert best is not None and beside.exit["best_step"] == best.step


def test_a_full_disk_beside_training_is_said_too_and_the_last_one_still_counts(tmp_path: Path) -> None:
    trial = Trial(tmp_path, steps=12, checkpoint_every=3, held_out="", checkpoint_keep=9)
    assert trial.fork(functools.partial(beside_and_slow, (6,))) == 0, trial.log
    assert [event["step"] for event in trial.events("checkpoint_failed")] == [6]
    assert names(trial) == ["index.json", "step-12", "step-3", "step-9"]
    failed = Trial(tmp_path, "failed", steps=6, checkpoint_every=3, held_out="")
    assert failed.fork(functools.partial(beside_and_slow, (6,))) == 1
    assert "SaveError" in failed.exit["error"] and names(failed) == ["index.json", "step-3"]
