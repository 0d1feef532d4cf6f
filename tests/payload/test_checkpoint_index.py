"""Which checkpoints stay, which is the best, and that the index says what the folders say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from remote_payload import rundir
from remote_payload.job import JobError
from remote_payload.train import checkpoint_index
from remote_payload.train.checkpoint_index import CheckpointIndex, best_of, entries, find_checkpoint
from tests.payload.test_drafter import CONFIG


def index_of(run_dir: Path, keep: int = 2, keep_best: bool = True, keep_every: int = 0) -> CheckpointIndex:
    return CheckpointIndex(run_dir, keep=keep, keep_best=keep_best, keep_every=keep_every)


def save(index: CheckpointIndex, step: int, awaited: bool = False) -> Path:
    return index.save(
        step,
        config=CONFIG,
        weights={"norm.weight": torch.ones(3)},
        training={"masters": torch.ones(3)},
        record={"step": step},
        awaited=awaited,
    )


def judged(index: CheckpointIndex, step: int, tau: float) -> bool:
    save(index, step, awaited=True)
    return index.evaluated(step, {"tau": tau})


def content(run_dir: Path) -> dict[str, Any]:
    return dict(json.loads((run_dir / "checkpoints" / "index.json").read_text()))


def test_the_newest_k_stay(tmp_path: Path) -> None:
    index = index_of(tmp_path)
    for step in (5, 9, 10, 100):
        save(index, step)
    assert rundir.checkpoint_steps(tmp_path) == [10, 100]
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["index.json", "step-10", "step-100"]


def test_the_best_by_tau_stays_besides_the_newest_until_a_better_one_comes(tmp_path: Path) -> None:
    index = index_of(tmp_path)
    assert judged(index, 10, 1.2)
    assert judged(index, 20, 3.0)
    for step, tau in ((30, 2.0), (40, 2.9), (50, 2.5)):
        assert not judged(index, step, tau)
    assert rundir.checkpoint_steps(tmp_path) == [20, 40, 50]
    said = content(tmp_path)
    assert (said["last"], said["best"]) == (50, {"step": 20, "tau": 3.0})
    kept = {each["step"]: (each["tau"], each["kept"], each["path"]) for each in said["checkpoints"]}
    assert kept == {
        20: (3.0, ["best"], "step-20"),
        40: (2.9, ["newest"], "step-40"),
        50: (2.5, ["newest"], "step-50"),
    }
    assert judged(index, 60, 3.0)  # of equal ones the later has seen more
    assert rundir.checkpoint_steps(tmp_path) == [50, 60]


def test_every_nth_stays(tmp_path: Path) -> None:
    index = index_of(tmp_path, keep=1, keep_every=20)
    for step in range(5, 65, 5):
        save(index, step)
    assert rundir.checkpoint_steps(tmp_path) == [20, 40, 60]


def test_one_whose_evaluation_is_under_way_stays_until_its_verdict(tmp_path: Path) -> None:
    """An evaluation takes longer than it takes to write the next few checkpoints."""
    index = index_of(tmp_path, keep=1)
    save(index, 10, awaited=True)
    save(index, 20, awaited=True)
    for step in (30, 40):
        save(index, step)
    assert rundir.checkpoint_steps(tmp_path) == [10, 20, 40]
    assert index.evaluated(10, {"tau": 2.0})
    assert rundir.checkpoint_steps(tmp_path) == [10, 20, 40]
    assert not index.evaluated(20, {"tau": 1.0})
    assert rundir.checkpoint_steps(tmp_path) == [10, 40]


def test_without_checkpoint_best_a_verdict_is_kept_but_saves_no_checkpoint(tmp_path: Path) -> None:
    index = index_of(tmp_path, keep=1, keep_best=False)
    assert judged(index, 10, 3.0)
    assert not judged(index, 20, 2.0) or best_of(entries(tmp_path)).step == 20  # type: ignore[union-attr]
    assert rundir.checkpoint_steps(tmp_path) == [20]


def test_an_evaluation_of_a_step_that_was_never_saved_makes_no_best(tmp_path: Path) -> None:
    index = index_of(tmp_path)
    save(index, 10)
    assert not index.evaluated(12, {"tau": 9.0})
    assert index.best() is None and index.tau(10) is None and rundir.checkpoint_steps(tmp_path) == [10]


def test_an_evaluation_before_the_first_checkpoint_is_no_problem(tmp_path: Path) -> None:
    index = index_of(tmp_path)
    assert not index.evaluated(0, {"tau": 1.0})
    assert index.problem is None


def test_an_evaluation_that_could_not_be_kept_is_a_problem_though_the_index_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = index_of(tmp_path)
    save(index, 10, awaited=True)
    write = checkpoint_index.rundir.write_whole

    def refuses(path: Path, text: bytes) -> None:
        if path.name == "evaluation.json":
            raise OSError(28, "No space left on device", str(path))
        write(path, text)

    monkeypatch.setattr(checkpoint_index.rundir, "write_whole", refuses)
    assert not index.evaluated(10, {"tau": 2.0})
    assert index.problem is not None and "evaluation of step 10" in index.problem


def test_a_new_attempt_knows_what_the_earlier_one_found_even_without_an_index(tmp_path: Path) -> None:
    judged(index_of(tmp_path), 10, 2.5)
    (tmp_path / "checkpoints" / "index.json").unlink()
    later = index_of(tmp_path)
    best = later.best()
    assert best is not None and (best.step, best.tau, later.tau(10)) == (10, 2.5, 2.5)
    for step in (20, 30, 40):
        save(later, step)
    assert rundir.checkpoint_steps(tmp_path) == [10, 30, 40]
    assert content(tmp_path)["best"] == {"step": 10, "tau": 2.5}


def test_a_checkpoint_is_found_by_best_newest_and_its_step_and_else_what_there_is_is_said(
    tmp_path: Path,
) -> None:
    with pytest.raises(JobError, match="holds no checkpoint"):
        find_checkpoint(tmp_path, "last")
    index = index_of(tmp_path, keep=3)
    save(index, 10)
    with pytest.raises(JobError, match=r"none of its 1 checkpoints was evaluated"):
        find_checkpoint(tmp_path, "best")
    judged(index, 20, 2.0)
    save(index, 30)
    for which, step in (("last", 30), ("best", 20), ("10", 10), ("step-30", 30)):
        assert find_checkpoint(tmp_path, which).name == f"step-{step}"
    with pytest.raises(JobError, match=r"'25': there is none .* last, best or one of step-10, step-20, s"):
        find_checkpoint(tmp_path, "25")


def test_a_disk_that_takes_no_index_is_noted_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = index_of(tmp_path)
    save(index, 10, awaited=True)

    def full(path: Path, _content: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(checkpoint_index.rundir, "write_whole", full)
    assert not index.evaluated(10, {"tau": 2.0})
    assert index.problem is not None and "No space left on device" in index.problem
    monkeypatch.undo()
    save(index, 20)
    assert index.problem is None and rundir.checkpoint_steps(tmp_path) == [10, 20]
