"""Which shapes of batches a target gets a graph for, so that few graphs waste little.

Packed, all documents of a batch stand in one row: a graph of T tokens, D documents and L tokens of the
longest holds every batch that has no more of any. Tokens cost; documents times the longest cost a little,
since attention is launched for as many tiles. Candidates are what an epoch's batches need, rounded up. The
graph that holds all batches is taken first, then whichever saves most, while graphs may be had.

Padded, a batch of rows [B, L] runs in any graph of at least B rows and L tokens a row. Batches are cut so
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

Ints = npt.NDArray[np.int64]

MOST_GRAPHS = 12
"""Graphs of a target. Each is captured and proved in about five forward passes. Twice as many would save a
small target another 3 % of its tokens, and take 8 s more to warm up on a slow host."""

RUNGS = 32
"""Sizes of packed graphs that are told apart, up to the token budget."""

WORTH = 0.002
"""What one more packed graph must save, as a share of all, to be worth its capture."""

TILE = 128
"""Tokens of a tile of queries in FlashAttention."""

TILE_COST = 0.5
"""What an empty tile of one document costs, in tokens: for each of SmolLM2's 9 heads a block of threads that
ends at once, some 500 of which an H200 starts in a microsecond; a token takes 0.04 of them in a layer."""

OVERSIZE = 1.25
"""Most tokens of a padded graph in token budgets: what it pads is memory, too."""

EAGER_COST = 3.0
"""What a token of an eager pass is taken to cost in tokens of a replay."""

_LEVELS = 96
"""Lengths that are told apart when padded shapes are chosen."""


@dataclasses.dataclass(frozen=True, order=True, slots=True)
class PackedShape:
    """One row of packed documents."""

    tokens: int
    documents: int
    longest: int

    def holds(self, lengths: list[int]) -> bool:
        """Whether documents of these lengths fit."""
        fewer = len(lengths) <= self.documents and sum(lengths) <= self.tokens
        return fewer and max(lengths) <= self.longest

    @property
    def cost(self) -> float:
        """In tokens."""
        return self.tokens + TILE_COST * self.documents * -(-self.longest // TILE)


@dataclasses.dataclass(frozen=True, order=True, slots=True)
class PaddedShape:
    """Rows padded to one length."""

    rows: int
    longest: int

    def holds(self, lengths: list[int]) -> bool:
        """Whether documents of these lengths fit."""
        return len(lengths) <= self.rows and max(lengths) <= self.longest

    @property
    def tokens(self) -> int:
        """Padding counted."""
        return self.rows * self.longest

    @property
    def cost(self) -> float:
        """In tokens."""
        return self.tokens


def packed_shapes(
    plan: EpochPlan, lengths: Ints, *, token_budget: int, max_batch: int, most: int = MOST_GRAPHS
) -> list[PackedShape]:
    """At most `most` shapes for batches like those of `plan`; the first holds every batch of every epoch.

    Args:
        plan: an epoch's batches.
        lengths: tokens of each sample, [samples].
        token_budget: most tokens of a batch, rows x longest row.
        max_batch: most rows of a batch.
        most: graphs that may be had.
    """
    used = int(lengths[np.concatenate(plan.batches)].max())
    all_hold = PackedShape(token_budget, max_batch, used)
    need: dict[PackedShape, int] = {}
    for batch in plan.batches:
        of_batch = lengths[batch]
        shape = _rounded(int(of_batch.sum()), int(of_batch.max()), token_budget, max_batch, used)
        need[shape] = need.get(shape, 0) + 1
    needed, counts = list(need), np.asarray(list(need.values()), float)
    # What a batch of each need costs in each candidate, which are the needs themselves.
    costs = np.asarray([[_cost(graph, shape) for graph in needed] for shape in needed])
    current, chosen = np.full(len(needed), all_hold.cost), [all_hold]
    while len(chosen) < most:
        saved = counts @ np.maximum(0, current[:, None] - costs)
        best = int(saved.argmax())
        if saved[best] <= WORTH * (counts @ current):
            break
        chosen.append(needed[best])
        current = np.minimum(current, costs[:, best])
    return chosen


def padded_shapes(
    plan: EpochPlan, lengths: Ints, *, token_budget: int, max_batch: int, most: int = MOST_GRAPHS
) -> list[PaddedShape]:
    """The same for padded rows, the shape with most tokens first; a batch may fit none.

    Later epochs have other batches: any sample may be the longest of one, so a twentieth of the batches is
    counted as if spread over all samples.
    """
    used = lengths[np.concatenate(plan.batches)]
    longest = np.asarray([lengths[batch].max() for batch in plan.batches])
    levels = _levels(used, longest)
    # Of each level: the shortest row in it, and how many batches have their longest in it.
    below = np.concatenate([[0], levels[:-1]])
    present = np.unique(used)
    shortest = present[np.searchsorted(present, below, side="right")]
    edges = np.concatenate([[0], levels]) + 0.5
    counts = np.histogram(longest, edges)[0].astype(float)
    counts += np.histogram(used, edges)[0] * (len(longest) / len(used)) / 20
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
            shapes.append(PaddedShape(int(rows[begin]), int(levels[end - 1])))
            left -= 1
        end = begin
    return sorted(shapes, key=lambda shape: (-shape.tokens, shape))


def _rounded(tokens: int, longest: int, token_budget: int, max_batch: int, used: int) -> PackedShape:
    """The graph for a batch: its tokens up to a part of the budget, its longest to a power of two."""
    size = -(-token_budget // RUNGS)
    level = TILE
    while level < longest:
        level *= 2
    documents = min(max_batch, token_budget // (level // 2 + 1)) if level > TILE else max_batch
    return PackedShape(min(token_budget, -(-tokens // size) * size), documents, min(level, used))


def _cost(graph: PackedShape, need: PackedShape) -> float:
    """Of a batch that needs so much; without end where it does not fit."""
    fits = need.tokens <= graph.tokens and need.documents <= graph.documents and need.longest <= graph.longest
    return graph.cost if fits else float("inf")


def _levels(used: Ints, longest: Ints) -> Ints:
    """Rising lengths up to the longest sample; finer where batches have their longest."""
    share = np.linspace(0, 1, _LEVELS // 2)
    quantiles = [np.quantile(values, share, method="higher") for values in (used, longest)]
    levels: Ints = np.unique(np.concatenate([*quantiles, [used.max()]]).astype(np.int64))
    return levels
