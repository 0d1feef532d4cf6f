"""What is to be evaluated: a run's checkpoint, or any drafter's folder; with its target and settings.

A run directory knows everything by its `job.toml`. A folder knows its target when dflashctl exported it
(`dflashctl.json` there); a drafter of others needs to be told.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from remote_payload import rundir
from remote_payload.job import Job, JobError, load
from remote_payload.job_paths import locate
from remote_payload.train.checkpoint import RECORD, damage
from remote_payload.train.checkpoint_index import best_of, entries, find_checkpoint
from remote_payload.train.contract import target_identity
from remote_payload.train.drafter import DrafterConfig
from remote_payload.train.evaluation import LOGIT_GAP
from remote_payload.train.model_source import resolve_model
from remote_payload.train.released import CONFIG, WEIGHTS, read_config
from remote_payload.train.target import check_mask_token, special_ids
from remote_payload.train.target import read_config as read_target_config

Log = Callable[[str], None]

ORIGIN = "dflashctl.json"
"""In an export: the run, the step, the target and what tells it from others."""

MAX_NEW_TOKENS = 256
"""Of a drafter's folder; a run has its job's."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A drafter and what it drafts for."""

    folder: Path
    run: str | None
    step: int | None
    target: str
    cache: Path
    held_out: Path | None = None
    """The prompts of the run's own evaluations."""
    max_new_tokens: int = MAX_NEW_TOKENS
    dtype: str = "auto"
    attention: str = "auto"
    trust_remote_code: bool = False
    logit_gap: float = LOGIT_GAP
    cpu_threads: int = 0
    identity: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The target's, when the drafter was written; empty when it is not known."""


def device_name(text: str) -> str:
    """A device as the tools take it, for argparse. Raises ArgumentTypeError."""
    if not re.fullmatch(r"auto|cpu|cuda:\d+", text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected auto, cpu or cuda:N")
    return text


def shard_of(text: str) -> tuple[int, int]:
    """`I/N` as two numbers. Raises argparse's error."""
    number, slash, count = text.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise argparse.ArgumentTypeError(f"{text!r}: expected I/N with I from 0 to N-1, such as 0/4")
    return int(number), int(count)


def chosen_checkpoint(run_dir: Path, which: str | None, log: Log) -> Path:
    """The folder of the checkpoint `which` of a run; None: the best, or the last where none was evaluated.

    Raises JobError naming those that there are.
    """
    if which is None:
        which = "best"
        found = entries(run_dir)
        if found and best_of(found) is None:
            which = "last"
            log("No checkpoint of this run was evaluated, so the last one is taken")
    return find_checkpoint(run_dir, which)


def is_run(path: Path) -> bool:
    """Whether `path` is a run directory and no drafter's folder."""
    return (path / rundir.JOB).is_file()


def find_subject(
    path: Path, *, checkpoint: str | None, target: str | None, cache: Path | None, log: Log
) -> Subject:
    """The drafter that `path` means, a run directory or a drafter's folder. Raises ValueError.

    Args:
        path: what to evaluate.
        checkpoint: of a run: `best`, `last`, `step-N`; None as in `chosen_checkpoint`.
        target: instead of the one that the drafter was trained for.
        cache: folder of converted models; None: the workspace's, or `.dflashctl/cache` here.
        log: hears what was chosen.
    """
    if is_run(path):
        return _of_run(path, checkpoint, target, cache, log)
    if checkpoint is not None:
        raise JobError(f"{path}: is no run directory, so it has no checkpoint {checkpoint!r}")
    read_config(path)  # says what is wrong with a folder that is no drafter's
    origin = rundir.read_whole(path / ORIGIN) or {}
    known = origin.get("target")
    if target is None and not isinstance(known, str):
        raise JobError(f"{path}: has no {ORIGIN} that names its target; name it with --target")
    step = origin.get("step")
    identity = origin.get("target_identity")
    return Subject(
        folder=path,
        run=str(origin["run"]) if "run" in origin else None,
        step=step if isinstance(step, int) else None,
        target=target or str(known),
        cache=cache or Path(".dflashctl/cache"),
        trust_remote_code=False,
        identity=identity if isinstance(identity, dict) else {},
    )


def _of_run(
    run_dir: Path, checkpoint: str | None, target: str | None, cache: Path | None, log: Log
) -> Subject:
    job: Job = load(run_dir / rundir.JOB)
    workspace = run_dir.absolute().parent.parent
    folder = chosen_checkpoint(run_dir, checkpoint, log)
    wrong = damage(folder, only=(WEIGHTS, CONFIG))
    if wrong is not None and folder.is_dir():  # a run that trains on may have removed it just now
        raise JobError(f"{folder} is damaged ({wrong}); name another checkpoint")
    record = rundir.read_whole(folder / RECORD) or {}
    contract = record.get("contract")
    there = workspace / Path(job.target).expanduser()
    return Subject(
        folder=folder,
        run=run_dir.absolute().name,
        step=int(folder.name.removeprefix("step-")),
        target=target or (str(there) if there.is_dir() else job.target),
        cache=cache or workspace / "cache",
        held_out=locate(job.held_out, workspace) if job.held_out else None,
        max_new_tokens=job.eval_max_new_tokens,
        dtype=job.target_dtype,
        attention=job.target_attention,
        trust_remote_code=job.trust_remote_code,
        logit_gap=job.eval_logit_gap,
        cpu_threads=job.cpu_threads,
        identity=contract if isinstance(contract, dict) else {},
    )


def resolved_target(subject: Subject, config: DrafterConfig, log: Log) -> tuple[Path, Any, set[int]]:
    """The target of `subject`: what to load, its text config, and the ids that end its texts.

    Raises ValueError when it is not there, or is none that a drafter of `config` can draft for. A target of
    the right sizes that is another one than the drafter was trained for is told, and may be wanted.
    """
    try:
        model = resolve_model(subject.target, subject.cache, log)
    except ValueError as error:
        raise JobError(f"{error}. Another one can be named with --target") from error
    text = read_target_config(model, subject.trust_remote_code)
    for name, theirs, ours in (
        ("hidden_size", text.hidden_size, config.width),
        ("num_hidden_layers", text.num_hidden_layers, config.target_layers),
        ("vocab_size", text.vocab_size, config.vocabulary),
    ):
        if theirs != ours:
            raise JobError(
                f"target {subject.target!r} has {name} = {theirs}; {subject.folder} drafts for one of {ours}"
            )
    special = special_ids(model, text)
    check_mask_token(config.mask_token_id, text, special)
    if model.is_dir() and subject.identity.get("target.config") != subject.identity.get("target.weights"):
        found = target_identity(model)  # one of the hub is known by its commit, and can only be trusted
        other = [key for key, value in found.items() if subject.identity.get(key, value) != value]
        if other:
            log(
                f"warning: target {subject.target!r} is not the one that the drafter was trained for:"
                f" {', '.join(other)} differ"
            )
    return model, text, special.get("eos_token_id", set())
