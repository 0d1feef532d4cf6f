"""When a run reports, and how fast it is from one report to the next."""

from __future__ import annotations

import time
from typing import Any

from remote_payload.train.progress import rounded

WARM_STEPS = 3
"""Steps left out of the step time that the ETA is made of."""

LOG_PERIOD_S = 5.0
"""Seconds between two lines about steps in the log; events come once a second."""


class StepClock:
    """Times steps and tokens from one report to the next, and the whole run for the ETA."""

    def __init__(self, step: int = 0, tokens: int = 0) -> None:
        """`step` and `tokens` are what a resumed run begins with."""
        self._reported = time.monotonic()
        self._logged = float("-inf")
        self._first, self._step, self._tokens = step, step, tokens
        self._warm: tuple[float, int] | None = None

    def due(self) -> bool:
        """Whether a second has passed since the last report."""
        return time.monotonic() - self._reported >= 1.0

    def log_due(self) -> bool:
        """Whether the log should have a line again; notes that it gets one."""
        due = time.monotonic() - self._logged >= LOG_PERIOD_S
        if due:
            self._logged = time.monotonic()
        return due

    def report(self, step: int, steps: int, tokens: int) -> dict[str, Any]:
        """Rates since the last report after `step` steps and `tokens` tokens, and the ETA."""
        now = time.monotonic()
        passed, done = now - self._reported, step - self._step
        rates = {
            "step_s": rounded(passed / max(done, 1), 4),
            "tokens_per_s": rounded((tokens - self._tokens) / passed, 1),
            "eta_s": None,
        }
        if self._warm and step > self._warm[1]:
            each = (now - self._warm[0]) / (step - self._warm[1])
            rates["eta_s"] = rounded(each * (steps - step), 1)
        if not self._warm and step >= self._first + WARM_STEPS:
            self._warm = (now, step)
        self._reported, self._step, self._tokens = now, step, tokens
        return rates
