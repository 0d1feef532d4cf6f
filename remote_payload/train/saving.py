"""Writing a checkpoint from inside a run, and saying so in the log, the events and the progress.

A disk that is full is no reason to lose a week: the run says so, keeps its older checkpoints and trains on.
Only when no step follows that could be saved later does it end the run.
"""

from __future__ import annotations

import time

from remote_payload.train import checkpoint
from remote_payload.train.checkpoint import SaveError
from remote_payload.train.replica import Replica
from remote_payload.train.resume import record_of
from remote_payload.train.run import Run

_COUNT_S = 5.0
"""Longest wait until every replica has counted its rows of the step; they do right after the reduction."""


def save(run: Run, replica: Replica, step: int, *, last: bool, awaited: bool) -> None:
    """Write the checkpoint of `step`; called by the leading replica, between two steps.

    `last`: no step follows; `awaited`: an evaluation of this step does. Raises SaveError when it fails and is
    the last.
    """
    start = time.perf_counter()
    _wait_for_counts(run, step)
    try:
        path = run.checkpoints.save(
            step,
            config=run.config,
            weights=replica.weights.named(replica.weights.values),
            training=replica.optimizer.state(),
            record=record_of(run, step),
            awaited=awaited,
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
    size, seconds = checkpoint.size_of(path), time.perf_counter() - start
    run.progress.update(
        checkpoint={"step": step, "t": round(time.time(), 3)}, checkpoint_error=run.checkpoints.problem
    )
    name = str(path.relative_to(run.run_dir))
    run.events.write("checkpoint", step=step, path=name, bytes=size, seconds=round(seconds, 3))
    run.log(f"Checkpoint {name} ({size / 2**20:.0f} MiB, {seconds:.1f} s)")
    if run.checkpoints.problem:
        run.log(f"Checkpoints: {run.checkpoints.problem}")


def _wait_for_counts(run: Run, step: int) -> None:
    deadline = time.monotonic() + _COUNT_S
    while run.progress.rows() < step * run.rows_per_step and time.monotonic() < deadline:
        run.control.check()
        time.sleep(0.001)
