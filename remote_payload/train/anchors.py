"""Where a document's blocks begin: eligible places, the order they are drawn in, and each document's share.

Anchors are drawn for each document from (seed, epoch, sample) alone, so they are the same after a resume, in
any company and for any number of replicas. Slots are shared per document, not per row: counted per row, 187
supervised tokens got 28 anchors (speculators #1071).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

RANDOM = "random"
UNIFORM = "uniform"

Ints = npt.NDArray[np.int64]


def eligible_places(supervised: npt.NDArray[np.bool_], last: npt.NDArray[np.bool_]) -> Ints:
    """Every token of a row that a block may begin at, rising: supervised, and the next of its document too.

    `last` are the last tokens of documents, [tokens].
    """
    return np.flatnonzero(supervised[:-1] & supervised[1:] & ~last[:-1])


def candidates(places: Ints, choice: str, block_size: int) -> Ints:
    """Those of a document's eligible `places` that may be drawn, rising.

    `choice` RANDOM: all of them. UNIFORM: the beginnings of blocks that do not overlap, every `block_size`
    tokens from the first of each supervised stretch: the paper's ablation (tau 4.94 against 5.64), not meant
    for real training.
    """
    if choice != UNIFORM or not len(places):
        return places
    starts = np.flatnonzero(np.diff(places, prepend=places[0] - 2) != 1)
    stretch = np.repeat(places[starts], np.diff(starts, append=len(places)))
    chosen: Ints = places[(places - stretch) % block_size == 0]
    return chosen


def draw(places: Ints, count: int, key: Sequence[int]) -> Ints:
    """`count` of a document's candidates `places`, rising; `key` is (seed, epoch, sample).

    A larger count only adds to what a smaller one draws.
    """
    if count in (0, len(places)):
        return places[:count]
    return np.sort(np.random.default_rng(list(key)).permutation(places)[:count])


def share_slots(candidates: Sequence[int], slots: int) -> list[int]:
    """How many of `slots` anchors each document gets: equal shares, what one cannot use goes to others.

    >>> share_slots([2, 100, 100], 20)
    [2, 9, 9]
    """
    shares = [0] * len(candidates)
    order = sorted(range(len(candidates)), key=lambda i: candidates[i])
    left = slots
    for done, i in enumerate(order):
        shares[i] = min(candidates[i], left // (len(order) - done))
        left -= shares[i]
    return shares
