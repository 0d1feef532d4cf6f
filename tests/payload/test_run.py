"""Whole tiny runs: what they leave behind, and that they are a function of job and seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from remote_payload import rundir
from remote_payload.train.buckets import EpochPlan, bucket_of, plan_epoch
from remote_payload.train.dataset import Dataset
from tests.payload.test_nonfinite import spoil
from tests.payload.trial import Trial

pytestmark = pytest.mark.slow


def test_a_run_by_its_real_command_trains_evaluates_and_leaves_a_complete_record(tmp_path: Path) -> None:
    trial = Trial(tmp_path, steps=12, checkpoint_every=5)
    assert trial.command() == 0, trial.log
    end = trial.exit
    assert (end["outcome"], end["exit_code"], end["step"], end["steps"]) == ("finished", 0, 12, 12)
    assert end["loss_last"] < end["loss_first"] and end["tau_before"] >= 1 and end["tau_after"] >= 1
    assert end["checkpoint"] == "checkpoints/step-12" and end["execution"] == "eager" and end["error"] is None
    names = sorted(path.name for path in (trial.run_dir / rundir.CHECKPOINTS).iterdir())
    assert names == ["index.json", "step-10", "step-12"]
    for kind in ("dataset", "bucket", "target", "compile", "ready", "start", "step", "eval", "end"):
        assert trial.events(kind), kind
    assert [event["step"] for event in trial.events("checkpoint")] == [5, 10, 12]
    assert [event["step"] for event in trial.events("eval")] == [0, 12]
    assert all(event["text_equal"] == event["prompts"] for event in trial.events("eval"))
    assert not trial.events("crash") and trial.crashes() == []
    progress = trial.progress
    assert (progress["phase"], progress["step"], progress["tokens"]) == ("ended", 12, end["tokens"])
    assert {thread["state"] for thread in progress["threads"]} == {"ended"}
    assert "24 samples loaded (Arrow-backed, lazy access)" in trial.log
    assert "Traceback" not in trial.log


def checkpoints(trial: Trial, step: int) -> dict[str, Any]:
    return trial.tensors(step) | trial.tensors(step, "training")


def finished(workspace: Path, name: str, **changes: Any) -> Trial:
    trial = Trial(workspace, name, held_out="", **changes)
    assert trial.fork() == 0, trial.log
    return trial


def test_two_targets_and_two_drafters_learn_what_one_and_one_do_with_the_same_rows_a_step(
    tmp_path: Path,
) -> None:
    """Two replicas add in another order than one; over 16 steps of AdamW float32 keeps five digits."""
    one = finished(tmp_path, "one", steps=16, rows_per_step=2)
    two = finished(tmp_path, "two", steps=16, rows_per_step=2, targets=["cpu"] * 2, drafters=["cpu"] * 2)
    assert sorted(event["replica"] for event in two.events("ready")) == [0, 1]
    assert sorted(event["target"] for event in two.events("target")) == [0, 1]
    mine, theirs = checkpoints(one, 16), checkpoints(two, 16)
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        torch.testing.assert_close(theirs[name], value, atol=2e-5, rtol=2e-4, msg=name)
    # The last loss is a mean over the steps since a report a second before: how many is a matter of load.
    assert two.exit["loss_first"] == pytest.approx(one.exit["loss_first"], rel=1e-4)
    assert one.exit["tokens"] == two.exit["tokens"]
    # The comparison means something: another seed is far away.
    other = finished(tmp_path, "other", steps=16, rows_per_step=2, seed=1)
    assert (other.tensors(16)["fc.weight"] - one.tensors(16)["fc.weight"]).abs().max() > 1e-2


def test_the_same_seed_gives_the_same_bits_also_with_two_targets_and_any_queue(tmp_path: Path) -> None:
    first = finished(tmp_path, "first", steps=10)
    again = finished(tmp_path, "again", steps=10)
    wider = finished(tmp_path, "wider", steps=10, targets=["cpu"] * 2, queue_depth=1)
    for other in (again, wider):
        assert other.exit["loss_first"] == first.exit["loss_first"]
        for name, value in checkpoints(first, 10).items():
            assert checkpoints(other, 10)[name].equal(value), name


def test_cached_features_give_the_same_run_from_a_cold_and_from_a_warm_cache(tmp_path: Path) -> None:
    cold = finished(tmp_path, "cold", steps=20, features="cached")
    warm = finished(tmp_path, "warm", steps=20, features="cached")
    online = finished(tmp_path, "online", steps=20)
    assert "(0% there already)" in cold.log and "(100% there already)" in warm.log
    for name, value in checkpoints(cold, 20).items():
        assert checkpoints(warm, 20)[name].equal(value), name
    difference = (cold.tensors(20)["fc.weight"] - online.tensors(20)["fc.weight"]).abs().max()
    assert 0 < float(difference) < 0.05  # bfloat16 on disk, and nothing else


def test_a_drafter_that_begins_with_a_layer_of_the_target_runs_too_and_an_epoch_ends_the_run(
    tmp_path: Path,
) -> None:
    trial = finished(tmp_path, "copied", steps=0, epochs=1.0, init_from_target=[4], layers=1)
    assert trial.exit["steps"] == trial.events("dataset")[0]["batches"]
    assert trial.exit["tokens"] == trial.events("dataset")[0]["tokens"]
    assert trial.progress["epoch"] == 1.0


def test_a_step_whose_gradient_is_not_finite_is_left_out_counted_and_named(tmp_path: Path) -> None:
    trial = Trial(tmp_path, steps=6, held_out="")
    assert trial.fork(poison_third_row) == 0, trial.log
    (event,) = trial.events("nonfinite")
    assert event["step"] == 3 and event["gradient_norm"] is None and event["nonfinite"] == ["gradient_norm"]
    third = plan_epoch_of(trial).batches[2].tolist()
    assert event["samples"] == sorted(third)
    assert trial.progress["nonfinite_steps"] == 1
    assert all(bool(value.isfinite().all()) for value in checkpoints(trial, 6).values())
    assert int(trial.tensors(6, "training")["adam_step"][0]) == 5


def plan_epoch_of(trial: Trial) -> EpochPlan:
    """The first epoch's plan, made again from the job alone."""
    job = trial.job
    lengths = Dataset.open(Path(job.dataset)).lengths
    return plan_epoch(
        lengths,
        bucket_of(lengths, job.bucket_edges),
        token_budget=job.token_budget,
        max_batch=job.max_batch,
        seed=job.seed,
        epoch=0,
    )


def poison_third_row() -> None:
    """The third row's features hold a NaN, as a half broken GPU would make them."""
    spoil(3, 3)
