"""Whole runs compiled by inductor, and the way down the ladder where that cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from remote_payload.train.execution import compiler
from tests.payload.test_resume import report_every_step
from tests.payload.trial import Trial

pytestmark = pytest.mark.slow


@pytest.mark.timeout(900)
@pytest.mark.skipif(compiler() is None, reason="no C++ compiler here")
def test_a_compiled_run_never_recompiles_and_learns_what_an_eager_one_does(tmp_path: Path) -> None:
    """Two replicas over three buckets and batches of 1 to 4 samples; inductor orders sums otherwise."""
    changes = {"steps": 24, "drafters": ["cpu"] * 2, "rows_per_step": 2, "held_out": ""}
    eager = Trial(tmp_path, "eager", **changes)
    compiled = Trial(tmp_path, "compiled", execution="compiled", **changes)
    assert eager.fork(report_every_step) == 0, eager.log
    compiled.patience_s = 800
    assert compiled.fork(report_every_step) == 0, compiled.log
    decided = compiled.events("compile")
    assert [event["execution"] for event in decided] == ["compiled"] * 2, decided
    assert all(event["compiled_step_s"] > 0 and event["eager_step_s"] > 0 for event in decided)
    assert compiled.progress["recompiles"] == 0 and not compiled.events("recompile")
    assert compiled.exit["execution"] == "compiled" and eager.exit["execution"] == "eager"
    mine, wanted = ([event["loss"] for event in run.events("step")] for run in (compiled, eager))
    assert len(wanted) == 24 and mine == pytest.approx(wanted, rel=1e-4)
    theirs = compiled.tensors(24)
    for name, value in eager.tensors(24).items():
        torch.testing.assert_close(theirs[name], value, atol=1e-4, rtol=1e-3, msg=name)
    assert any((tmp_path / "cache" / "inductor").rglob("*.so"))


def test_without_a_compiler_a_run_is_eager_and_says_why(tmp_path: Path) -> None:
    trial = Trial(tmp_path, execution="auto", steps=3, held_out="")
    assert trial.command(PATH="/nowhere", CXX="/nowhere/g++") == 0, trial.log
    (event,) = trial.events("compile")
    assert event["execution"] == "eager" and "there is none (CXX, g++, clang++)" in event["reason"]
    assert event["compiled_step_s"] is None and trial.exit["execution"] == "eager"


def test_a_compiler_that_fails_leaves_the_run_eager_with_what_it_said(tmp_path: Path) -> None:
    (tmp_path / "g++").write_text("#!/bin/sh\necho out of order >&2\nexit 1\n")
    (tmp_path / "g++").chmod(0o755)
    trial = Trial(tmp_path, execution="compiled", steps=3, held_out="")
    assert trial.command(CXX=str(tmp_path / "g++")) == 0, trial.log
    (event,) = trial.events("compile")
    assert event["execution"] == "eager" and event["reason"].startswith("compiling failed: ")
    assert trial.exit["outcome"] == "finished" and "Traceback" not in trial.log
