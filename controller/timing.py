"""The time constants of a connection, in one place and injectable: a rule of 15 s is tested in one.

`DFLASHCTL_TIME_SCALE` (a factor, 1 by default) scales those of a whole process and of the feeds it starts.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence
from typing import Final, Self

from controller.errors import UsageError

SCALE_VARIABLE: Final = "DFLASHCTL_TIME_SCALE"


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """All in seconds."""

    beat_s: float = 2.0
    """The feed's beats, and how often `mirror.json` is written at least."""
    silence_s: float = 15.0
    """A feed that sent no byte for so long is dead, whatever the socket says."""
    ping_s: float = 5.0
    hello_s: float = 30.0
    """From the start of the command to the feed's first frame: ssh, pct and an interpreter start."""
    backoff: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
    """Wait before the first, second, ... try after a failure; the last one is kept for ever."""
    jitter: float = 0.2
    """Up to this share is added to a wait, so that many laptops do not come back at once."""
    fill_s: float = 60.0
    """A feed that beats and sent none of the older bytes it was asked for in so long will not send them."""
    refused_s: float = 60.0
    """Wait after a refusal that only a person can lift (host key, login)."""
    lock_s: float = 0.5
    """How often a view that only reads looks whether it may take over."""
    poll_s: float = 0.25
    """Longest wait in which a thread does not look whether it was stopped."""
    scale: float = 1.0
    """What the constants above were multiplied by."""

    @classmethod
    def scaled(cls, factor: float) -> Self:
        """These constants times `factor`; starting a process takes what it takes, so not all shrink."""
        base = cls()
        return cls(
            beat_s=base.beat_s * factor,
            silence_s=base.silence_s * factor,
            ping_s=base.ping_s * factor,
            hello_s=max(10.0, base.hello_s * factor),
            backoff=tuple(wait * factor for wait in base.backoff),
            jitter=base.jitter,
            fill_s=base.fill_s * factor,
            refused_s=base.refused_s * factor,
            lock_s=min(base.lock_s, base.lock_s * factor),
            poll_s=min(base.poll_s, base.poll_s * factor),
            scale=factor,
        )

    @classmethod
    def from_environment(cls) -> Self:
        """The constants, scaled by `DFLASHCTL_TIME_SCALE`. Raises UsageError when that is no factor."""
        text = os.environ.get(SCALE_VARIABLE, "1")
        try:
            factor = float(text)
        except ValueError:
            factor = 0.0
        if not 0.001 <= factor <= 1000:
            raise UsageError(f"{SCALE_VARIABLE} is {text!r}, expected a factor from 0.001 to 1000")
        return cls.scaled(factor)

    def command(self, argv: Sequence[str]) -> list[str]:
        """`argv` for a place, so that what it starts has clocks as fast as these."""
        return [*argv] if self.scale == 1 else ["env", f"{SCALE_VARIABLE}={self.scale:g}", *argv]


def awake_and_asleep() -> float:
    """A monotonic clock that goes on while the laptop sleeps, where the system has one.

    A laptop that wakes up finds its connections silent since it fell asleep.
    """
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
