"""The layout of a released DFlash drafter: written and read here, and nowhere else.

A folder with `config.json` and safetensors, as z-lab, SGLang and vLLM load it. Checkpoints and exports of
this project have it, and `init_from`, `evaluate` and the reload check of an export read it. SGLang skips
names that it does not know and never notices missing ones, so this reader is strict: every tensor that the
drafter has must be there, in its shape, and nothing else may.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from remote_payload.job import JobError
from remote_payload.train.drafter import Drafter, DrafterConfig

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
SHARDS = "model.safetensors.index.json"

PREFIX = "model."
"""Before every name in some checkpoints, and in none of z-lab's."""

_NAMED = 5
"""How many tensor names an error lists."""


class ReleasedError(JobError):
    """A drafter's folder that cannot be used; the text names the file, what was expected and what to do."""


def read_released(path: Path) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """The drafter in the folder `path`: its sizes, and tensors by name (no prefix) as stored, on the CPU.

    One `model.safetensors`, shards with their index, or the folder's only safetensors file. Raises
    ReleasedError when something is absent or damaged, when the drafter is built in a way that this
    project's is not, or when a tensor is missing, unknown or of another shape.
    """
    config = read_config(path)
    tensors: dict[str, Tensor] = {}
    for file in _weight_files(path):
        try:
            part = load_file(file)
        except (OSError, SafetensorError) as error:
            raise ReleasedError(f"{file}: cannot be read as safetensors ({error}); copy it again") from error
        for stored, tensor in part.items():
            name = stored.removeprefix(PREFIX)
            if name in tensors:
                raise ReleasedError(f"{file}: tensor {name} is there twice ({stored!r} for one)")
            tensors[name] = tensor
    _check_tensors(path, config, tensors)
    return config, tensors


def read_config(path: Path) -> DrafterConfig:
    """The drafter's sizes in `path`/config.json. Raises ReleasedError."""
    file = path / CONFIG
    if not path.is_dir():
        found = "is a file" if path.exists() else "there is no such folder"
        raise ReleasedError(f"{path}: {found}; expected the folder of a DFlash drafter with {CONFIG}")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        more = "; a run's drafters are its checkpoints/step-N" if (path / "checkpoints").is_dir() else ""
        raise ReleasedError(
            f"{file}: there is no such file; expected a DFlash drafter's folder{more}"
        ) from error
    except (OSError, ValueError) as error:
        raise ReleasedError(f"{file}: cannot be read as JSON ({error})") from error
    if not isinstance(values, dict):
        raise ReleasedError(f"{file}: expected an object, found {type(values).__name__}")
    return _config(file, values)


def expected_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of a drafter's tensors by name."""
    with torch.device("meta"):
        return {name: tuple(value.shape) for name, value in Drafter(config).state_dict().items()}


def released_config(c: DrafterConfig, dtype: str) -> dict[str, Any]:
    """`config.json` as z-lab's reader, SGLang and vLLM expect it.

    `rope_theta` stands there twice: transformers 5 writes only `rope_parameters`, and older readers then
    silently take 10000.
    """
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": c.block_size,
        "num_target_layers": c.target_layers,
        "dflash_config": {
            "mask_token_id": c.mask_token_id,
            "target_layer_ids": list(c.tap_layers),
            "block_size": c.block_size,
        },
        "num_hidden_layers": c.layers,
        "hidden_size": c.width,
        "intermediate_size": c.ffn,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": c.norm_eps,
        "layer_types": ["full_attention"] * c.layers,
        "rope_theta": c.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta},
        "max_position_embeddings": c.max_positions,
        "vocab_size": c.vocabulary,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "is_causal": False,
        "dtype": dtype,
    }


def _config(file: Path, values: Mapping[str, Any]) -> DrafterConfig:
    names = values.get("architectures") or []
    if not any("dflash" in str(name).lower() for name in names):
        raise ReleasedError(f"{file}: architectures = {names}: expected ['DFlashDraftModel']")
    for key, wanted in (("hidden_act", "silu"), ("attention_bias", False), ("rope_scaling", None)):
        if values.get(key, wanted) != wanted:
            raise ReleasedError(f"{file}: {key} = {values[key]!r}: this drafter has {wanted!r} there")
    inner, rope = _table(file, values, "dflash_config"), _table(file, values, "rope_parameters")
    if rope.get("rope_type", "default") != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ReleasedError(
            f"{file}: rope_parameters = {rope}: expected plain rotary positions of full width"
        )
    layers = _whole(file, values, "num_hidden_layers")
    kinds = values.get("layer_types") or []
    if set(kinds) - {"full_attention"}:
        raise ReleasedError(f"{file}: layer_types = {kinds}: expected full_attention in every layer")
    taps = inner.get("target_layer_ids")
    if not isinstance(taps, list) or not taps or not all(type(tap) is int for tap in taps):
        raise ReleasedError(
            f"{file}: dflash_config.target_layer_ids = {taps!r}: expected a list of layer numbers"
        )
    heads, width = _whole(file, values, "num_attention_heads"), _whole(file, values, "hidden_size")
    return DrafterConfig(
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=_whole(file, {"num_key_value_heads": heads, **values}, "num_key_value_heads"),
        head_dim=_whole(file, {"head_dim": width // max(1, heads), **values}, "head_dim"),
        ffn=_whole(file, values, "intermediate_size"),
        norm_eps=_number(file, values, "rms_norm_eps"),
        rope_theta=_number(file, {"rope_theta": _both(file, values, rope, "rope_theta")}, "rope_theta"),
        vocabulary=_whole(file, values, "vocab_size"),
        tap_layers=tuple(taps),
        target_layers=_whole(file, values, "num_target_layers"),
        block_size=_whole(file, {"block_size": _both(file, values, inner, "block_size")}, "block_size"),
        mask_token_id=_whole(file, inner, "mask_token_id", least=0),
        max_positions=_whole(file, values, "max_position_embeddings"),
    )


def _check_tensors(path: Path, config: DrafterConfig, tensors: Mapping[str, Tensor]) -> None:
    wanted = expected_shapes(config)
    missing, unknown = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    if missing:
        raise ReleasedError(
            f"{path}: {len(missing)} of the drafter's {len(wanted)} tensors are missing: {_listed(missing)}"
            + (f"; not known: {_listed(unknown)}" if unknown else "")
        )
    if unknown:
        hint = (
            "; embedding and head are the target's and belong to no drafter"
            if any("embed" in name or "lm_head" in name for name in unknown)
            else ""
        )
        raise ReleasedError(f"{path}: {len(unknown)} tensors that no drafter has: {_listed(unknown)}{hint}")
    for name, shape in wanted.items():
        if tuple(tensors[name].shape) != shape:
            raise ReleasedError(
                f"{path}: {name} has shape {tuple(tensors[name].shape)}; {CONFIG} there says {shape}"
            )
        if not tensors[name].is_floating_point():
            raise ReleasedError(f"{path}: {name} is {tensors[name].dtype}; expected floating-point numbers")


def _weight_files(path: Path) -> list[Path]:
    index = path / SHARDS
    if index.is_file():
        try:
            shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ReleasedError(f"{index}: is no index of shards ({error!r}); copy it again") from error
        files = [path / Path(str(shard)).name for shard in shards]
        absent = [file.name for file in files if not file.is_file()]
        if absent or not files:
            raise ReleasedError(f"{index}: shards are missing: {_listed(absent)}; copy the whole folder")
        return files
    if (path / WEIGHTS).is_file():
        return [path / WEIGHTS]
    found = sorted(path.glob("*.safetensors"))
    if len(found) != 1:
        names = _listed([file.name for file in found]) if found else "none"
        raise ReleasedError(f"{path}: expected {WEIGHTS} or {SHARDS}, found {names}")
    return found


def _both(file: Path, values: Mapping[str, Any], inner: Mapping[str, Any], key: str) -> Any:
    """A value that may stand in two places, and must be the same where it does."""
    given = [table[key] for table in (values, inner) if table.get(key) is not None]
    if len(given) == 2 and given[0] != given[1]:
        raise ReleasedError(f"{file}: {key} is {given[0]} in one place and {given[1]} in another")
    return given[0] if given else None


def _table(file: Path, values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = values.get(key) or {}
    if not isinstance(value, Mapping):
        raise ReleasedError(f"{file}: {key} = {value!r}: expected an object")
    return value


def _whole(file: Path, values: Mapping[str, Any], key: str, least: int = 1) -> int:
    value = values.get(key)
    if type(value) is not int or value < least:
        raise ReleasedError(f"{file}: {key} = {value!r}: expected a whole number of at least {least}")
    return value


def _number(file: Path, values: Mapping[str, Any], key: str) -> float:
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ReleasedError(f"{file}: {key} = {value!r}: expected a number above 0")
    return float(value)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
