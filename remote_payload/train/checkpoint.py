"""Checkpoints: `checkpoints/step-N/`, complete or absent.

Everything is written and synced in a folder beside, which is renamed at the end. `model.safetensors` and
`config.json` are a DFlash checkpoint as the released ones are laid out; `training.safetensors` has the
float32 masters and AdamW's moments, `training.json` where in the data the run stood.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from remote_payload import rundir
from remote_payload.train.drafter import DrafterConfig
from remote_payload.train.released import CONFIG, WEIGHTS, released_config

_NAME = re.compile(r"step-(\d+)")


def save(
    run_dir: Path,
    step: int,
    *,
    config: DrafterConfig,
    weights: dict[str, Tensor],
    training: dict[str, Tensor],
    position: dict[str, Any],
    keep: int,
) -> Path:
    """Write the checkpoint of `step` and remove all but the newest `keep`. Raises OSError.

    Args:
        weights: the drafter's parameters by name, in the type they are to be served in.
        training: the optimizer's flat tensors.
        position: what a resumed run needs to go on with the very next batch.
    """
    folder = run_dir / rundir.CHECKPOINTS
    folder.mkdir(exist_ok=True)
    final, partial = folder / f"step-{step}", folder / f".step-{step}.{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    contiguous = {name: value.detach().cpu().clone() for name, value in weights.items()}
    save_file(contiguous, partial / WEIGHTS, metadata={"format": "pt"})
    save_file({n: v.detach().cpu().clone() for n, v in training.items()}, partial / "training.safetensors")
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    rundir.write_whole(partial / CONFIG, _json(released_config(config, dtype)))
    rundir.write_whole(partial / "training.json", _json(position))
    for path in partial.iterdir():
        _sync(path)
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    _sync(folder)
    for old in steps(run_dir)[:-keep]:
        shutil.rmtree(folder / f"step-{old}")
    return final


def steps(run_dir: Path) -> list[int]:
    """Steps of the complete checkpoints, rising."""
    folder = run_dir / rundir.CHECKPOINTS
    names = [_NAME.fullmatch(path.name) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(match[1]) for match in names if match)


def size_of(folder: Path) -> int:
    """Bytes of a checkpoint."""
    return sum(path.stat().st_size for path in folder.iterdir())


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, indent=2).encode() + b"\n"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
