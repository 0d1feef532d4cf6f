"""Whether a crashed run is tried again, when, and why not: the rules of `restart = "on-crash"`.

A restart helps against what passes: a GPU that fell off the bus, a file system that hung, memory that
somebody else took. It does not help against what would repeat at once, so these end the run:

- a refused job (exit code 2), and of course a run that finished or was asked to stop;
- a failure before any step was trained: a missing package, memory that does not suffice at step 0;
- the same failure at the same step as in the attempt before: a run is a function of its seed.

The first two are of the first attempt. One that trained before shows that the job can be run: what a later
attempt meets before its first step (no such device, no such folder) is of the machine, and may pass.

Waits grow (10, 20, 40 ... 300 s), and an attempt that trained for half an hour wipes the slate clean.
Standard library only; pure but for `RestartPolicy.read`.
"""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

from remote_payload.job_key import MOST
from remote_payload.outcome import Outcome
from remote_payload.rundir import State, TrainerExit

_LONGEST_WAIT_S = 300.0
_HEALTHY_S = 1800.0


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """One attempt's end."""

    outcome: Outcome
    step: int
    """The newest step that its progress told of; 0: it trained none, whatever it went on from."""
    trained_s: float
    """From its first progress to its end."""
    asked_to_stop: bool


@dataclasses.dataclass(frozen=True, slots=True)
class RestartPolicy:
    """The job's keys `restart`, `restart_limit` and `restart_wait`; `scale` shortens every time."""

    on_crash: bool = False
    limit: int = 5
    wait_s: float = 10.0
    scale: float = 1.0

    @classmethod
    def read(cls, job: Path, scale: float) -> RestartPolicy:
        """The one that job.toml asks for; no restarts where there is no such file, or a damaged one."""
        try:
            values = tomllib.loads(job.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return cls(scale=scale)
        default = cls()
        return cls(
            on_crash=values.get("restart") == "on-crash",
            limit=int(_number(values.get("restart_limit"), default.limit)),
            wait_s=_number(values.get("restart_wait"), default.wait_s),
            scale=scale,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """What follows an attempt."""

    wait_s: float | None
    """Seconds until the next attempt; None: this end stands."""
    why_not: str = ""
    """Why there is no restart; empty where none was wanted anyway."""


class Restarts:
    """The restarts of one supervisor: asked after each attempt what to do."""

    def __init__(self, policy: RestartPolicy) -> None:
        self.policy = policy
        self.count = 0
        """Restarts since the last long healthy stretch."""
        self._before: Ended | None = None

    def after(self, ended: Ended) -> Decision:
        """What follows the attempt that ended so."""
        before, self._before = self._before, ended
        crashed = ended.outcome.state in (State.FAILED, State.KILLED)
        if not self.policy.on_crash or not crashed or ended.asked_to_stop:
            return Decision(None)
        why_not = _would_repeat(ended, before)
        if why_not:
            return Decision(None, why_not)
        if ended.trained_s >= _HEALTHY_S * self.policy.scale:
            self.count = 0
        if self.count >= self.policy.limit:
            return Decision(None, f"restarted {self.count} times already, which is the limit")
        self.count += 1
        wait = min(self.policy.wait_s * 2 ** (self.count - 1), _LONGEST_WAIT_S)
        return Decision(wait * self.policy.scale)


def _would_repeat(ended: Ended, before: Ended | None) -> str:
    refused = ended.outcome.exit_code == TrainerExit.REFUSED and ended.outcome.signal is None
    if before is None and refused:
        return "not restarted: the job was refused, and would be again"
    if before is None and not ended.step:
        return "not restarted: it failed before its first step, and would again"
    if before is not None and before.step == ended.step > 0 and before.outcome == ended.outcome:
        return f"not restarted: it failed in the same way at step {ended.step} in the attempt before"
    return ""


def _number(value: Any, default: float) -> float:
    usable = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MOST
    return float(value) if usable else default
