"""Export a run's drafter as z-lab, SGLang and vLLM load it, and prove it by reading it back.

    python -m remote_payload.tools.export RUN_DIR --checkpoint best --name first

Writes `exports/NAME/` in the run directory, complete or absent: `config.json` and `model.safetensors`
(`train/released.py` has the layout), a model card, and `dflashctl.json` with the run, the step and what tells
the target from others. Before the folder gets its name it is read back from the disk into a fresh drafter,
whose logits on random features and blocks are compared with those of the checkpoint's own weights
(`export_check.py`): SGLang skips names that it does not know and never notices missing ones.

A float32 export has the optimizer's masters, which a GPU run's checkpoint keeps beside its bfloat16 weights.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from remote_payload import rundir
from remote_payload.job import JobError, load
from remote_payload.send import EXPORTS
from remote_payload.tools.export_check import Check, check_export
from remote_payload.tools.model_card import Card, model_card
from remote_payload.tools.subject import ORIGIN, Log, chosen_checkpoint, device_name, is_run
from remote_payload.train import checkpoint
from remote_payload.train.checkpoint_index import EVALUATION
from remote_payload.train.devices import DTYPES, dtype_name, resolve_devices
from remote_payload.train.drafter import Drafter, DrafterConfig
from remote_payload.train.event_log import events_of
from remote_payload.train.released import CONFIG, WEIGHTS, read_released, released_config
from remote_payload.train.weights import FlatWeights

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+@=-]{0,200}")
_SLACK_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Exported:
    """A complete export; the field names are keys of `export --json`."""

    name: str
    step: int
    path: str
    dtype: str
    bytes: int
    tensors: int
    tau: float | None
    tau_macro: float | None
    check: dict[str, Any]


def export(
    run_dir: Path,
    *,
    which: str | None = None,
    name: str | None = None,
    dtype: str = "bfloat16",
    force: bool = False,
    device: str = "cpu",
    log: Log,
) -> Exported:
    """Write one checkpoint of a run as `exports/NAME`; `name` is its step's if not given.

    Args:
        run_dir: the run directory; the run may be training.
        which: `best`, `last`, `step-N`; None as in `subject.chosen_checkpoint`.
        name: of the folder.
        dtype: of the tensors.
        force: an export of that name is replaced, once the new one is complete.
        device: where the check computes.
        log: hears of every stage.

    Raises JobError for what cannot be exported, and leaves what stood there before as it was.
    """
    if not is_run(run_dir):
        raise JobError(f"{run_dir}: is no run directory: it has no {rundir.JOB}")
    source = chosen_checkpoint(run_dir, which, log)
    step = int(source.name.removeprefix("step-"))
    name = source.name if name is None else name
    if not _NAME.fullmatch(name):
        raise JobError(f"--name {name!r}: expected letters, digits and ._+@=-, no dot in front")
    final = run_dir / EXPORTS / name
    if final.exists() and not force:
        raise JobError(
            f"{EXPORTS}/{name} exists already ({_described(final)}); choose another --name, or replace it"
            " with --force"
        )
    log(f"Exporting {source.name}{_of_a_run_that_trains(run_dir)} as {EXPORTS}/{name}, {dtype}...")
    config, stored, weights, record = _read(source, DTYPES[dtype])
    partial = final.with_name(f".{name}.{os.getpid()}.partial")
    try:
        _make_room(final.parent, weights)
        partial.mkdir()
        save_file(weights, partial / WEIGHTS, metadata={"format": "pt"})
        rundir.write_whole(partial / CONFIG, _json(released_config(config, dtype)))
        log("Reading it back, and comparing its logits with the checkpoint's...")
        check = check_export(partial, config, stored, weights, torch.device(resolve_devices([device])[0]))
        log(f"Verified: {check.sentence}")
        card = _card(run_dir, name, source, step, dtype, config, record, check)
        rundir.write_whole(partial / ORIGIN, _json(card.origin()))
        rundir.write_whole(partial / "README.md", model_card(card).encode())
        for path in partial.iterdir():
            path.chmod(0o644)  # to be served by somebody else, perhaps
            checkpoint.sync(path)
        _put(partial, final)
    except (OSError, SafetensorError) as error:
        raise JobError(f"{EXPORTS}/{name} could not be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    evaluation = card.evaluation or {}
    return Exported(
        name=name,
        step=step,
        path=str(final),
        dtype=dtype,
        bytes=checkpoint.size_of(final),
        tensors=len(weights),
        tau=evaluation.get("tau"),
        tau_macro=evaluation.get("tau_macro"),
        check=dataclasses.asdict(check),
    )


def _read(
    source: Path, dtype: torch.dtype
) -> tuple[DrafterConfig, dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """Sizes, weights as the checkpoint has them (the masters for float32), as `dtype`, and its record."""
    try:
        wrong = checkpoint.damage(source)
        if not source.is_dir():
            raise FileNotFoundError(2, "it is not there any more")
        if wrong is not None:
            raise JobError(f"{source} is damaged ({wrong}); name another checkpoint")
        config, stored = read_released(source)
        if dtype == torch.float32 and any(value.dtype != dtype for value in stored.values()):
            stored = _masters(source, config, stored)
        record = checkpoint.read_record(source)
    except (OSError, SafetensorError) as error:
        raise JobError(
            f"{source}: cannot be read ({error}); a run that trains may have let go of it: try again"
        ) from error
    return config, stored, {name: value.to(dtype, copy=True) for name, value in stored.items()}, record


def _masters(source: Path, config: DrafterConfig, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The float32 masters by name, proved to be those that `stored` was rounded from. Raises JobError."""
    drafter = Drafter.blank(config)
    flat = load_file(source / checkpoint.TRAINING)["masters"]
    masters = FlatWeights(drafter, torch.float32, adjacent=drafter.adjacent()).named(flat)
    wrong = [name for name, value in masters.items() if not value.to(stored[name].dtype).equal(stored[name])]
    if wrong:
        raise JobError(
            f"{source / checkpoint.TRAINING}: the masters of {wrong[0]} and {len(wrong) - 1} more are not"
            f" what {WEIGHTS} was rounded from; export it as {dtype_name(stored[wrong[0]].dtype)}"
        )
    return masters


def _make_room(folder: Path, weights: Mapping[str, Tensor]) -> None:
    folder.mkdir(exist_ok=True)
    for left in folder.glob(".*.partial"):
        if not _lives(left.name.split(".")[-2]):
            shutil.rmtree(left, ignore_errors=True)
    needed = _SLACK_BYTES + sum(value.nbytes for value in weights.values())
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise JobError(
            f"the export needs {needed / 2**20:,.0f} MiB and {folder} has {free / 2**20:,.0f} MiB free; free"
            " some space: dflashctl prune"
        )


def _lives(pid: str) -> bool:
    return Path("/proc", pid).is_dir()


def _put(partial: Path, final: Path) -> None:
    """Give the complete folder its name; what had it before goes then."""
    old = final.with_name(f".{final.name}.{os.getpid()}.old.partial")
    if final.exists():
        final.rename(old)
    try:
        partial.rename(final)
    except OSError:
        if old.exists():
            old.rename(final)
        raise
    checkpoint.sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def _card(
    run_dir: Path,
    name: str,
    source: Path,
    step: int,
    dtype: str,
    config: DrafterConfig,
    record: Mapping[str, Any],
    check: Check,
) -> Card:
    """Everything that the run knows of this checkpoint."""
    contract = record.get("contract") or {}
    keys = ("target.config", "target.weights", "tokenizer")
    return Card(
        run=run_dir.absolute().name,
        name=name,
        step=step,
        steps=record.get("steps"),
        dtype=dtype,
        config=config,
        job=load(run_dir / rundir.JOB),
        launched=rundir.read_whole(run_dir / rundir.RUN) or {},
        dataset=_last_event(run_dir, "dataset") or {},
        training_s=record.get("training_s"),
        evaluation=rundir.read_whole(source / EVALUATION) or _last_event(run_dir, "eval", step),
        target_identity={key: contract[key] for key in keys if key in contract},
        check=check,
    )


def _last_event(run_dir: Path, kind: str, step: int | None = None) -> dict[str, Any] | None:
    """The newest event of `kind` (and of `step`, if given); None when there is none."""
    found = None
    with contextlib.suppress(OSError):
        for record in events_of(run_dir, kind):
            if step in (None, record.get("step")):
                found = record
    return found


def _of_a_run_that_trains(run_dir: Path) -> str:
    """Words about a run that goes on, or nothing."""
    status = rundir.read_whole(run_dir / rundir.STATUS) or {}
    progress = rundir.read_whole(run_dir / rundir.PROGRESS) or {}
    if status.get("state") not in (rundir.State.RUNNING, rundir.State.STALLED, rundir.State.LAUNCHING):
        return ""
    return f" (the run is training, at step {progress.get('step')} of {progress.get('steps')})"


def _described(folder: Path) -> str:
    origin = rundir.read_whole(folder / ORIGIN) or {}
    return f"of step {origin['step']}, {origin.get('dtype')}" if "step" in origin else "not made by dflashctl"


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=2).encode() + b"\n"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; argparse itself ends with code 2 for a wrong one."""
    parser = argparse.ArgumentParser(
        prog="python -m remote_payload.tools.export",
        description="Write a run's drafter as z-lab, SGLang and vLLM load it.",
    )
    add = parser.add_argument
    add("run", type=Path, help="the run directory")
    add("--checkpoint", help="best, last or step-N (default: best, or last where none was evaluated)")
    add("--name", help="of the folder in exports/ (default: step-N)")
    add("--dtype", default="bfloat16", choices=tuple(DTYPES), help="of the tensors (default bfloat16)")
    add(
        "--device",
        type=device_name,
        default="cpu",
        help="where the check computes: cpu (default), auto or cuda:N",
    )
    add("--force", action="store_true", help="replace an export of that name")
    add("--json", action="store_true", help="what was written as JSON on stdout")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Run the tool; returns the exit code: 0, or 2 after one sentence about what is in the way."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))

    def log(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    arguments = parse(argv)
    try:
        done = export(
            arguments.run,
            which=arguments.checkpoint,
            name=arguments.name,
            dtype=arguments.dtype,
            force=arguments.force,
            device=arguments.device,
            log=log,
        )
    except ValueError as error:
        log(f"export: {error}")
        return 2
    print(json.dumps(dataclasses.asdict(done)) if arguments.json else done.path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
