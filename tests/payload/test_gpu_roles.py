"""On GPUs: roles by measurement, and features of another GPU, in whole runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.payload.test_resume import report_every_step
from tests.payload.tiny import write_model
from tests.payload.trial import Trial

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # what torch warns of while it compiles is no failed compilation
    pytest.mark.timeout(500),  # two trainers, and on each GPU a target and a drafter that compile
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

STEPS = 20


def trial(workspace: Path, name: str, **changes: Any) -> Trial:
    if not (workspace / "model").exists():
        write_model(workspace / "model", hidden_size=128, intermediate_size=256, head_dim=32)
    sizes = {"token_budget": 1024, "max_batch": 8, "anchors": 128, "block_size": 16, "learning_rate": 1e-3}
    run = Trial(workspace, name, **sizes, steps=STEPS, held_out="", **changes)
    run.patience_s = 240.0
    return run


def test_a_run_measures_both_sides_uses_every_gpu_and_keeps_its_choice_when_it_goes_on(
    tmp_path: Path,
) -> None:
    rows = 2 * torch.cuda.device_count()
    lists: dict[str, Any] = {"targets": ["auto"], "drafters": ["auto"], "rows_per_step": rows}
    run = trial(tmp_path, "auto", roles="auto", execution="auto", **lists)
    assert run.fork(report_every_step) == 0, run.log
    (event,) = run.events("roles")
    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    assert event["taken"] and event["gpus"] == gpus
    assert {*event["targets"], *event["drafters"]} == {*gpus}
    assert event["execution"] == "graph" and event["target_s"] > 0 and event["row_s"] > 0
    assert 0 < event["target_gib"] < event["free_gib"] and 0 < event["drafter_gib"] < event["free_gib"]
    loaded = {target["target"]: target["device"] for target in run.events("target")}
    assert loaded == dict(enumerate(event["targets"]))  # they load one by one, in any order
    assert sorted(ready["device"] for ready in run.events("ready")) == sorted(event["drafters"])
    assert {compiled["execution"] for compiled in run.events("compile")} == {"graph"}, run.log
    assert run.progress["recompiles"] == 0
    assert all(0 <= step["mfu_share"] < 1 for step in run.events("step"))
    assert run.fork(attempt=2) == 0, run.log
    assert len(run.events("roles")) == 1 and "Roles as chosen before" in run.log


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_features_of_another_gpu_train_as_those_of_the_drafters_own(tmp_path: Path) -> None:
    losses = []
    for target in ("cuda:1", "cuda:0"):
        name, rungs = target.replace(":", ""), {"execution": "eager", "target_execution": "graph"}
        run = trial(tmp_path, name, targets=[target], drafters=["cuda:1"], **rungs)
        assert run.fork(report_every_step) == 0, run.log
        losses.append([step["loss"] for step in run.events("step")])
    here, elsewhere = losses
    assert len(here) == STEPS and elsewhere == pytest.approx(here, rel=2e-3)  # kernels with atomics
    assert len(set(here)) == STEPS
