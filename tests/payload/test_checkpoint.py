"""Checkpoints: complete or absent, and laid out as the released ones."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config

from remote_payload import rundir
from remote_payload.train import checkpoint
from remote_payload.train.checkpoint import SaveError
from remote_payload.train.drafter import Drafter, DrafterConfig, initialise
from remote_payload.train.target_config import rope_theta
from tests.payload.test_drafter import CONFIG


def weights_of(config: DrafterConfig = CONFIG, seed: int = 0) -> dict[str, torch.Tensor]:
    drafter = Drafter(config)
    initialise(drafter, torch.Generator().manual_seed(seed))
    return drafter.state_dict()


def save(run_dir: Path, step: int, **changes: Any) -> Path:
    values: dict[str, Any] = {
        "config": CONFIG,
        "weights": weights_of(),
        "training": {"masters": torch.arange(5.0)},
        "record": {"step": step, "sequence": 2 * step, "seed": 0},
        **changes,
    }
    return checkpoint.save(run_dir, step, **values)


def test_a_checkpoint_holds_weights_config_and_training_state(tmp_path: Path) -> None:
    path = save(tmp_path, 7)
    assert path == tmp_path / "checkpoints" / "step-7"
    assert sorted(p.name for p in path.iterdir()) == [
        "config.json",
        "manifest.json",
        "model.safetensors",
        "training.json",
        "training.safetensors",
    ]
    loaded = Drafter(CONFIG)
    loaded.load_state_dict(load_file(path / "model.safetensors"), strict=True)
    for name, value in weights_of().items():
        assert loaded.state_dict()[name].equal(value)
    assert load_file(path / "training.safetensors")["masters"].equal(torch.arange(5.0))
    assert json.loads((path / "training.json").read_text()) == {"step": 7, "sequence": 14, "seed": 0}
    assert checkpoint.size_of(path) == sum(p.stat().st_size for p in path.iterdir())


def test_views_of_one_flat_tensor_are_saved_each_for_itself(tmp_path: Path) -> None:
    flat = torch.arange(12.0)
    path = save(tmp_path, 1, weights={"a": flat[:4].view(2, 2), "b": flat[4:]})
    saved = load_file(path / "model.safetensors")
    assert saved["a"].equal(flat[:4].view(2, 2)) and saved["b"].equal(flat[4:])
    assert (path / "model.safetensors").stat().st_size < 1000


def test_the_config_is_that_of_the_released_checkpoints(tmp_path: Path) -> None:
    config = json.loads((save(tmp_path, 1) / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"] and config["model_type"] == "qwen3"
    assert config["block_size"] == config["dflash_config"]["block_size"] == 4
    assert config["dflash_config"]["mask_token_id"] == 49
    assert config["dflash_config"]["target_layer_ids"] == [1, 2, 4]
    assert (config["num_target_layers"], config["num_hidden_layers"]) == (6, 2)
    assert (config["hidden_size"], config["intermediate_size"], config["vocab_size"]) == (24, 36, 50)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (4, 2, 10)
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 5000.0
    assert config["layer_types"] == ["full_attention"] * 2
    assert config["tie_word_embeddings"] is False and config["is_causal"] is False
    assert config["hidden_act"] == "silu" and config["rms_norm_eps"] == 1e-5
    assert config["max_position_embeddings"] == 512 and config["dtype"] == "float32"


def test_a_targets_partial_rotary_factor_does_not_leak_into_the_drafter(tmp_path: Path) -> None:
    """The drafter rotates whole heads (NeMo #3605)."""
    rope = {"rope_type": "default", "rope_theta": 3000.0, "partial_rotary_factor": 0.5}
    target = Qwen3Config(hidden_size=24, num_attention_heads=4, num_hidden_layers=6, rope_parameters=rope)
    config = DrafterConfig.for_target(target, layers=1, tap_layers=(1, 2), block_size=4, mask_token_id=5)
    text = (save(tmp_path, 1, config=config) / "config.json").read_text()
    assert "partial" not in text and json.loads(text)["rope_theta"] == 3000.0


def test_transformers_reads_the_config_back_with_the_same_sizes(tmp_path: Path) -> None:
    read = Qwen3Config.from_pretrained(save(tmp_path, 1))
    assert (read.hidden_size, read.head_dim, read.num_key_value_heads) == (24, 10, 2)
    assert rope_theta(read) == 5000.0 and read.tie_word_embeddings is False


def test_a_step_saved_twice_holds_the_newer_state(tmp_path: Path) -> None:
    save(tmp_path, 5)
    path = save(tmp_path, 5, training={"masters": torch.ones(3)})
    assert load_file(path / "training.safetensors")["masters"].tolist() == [1, 1, 1]
    assert rundir.checkpoint_steps(tmp_path) == [5]


def test_a_step_that_stands_already_is_there_whole_at_every_moment_of_its_second_saving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked at before every call that changes a name."""
    save(tmp_path, 5)
    folder = tmp_path / "checkpoints" / "step-5"
    looked = []

    def watched(owner: Any, name: str) -> None:
        change = getattr(owner, name)

        def look_and_change(*given: Any, **named: Any) -> Any:
            assert checkpoint.damage(folder) is None
            looked.append(name)
            return change(*given, **named)

        monkeypatch.setattr(owner, name, look_and_change)

    watched(Path, "rename")
    watched(checkpoint, "exchange")
    watched(checkpoint.shutil, "rmtree")
    save(tmp_path, 5, record={"step": 5, "newer": True})
    monkeypatch.undo()
    assert "exchange" in looked and checkpoint.damage(folder) is None
    assert checkpoint.read_record(folder)["newer"] is True
    assert [path.name for path in folder.parent.iterdir()] == ["step-5"]


@pytest.mark.parametrize("error", [OSError(22, "Invalid argument"), OSError(38, "Function not implemented")])
def test_where_a_disk_cannot_exchange_names_a_step_that_stands_is_kept_and_the_new_one_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    save(tmp_path, 5)

    def refuse(*_: Path) -> None:
        raise error

    monkeypatch.setattr(checkpoint, "exchange", refuse)
    with pytest.raises(SaveError, match=r"step-5 stands there already and stays: .* not exchange names"):
        save(tmp_path, 5, record={"step": 5, "newer": True})
    folder = tmp_path / "checkpoints" / "step-5"
    assert checkpoint.damage(folder) is None and "newer" not in checkpoint.read_record(folder)
    assert [path.name for path in folder.parent.iterdir()] == ["step-5"]


@pytest.mark.parametrize("at", ["save_file", "write_whole", "sync"])
def test_a_save_that_fails_says_why_and_leaves_no_checkpoint_and_the_older_ones_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    save(tmp_path, 5)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rundir if at == "write_whole" else checkpoint, at, full)
    for step in (5, 6):
        with pytest.raises(SaveError, match="No space left"):
            save(tmp_path, step)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-5"]
    assert checkpoint.damage(checkpoint.folder_of(tmp_path, 5)) is None
    monkeypatch.undo()
    save(tmp_path, 6)
    assert rundir.checkpoint_steps(tmp_path) == [5, 6]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-5", "step-6"]


def test_a_disk_that_is_too_small_is_seen_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(total=1 << 40, used=0, free=5 << 20)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _path: usage)
    written: list[object] = []
    monkeypatch.setattr(checkpoint, "_write", lambda *given: written.append(given))
    with pytest.raises(SaveError, match=r"needs 16 MiB and .*checkpoints has 5 MiB free; .*checkpoint_keep"):
        save(tmp_path, 1, training={"masters": torch.zeros(3 << 20)})
    assert not written and rundir.checkpoint_steps(tmp_path) == []


def test_what_is_not_as_it_was_written_is_found_by_its_name(tmp_path: Path) -> None:
    path = save(tmp_path, 7)
    assert checkpoint.damage(path) is None
    for name in ("model.safetensors", "training.safetensors", "config.json", "training.json"):
        file = path / name
        whole = file.read_bytes()
        file.write_bytes(whole[:-1])
        assert checkpoint.damage(path) == f"{name} has {len(whole) - 1} bytes of {len(whole)}"
        file.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
        assert checkpoint.damage(path) == f"{name} is not what was written (its sha256 differs)"
        file.unlink()
        assert checkpoint.damage(path) == f"{name}: No such file or directory"
        file.write_bytes(whole)
        assert checkpoint.damage(path) is None
    for text in ("", "{}", '{"files": {"config.json": {}}}', '{"files": []}'):
        (path / "manifest.json").write_text(text)
        assert checkpoint.damage(path) == "no usable manifest.json"


def test_what_a_killed_trainer_left_half_is_no_checkpoint_and_is_swept(tmp_path: Path) -> None:
    save(tmp_path, 4)
    for name in (".step-8.123", ".step-2.removed"):
        (tmp_path / "checkpoints" / name).mkdir()
        (tmp_path / "checkpoints" / name / "model.safetensors").write_bytes(b"half")
    assert rundir.checkpoint_steps(tmp_path) == [4]
    checkpoint.sweep(tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-4"]


def test_numbers_that_are_not_finite_do_not_make_the_record_unreadable(tmp_path: Path) -> None:
    path = save(tmp_path, 1, record={"loss_last": float("nan"), "step": 1})
    text = (path / "training.json").read_text()
    assert "NaN" not in text and checkpoint.read_record(path)["loss_last"] is None


def test_other_files_in_the_folder_are_no_checkpoints(tmp_path: Path) -> None:
    assert rundir.checkpoint_steps(tmp_path) == []
    for name in ("step-", "step-x", ".step-4.123", "step-4.old", "notes"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert rundir.checkpoint_steps(tmp_path) == []
