"""Writing a checkpoint from inside a run, and saying so in the log, the events and the progress.

The drafters stop for a copy into main memory and go on while a thread of its own writes, reads back and
hashes it (12 s for 1.4 GB on a slow disk, 2 s for the copy), since every evaluated step writes one. At most
one copy is under way.
On a CPU nothing is gained by that, and beside the last checkpoint nothing goes on: these are written at once.

A disk that is full is no reason to lose a week: the run says so, keeps its older checkpoints and trains on.
Only when no step follows that could be saved later does it end the run.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from remote_payload.train import checkpoint
from remote_payload.train.checkpoint import SaveError
from remote_payload.train.replica import Replica
from remote_payload.train.resume import record_of
from remote_payload.train.run import Run

_COUNT_S = 5.0
"""Longest wait until every replica has counted its rows of the step; they do right after the reduction."""


def save(run: Run, replica: Replica, step: int, *, last: bool, awaited: bool) -> None:
    """Save `step`; called by the leading replica, between two steps.

    `last`: no step follows; `awaited`: an evaluation of this step does. Raises SaveError when it fails and is
    the last.
    """
    start = time.perf_counter()
    run.saver.wait()
    _wait_for_counts(run, step)
    weights, training = replica.weights.named(replica.weights.values), replica.optimizer.state()
    beside = not last and goes_beside(replica.device)
    if beside:
        weights, training = checkpoint.on_host(weights), checkpoint.on_host(training)
    write = functools.partial(
        _write, run, step, weights, training, record_of(run, step), awaited=awaited, last=last, began=start
    )
    if beside:
        run.saver.submit(functools.partial(write, waited=time.perf_counter() - start))
    else:
        write(waited=None)


def goes_beside(device: torch.device) -> bool:
    """Whether a drafter on `device` trains on while its checkpoint is written."""
    return device.type != "cpu"


def _write(
    run: Run,
    step: int,
    weights: Mapping[str, Tensor],
    training: Mapping[str, Tensor],
    record: Mapping[str, Any],
    *,
    awaited: bool,
    last: bool,
    began: float,
    waited: float | None,
) -> None:
    """Write what was collected. `waited`: seconds the drafters stood still; None: for all of it."""
    try:
        path = run.checkpoints.save(
            step, config=run.config, weights=weights, training=training, record=record, awaited=awaited
        )
    except SaveError as error:
        kept = f"the newest is {run.saved.name}" if run.saved else "there is none yet"
        line = f"The checkpoint of step {step} could not be written: {error} ({kept})"
        run.progress.update(checkpoint_error=f"step {step}: {error}")
        run.events.write("checkpoint_failed", step=step, error=str(error))
        if last:
            raise SaveError(line) from error
        run.log(f"{line}; training goes on")
        return
    run.saved = path
    size, seconds = checkpoint.size_of(path), time.perf_counter() - began
    run.progress.update(
        checkpoint={"step": step, "t": round(time.time(), 3)}, checkpoint_error=run.checkpoints.problem
    )
    name = str(path.relative_to(run.run_dir))
    run.events.write(
        "checkpoint",
        step=step,
        path=name,
        bytes=size,
        seconds=round(seconds, 3),
        waited_s=round(seconds if waited is None else waited, 3),
    )
    stood = "" if waited is None else f", of which the drafters waited {waited:.1f} s"
    run.log(f"Checkpoint {name} ({size / 2**20:.0f} MiB, {seconds:.1f} s{stood})")
    if run.checkpoints.problem:
        run.log(f"Checkpoints: {run.checkpoints.problem}")


def _wait_for_counts(run: Run, step: int) -> None:
    deadline = time.monotonic() + _COUNT_S
    while run.progress.rows() < step * run.rows_per_step and time.monotonic() < deadline:
        run.control.check()
        time.sleep(0.001)
