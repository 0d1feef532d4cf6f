"""What an evaluation means for the run: whether it is the best so far, and whether to raise the alarm."""

from __future__ import annotations

from typing import Any

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
    if compared or raised:  # a resumed run's first evaluation has no estimate, and takes no warning back
        run.progress.update(alarm=raised if alarm is None else alarm.record())
    if alarm is not None:
        run.events.write("alarm", **alarm.record())
        run.log(alarm.line())
