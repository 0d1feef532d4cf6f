"""How fast the supervising half's clocks run: one factor, so that a test of a 60 s rule takes one second.

`DFLASHCTL_TIME_SCALE` (default 1) multiplies every constant of supervisor, feed and GPU sampler. It is
never passed on to the trainer. Standard library only.
"""

from __future__ import annotations

import math
import os

VARIABLE = "DFLASHCTL_TIME_SCALE"


def time_scale() -> float:
    """The factor from the environment; raises ValueError when it is no number above 0."""
    text = os.environ.get(VARIABLE, "1")
    try:
        scale = float(text)
    except ValueError:
        scale = math.nan
    if not (0 < scale < math.inf):
        raise ValueError(f"{VARIABLE}={text!r}: expected a number above 0, such as 0.1")
    return scale
