"""Runs whose features become NaN: steps are left out and named, and a run in which they do not stop ends."""

from __future__ import annotations

import functools
import importlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from controller.diagnose import diagnose_text
from tests.payload.trial import Trial

pytestmark = pytest.mark.slow


def spoil(first: int, last: int) -> None:
    """Make the features of the run's batches `first` to `last`, counted from 1, NaN."""
    pipeline: Any = importlib.import_module("remote_payload.train.pipeline")
    real = pipeline.compute_features

    @functools.wraps(real)
    def spoiled(*args: Any, **kwargs: Any) -> Any:
        features = real(*args, **kwargs)
        if first <= features.batch.sequence + 1 <= last:
            features.packed.fill_(torch.nan)
        return features

    pipeline.compute_features = spoiled


@pytest.mark.parametrize("drafters", [1, 2])
def test_a_run_without_finite_gradients_ends_as_crashed_and_names_step_bucket_and_samples(
    tmp_path: Path, drafters: int
) -> None:
    trial = Trial(tmp_path, steps=100_000, drafters=["cpu"] * drafters, nonfinite_limit=5, held_out="")
    assert trial.fork(functools.partial(spoil, 7, 10**9)) == 1
    (crash,) = trial.crashes()
    (*_, event) = trial.events("nonfinite")
    assert event["in_row"] >= 5 and event["in_row"] == event["skipped_steps"] == event["step"] - 6 // drafters
    assert crash["thread"] == "drafter-0" and crash["first"]
    assert (crash["step"], crash["bucket"], crash["samples"]) == (
        event["step"],
        event["bucket"],
        event["samples"],
    )
    assert crash["samples"] and crash["bucket"] is not None
    assert crash["error"].startswith("remote_payload.train.nonfinite.NonFiniteGradients: ")
    first = 6 // drafters + 1
    for word in (
        f"from step {first} on",
        f"the newest is step {event['step']}",
        f"bucket {event['bucket']}",
        "nonfinite_limit = 5",
    ):
        assert word in crash["error"]
    assert trial.exit["outcome"] == "crashed" and trial.exit["error"] == crash["error"]
    found = diagnose_text(crash["traceback"])
    assert found is not None and found.name == "nonfinite-limit"


def test_without_a_limit_a_run_goes_on_and_its_weights_stay_as_they_were(tmp_path: Path) -> None:
    trial = Trial(tmp_path, steps=6, nonfinite_limit=0, held_out="", checkpoint_every=1, checkpoint_keep=9)
    assert trial.fork(functools.partial(spoil, 4, 10**9)) == 0
    assert trial.progress["nonfinite_steps"] == 3
    third, last = trial.tensors(3), trial.tensors(6)
    assert all(value.equal(last[name]) for name, value in third.items())


def test_one_bad_batch_costs_one_step_and_is_named(tmp_path: Path) -> None:
    trial = Trial(tmp_path, steps=6, nonfinite_limit=2, held_out="")
    assert trial.fork(functools.partial(spoil, 6, 6)) == 0
    (event,) = trial.events("nonfinite")
    assert (event["step"], event["in_row"], event["skipped_steps"]) == (6, 1, 1)
    assert event["gradient_norm"] is None and event["nonfinite"] == ["gradient_norm"]
    assert event["samples"] and trial.progress["nonfinite_steps"] == 1
    losses = [step["loss"] for step in trial.events("step")]
    assert losses[-1] is None or not math.isfinite(losses[-1])  # of a report with the bad step alone
