"""From samples to what the devices see: a padded batch for the target, one packed row for the drafter.

The target sees `[B, L]`, right-padded, which a causal model may read without a mask: no real token has a
pad before it. The drafter sees one fixed shape whatever the batch: the same documents packed into one row
of `token_budget` context tokens, and a fixed number of anchor slots, each with its block. Fixed shapes are
what makes compilation safe, and keep the allocator from fragmenting (SpecForge's "late OOM").

Anchors are drawn here, on the CPU, from (seed, epoch, sample) alone, so they are the same after a resume and
for any number of replicas. They are counted per document, not per row: counted per row, 187 supervised
tokens got 28 anchors (speculators #1071).

Shapes: C context tokens of a row, A anchor slots, B block size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from remote_payload.train.buckets import EpochPlan
from remote_payload.train.dataset import NO_ANSWER, OUTSIDE_VOCABULARY, Dataset, Skipped

Ints = npt.NDArray[np.int64]


@dataclasses.dataclass(kw_only=True, slots=True)
class RowShape:
    """The fixed shape of every packed row, and what its blocks are made of."""

    token_budget: int
    anchors: int
    block_size: int
    mask_token_id: int
    gamma: float

    @property
    def block_weights(self) -> npt.NDArray[np.float32]:
        """Weight of block position k = 1..B-1, exp(-(k-1)/gamma), [B-1] (DFlash paper, eq. 4)."""
        return np.exp(-np.arange(self.block_size - 1) / self.gamma).astype(np.float32)


@dataclasses.dataclass(kw_only=True, slots=True)
class Row:
    """One packed row: everything of a batch that a drafter replica needs but the features."""

    positions: Tensor
    """Position of each context token in its own document, [C] int64."""
    starts: Tensor
    """First context index of each anchor's document, [A] int64; C in an empty slot."""
    anchors: Tensor
    """Context index of each anchor, rising, [A] int64; 0 in an empty slot (empty slots come last)."""
    block_tokens: Tensor
    """Anchor token, then masks, [A, B] int64."""
    block_positions: Tensor
    """Positions of the block's tokens in the document, [A, B] int64."""
    labels: Tensor
    """The tokens that follow the anchor, [A, B-1] int64; 0 where there is none."""
    weights: Tensor
    """Loss weight of each label, [A, B-1] float32; 0 where there is none."""

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, in a fixed order."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


@dataclasses.dataclass(kw_only=True, slots=True)
class Batch:
    """What goes through the pipeline for one batch of samples."""

    sequence: int
    """Number of this batch in the whole run, from 0; decides which replica takes it."""
    epoch: int
    bucket: int
    samples: list[int]
    ids: Tensor
    """Right-padded token ids for the target, [B, L] int64."""
    lengths: list[int]
    row: Row
    weight: float
    """Sum of the row's loss weights."""
    supervised: int
    """Anchors that could have been drawn, over all documents."""
    drawn: int
    """Anchors that were drawn."""

    @property
    def tokens(self) -> int:
        """Real tokens of the batch."""
        return sum(self.lengths)

    @property
    def padding_share(self) -> float:
        """Share of the target's tokens that are padding."""
        return 1.0 - self.tokens / self.ids.numel()


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


def draw_anchors(supervised: npt.NDArray[np.bool_], key: Sequence[int]) -> Ints:
    """All possible anchors of a document in an order that depends on `key` = (seed, epoch, sample) alone.

    An anchor is a supervised token whose next token is supervised too; the caller takes the first few.
    """
    candidates = np.flatnonzero(supervised[:-1] & supervised[1:])
    return np.random.default_rng(list(key)).permutation(candidates)


class BatchMaker:
    """Makes batches out of sample numbers; used by one thread."""

    def __init__(self, dataset: Dataset, shape: RowShape, *, seed: int, vocabulary: int, pad_id: int) -> None:
        self._dataset = dataset
        self._shape = shape
        self._seed = seed
        self._vocabulary = vocabulary
        self._pad_id = pad_id
        self.skipped = Skipped()
        """Samples found unusable when their ids were touched."""
        self._seen: set[int] = set()

    def epoch(self, plan: EpochPlan, epoch: int, first_sequence: int) -> Iterator[Batch]:
        """The batches of one epoch, numbered from `first_sequence`."""
        for number, samples in enumerate(plan.batches):
            yield self.make(samples, int(plan.buckets[number]), epoch, first_sequence + number)

    def make(self, samples: Ints, bucket: int, epoch: int, sequence: int) -> Batch:
        """The batch of `samples`. A sample that cannot be used keeps its place and gets no anchor."""
        documents = [self._document(int(sample), epoch) for sample in samples]
        shape = self._shape
        lengths = [len(ids) for ids, _, _ in documents]
        padded = np.full((len(documents), max(lengths)), self._pad_id, np.int64)
        for i, (ids, _, _) in enumerate(documents):
            padded[i, : len(ids)] = ids
        shares = share_slots([len(anchors) for _, _, anchors in documents], shape.anchors)
        row = empty_row(shape)
        label_weights = shape.block_weights
        start = slot = 0
        for (ids, supervised, anchors), share in zip(documents, shares, strict=True):
            row.positions[start : start + len(ids)] = torch.arange(len(ids))
            if share:
                chosen = np.sort(anchors[:share])
                where = slice(slot, slot + share)
                labels, valid = _labels(ids, supervised, chosen, shape.block_size)
                row.starts[where] = start
                row.anchors[where] = torch.from_numpy(chosen + start)
                row.block_tokens[where, 0] = torch.from_numpy(ids[chosen])
                row.block_positions[where] += torch.from_numpy(chosen)[:, None]
                row.labels[where] = torch.from_numpy(labels)
                row.weights[where] = torch.from_numpy(valid * label_weights)
                slot += share
            start += len(ids)
        return Batch(
            sequence=sequence,
            epoch=epoch,
            bucket=bucket,
            samples=[int(sample) for sample in samples],
            ids=torch.from_numpy(padded),
            lengths=lengths,
            row=row,
            weight=float(row.weights.sum(dtype=torch.float64)),
            supervised=sum(len(anchors) for _, _, anchors in documents),
            drawn=slot,
        )

    def _document(self, sample: int, epoch: int) -> tuple[Ints, npt.NDArray[np.bool_], Ints]:
        ids = self._dataset.ids(sample).astype(np.int64)
        supervised = self._dataset.supervised(sample)
        if ids.min() < 0 or ids.max() >= self._vocabulary:
            self._skip(sample, OUTSIDE_VOCABULARY)
            return np.full_like(ids, self._pad_id), np.zeros_like(supervised), ids[:0]
        anchors = draw_anchors(supervised, (self._seed, epoch, sample))
        if not len(anchors):
            self._skip(sample, NO_ANSWER)
        return ids, supervised, anchors

    def _skip(self, sample: int, reason: str) -> None:
        if sample not in self._seen:
            self._seen.add(sample)
            self.skipped.add(reason, [sample])


def empty_row(shape: RowShape) -> Row:
    """A row without documents: every slot is empty, every weight 0. A replica without a batch runs it."""
    slots, block = shape.anchors, shape.block_size
    block_tokens = torch.full((slots, block), shape.mask_token_id, dtype=torch.int64)
    return Row(
        positions=torch.zeros(shape.token_budget, dtype=torch.int64),
        starts=torch.full((slots,), shape.token_budget, dtype=torch.int64),
        anchors=torch.zeros(slots, dtype=torch.int64),
        block_tokens=block_tokens,
        block_positions=torch.arange(block).repeat(slots, 1),
        labels=torch.zeros((slots, block - 1), dtype=torch.int64),
        weights=torch.zeros((slots, block - 1), dtype=torch.float32),
    )


def _labels(
    ids: Ints, supervised: npt.NDArray[np.bool_], anchors: Ints, block_size: int
) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Labels [anchors, B-1] after each anchor, and which of them carry loss.

    A block may run past the end of its document or into a prompt; from there on nothing counts, because in
    serving a block ends there too.
    """
    index = anchors[:, None] + np.arange(1, block_size)
    inside = index < len(ids)
    index = np.minimum(index, len(ids) - 1)
    valid = np.logical_and.accumulate(inside & supervised[index], axis=1)
    return np.where(valid, ids[index], 0), valid
