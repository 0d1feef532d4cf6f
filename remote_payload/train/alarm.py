"""The alarm for a drafter that does well in training and cannot draft: the two taus part.

Training estimates tau from its own blocks: of each, how many tokens would have been accepted. Decoding
measures it. A mask that lets a block see its own answer, features that belong to other tokens, or a head
that is not the target's raise the first and not the second (SpecForge #455, #473: accuracy 70 %, tau 1.02 to
1.29). Nothing else about such a run looks wrong, so it is an event and not a curve to notice.

The estimate is the mean over the newer half of the steps since the last evaluation: the older half of a
drafter that improves is of another drafter. The alarm is one-sided, because an honest estimate is too low
rather than too high: blocks that run past the end of their document are cut short in it, and any mean lags.
An honest drafter that learned a small training set by heart does raise it, and should.
"""

from __future__ import annotations

import dataclasses

REASON = "leak_or_misalignment"

OUT_OF_MEMORY = "evaluation_out_of_memory"
"""The reason of an alarm of another kind: there was no memory to decode, so nothing is known of tau."""

FLOOR = 1.5
"""Estimates below it raise no alarm: half an accepted token a round is what frequent words alone give, and
with a ratio near 1 the noise of a few prompts would be above it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Alarm:
    """The two taus of one step part by more than the job's ratio."""

    step: int
    tau: float
    """Decoded."""
    tau_estimate: float
    """By training, over the steps since the evaluation before."""

    @property
    def ratio(self) -> float:
        """How many times the decoded tau the estimate is."""
        return self.tau_estimate / self.tau

    def record(self) -> dict[str, float | str]:
        """The fields of its event, and of `alarm` in progress.json."""
        return {
            "reason": REASON,
            "step": self.step,
            "tau": round(self.tau, 4),
            "tau_estimate": round(self.tau_estimate, 4),
            "ratio": round(self.ratio, 3),
        }

    def line(self) -> str:
        """What it means and what to check, for the log."""
        return (
            f"ALARM at step {self.step}: training's own estimate of tau is {self.tau_estimate:.2f}, but"
            f" decoding measures {self.tau:.2f}. The drafter sees in training what does not exist when it"
            " serves (a leaking mask), its features belong to other tokens, or it knows its training set by"
            " heart. Trust the decoded tau. Check the mask and the alignment of ids and features first, and"
            " that held-out prompts have the template and the kind of the training data; then train on more"
            " varied data"
        )


class TauWatch:
    """Smooths the estimate between evaluations, and compares. One thread reads and marks, another judges."""

    def __init__(self, ratio: float) -> None:
        """`ratio` is the job's `tau_alarm_ratio`; 0: never an alarm."""
        self._ratio = ratio
        self._read: list[tuple[float, int]] = []
        self._newest: float | None = None
        self._marked: dict[int, float | None] = {}

    def read(self, estimate: float | None, steps: int) -> None:
        """Take in the estimate over the last `steps` steps; None: there was nothing to estimate from."""
        if estimate is not None:
            self._read.append((estimate, steps))

    def mark(self, step: int) -> None:
        """The weights of `step` go to the evaluator: what was read so far is compared with its result.

        Where nothing was, since reports come once a second, it is what was compared before.
        """
        if self._read:
            self._newest = _mean_of_newer_half(self._read)
            self._read = []
        self._marked[step] = self._newest

    def estimate(self, step: int) -> float | None:
        """What belongs to a marked step that was not judged yet."""
        return self._marked.get(step)

    def judge(self, step: int, tau: float) -> Alarm | None:
        """Compare with the decoded `tau` of a marked step."""
        estimate = self._marked.pop(step, None)
        if not self._ratio or estimate is None or estimate < FLOOR or estimate <= self._ratio * tau:
            return None
        return Alarm(step, tau, estimate)


def _mean_of_newer_half(read: list[tuple[float, int]]) -> float:
    """Mean estimate by steps, over as many of the newest readings as make half of the steps or more."""
    half, total, count = sum(steps for _, steps in read) / 2, 0.0, 0
    for estimate, steps in reversed(read):
        total, count = total + estimate * steps, count + steps
        if count >= half:
            break
    return total / count
