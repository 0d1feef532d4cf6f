"""A contract names what must stay, and each difference is refused by its name."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remote_payload.job import Job, JobError, resumable_keys
from remote_payload.train.contract import (
    RESOLVED,
    ContractError,
    check_contract,
    contract_of,
    dataset_identity,
    target_identity,
)
from remote_payload.train.dataset import Dataset
from remote_payload.train.drafter import DrafterConfig
from tests.payload.test_drafter import CONFIG
from tests.payload.tiny import job_values, random_samples, write_arrow


def contract(
    folder: Path, config: DrafterConfig = CONFIG, rows_per_step: int = 1, **changes: Any
) -> dict[str, Any]:
    values = job_values(folder)
    job = Job.from_mapping({**values, **changes}, "tiny")
    return contract_of(
        job,
        model=Path(values["target"]),
        config=config,
        dataset=Dataset.open(Path(job.dataset)),
        rows_per_step=rows_per_step,
    )


def refusal(then: dict[str, Any], now: dict[str, Any]) -> str:
    with pytest.raises(ContractError) as refused:
        check_contract(then, now, Path("checkpoints/step-4"))
    return str(refused.value)


def test_the_same_job_keeps_its_contract_also_through_json_and_at_another_place(tmp_path: Path) -> None:
    first = contract(tmp_path)
    check_contract(first, contract(tmp_path), tmp_path)
    moved = shutil.copytree(tmp_path, tmp_path / "moved")
    check_contract(first, contract(moved, dataset=str(moved / "train.arrow")), tmp_path)


def test_every_key_of_the_job_is_in_the_contract_may_change_or_stands_there_as_what_it_came_to(
    tmp_path: Path,
) -> None:
    keys = {field.name for field in dataclasses.fields(Job)}
    said = contract(tmp_path)
    assert set(RESOLVED) <= keys
    assert keys == (keys & set(said)) | set(resumable_keys()) | set(RESOLVED)
    assert not set(said) & set(resumable_keys())


def test_what_a_resumed_run_may_change_is_no_difference(tmp_path: Path) -> None:
    free = {"steps": 99, "eval_every": 3, "checkpoint_keep": 7, "queue_depth": 9, "execution": "auto"}
    free |= {"tau_alarm_ratio": 0.0, "checkpoint_best": False, "checkpoint_keep_every": 5}
    check_contract(contract(tmp_path), contract(tmp_path, **free), tmp_path)
    # As many rows a step, by another number of replicas, is the same training.
    two = contract(tmp_path, drafters=["cpu"] * 2, rows_per_step=2)
    check_contract({**contract(tmp_path), "rows_per_step": 2}, {**two, "rows_per_step": 2}, tmp_path)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"seed": 5}, "seed is 0 in the checkpoint and 5 now (set it back)"),
        ({"token_budget": 256}, "token_budget is 128 in the checkpoint and 256 now"),
        ({"max_batch": 5}, "max_batch is 4 in the checkpoint and 5 now"),
        ({"bucket_edges": [0, 64]}, "bucket_edges is [0, 24, 40, 64] in the checkpoint and [0, 64] now"),
        ({"anchors": 17}, "anchors is 16"),
        ({"learning_rate": 1.0}, "learning_rate is 0.01"),
        ({"objective": "dpace"}, 'objective is "ce" in the checkpoint and "dpace" now'),
        ({"features": "cached"}, 'features is "online"'),
        ({"compute_dtype": "bfloat16"}, 'drafter.dtype is "float32" in the checkpoint and "bfloat16" now'),
        ({"target_dtype": "bfloat16"}, "target.dtype is"),
    ],
)
def test_a_key_that_changes_the_training_is_refused_by_name_and_values(
    tmp_path: Path, changes: dict[str, Any], key: str
) -> None:
    assert key in refusal(contract(tmp_path), contract(tmp_path, **changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mask_token_id": 48}, "drafter.mask_token_id is 49 in the checkpoint and 48 now"),
        ({"tap_layers": (1, 2, 3)}, "drafter.tap_layers is [1, 2, 4] in the checkpoint and [1, 2, 3] now"),
        ({"block_size": 8}, "drafter.block_size is 4"),
        ({"vocabulary": 51}, "drafter.vocabulary is 50"),
        (
            {"layers": 3, "width": 32},
            "drafter.layers is 2 in the checkpoint and 3 now (set it back); drafter.w",
        ),
    ],
)
def test_a_drafter_of_other_sizes_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    """NeMo #2824: a run was resumed with another mask id."""
    other = dataclasses.replace(CONFIG, **changes)
    assert said in refusal(contract(tmp_path), contract(tmp_path, other))


def test_another_target_is_noticed_by_config_weights_and_tokenizer(tmp_path: Path) -> None:
    job_values(tmp_path)
    model = tmp_path / "model"
    (model / "tokenizer.json").write_text('{"a": 1}')
    before = target_identity(model)
    assert target_identity(shutil.copytree(model, tmp_path / "copy")) == before
    weights = model / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-9] ^= 1  # one weight
    weights.write_bytes(data)
    changed = target_identity(model)
    assert {key for key in before if changed[key] != before[key]} == {"target.weights"}
    (model / "tokenizer.json").write_text('{"a": 2}')
    (model / "config.json").write_text((model / "config.json").read_text() + " ")
    changed |= target_identity(model)
    assert all(changed[key] != before[key] for key in before)
    said = refusal(before, changed)
    for key in ("target.config", "target.weights", "tokenizer"):
        assert key in said
    assert "give back the target that the run began with" in said


def test_another_dataset_is_noticed_by_count_lengths_and_content(tmp_path: Path) -> None:
    samples, prompts = random_samples(30)
    before = dataset_identity(Dataset.open(write_arrow(tmp_path / "a.arrow", samples, prompts)))
    again = dataset_identity(Dataset.open(write_arrow(tmp_path / "b.arrow", samples, prompts)))
    assert again == before
    dice = np.random.default_rng(0)
    other = [dice.permutation(ids).tolist() for ids in samples]
    content = dataset_identity(Dataset.open(write_arrow(tmp_path / "c.arrow", other, prompts)))
    assert {key for key in before if content[key] != before[key]} == {"dataset.content"}
    fewer = dataset_identity(Dataset.open(write_arrow(tmp_path / "d.arrow", samples[1:], prompts[1:])))
    assert all(fewer[key] != before[key] for key in before)


def test_a_key_that_the_checkpoint_does_not_know_may_have_its_default_and_no_other_value(
    tmp_path: Path,
) -> None:
    older = contract(tmp_path)
    del older["objective"], older["betas"]
    check_contract(older, contract(tmp_path), tmp_path)
    assert "objective is not known in the checkpoint" in refusal(older, contract(tmp_path, objective="dpace"))
    newer = {**contract(tmp_path), "some_new_key": 1}
    assert "some_new_key is 1 in the checkpoint and not known now" in refusal(newer, contract(tmp_path))
    assert issubclass(ContractError, JobError)
