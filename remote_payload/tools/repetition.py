"""Degenerate repetition in a greedy answer: what to keep of it, and why not all.

A small model decoding greedily falls into loops. A drafter trained on them learns to copy, and its
acceptance length then flatters: a loop is drafted perfectly. Two rules, on token ids so that they
hold for any language. A **loop** is a unit of at most `MAX_PERIOD` tokens repeated back to back;
the text up to the end of its first unit is still the target's own greedy text, so it is kept, cut
there. **Repetition** without a fixed period (a numbered list of one sentence) shows as a large share
of n-grams that stood in the answer before; the answer is cut where that begins, or dropped.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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


def judge(answer: Sequence[int], cut: bool = True) -> Verdict:
    """What to keep of the token ids of an answer, its end-of-text token left off.

    Reasons: `empty`, `loop`, `repetition`, or None when the whole answer is kept. Without `cut` an answer of
    repetition is dropped whole.
    """
    if not answer:
        return Verdict(0, "empty")
    loop = find_loop(answer)
    keep = len(answer) if loop is None else sum(loop)
    reason = None if loop is None else "loop"
    if repeated_share(answer[:keep]) > MAX_REPEATED_SHARE:
        keep, reason = find_repetition(answer[:keep]) if cut else 0, "repetition"
    return Verdict(0 if reason and keep < MIN_ANSWER else keep, reason)


def find_repetition(tokens: Sequence[int]) -> int:
    """How many tokens stand before the repetition: what remains is no repetition, by the same rule.

    An `N_GRAM`-gram that is a copy counts `1 - MAX_REPEATED_SHARE`, another `-MAX_REPEATED_SHARE`; the end
    with the greatest sum is cut off. Had the rest a larger share of copies than allowed, its sum would be
    above 0, and the end would have been greater with it.
    """
    copies = _copies(tokens)
    sums = (np.array(copies) - MAX_REPEATED_SHARE)[::-1].cumsum()[::-1]
    first = int(sums.argmax())
    return first + N_GRAM - 1 if sums[first] > 0 else len(tokens)


def find_loop(tokens: Sequence[int]) -> tuple[int, int] | None:
    """(start, period) of the loop that begins first, the shortest period winning; None if none.

    A loop is `tokens[i] == tokens[i - period]` over a run that makes at least `MIN_REPEATS` units
    and at least `MIN_SPAN` tokens. Work is O(len(tokens) * MAX_PERIOD), for all periods at once.
    """
    count = len(tokens)
    periods = np.arange(1, min(MAX_PERIOD, count // MIN_REPEATS) + 1)[:, None]
    if not len(periods):
        return None
    ids, place = np.array(tokens), np.arange(count)
    same = (place >= periods) & (ids[place] == ids[np.maximum(place - periods, 0)])
    run = place - np.maximum.accumulate(np.where(same, -1, place), axis=1)
    run = np.where(same, run, 0)
    long = run + periods >= np.maximum(MIN_REPEATS * periods, MIN_SPAN)
    found = np.flatnonzero(long.any(axis=1))
    if not len(found):
        return None
    ends = long[found].argmax(axis=1)
    starts = ends + 1 - run[found, ends] - periods[found, 0]
    first = int(starts.argmin())
    return int(starts[first]), int(periods[found[first], 0])


def repeated_share(tokens: Sequence[int]) -> float:
    """Share of the `N_GRAM`-grams that are copies of an earlier one; 0 for a very short text."""
    copies = _copies(tokens)
    return sum(copies) / len(copies) if len(copies) >= MIN_ANSWER else 0.0


def _copies(tokens: Sequence[int]) -> list[bool]:
    """Whether each `N_GRAM`-gram stood before."""
    seen: set[tuple[int, ...]] = set()
    copies = []
    for gram in zip(*(tokens[i:] for i in range(N_GRAM)), strict=False):
        copies.append(gram in seen)
        seen.add(gram)
    return copies
