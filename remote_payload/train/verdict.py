"""What an evaluation means for the run: whether it is the best so far, and whether to raise the alarm."""

from __future__ import annotations

from typing import Any

from remote_payload.train.alarm import OUT_OF_MEMORY
from remote_payload.train.checkpoint_index import Best
from remote_payload.train.evaluation import Report
from remote_payload.train.run import Run


def judge(run: Run, report: Report) -> None:
    """Note the best checkpoint and the alarm, as events, in the progress and in the log."""
    step, tau = int(report.record["step"]), float(report.record["tau"])  # rounded, as it is kept
    run.saver.wait()  # its checkpoint may still be under way
    stands = run.checkpoints.evaluated(step, report.record)
    if stands and (run.best is None or tau >= run.best.tau):
        run.best = Best(step, tau)
        run.progress.update(best={"step": step, "tau": tau})
        run.events.write("best", step=step, tau=tau, path=f"checkpoints/step-{step}")
        run.log(f"Best so far: tau {tau:.3f} at step {step}")
    if run.checkpoints.problem:
        run.log(f"Checkpoints: {run.checkpoints.problem}")
    compared = run.watch.estimate(step) is not None
    alarm = run.watch.judge(step, tau)
    raised: dict[str, Any] | None = {"reason": "not_lossless", "step": step} if report.not_lossless else None
    # A resumed run's first evaluation has no estimate, and takes no warning back but one of no memory.
    if compared or raised or _reason(run) == OUT_OF_MEMORY:
        run.progress.update(alarm=raised if alarm is None else alarm.record())
    if alarm is not None:
        run.events.write("alarm", **alarm.record())
        run.log(alarm.line())


def leave_unjudged(run: Run, step: int) -> None:
    """`step` has no evaluation for want of memory: its checkpoint stays for other reasons alone."""
    run.saver.wait()  # its checkpoint may still be under way
    run.checkpoints.expect_no_longer(step)
    if _reason(run) in (None, OUT_OF_MEMORY):  # what an earlier one found is still true
        run.progress.update(alarm={"reason": OUT_OF_MEMORY, "step": step, "skipped": run.unevaluated})


def _reason(run: Run) -> str | None:
    """Of the alarm that stands."""
    alarm = run.progress.values["alarm"]
    return alarm["reason"] if alarm else None
