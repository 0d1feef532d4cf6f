"""Steps without a finite gradient: said when they happen, and the end of the run when they do not stop.

The optimizer leaves such a step out and counts it on the device. The leading replica reads the count with its
report, at most once a second, so what is said here comes up to a second late, and a run that must end
ends some steps after the one that made it hopeless.
"""

from __future__ import annotations

from remote_payload.train.optimizer import OptimizerReading
from remote_payload.train.run import Run
from remote_payload.train.run_control import ThreadStatus

_NAMED = 10
"""Samples named in the error's text; its file in crash/ has all of them."""


class NonFiniteGradients(ArithmeticError):
    """Too many steps in a row had a gradient that is not finite."""


def say_nonfinite(run: Run, reading: OptimizerReading, status: ThreadStatus) -> None:
    """Write an event and a line for steps left out since the last report.

    Raises NonFiniteGradients when there were `nonfinite_limit` of them in a row; `status` then has the step,
    bucket and samples, for the record in crash/.
    """
    if reading.skipped <= run.progress.values["nonfinite_steps"]:
        return
    bad = [batch for step, batch in tuple(run.trained) if step == reading.bad_step]
    bucket = bad[0].bucket if bad else None
    samples = sorted(sample for batch in bad for sample in batch.samples)
    run.progress.update(nonfinite_steps=reading.skipped)
    run.events.write(
        "nonfinite",
        step=reading.bad_step,
        bucket=bucket,
        samples=samples,
        gradient_norm=reading.bad_norm,
        skipped_steps=reading.skipped,
        in_row=reading.in_row,
    )
    run.log(
        f"step {reading.bad_step}: the gradient was not finite; {reading.skipped} steps left out so far,"
        f" {reading.in_row} of them in a row until now"
    )
    limit = run.job.nonfinite_limit
    if limit and reading.longest_in_row >= limit:
        status.enter("stopping for want of finite gradients", bucket=bucket, samples=samples)
        status.step = reading.bad_step
        named = ", ".join(map(str, samples[:_NAMED])) + (", ..." if len(samples) > _NAMED else "")
        since = f" from step {reading.bad_step - reading.in_row + 1} on" if reading.in_row else ""
        raise NonFiniteGradients(
            f"{reading.longest_in_row} steps in a row without a finite gradient{since} (nonfinite_limit ="
            f" {limit}); the newest is step {reading.bad_step}, bucket {bucket}, samples {named or 'unknown'}"
        )
