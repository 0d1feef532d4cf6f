"""A run that was killed and goes on is the run that was never killed, to the bit (SpecForge #464)."""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from remote_payload import rundir
from remote_payload.train import checkpoint, checkpoint_index
from tests.payload.test_run_endings import PACKAGE, fail_at, hang
from tests.payload.trial import Trial

pytestmark = pytest.mark.slow

STEPS = 14
EXACT = ("loss", "tau_estimate", "accuracy", "gradient_norm", "learning_rate", "epoch", "bucket")
COUNTED = ("tokens", "drawn", "candidates", "ema")


def report_every_step() -> None:
    """A report of each step, where a run would report once a second."""
    from remote_payload.train.step_clock import StepClock

    StepClock.due = lambda _self: True  # type: ignore[method-assign]


def killed_after(step: int) -> Callable[[], None]:
    return KilledAfter(step)


class KilledAfter:
    """SIGKILL in the middle of a step: the one after `step` has its gradient, and nothing is written."""

    def __init__(self, step: int) -> None:
        self.step = step

    def __call__(self) -> None:
        report_every_step()
        from remote_payload.train import training

        run_rows, step = training.run_rows, self.step

        def run_rows_or_die(run: Any, replica: Any, status: Any, number: int) -> Any:
            rows = run_rows(run, replica, status, number)
            if number == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return rows

        training.run_rows = run_rows_or_die


class KilledWhileSaving:
    """SIGKILL when the `count`-th file of a checkpoint is synced."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __call__(self) -> None:
        report_every_step()
        sync, calls = checkpoint.sync, []

        def sync_or_die(path: Path) -> None:
            calls.append(path)
            if len(calls) == self.count:
                os.kill(os.getpid(), signal.SIGKILL)
            sync(path)

        vars(checkpoint)["sync"] = sync_or_die


def steps_of(trial: Trial) -> dict[int, dict[str, Any]]:
    """What was reported of each step; a later attempt replaces what an earlier one said."""
    return {event["step"]: {key: event[key] for key in EXACT} for event in trial.events("step")}


def record(trial: Trial, step: int) -> dict[str, Any]:
    return checkpoint.read_record(checkpoint.folder_of(trial.run_dir, step))


def assert_the_same_run(resumed: Trial, whole: Trial, step: int = STEPS) -> None:
    mine, theirs = steps_of(resumed), steps_of(whole)
    assert sorted(mine) == sorted(theirs) == list(range(1, step + 1))
    for number, values in theirs.items():
        assert mine[number] == values, f"step {number}"
    for file in ("model", "training"):
        ours, others = resumed.tensors(step, file), whole.tensors(step, file)
        assert ours.keys() == others.keys()
        for name, value in others.items():
            assert ours[name].equal(value), f"{file}: {name}"
    before, after = record(whole, step), record(resumed, step)
    for name in COUNTED:
        assert after["progress"][name] == before["progress"][name], name
    for bucket, other in zip(after["progress"]["buckets"], before["progress"]["buckets"], strict=True):
        for name in ("batches", "tokens", "padding", "loss"):
            assert bucket[name] == other[name], name
    assert after["contract"] == before["contract"]
    for name in ("loss_first", "loss_last", "step", "steps", "tokens"):
        assert resumed.exit[name] == whole.exit[name], name


def whole_run(workspace: Path, **changes: Any) -> Trial:
    trial = Trial(workspace, "whole", steps=STEPS, held_out="", checkpoint_every=4, **changes)
    assert trial.fork(report_every_step) == 0, trial.log
    return trial


SETTINGS: dict[str, dict[str, Any]] = {
    "online": {},
    "cached": {"features": "cached"},
    "accumulation": {"rows_per_step": 3},
    "two replicas": {"drafters": ["cpu"] * 2, "targets": ["cpu"] * 2, "rows_per_step": 2},
    "two replicas, accumulation, cached": {
        "drafters": ["cpu"] * 2,
        "rows_per_step": 4,
        "features": "cached",
        "queue_depth": 1,
    },
}


@pytest.mark.parametrize("changes", SETTINGS.values(), ids=SETTINGS.keys())
def test_a_run_that_was_killed_at_a_random_step_and_goes_on_is_the_whole_run_to_the_bit(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    whole = whole_run(tmp_path, **changes)
    dice = random.Random(repr(changes))
    for number, step in enumerate(dice.sample(range(1, STEPS), 2)):
        killed = Trial(tmp_path, f"killed-{number}", steps=STEPS, held_out="", checkpoint_every=4, **changes)
        assert killed.fork(killed_after(step)) == -signal.SIGKILL
        assert killed.fork(report_every_step, attempt=2) == 0, killed.log
        (event,) = killed.events("resume")
        kept = step - step % 4
        assert (event["from_step"], event["attempt"]) == (kept, 2)
        assert event["path"] == (f"checkpoints/step-{kept}" if kept else None)
        assert_the_same_run(killed, whole)


def test_a_run_that_was_killed_three_times_and_once_while_saving_is_the_whole_run_to_the_bit(
    tmp_path: Path,
) -> None:
    whole = whole_run(tmp_path)
    killed = Trial(tmp_path, "killed", steps=STEPS, held_out="", checkpoint_every=4)
    assert killed.fork(killed_after(5)) == -signal.SIGKILL
    assert killed.fork(KilledWhileSaving(2), attempt=2) == -signal.SIGKILL
    folder = killed.run_dir / rundir.CHECKPOINTS
    assert any(path.name.startswith(".step-8.") for path in folder.iterdir())
    assert killed.fork(killed_after(9), attempt=3) == -signal.SIGKILL
    assert killed.fork(report_every_step, attempt=4) == 0, killed.log
    assert [event["from_step"] for event in killed.events("resume")] == [4, 4, 8]
    assert sorted(path.name for path in folder.iterdir()) == ["index.json", "step-12", "step-14"]
    assert_the_same_run(killed, whole)


def test_by_its_real_command_a_run_killed_from_outside_goes_on_and_counts_on(tmp_path: Path) -> None:
    """Losses of steps that were reported are compared by the loss of the end: reports are by the second."""
    whole = Trial(tmp_path, "whole", steps=60, checkpoint_every=5, eval_every=20, checkpoint_keep=60)
    assert whole.command() == 0, whole.log
    killed = Trial(tmp_path, "killed", steps=60, checkpoint_every=5, eval_every=20)
    killed.start(functools.partial(fail_at, f"{PACKAGE}.batch", "BatchMaker.make", 45, hang))
    killed.wait_for(lambda: len(killed.events("checkpoint")) >= 3 and killed.events("eval"))
    killed.signal(signal.SIGKILL)
    assert killed.finish() == -signal.SIGKILL
    assert killed.command(attempt=2) == 0, killed.log
    begun = killed.events("resume")[0]["from_step"]
    assert 15 <= begun < 60
    for file in ("model", "training"):
        for name, value in whole.tensors(60, file).items():
            assert killed.tensors(60, file)[name].equal(value), name
    end = killed.exit
    assert (end["step"], end["outcome"], end["tokens"]) == (60, "finished", whole.exit["tokens"])
    assert end["loss_first"] == whole.exit["loss_first"] and end["tau_before"] == whole.exit["tau_before"]
    assert end["tau_after"] == whole.exit["tau_after"]
    taus = {event["step"]: event["tau"] for event in whole.events("eval")}
    mine = {event["step"]: event["tau"] for event in killed.events("eval")}
    assert sorted(taus) == [0, 20, 40, 60] and mine.items() <= taus.items()
    assert {0, *(step for step in taus if step >= begun)} <= mine.keys()  # an earlier one may be cut off
    assert end["best_tau"] == max(tau for step, tau in mine.items() if step)
    assert "Traceback" not in killed.log


def test_an_evaluation_that_a_kill_cut_off_is_made_up_for_when_no_step_is_left(tmp_path: Path) -> None:
    trial = Trial(tmp_path, steps=6)
    assert trial.fork(KilledInEvaluation()) == -signal.SIGKILL
    assert [event["step"] for event in trial.events("eval")] == [0]
    assert rundir.checkpoint_steps(trial.run_dir) == [6]
    assert trial.fork(attempt=2) == 0, trial.log
    assert [event["step"] for event in trial.events("eval")] == [0, 6]
    assert "No step is left to train" in trial.log
    assert trial.exit["tau_after"] == trial.events("eval")[-1]["tau"] and trial.exit["step"] == 6
    best = checkpoint_index.best_of(checkpoint_index.entries(trial.run_dir))
    assert best is not None and best.step == 6


class KilledInEvaluation:
    def __call__(self) -> None:
        from remote_payload.train.evaluation import Evaluation

        run = Evaluation.run

        def run_or_die(self: Any, target: Any, drafter: Any, step: int = 0, *rest: Any) -> Any:
            if step:
                os.kill(os.getpid(), signal.SIGKILL)
            return run(self, target, drafter, step, *rest)

        Evaluation.run = run_or_die  # type: ignore[method-assign]


def test_a_damaged_newest_checkpoint_is_named_set_aside_and_the_next_older_one_used(tmp_path: Path) -> None:
    whole = whole_run(tmp_path, checkpoint_keep=9)
    killed = Trial(tmp_path, "killed", steps=STEPS, held_out="", checkpoint_every=4, checkpoint_keep=9)
    assert killed.fork(killed_after(13)) == -signal.SIGKILL
    newest, second = (checkpoint.folder_of(killed.run_dir, step) for step in (12, 8))
    with (newest / "training.safetensors").open("r+b") as file:  # one bit of it, as a bad disk does
        file.seek(-5, os.SEEK_END)
        byte = file.read(1)
        file.seek(-5, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    data = (second / "model.safetensors").read_bytes()
    (second / "model.safetensors").write_bytes(data[:-100])
    assert killed.fork(report_every_step, attempt=2) == 0, killed.log
    assert killed.events("resume")[0]["from_step"] == 4
    assert "step-12 is damaged (training.safetensors is not what was written" in killed.log
    assert f"step-8 is damaged (model.safetensors has {len(data) - 100} bytes of {len(data)})" in killed.log
    names = {path.name for path in (killed.run_dir / rundir.CHECKPOINTS).iterdir()}
    assert {"step-12.damaged", "step-8.damaged", "step-12", "step-8"} <= names
    assert_the_same_run(killed, whole)


def test_when_no_checkpoint_is_whole_the_run_does_not_begin_anew_unasked(tmp_path: Path) -> None:
    trial = Trial(tmp_path, steps=STEPS, held_out="", checkpoint_every=4)
    assert trial.fork(killed_after(6)) == -signal.SIGKILL
    folder = checkpoint.folder_of(trial.run_dir, 4)
    (folder / "manifest.json").unlink()
    assert trial.fork(attempt=2) == 2
    assert "no checkpoint there is whole (step-4: no usable manifest.json)" in trial.exit["error"]
    shutil.rmtree(folder)
    assert trial.fork(attempt=3) == 0
    assert trial.events("resume")[0]["from_step"] == 0
    assert "beginning at step 0" in trial.log


def changed(trial: Trial, **changes: Any) -> None:
    """Another job in the same run directory."""
    from remote_payload.job import Job
    from tests.payload.tiny import job_values

    values = {**job_values(trial.run_dir.parent.parent), "steps": STEPS, "checkpoint_every": 4}
    trial.write_job(Job.from_mapping({**values, "held_out": "", **changes}, "changed").to_toml())


def test_a_resumed_run_with_another_mask_token_taps_or_seed_is_refused_naming_both_values(
    tmp_path: Path,
) -> None:
    trial = Trial(tmp_path, steps=STEPS, held_out="", checkpoint_every=4)
    assert trial.fork(killed_after(6)) == -signal.SIGKILL
    for changes, said in (
        ({"mask_token_id": 95}, "drafter.mask_token_id is 96 in the checkpoint and 95 now (set it back)"),
        ({"tap_layers": [1, 2, 4]}, "drafter.tap_layers is [1, 2, 3] in the checkpoint and [1, 2, 4] now"),
        ({"seed": 3, "anchors": 32}, "anchors is 16 in the checkpoint and 32 now (set it back); seed is 0"),
        ({"rows_per_step": 2}, "rows_per_step is 1 in the checkpoint and 2 now"),
        ({"steps": 3}, "steps = 3, but"),
    ):
        changed(trial, **changes)
        assert trial.fork(attempt=2) == 2
        assert said in trial.exit["error"], trial.exit["error"]
        assert trial.last_line.endswith(trial.exit["error"])
    assert not trial.crashes() and rundir.checkpoint_steps(trial.run_dir) == [4]


def test_a_resumed_run_may_evaluate_save_and_wait_otherwise_and_train_longer_and_says_the_latter(
    tmp_path: Path,
) -> None:
    trial = Trial(tmp_path, steps=STEPS, held_out="", checkpoint_every=4)
    assert trial.fork(killed_after(6)) == -signal.SIGKILL
    changed(
        trial, steps=20, checkpoint_every=3, queue_depth=1, targets=["cpu"] * 2, checkpoint_keep=9,
        held_out=str(tmp_path / "held.arrow"), eval_every=10,
    )  # fmt: skip
    assert trial.fork(attempt=2) == 0, trial.log
    assert [event["step"] for event in trial.events("eval")] == [10, 20]
    assert rundir.checkpoint_steps(trial.run_dir) == [4, 6, 9, 10, 12, 15, 18, 20]
    assert trial.events("resume")[0]["steps_before"] == STEPS
    assert (
        "The run has 20 steps now and had 14: the learning rate goes on at step 4 of the new curve"
        in trial.log
    )
    assert trial.exit["tau_before"] is None and trial.exit["tau_after"] >= 1


def other_default_generators() -> None:
    """Seed every default generator anew in each step, as another library might."""
    report_every_step()
    from remote_payload.train import training

    run_rows = training.run_rows

    def run_rows_after_seeding(*given: Any) -> Any:
        seed = time.time_ns() % 2**32
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        return run_rows(*given)

    training.run_rows = run_rows_after_seeding


def test_a_run_depends_on_no_default_generator_so_a_checkpoint_need_not_keep_their_states(
    tmp_path: Path,
) -> None:
    whole = whole_run(tmp_path)
    other = Trial(tmp_path, "other", steps=STEPS, held_out="", checkpoint_every=4)
    assert other.fork(other_default_generators) == 0, other.log
    assert_the_same_run(other, whole)


def test_the_index_that_was_lost_is_made_again_from_the_folders(tmp_path: Path) -> None:
    trial = Trial(tmp_path, steps=8, eval_every=2, checkpoint_keep=9)
    assert trial.fork() == 0, trial.log
    path = trial.run_dir / rundir.CHECKPOINTS / "index.json"
    before = json.loads(path.read_text())
    path.unlink()
    found = checkpoint_index.entries(trial.run_dir)
    assert {2, 8} <= {entry.step for entry in found if entry.tau is not None}
    best = checkpoint_index.best_of(found)
    assert best is not None and {"step": best.step, "tau": best.tau} == before["best"]
    assert trial.exit["best_tau"] == best.tau
    assert trial.exit["best_checkpoint"] == f"checkpoints/step-{best.step}"


def test_a_run_goes_on_with_fewer_replicas_when_a_step_keeps_its_rows(tmp_path: Path) -> None:
    """A GPU died: the sums are added in another order, so losses agree to float32's five digits."""
    whole = whole_run(tmp_path, drafters=["cpu"] * 2, rows_per_step=2)
    killed = Trial(
        tmp_path,
        "killed",
        steps=STEPS,
        held_out="",
        checkpoint_every=4,
        drafters=["cpu"] * 2,
        rows_per_step=2,
    )
    assert killed.fork(killed_after(9)) == -signal.SIGKILL
    changed(killed, drafters=["cpu"], rows_per_step=2)
    assert killed.fork(report_every_step, attempt=2) == 0, killed.log
    assert killed.events("resume")[0]["from_step"] == 8
    mine, theirs = steps_of(killed), steps_of(whole)
    for step in range(9, STEPS + 1):
        assert mine[step]["loss"] == pytest.approx(theirs[step]["loss"], rel=1e-4)
    assert record(killed, STEPS)["progress"]["tokens"] == record(whole, STEPS)["progress"]["tokens"]
