"""Whole runs with each objective and schedule."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from remote_payload.train.objective import FROM_LABELS
from tests.payload.tiny import write_arrow
from tests.payload.trial import Trial

pytestmark = pytest.mark.slow

RUNS: list[dict[str, Any]] = [
    {"objective": "ce"},
    {"objective": "dpace", "dpace_alpha": 0.4, "schedule": "linear"},
    {"objective": "focal", "schedule": "wsd", "decay": 0.5},
    {"objective": "chain", "chain_weight": 5.0},
    {"objective": "forward_kl", "kl_share": 0.7},
    {"objective": "forward_kl", "features": "cached", "targets": ["cpu"] * 2},
    {"objective": "lk", "drafters": ["cpu"] * 2, "rows_per_step": 4},
]


@pytest.mark.parametrize("changes", RUNS, ids=lambda run: "-".join(map(str, run.values())))
def test_a_run_with_it_learns_and_reports_cross_entropy_beside_its_own_loss(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    counting = [[2 + (start + i) % 40 for i in range(40)] for start in range(24)]
    dataset = write_arrow(tmp_path / "counting.arrow", counting, [8] * 24)
    trial = Trial(tmp_path, steps=200, dataset=str(dataset), bucket_edges=[0, 64], held_out="", **changes)
    assert trial.fork() == 0, trial.log
    steps = trial.events("step")
    first, last = steps[0], steps[-1]
    for record in (first, last):
        assert all(math.isfinite(record[key]) for key in ("loss", "ce"))
        assert (record["loss"] == pytest.approx(record["ce"])) == (changes["objective"] == "ce")
        conditional, accuracy = record["conditional_accuracy"], record["accuracy"]
        assert len(conditional) == len(accuracy) == 3 and conditional[0] == accuracy[0]
    assert last["loss"] < 0.9 * first["loss"]
    if changes["objective"] in FROM_LABELS:  # the target itself cannot count
        assert last["ce"] < 0.85 * first["ce"]
    assert trial.progress["nonfinite_steps"] == 0 and trial.progress["ce"] == pytest.approx(
        last["ce"], abs=1e-4
    )


def test_features_with_the_last_hidden_states_have_a_cache_of_their_own(tmp_path: Path) -> None:
    for name, objective in (("one", "ce"), ("two", "lk"), ("three", "lk")):
        trial = Trial(tmp_path, name, features="cached", objective=objective, held_out="", steps=11)
        assert trial.fork() == 0, trial.log
        there = "(100% there already)" if name == "three" else "(0% there already)"
        assert there in trial.log
