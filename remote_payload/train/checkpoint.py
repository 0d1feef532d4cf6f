"""One checkpoint: `checkpoints/step-N/`, complete or absent, and provably whole.

Everything is written and synced in a folder beside, which is renamed at the end. `model.safetensors` and
`config.json` are a DFlash drafter as the released ones are laid out; `training.safetensors` has the float32
masters and the optimizer's state, `training.json` where the run stood and what it was (`contract.py`).
`manifest.json` names every file with its size and sha256: a disk that lies, or a copy that was cut short, is
found before a run continues from it. Which checkpoints stay is `checkpoint_index.py`'s matter.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from remote_payload import rundir
from remote_payload.train.devices import dtype_name
from remote_payload.train.drafter import DrafterConfig
from remote_payload.train.released import CONFIG, WEIGHTS, released_config

TRAINING = "training.safetensors"
RECORD = "training.json"
MANIFEST = "manifest.json"

_HERE, _EXCHANGE = -100, 2
"""AT_FDCWD and RENAME_EXCHANGE of renameat2(2)."""
_SLACK_BYTES = 4 << 20
"""For headers, small files and the file system's own."""


class SaveError(Exception):
    """A checkpoint that could not be written; the text says why, in one sentence."""


def save(
    run_dir: Path,
    step: int,
    *,
    config: DrafterConfig,
    weights: Mapping[str, Tensor],
    training: Mapping[str, Tensor],
    record: Mapping[str, Any],
) -> Path:
    """Write the checkpoint of `step`; one that stood there stays until the new one takes its place at once.

    Args:
        config: the drafter's sizes.
        weights: the drafter's parameters by name, in the type they are to be served in.
        training: flat tensors of the optimizer.
        record: what a resumed run needs to go on with the very next batch, as JSON.

    Raises SaveError, and leaves nothing new behind, when the disk is too small, a write fails, or one stands
    there already and the disk cannot exchange the two.
    """
    folder = run_dir / rundir.CHECKPOINTS
    final, partial = folder / f"step-{step}", folder / f".step-{step}.{os.getpid()}"
    try:
        folder.mkdir(exist_ok=True)
        needed = _SLACK_BYTES + sum(t.nbytes for part in (weights, training) for t in part.values())
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise SaveError(
                f"it needs {_mib(needed)} and {folder} has {_mib(free)} free; free some space, or lower"
                " checkpoint_keep"
            )
        remove(partial)
        partial.mkdir()
        _write(partial, step, config, weights, training, record)
        if final.exists():
            _take_the_place_of(final, partial)
        else:
            partial.rename(final)
        sync(folder)
    except (OSError, SafetensorError) as error:  # safetensors wraps what the system said
        raise SaveError(f"{error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final


def exchange(one: Path, other: Path) -> None:
    """Let two folders of one disk have each other's name, in one moment. Raises OSError where none can."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if libc.renameat2(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _take_the_place_of(final: Path, partial: Path) -> None:
    try:
        exchange(partial, final)
    except OSError as error:  # network disks, mostly
        raise SaveError(
            f"{final.name} stands there already and stays: this disk could not exchange names"
            f" ({error.strerror})"
        ) from error


def on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in main memory, so that the originals may change while they are written."""
    return {name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()}


def folder_of(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of `step` stands, or would."""
    return run_dir / rundir.CHECKPOINTS / f"step-{step}"


def damage(folder: Path, *, only: Collection[str] = ()) -> str | None:
    """What is wrong with a checkpoint, in a few words; None when every file is as it was written.

    Reads all of it (2.5 s for 1.4 GB on two busy cores), or the files `only`.
    """
    manifest = rundir.read_whole(folder / MANIFEST)
    files = manifest.get("files") if manifest else None
    if not isinstance(files, dict) or not {WEIGHTS, CONFIG, TRAINING, RECORD} <= files.keys():
        return f"no usable {MANIFEST}"
    for name, written in files.items():
        if only and name not in only:
            continue
        path = folder / name
        try:
            size = path.stat().st_size
            if size != written["bytes"]:
                return f"{name} has {size} bytes of {written['bytes']}"
            if _digest(path) != written["sha256"]:
                return f"{name} is not what was written (its sha256 differs)"
        except OSError as error:
            return f"{name}: {error.strerror}"
        except (KeyError, TypeError):
            return f"no usable {MANIFEST}"
    return None


def read_record(folder: Path) -> dict[str, Any]:
    """The record that `save` was given. Raises ValueError or OSError for what `damage` would name."""
    record = json.loads((folder / RECORD).read_bytes())
    if not isinstance(record, dict):
        raise ValueError(f"{folder / RECORD}: expected an object")
    return record


def size_of(folder: Path) -> int:
    """Bytes of a checkpoint."""
    return sum(path.stat().st_size for path in folder.iterdir())


def remove(folder: Path) -> None:
    """Remove a checkpoint so that a kill meanwhile leaves no half one under its name. Raises OSError."""
    if not folder.exists():
        return
    aside = folder.with_name(f".{folder.name.lstrip('.')}.removed")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    shutil.rmtree(aside)


def sweep(run_dir: Path) -> None:
    """Remove what a killed trainer left half written or half removed."""
    for path in (run_dir / rundir.CHECKPOINTS).glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)


def _write(
    folder: Path,
    step: int,
    config: DrafterConfig,
    weights: Mapping[str, Tensor],
    training: Mapping[str, Tensor],
    record: Mapping[str, Any],
) -> None:
    for name, tensors in ((WEIGHTS, weights), (TRAINING, training)):
        # safetensors wants tensors of their own, and views of one flat tensor are not.
        own = {key: value if _is_own(value) else value.to("cpu", copy=True) for key, value in tensors.items()}
        save_file(own, folder / name, metadata={"format": "pt"})
    dtype = dtype_name(next(iter(weights.values())).dtype)
    rundir.write_whole(folder / CONFIG, _json(released_config(config, dtype)))
    rundir.write_whole(folder / RECORD, _json(record))
    files = {}
    for path in sorted(folder.iterdir()):
        sync(path)
        files[path.name] = {"bytes": path.stat().st_size, "sha256": _digest(path)}
    manifest = rundir.stamp("checkpoint", {"step": step, "files": files})
    rundir.write_whole(folder / MANIFEST, _json(manifest))
    sync(folder)


def _is_own(value: Tensor) -> bool:
    """Whether a tensor lies in main memory with nothing else in its storage."""
    whole = value.untyped_storage().nbytes() == value.nbytes
    return value.device.type == "cpu" and whole and value.is_contiguous() and not value.requires_grad


def _json(value: Mapping[str, Any]) -> bytes:
    finite = rundir.decode(rundir.encode(value))  # JSON has no NaN; the record's own rule applies
    return json.dumps(finite, indent=2).encode() + b"\n"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Have the system put a file, or a folder's names, on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"


def written_at(folder: Path) -> float | None:
    """Unix seconds of the checkpoint's completion, by its manifest."""
    manifest = rundir.read_whole(folder / MANIFEST) or {}
    t = manifest.get("t")
    return float(t) if isinstance(t, int | float) else None
