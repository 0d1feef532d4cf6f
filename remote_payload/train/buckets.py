"""Length buckets, and the order of an epoch's batches as a pure function of (seed, epoch).

A batch holds samples of one bucket, so that the target sees little padding: rows x longest row stays within
the token budget, and rows within `max_batch`. The batches of all buckets are shuffled together.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt


@dataclasses.dataclass(frozen=True, slots=True)
class EpochPlan:
    """An epoch's batches in order: the samples of each (by number), and its bucket."""

    batches: list[npt.NDArray[np.int64]]
    buckets: npt.NDArray[np.int64]

    def counts(self, buckets: int) -> list[int]:
        """Batches of each bucket."""
        return [int(count) for count in np.bincount(self.buckets, minlength=buckets)]


def bucket_of(lengths: npt.NDArray[np.int64], edges: Sequence[int]) -> npt.NDArray[np.int64]:
    """The bucket of each length, [edge, next edge), or -1 outside all of them."""
    bucket = np.searchsorted(np.asarray(edges), lengths, side="right") - 1
    return np.where(bucket < len(edges) - 1, bucket, -1)


def plan_epoch(
    lengths: npt.NDArray[np.int64],
    buckets: npt.NDArray[np.int64],
    *,
    token_budget: int,
    max_batch: int,
    seed: int,
    epoch: int,
) -> EpochPlan:
    """The batches of `epoch`: the same for the same arguments, whatever ran before.

    Args:
        lengths: tokens of each sample, [samples].
        buckets: the bucket of each sample, -1 for one left out, [samples].
        token_budget: most tokens of a batch, rows x longest row.
        max_batch: most rows of a batch.
        seed: the job's seed.
        epoch: 0 for the first pass.
    """
    random = np.random.default_rng([seed, epoch])
    batches: list[npt.NDArray[np.int64]] = []
    owners: list[int] = []
    for bucket in range(int(buckets.max(initial=-1)) + 1):
        samples = random.permutation(np.flatnonzero(buckets == bucket))
        starts = _cuts(lengths[samples].tolist(), token_budget, max_batch)
        batches += np.split(samples, starts[1:]) if len(samples) else []
        owners += [bucket] * len(starts)
    order = random.permutation(len(batches))
    return EpochPlan([batches[i] for i in order], np.asarray(owners, np.int64)[order])


def widest_batches(
    plan: EpochPlan, lengths: npt.NDArray[np.int64], *, token_budget: int, max_batch: int
) -> list[tuple[int, int]]:
    """Rows and tokens of a row of the batches that ask most of a target, whatever the order of samples.

    One has the most tokens, padding counted, and one the longest row; often they are the same.
    """
    rising = np.unique(lengths[np.concatenate(plan.batches)]).tolist()
    shapes = [(min(max_batch, token_budget // tokens), tokens) for tokens in rising]
    most = max(shapes, key=lambda shape: (shape[0] * shape[1], shape[1]))
    return [most] if most == shapes[-1] else [most, shapes[-1]]


def epochs_from(plan: Callable[[int], EpochPlan], sequence: int) -> Iterator[tuple[int, EpochPlan, int]]:
    """The epochs without end, from the one that holds batch number `sequence` of the run.

    Each with its plan and the number of its first batch. Epochs before it are planned, since they differ by a
    few batches, but nothing of their content is read.
    """
    first = 0
    for epoch in itertools.count():
        this = plan(epoch)
        assert this.batches, "a plan without batches has no next one"
        if sequence < first + len(this.batches):
            yield epoch, this, first
        first += len(this.batches)


def _cuts(lengths: list[int], token_budget: int, max_batch: int) -> list[int]:
    """Where each batch starts when samples are taken in order until one more would not fit."""
    starts: list[int] = []
    rows, longest = max_batch, 0
    for place, length in enumerate(lengths):
        rows += 1
        if length > longest:
            longest = length
        if rows > max_batch or rows * longest > token_budget:
            starts.append(place)
            rows, longest = 1, length
    return starts
