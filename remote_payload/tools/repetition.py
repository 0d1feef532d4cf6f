"""Degenerate repetition in a greedy answer: what to keep of it, and why not all.

A small model decoding greedily falls into loops. A drafter trained on them learns to copy, and its
acceptance length then flatters: a loop is drafted perfectly. Two rules, on token ids so that they
hold for any language. A **loop** is a unit of at most `MAX_PERIOD` tokens repeated back to back;
the text up to the end of its first unit is still the target's own greedy text, so it is kept, cut
there. **Repetition** without a fixed period (a numbered list of one sentence) shows as a large share
of n-grams that stood in the answer before; there is no good place to cut, so the answer is dropped.
"""

from collections.abc import Sequence
from dataclasses import dataclass

MAX_PERIOD = 40
MIN_REPEATS = 3
MIN_SPAN = 12
"""Tokens a loop covers at least: a shorter one ("ha ha ha", a table's rule) is ordinary text."""

N_GRAM = 4
MAX_REPEATED_SHARE = 0.25
MIN_ANSWER = 12
"""Tokens that a cut answer must still have to be worth keeping."""


@dataclass(frozen=True)
class Verdict:
    """The first `keep` tokens are kept (0: the answer is dropped), `reason` says why not all."""

    keep: int
    reason: str | None = None


def judge(answer: Sequence[int]) -> Verdict:
    """What to keep of the token ids of an answer, its end-of-text token left off.

    Reasons: `empty`, `loop`, `repetition`, or None when the whole answer is kept.
    """
    if not answer:
        return Verdict(0, "empty")
    loop = find_loop(answer)
    keep = len(answer) if loop is None else sum(loop)
    if loop is not None and keep < MIN_ANSWER:
        return Verdict(0, "loop")
    if repeated_share(answer[:keep]) > MAX_REPEATED_SHARE:
        return Verdict(0, "repetition")
    return Verdict(keep, None if loop is None else "loop")


def find_loop(tokens: Sequence[int]) -> tuple[int, int] | None:
    """(start, period) of the loop that begins first, the shortest period winning; None if none.

    A loop is `tokens[i] == tokens[i - period]` over a run that makes at least `MIN_REPEATS` units
    and at least `MIN_SPAN` tokens. Time is O(len(tokens) * MAX_PERIOD).
    """
    first: tuple[int, int] | None = None
    for period in range(1, min(MAX_PERIOD, len(tokens) // MIN_REPEATS) + 1):
        run = 0
        for i in range(period, len(tokens)):
            run = run + 1 if tokens[i] == tokens[i - period] else 0
            if run + period >= max(MIN_REPEATS * period, MIN_SPAN):
                start = i + 1 - run - period
                if first is None or start < first[0]:
                    first = (start, period)
                break
    return first


def repeated_share(tokens: Sequence[int]) -> float:
    """Share of the `N_GRAM`-grams that are copies of an earlier one; 0 for a very short text."""
    grams = [tuple(tokens[i : i + N_GRAM]) for i in range(len(tokens) - N_GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if len(grams) >= MIN_ANSWER else 0.0
