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


def eligible_places(supervised: npt.NDArray[np.bool_]) -> Ints:
    """The supervised tokens whose next token is supervised too: every place a block may begin at, rising."""
    return np.flatnonzero(supervised[:-1] & supervised[1:])


def draw_order(places: Ints, key: Sequence[int], choice: str, block_size: int) -> Ints:
    """Anchors of a document in the order in which slots take them; the caller takes the first few.

    `places` are the eligible ones, `key` is (seed, epoch, sample). `choice` RANDOM draws from all of them;
    UNIFORM from the beginnings of blocks that do not overlap, every `block_size` tokens from the first of
    each supervised stretch: the paper's ablation (tau 4.94 against 5.64), not meant for real training.
    """
    if choice == UNIFORM and len(places):
        starts = np.flatnonzero(np.diff(places, prepend=places[0] - 2) != 1)
        stretch = np.repeat(places[starts], np.diff(starts, append=len(places)))
        places = places[(places - stretch) % block_size == 0]
    return np.random.default_rng(list(key)).permutation(places)


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
