"""On a GPU: a run that was killed goes on by graph, with its optimizer, and ends where the whole run ends."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from remote_payload import rundir
from tests.payload.test_resume import KilledAfter, report_every_step
from tests.payload.tiny import write_model
from tests.payload.trial import Trial

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # what torch warns of while it compiles is no failed compilation
    pytest.mark.timeout(900),  # four trainers one after the other: each imports, compiles and proves a graph
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
    run.patience_s = 300.0
    return run


class KilledOnceSaved(KilledAfter):
    """SIGKILL in the middle of a step after `step`, when the checkpoint of step 30 is whole.

    It is written beside training, and 40 steps of so small a drafter take less time than a file's sync.
    """

    def __init__(self, step: int, checkpoint: Path) -> None:
        super().__init__(step)
        self.checkpoint = checkpoint

    def __call__(self) -> None:
        super().__call__()
        from remote_payload.train import training

        killing = training.run_rows

        def wait_and_run(run: Any, replica: Any, status: Any, number: int) -> Any:
            deadline = time.monotonic() + 60
            while number == self.step and not self.checkpoint.exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            return killing(run, replica, status, number)

        training.run_rows = wait_and_run


def losses(run: Trial) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in run.events("step")}


def test_a_killed_run_goes_on_by_graph_with_the_losses_of_the_whole_one(tmp_path: Path) -> None:
    write_model(tmp_path / "model", hidden_size=128, intermediate_size=256, head_dim=32)
    whole, killed = trial(tmp_path, "whole"), trial(tmp_path, "killed")
    assert whole.fork(report_every_step) == 0, whole.log
    saved = killed.run_dir / rundir.CHECKPOINTS / "step-30"
    assert killed.fork(KilledOnceSaved(34, saved)) == -signal.SIGKILL, killed.log
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
