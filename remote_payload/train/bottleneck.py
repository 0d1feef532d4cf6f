"""Which side of the pipeline holds up the others, said once in a while and in words.

    reader -> [batches] -> targets -> [features] -> drafters

Whoever is slowest never waits, those after it wait for input, and those before it for room in a queue. The
shares are of the threads' last minutes, so that they follow a run whose documents grow longer.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from remote_payload.train.run_control import ThreadStatus

CLEARLY = 0.1
"""By how much more of its time a side must wait than the other to be called the faster one."""

PERIOD_S = 30.0


@dataclasses.dataclass(frozen=True, slots=True)
class Waiting:
    """Shares of time in which the threads of each kind waited, 0 to 1; None without such threads."""

    targets_for_batches: float | None
    targets_for_room: float | None
    drafters_for_features: float | None

    @classmethod
    def of(cls, threads: Sequence[ThreadStatus]) -> Waiting:
        """What the threads of a run have waited for lately."""

        def share(role: str, state: str) -> float | None:
            shares = [thread.waiting_share(state) for thread in list(threads) if thread.role == role]
            return round(sum(shares) / len(shares), 3) if shares else None

        return cls(
            targets_for_batches=share("target", "waiting for batches"),
            targets_for_room=share("target", "waiting for the drafters"),
            drafters_for_features=share("drafter", "waiting for features"),
        )

    @property
    def bottleneck(self) -> str:
        """`reader`, `targets`, `drafters`, or `none` where the sides wait about as much as each other."""
        starved = self.drafters_for_features or 0.0
        full = self.targets_for_room or 0.0
        if starved > full + CLEARLY:
            return "reader" if (self.targets_for_batches or 0.0) > CLEARLY else "targets"
        if full > starved + CLEARLY:
            return "drafters"
        return "none"

    def words(self) -> str:
        """One sentence for the log."""
        shares = [
            (f"{what} {share:.0%}")
            for what, share in (
                ("targets wait for batches", self.targets_for_batches),
                ("for room", self.targets_for_room),
                ("drafters for features", self.drafters_for_features),
            )
            if share is not None
        ]
        advice = {
            "reader": "the reader is the bottleneck",
            "targets": "the targets are the bottleneck: more of them, or fewer drafters, would be faster",
            "drafters": "the drafters are the bottleneck: more of them, or fewer targets, would be faster",
            "none": "neither side holds up the other",
        }
        return f"{', '.join(shares)} of their time; {advice[self.bottleneck]}"


class Periodic:
    """True at most once in `PERIOD_S` seconds."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def due(self) -> bool:
        """Whether the time has come; if so the next period begins."""
        now = time.monotonic()
        if now - self._last < PERIOD_S:
            return False
        self._last = now
        return True
