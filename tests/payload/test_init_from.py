"""A drafter that begins with released weights: the same kind of drafter, or refused by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from remote_payload.job import Job, JobError
from remote_payload.rundir import checkpoint_steps
from remote_payload.train.checkpoint import folder_of
from remote_payload.train.drafter import Drafter, initialise
from remote_payload.train.init_from import check_initial, load_initial
from remote_payload.train.released import ReleasedError
from tests.payload.test_drafter import CONFIG
from tests.payload.test_released import shard, tensors, write
from tests.payload.tiny import MASK, job_values, write_model
from tests.payload.trial import Trial


@pytest.mark.parametrize("form", ["one file", "shards with a prefix"])
def test_the_weights_are_those_of_the_release(tmp_path: Path, form: str) -> None:
    folder = write(tmp_path)
    if form != "one file":
        shard(folder)
    check_initial(folder, CONFIG)
    drafter = Drafter(CONFIG)
    initialise(drafter, torch.Generator().manual_seed(9))
    load_initial(drafter, folder)
    for name, value in tensors().items():
        mine = drafter.state_dict()[name]
        assert mine.dtype == torch.float32 and mine.equal(value.float()), name


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layers": 3}, "layers is 2 there and 3 in this run (set layers = 2)"),
        (
            {"tap_layers": (1, 2, 3)},
            "tap_layers is [1, 2, 4] there and [1, 2, 3] in this run (set tap_layers =",
        ),
        ({"block_size": 8}, "block_size is 4 there and 8 in this run (set block_size = 4)"),
        ({"mask_token_id": 48}, "mask_token_id is 49 there and 48 in this run (set mask_token_id = 49)"),
        (
            {"rope_theta": 1e6},
            "rope_theta is 5000.0 there and 1000000.0 in this run (it is of another target)",
        ),
        ({"norm_eps": 1e-6}, "norm_eps is 1e-05 there and 1e-06"),
        (
            {"width": 32, "heads": 8},
            "width is 24 there and 32 in this run (it is of another target); heads is 4",
        ),
        ({"target_layers": 36}, "target_layers is 6 there and 36"),
        ({"vocabulary": 51}, "vocabulary is 50 there and 51"),
    ],
)
def test_a_drafter_of_another_kind_is_refused_naming_both_values(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(JobError) as refused:
        check_initial(write(tmp_path), dataclasses.replace(CONFIG, **changes))
    assert said in str(refused.value) and str(tmp_path / "config.json") in str(refused.value)


def test_how_long_texts_may_be_is_no_part_of_the_weights(tmp_path: Path) -> None:
    check_initial(write(tmp_path), dataclasses.replace(CONFIG, max_positions=9999))


def test_missing_and_unknown_tensors_are_refused_by_name(tmp_path: Path) -> None:
    values = tensors()
    values["layers.0.self_attn.q_bias"] = values.pop("fc.weight")
    with pytest.raises(ReleasedError, match=r"missing: fc.weight; not known: layers.0.self_attn.q_bias"):
        load_initial(Drafter(CONFIG), write(tmp_path, values))


def test_it_excludes_init_from_target(tmp_path: Path) -> None:
    values = {**job_values(tmp_path), "init_from": "x", "init_from_target": [1]}
    with pytest.raises(JobError, match=r"init_from = 'x' and init_from_target = \[1\] exclude each other"):
        Job.from_mapping(values, "my.toml")


@pytest.mark.slow
def test_a_run_goes_on_with_the_weights_of_another_runs_checkpoint_and_may_find_them_the_best(
    tmp_path: Path,
) -> None:
    first = Trial(tmp_path, "first", steps=40)
    assert first.fork() == 0, first.log
    source = folder_of(first.run_dir, 40)
    second = Trial(tmp_path, "second", steps=1, init_from=str(source), learning_rate=1e-12)
    assert second.fork() == 0, second.log
    # A relative path starts at the workspace.
    again = Trial(tmp_path, "again", steps=1, init_from="runs/first/checkpoints/step-40")
    assert again.fork() == 0, again.log
    assert checkpoint_steps(second.run_dir) == [0, 1]
    for name, value in first.tensors(40).items():
        assert second.tensors(0)[name].equal(value), name
        torch.testing.assert_close(second.tensors(1)[name], value, atol=1e-9, rtol=0)
    assert second.exit["loss_first"] == again.exit["loss_first"]
    assert second.events("eval")[0]["tau"] == first.exit["tau_after"] == second.exit["tau_before"]
    assert second.exit["best_step"] in (0, 1)
    assert f"Weights begin as those of {source}" in second.log


@pytest.mark.slow
def test_a_run_that_cannot_begin_with_them_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    first = Trial(tmp_path, "first", steps=2, held_out="")
    assert first.fork() == 0, first.log
    source = str(folder_of(first.run_dir, 2))
    for changes, said in (
        ({"mask_token_id": MASK - 1}, "mask_token_id is 96 there and 95 in this run"),
        ({"taps": 2}, "tap_layers is [1, 2, 3] there and [1, 3] in this run"),
        ({"init_from": str(tmp_path / "nowhere")}, "nowhere: there is no such folder"),
        ({"init_from": str(tmp_path / "model")}, "architectures = ['Qwen3ForCausalLM']"),
    ):
        trial = Trial(tmp_path, f"refused-{said[:4]}", **{"steps": 2, "init_from": source, **changes})
        assert trial.fork() == 2
        assert said in trial.exit["error"] and trial.last_line.endswith(trial.exit["error"])
        assert "Loading" not in trial.log and not trial.crashes()


@pytest.mark.slow
def test_a_mask_token_that_ends_texts_is_refused_also_when_a_release_was_trained_with_it(
    tmp_path: Path,
) -> None:
    """NeMo #2461: the mask id was the end-of-text id, and the drafter learned both as one."""
    write_model(tmp_path / "model", eos_token_id=MASK)
    trial = Trial(tmp_path, steps=2, held_out="")
    assert trial.fork() == 2
    assert f"mask_token_id = {MASK} is the target's eos_token_id ({MASK})" in trial.exit["error"]
