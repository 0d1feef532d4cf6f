"""On a GPU: a run that was killed goes on by graph, with its optimizer, and ends where the whole run ends."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.payload.test_resume import KilledAfter, report_every_step
from tests.payload.tiny import write_model
from tests.payload.trial import Trial

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

STEPS = 40


def trial(workspace: Path, name: str) -> Trial:
    run = Trial(
        workspace,
        name,
        targets=["cuda:0"],
        drafters=["cuda:0"],
        token_budget=1024,
        max_batch=32,
        anchors=128,
        block_size=16,
        execution="auto",
        learning_rate=1e-3,
        steps=STEPS,
        checkpoint_every=15,
        eval_every=20,
    )
    run.patience_s = 240.0
    return run


def losses(run: Trial) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in run.events("step")}


def test_a_killed_run_goes_on_by_graph_with_the_losses_of_the_whole_one(tmp_path: Path) -> None:
    write_model(tmp_path / "model", hidden_size=128, intermediate_size=256, head_dim=32)
    whole, killed = trial(tmp_path, "whole"), trial(tmp_path, "killed")
    assert whole.fork(report_every_step) == 0, whole.log
    assert killed.fork(KilledAfter(34)) == -signal.SIGKILL, killed.log
    assert killed.fork(report_every_step, attempt=2) == 0, killed.log
    (resume,) = killed.events("resume")
    assert resume["from_step"] == 30
    assert {event["execution"] for event in killed.events("compile")} == {"graph"}
    mine, theirs = losses(killed), losses(whole)
    assert sorted(mine) == list(range(1, STEPS + 1))
    for step, loss in theirs.items():  # kernels with atomics add in any order
        assert mine[step] == pytest.approx(loss, rel=2e-2), step
    # An optimizer that began anew would take a step of the whole learning rate in every weight.
    moved = distance(killed, whole)
    assert moved < 0.05, f"{moved:.4f} of what training moved"


def distance(one: Trial, other: Trial) -> float:
    """How far the masters of two runs are apart at the end, as a share of what the last steps moved."""
    mine, theirs = (run.tensors(STEPS, "training")["masters"] for run in (one, other))
    before = other.tensors(30, "training")["masters"]
    return float((mine - theirs).norm() / (theirs - before).norm())


def test_an_evaluation_beside_training_on_one_gpu_reads_a_finished_snapshot(tmp_path: Path) -> None:
    write_model(tmp_path / "model", hidden_size=128, intermediate_size=256, head_dim=32)
    run = trial(tmp_path, "evaluated")
    assert run.fork(report_every_step) == 0, run.log
    evaluations: list[dict[str, Any]] = run.events("eval")
    assert evaluations[-1]["step"] == STEPS
    assert not run.events("alarm"), run.log
    assert evaluations[-1]["text_equal"] + evaluations[-1]["diverged_allowed"] == evaluations[-1]["prompts"]
