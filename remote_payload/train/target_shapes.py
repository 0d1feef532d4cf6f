"""Which shapes of batches a target gets a graph for, so that few graphs waste little.

A batch of rows [B, L] runs in any graph of at least B rows and L tokens a row, padded. Batches are cut so
that rows x longest row stay within the token budget, so a graph of R x L tokens for all whose longest row is
in (low, L] needs R = budget // (low + 1) rows: the nearer low is to L, the less it pads, and the more graphs
it takes. The cuts are chosen by dynamic programming over the lengths that batches have as their longest, so
that all batches of an epoch cost least. Where no graph pays (long rows that hardly ever come), batches run
eagerly.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import numpy.typing as npt

from remote_payload.train.buckets import EpochPlan

MOST_GRAPHS = 12
"""Graphs of a target. Each is captured and proved in about four forward passes."""

OVERSIZE = 1.25
"""Most tokens of a graph in token budgets: what it pads is memory, too."""

EAGER_COST = 3.0
"""What a token of an eager pass is taken to cost in tokens of a replay."""

_LEVELS = 96
"""Lengths that are told apart when cuts are chosen."""


@dataclasses.dataclass(frozen=True, order=True, slots=True)
class PassShape:
    """A forward pass of fixed shape."""

    rows: int
    longest: int

    @property
    def tokens(self) -> int:
        """Padding counted."""
        return self.rows * self.longest

    def holds(self, rows: int, longest: int) -> bool:
        """Whether a batch of that many rows and tokens a row fits."""
        return rows <= self.rows and longest <= self.longest


def choose_shapes(
    plan: EpochPlan,
    lengths: npt.NDArray[np.int64],
    *,
    token_budget: int,
    max_batch: int,
    most: int = MOST_GRAPHS,
) -> list[PassShape]:
    """At most `most` shapes for batches like those of `plan`, the one with most tokens first.

    Later epochs have other batches: any sample may be the longest of one, so a twentieth of the batches is
    counted as if spread over all samples.

    Args:
        plan: an epoch's batches.
        lengths: tokens of each sample, [samples].
        token_budget: most tokens of a batch, rows x longest row.
        max_batch: most rows of a batch.
        most: graphs that may be had.
    """
    used = lengths[np.concatenate(plan.batches)]
    longest = np.asarray([lengths[batch].max() for batch in plan.batches])
    levels = _levels(used, longest)
    # Of each level: the shortest row in it, and how many batches have their longest in it.
    below = np.concatenate([[0], levels[:-1]])
    present = np.unique(used)
    shortest = present[np.searchsorted(present, below, side="right")]
    counts = np.histogram(longest, np.concatenate([[0], levels]) + 0.5)[0].astype(float)
    spread = np.histogram(used, np.concatenate([[0], levels]) + 0.5)[0] * (len(longest) / len(used))
    counts += spread / 20
    rows = np.minimum(max_batch, token_budget // shortest)
    eager = np.concatenate([[0.0], np.cumsum(counts * rows * levels * EAGER_COST)])
    batches = np.concatenate([[0.0], np.cumsum(counts)])

    @functools.cache
    def best(end: int, left: int) -> tuple[float, int, bool]:
        """Least cost of the levels below `end`; where the last group begins, and whether it has a graph."""
        if end == 0:
            return 0.0, 0, False
        found = (best(end - 1, left)[0] + eager[end] - eager[end - 1], end - 1, False)
        if left:
            for begin in range(end - 1, -1, -1):
                tokens = int(rows[begin]) * int(levels[end - 1])
                if tokens > OVERSIZE * token_budget:
                    break
                cost = best(begin, left - 1)[0] + tokens * (batches[end] - batches[begin])
                found = min(found, (cost, begin, True))
        return found

    shapes, end, left = [], len(levels), most
    while end:
        _, begin, captured = best(end, left)
        if captured:
            shapes.append(PassShape(int(rows[begin]), int(levels[end - 1])))
            left -= 1
        end = begin
    return sorted(shapes, key=lambda shape: (-shape.tokens, shape))


def fitting(shapes: list[PassShape], rows: int, longest: int) -> PassShape | None:
    """The shape that runs such a batch with the fewest tokens, or None."""
    fit = [shape for shape in shapes if shape.holds(rows, longest)]
    return min(fit, key=lambda shape: shape.tokens, default=None)


def _levels(used: npt.NDArray[np.int64], longest: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Rising lengths up to the longest sample; finer where batches have their longest."""
    share = np.linspace(0, 1, _LEVELS // 2)
    quantiles = [np.quantile(values, share, method="higher") for values in (used, longest)]
    levels: npt.NDArray[np.int64] = np.unique(np.concatenate([*quantiles, [used.max()]]).astype(np.int64))
    return levels
