"""Reading a released DFlash drafter: what is there is used whole, and what is not is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from remote_payload.train.drafter import Drafter, initialise
from remote_payload.train.released import (
    ReleasedError,
    expected_shapes,
    read_config,
    read_released,
    released_config,
)
from tests.payload.test_drafter import CONFIG

ZLAB = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 16,
    "bos_token_id": 151643,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "initializer_range": 0.02,
    "intermediate_size": 9728,
    "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 40960,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
"""The shape of z-lab's config.json: block size at the top only, theta without `rope_parameters`."""


def tensors(seed: int = 0) -> dict[str, Tensor]:
    drafter = Drafter(CONFIG)
    initialise(drafter, torch.Generator().manual_seed(seed))
    return {name: value.to(torch.bfloat16) for name, value in drafter.state_dict().items()}


def write(folder: Path, values: dict[str, Tensor] | None = None, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors() if values is None else values, folder / "model.safetensors")
    config = {**released_config(CONFIG, "bfloat16"), **changes}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    return folder


def shard(folder: Path) -> Path:
    """Split a written folder into two shards with their index, names prefixed."""
    values = {f"model.{name}": value for name, value in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    names = sorted(values)
    files = {name: f"model-0000{1 + (i % 2)}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({n: values[n] for n in names if files[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


def same(read: dict[str, Tensor]) -> bool:
    return read.keys() == tensors().keys() and all(read[n].equal(v) for n, v in tensors().items())


def test_what_was_written_is_read_back_with_its_sizes_and_bits(tmp_path: Path) -> None:
    config, read = read_released(write(tmp_path))
    assert config == CONFIG and same(read) and read["fc.weight"].dtype == torch.bfloat16


def test_shards_and_a_prefix_before_every_name_change_nothing(tmp_path: Path) -> None:
    config, read = read_released(shard(write(tmp_path)))
    assert config == CONFIG and same(read)


def test_a_single_file_of_another_name_is_found_and_training_state_is_no_model(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "draft.safetensors")
    assert same(read_released(tmp_path)[1])
    (tmp_path / "draft.safetensors").rename(tmp_path / "model.safetensors")
    save_file({"masters": torch.zeros(3)}, tmp_path / "training.safetensors")
    assert same(read_released(tmp_path)[1])
    (tmp_path / "model.safetensors").rename(tmp_path / "draft.safetensors")
    with pytest.raises(ReleasedError, match=r"expected model.safetensors or .*found draft.*training"):
        read_released(tmp_path)


def test_a_config_as_z_lab_writes_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(ZLAB))
    config = read_config(tmp_path)
    assert (config.layers, config.width, config.heads, config.kv_heads, config.head_dim) == (
        5,
        2560,
        32,
        8,
        128,
    )
    assert (config.tap_layers, config.target_layers) == ((1, 9, 17, 25, 33), 36)
    assert (config.block_size, config.mask_token_id, config.vocabulary) == (16, 151669, 151936)
    assert (config.rope_theta, config.norm_eps, config.max_positions) == (1e6, 1e-6, 40960)
    assert len(expected_shapes(config)) == 58


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "architectures = .*expected .*DFlashDraftModel"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "rope_scaling = .*yarn"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 5000.0}}, "rope_parameters = .*yarn"),
        ({"rope_parameters": {"rope_theta": 7.0}}, "rope_theta is 5000.0 in one place and 7.0"),
        ({"rope_parameters": {"rope_theta": 5000.0, "partial_rotary_factor": 0.5}}, "full width"),
        ({"rope_theta": ..., "rope_parameters": ...}, "rope_theta = None: expected a number"),
        ({"block_size": 8}, "block_size is 8 in one place and 4 in another"),
        ({"dflash_config": {"target_layer_ids": [1, 2, 4]}}, "mask_token_id = None"),
        ({"dflash_config": {"mask_token_id": 49}}, "target_layer_ids = None"),
        ({"dflash_config": [1]}, r"dflash_config = \[1\]: expected an object"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types = .*sliding_attention"),
        ({"num_target_layers": ...}, "num_target_layers = None"),
        ({"hidden_size": "24"}, "hidden_size = '24'"),
        ({"rms_norm_eps": True}, "rms_norm_eps = True"),
    ],
)
def test_a_drafter_of_another_kind_is_refused_by_file_and_key(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ReleasedError, match=said) as refused:
        read_released(write(tmp_path, **changes))
    assert str(tmp_path / "config.json") in str(refused.value)


def test_missing_and_unknown_tensors_are_refused_by_name(tmp_path: Path) -> None:
    values = tensors()
    del values["layers.1.self_attn.k_norm.weight"], values["norm.weight"]
    with pytest.raises(
        ReleasedError, match=r"2 of the drafter's 25 .*layers.1.self_attn.k_norm.weight, norm"
    ):
        read_released(write(tmp_path / "missing", values))
    with pytest.raises(ReleasedError, match=r"no drafter has: layers.0.mlp.bias$"):
        read_released(write(tmp_path / "unknown", {**tensors(), "layers.0.mlp.bias": torch.zeros(2)}))
    with pytest.raises(ReleasedError, match=r"embed_tokens.weight; embedding and head are the target's"):
        read_released(write(tmp_path / "embedding", {**tensors(), "embed_tokens.weight": torch.zeros(2)}))
    renamed = {name.replace("hidden_norm", "context_norm"): value for name, value in tensors().items()}
    with pytest.raises(ReleasedError, match=r"missing: hidden_norm.weight; not known: context_norm.weight"):
        read_released(write(tmp_path / "renamed", renamed))


def test_a_tensor_of_another_shape_kind_or_given_twice_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ReleasedError, match=r"fc.weight has shape \(24, 48\).*\(24, 72\)"):
        read_released(write(tmp_path / "shape", {**tensors(), "fc.weight": torch.zeros(24, 48)}))
    whole = torch.zeros(24, dtype=torch.int32)
    with pytest.raises(ReleasedError, match=r"norm.weight is torch.int32"):
        read_released(write(tmp_path / "whole", {**tensors(), "norm.weight": whole}))
    with pytest.raises(ReleasedError, match=r"norm.weight is there twice"):
        read_released(write(tmp_path / "twice", {**tensors(), "model.norm.weight": torch.zeros(24)}))


def test_what_is_absent_or_damaged_is_refused_by_its_file(tmp_path: Path) -> None:
    with pytest.raises(ReleasedError, match=r"nowhere: there is no such folder"):
        read_released(tmp_path / "nowhere")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ReleasedError, match=r"config.json: there is no such file.*checkpoints/step-N"):
        read_released(tmp_path / "run")
    folder = write(tmp_path / "a")
    with pytest.raises(ReleasedError, match=r"config.json: is a file"):
        read_released(folder / "config.json")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ReleasedError, match=r"model.safetensors: cannot be read as safetensors"):
        read_released(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ReleasedError, match=r"config.json: cannot be read as JSON"):
        read_released(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ReleasedError, match=r"expected an object, found list"):
        read_released(folder)
    sharded = shard(write(tmp_path / "b"))
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ReleasedError, match=r"shards are missing: model-00002-of-00002.safetensors"):
        read_released(sharded)
    (sharded / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ReleasedError, match=r"is no index of shards"):
        read_released(sharded)
