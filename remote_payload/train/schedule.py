"""The learning rate of a step: a linear rise, then one of three falls to 0; a function of the step alone.

Nothing of it needs saving: a resumed run that knows its step knows its rate. With R the steps of the rise
(`warmup` of them all, at least one) and T all steps, step t (from 0) has the peak rate times

    t < R           (t + 1) / R
    cosine          (1 + cos(pi (t - R) / (T - R))) / 2
    linear          1 - (t - R) / (T - R)
    wsd             1, and in the last D steps (`decay` of them all) 1 - sqrt((t - (T - D)) / D)

Warm-up, stable, decay: the stable part needs no end in sight, and a run may be prolonged from a checkpoint
before the fall. Its shape is 1 - sqrt, which beats a straight line (arXiv 2405.18392); TorchSpec saw tau rise
from 3.79 to 3.94 with it.
"""

from __future__ import annotations

import math

from remote_payload.job import Job


def learning_rate(step: int, steps: int, job: Job) -> float:
    """The rate of step 0..steps-1 of a run of `steps`."""
    rise = max(1, round(job.warmup * steps))
    if step < rise:
        return job.learning_rate * (step + 1) / rise
    done = (step - rise) / max(1, steps - rise)
    if job.schedule == "linear":
        return job.learning_rate * (1 - done)
    if job.schedule == "wsd":
        begin = max(rise, steps - round(job.decay * steps))
        fallen = max(0.0, (step - begin) / max(1, steps - begin))
        return job.learning_rate * (1 - math.sqrt(fallen))
    return job.learning_rate * 0.5 * (1 + math.cos(math.pi * done))
