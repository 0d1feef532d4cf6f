"""How a later attempt goes on: where from, with what, and what is refused.

An attempt after the first continues from the newest whole checkpoint of its own run directory. What it
needs is the weights, the optimizer and one number: the order of samples and their anchors are functions of
(seed, epoch, sample), so the number of the next batch says everything about the data.

No generator's state is kept, because none matters: first weights come from a generator of the seed, anchors
and order from generators of (seed, epoch, sample), and a step draws nothing. A test shows that a run does not
depend on torch's default generators.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from remote_payload.job import JobError
from remote_payload.rundir import CHECKPOINTS, checkpoint_steps
from remote_payload.train import checkpoint
from remote_payload.train.checkpoint import TRAINING
from remote_payload.train.checkpoint_index import Best
from remote_payload.train.contract import Contract, check_contract
from remote_payload.train.evaluation import Report
from remote_payload.train.event_log import events_of
from remote_payload.train.replica import Replica
from remote_payload.train.run import Log, Run

FORMAT = 1
"""Of `training.json` and the tensors beside it; raise it when an older one cannot be continued."""


@dataclasses.dataclass(frozen=True, slots=True)
class Resume:
    """A checkpoint to go on from."""

    path: Path
    step: int
    record: Mapping[str, Any]


def find_resume(run_dir: Path, log: Log) -> Resume | None:
    """The newest whole checkpoint of the run, or None when it has none at all.

    A damaged one is named, and renamed to `step-N.damaged` so that nobody takes it for a checkpoint again,
    and the next older one is used. Raises JobError when all are damaged: to begin anew is the user's choice.
    """
    checkpoint.sweep(run_dir)
    damaged: list[tuple[Path, str]] = []
    for step in reversed(checkpoint_steps(run_dir)):
        folder = checkpoint.folder_of(run_dir, step)
        wrong = checkpoint.damage(folder)
        if wrong is None:
            for other, why in damaged:
                aside = other.with_name(f"{other.name}.damaged")
                checkpoint.remove(aside)
                other.rename(aside)
                log(f"{CHECKPOINTS}/{other.name} is damaged ({why}): set aside as {aside.name}, not used")
            return Resume(folder, step, checkpoint.read_record(folder))
        damaged.append((folder, wrong))
    if damaged:
        named = "; ".join(f"{folder.name}: {why}" for folder, why in damaged)
        raise JobError(
            f"{run_dir / CHECKPOINTS}: no checkpoint there is whole ({named}). Remove them to let the run"
            " begin anew from step 0, or launch a new run"
        )
    return None


def record_of(run: Run, step: int) -> dict[str, Any]:
    """What a checkpoint of `step` says of the run besides its tensors."""
    return {
        "format": FORMAT,
        "step": step,
        "sequence": step * run.rows_per_step,
        "steps": run.steps,
        "seed": run.job.seed,
        "best": None if run.best is None else dataclasses.asdict(run.best),
        "loss_first": run.first_loss,
        "loss_last": run.last_loss,
        "training_s": run.training_s,
        "progress": run.progress.state(),
        "contract": run.contract,
    }


def check_resume(resume: Resume, contract: Contract, steps: int) -> None:
    """Refuse a checkpoint of something else, or of a later step than the run has. Raises JobError."""
    written = resume.record.get("format")
    if written != FORMAT:
        raise JobError(
            f"{resume.path / checkpoint.RECORD}: is of format {written}, and this version goes on from"
            f" {FORMAT} alone; resume with the version that wrote it, or launch a new run with init_from for"
            " the weights"
        )
    check_contract(resume.record["contract"], contract, resume.path)
    if resume.step > steps:
        raise JobError(
            f"steps = {steps}, but {resume.path} is of step {resume.step}; set steps to {resume.step} or more"
        )


def go_on(run: Run, resume: Resume | None) -> None:
    """Let a prepared run go on from `resume`, or from step 0 when there is no checkpoint, and say so."""
    if resume is None:
        run.events.write("resume", from_step=0, path=None)
        run.log("No checkpoint of an earlier attempt: beginning at step 0")
        return
    take_up(run, resume)
    path = resume.path.relative_to(run.run_dir)
    run.events.write("resume", from_step=resume.step, path=str(path), steps_before=resume.record["steps"])
    run.log(f"Going on from {path}, step {resume.step} of {run.steps}")
    if resume.record["steps"] != run.steps:
        run.log(
            f"The run has {run.steps} steps now and had {resume.record['steps']}: the learning rate goes on"
            f" at step {resume.step} of the new curve"
        )


def take_up(run: Run, resume: Resume) -> None:
    """Take over what `resume` says: counters, losses, evaluations, the best."""
    record = resume.record
    run.step = run.first_step = resume.step
    run.resume_from = run.saved = resume.path
    run.first_loss, run.last_loss = record["loss_first"], record["loss_last"]
    run.training_s = record["training_s"]
    run.reports = earlier_reports(run.run_dir, resume.step)
    run.progress.restore(record["progress"])
    epoch = round(resume.step * run.rows_per_step / run.batches_per_epoch, 4)
    run.progress.update(
        step=resume.step,
        epoch=epoch,
        checkpoint={"step": resume.step, "t": checkpoint.written_at(resume.path)},
    )
    if run.reports:
        run.progress.update(tau=round(run.reports[-1].tau, 4), tau_step=run.reports[-1].record["step"])
    standing = run.checkpoints.best()
    if standing is not None and standing.tau is not None:  # also one that was judged after `resume` was saved
        run.best = Best(standing.step, standing.tau)
    elif record["best"]:
        run.best = Best(**record["best"])
    if run.best:
        run.progress.update(best=dataclasses.asdict(run.best))


def restore(replica: Replica, path: Path) -> None:
    """Give a replica the weights and the optimizer of the checkpoint `path`. Raises JobError.

    Nothing moves in memory. Every replica gets the same, whichever wrote it.
    """
    try:
        replica.optimizer.load_state(load_file(path / TRAINING))
    except ValueError as error:
        raise JobError(f"{path / TRAINING}: {error}; another version of the payload wrote it") from error


def earlier_reports(run_dir: Path, step: int) -> list[Report]:
    """The first and the last evaluation of earlier attempts up to `step`, from the run's own events.

    An evaluation may end after the checkpoint of its step was written, so no checkpoint can hold it.
    """
    found: list[Report] = []
    for record in events_of(run_dir, "eval"):
        if record["step"] <= step:
            found = [*found[:1], Report(tau=record["tau"], record=record)]
    return found
