"""What a checkpoint is of, and the refusal to go on with it as something else.

A contract is a flat table of names and values: the target (its config, weights and tokenizer), the drafter's
sizes, the dataset, and every key of the job that a resumed run may not change (those without `resumable` in
`job.py`). With another mask token, other taps or another order of samples a resumed run would train on
without an error and be worth nothing (NeMo #2824), so each difference is refused by its name.

Weights are known by size and a digest of pieces spread over each file, its header among them: hashing 16 GB
at each start would cost more than it proves, and no retrained model has the same bytes in all those places.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import try_to_load_from_cache

from remote_payload.job import Job, JobError, resumable_keys
from remote_payload.train.dataset import Dataset
from remote_payload.train.devices import compute_dtype, dtype_name
from remote_payload.train.drafter import DrafterConfig

Contract = dict[str, Any]

RESOLVED = (
    "target",
    "target_dtype",
    "compute_dtype",
    "dataset",
    "drafters",
    "layers",
    "block_size",
    "mask_token_id",
    "taps",
    "tap_layers",
    "rows_per_step",
    "init_from",
    "init_from_target",
)
"""Keys of the job that stand in a contract as what they came to, or that only say how a run begins."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")

_PIECES = 32
_PIECE_BYTES = 64 << 10
_SAMPLES = 64
"""Samples whose ids are part of a dataset's identity; the lengths of all of them are."""

_WHAT_TO_DO = {
    "target": "give back the target that the run began with",
    "tokenizer": "give back the tokenizer that the run began with",
    "dataset": "give back the dataset that the run began with",
    "drafter": "set it back",
}


class ContractError(JobError):
    """A checkpoint of something else than what the job is now; each difference is named."""


def contract_of(
    job: Job, *, model: str | Path, config: DrafterConfig, dataset: Dataset, rows_per_step: int
) -> Contract:
    """The contract of a prepared run; `model` is what the target is loaded from. Values are plain JSON."""
    sizes = {f"drafter.{name}": value for name, value in dataclasses.asdict(config).items()}
    free = {*resumable_keys(), *RESOLVED}
    keys = {
        field.name: getattr(job, field.name) for field in dataclasses.fields(job) if field.name not in free
    }
    contract = {
        **target_identity(Path(model)),
        "target.dtype": _dtype(job.target_dtype, job.targets[0]),
        **sizes,
        "drafter.dtype": _dtype(job.compute_dtype, job.drafters[0]),
        **dataset_identity(dataset),
        "rows_per_step": rows_per_step,
        **keys,
    }
    return dict(json.loads(json.dumps(contract)))


def check_contract(then: Mapping[str, Any], now: Contract, path: Path) -> None:
    """Refuse the checkpoint `path` whose contract is `then` unless it is `now`'s. Raises ContractError."""
    absent = object()
    differences = [
        (key, then.get(key, absent), now.get(key, absent))
        for key in dict.fromkeys([*now, *then])
        if then.get(key, absent) != now.get(key, absent)
    ]
    differences = [d for d in differences if d[1] is not absent or d[2] != _default(d[0])]
    if not differences:
        return
    said = [
        f"{key} is {_shown(before, absent)} in the checkpoint and {_shown(after, absent)} now"
        f" ({_WHAT_TO_DO.get(key.split('.')[0], 'set it back')})"
        for key, before, after in differences
    ]
    raise ContractError(
        f"{path} cannot be continued, it is of another run: {'; '.join(said)}. Or launch a new run, with"
        " init_from for the weights"
    )


def target_identity(model: Path) -> Contract:
    """What tells one target from another, and its tokenizer; one of the hub is known by its commit."""
    if not model.is_dir():
        file = try_to_load_from_cache(str(model), "config.json")
        commit = Path(file).parent.name if isinstance(file, str) else str(model)
        return dict.fromkeys(("target.config", "target.weights", "tokenizer"), commit)
    weights = hashlib.sha256()
    for path in sorted(model.glob("*.safetensors")):
        weights.update(f"{path.name} {path.stat().st_size}\n".encode())
        _update_with_pieces(weights.update, path)
    tokenizer = hashlib.sha256()
    present = [model / name for name in TOKENIZER_FILES if (model / name).is_file()]
    for path in present:
        tokenizer.update(path.name.encode() + path.read_bytes())
    return {
        "target.config": hashlib.sha256((model / "config.json").read_bytes()).hexdigest()[:16],
        "target.weights": weights.hexdigest()[:16],
        "tokenizer": tokenizer.hexdigest()[:16] if present else "none",
    }


def dataset_identity(dataset: Dataset) -> Contract:
    """What tells one dataset from another; its path does not, since a moved set is the same set."""
    content = hashlib.sha256()
    for sample in np.unique(np.linspace(0, len(dataset) - 1, _SAMPLES).astype(int)).tolist():
        content.update(np.ascontiguousarray(dataset.ids(sample), dtype="<i8").tobytes())
        content.update(np.packbits(dataset.supervised(sample)).tobytes())
    return {
        "dataset.samples": len(dataset),
        "dataset.tokens": dataset.tokens,
        "dataset.lengths": dataset.fingerprint,
        "dataset.content": content.hexdigest()[:16],
    }


def _update_with_pieces(update: Callable[[bytes], None], path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        for place in np.linspace(0, max(0, size - _PIECE_BYTES), _PIECES).astype(int).tolist():
            file.seek(place)
            update(file.read(_PIECE_BYTES))


def _dtype(name: str, device: str) -> str:
    return dtype_name(compute_dtype(name, torch.device(device)))


def _default(key: str) -> Any:
    """What a key was before it existed: the job's default, since that is what an older payload did."""
    fields: Sequence[dataclasses.Field[Any]] = dataclasses.fields(Job)
    field = next((field for field in fields if field.name == key), None)
    if field is None:
        return dataclasses.MISSING
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _shown(value: Any, absent: object) -> str:
    return "not known" if value is absent else json.dumps(value)
