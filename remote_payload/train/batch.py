"""From samples to what the devices see: a padded batch for the target, one packed row for the drafter.

The target sees `[B, L]`, right-padded, which a causal model may read without a mask: no real token has a
pad before it. The drafter sees one fixed shape whatever the batch: the same documents packed into one row
of `token_budget` context tokens, and a fixed number of anchor slots, each with its block. Fixed shapes are
what makes compilation safe, and keep the allocator from fragmenting (SpecForge's "late OOM").

Anchors are drawn here, on the CPU (`anchors.py`), so that no step waits for a device to have drawn them.

Shapes: C context tokens of a row, A anchor slots, B block size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from remote_payload.train.anchors import RANDOM, candidates, draw, eligible_places, share_slots
from remote_payload.train.buckets import EpochPlan, epochs_from, widest_batches
from remote_payload.train.dataset import Dataset
from remote_payload.train.target_shapes import PackedShape, PaddedShape, packed_shapes, padded_shapes
from remote_payload.train.unusable import Findings, Skipped

Ints = npt.NDArray[np.int64]


@dataclasses.dataclass(kw_only=True, slots=True)
class RowShape:
    """The fixed shape of every packed row, and what its blocks are made of."""

    token_budget: int
    anchors: int
    block_size: int
    mask_token_id: int
    gamma: float
    anchor_choice: str = RANDOM
    """How anchors are chosen: `anchors.RANDOM` or `anchors.UNIFORM`."""

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
    """Eligible anchor places of all documents."""
    drawn: int
    """Anchors that were drawn."""
    documents: int
    """Documents with an eligible place."""
    covered: int
    """Documents with an anchor."""

    @property
    def tokens(self) -> int:
        """Real tokens of the batch."""
        return sum(self.lengths)

    @property
    def pairs(self) -> float:
        """Pairs of a block's token and a key that it sees: context below the anchor, and its block."""
        row, block = self.row, self.row.block_tokens.shape[1]
        used = row.starts < len(row.positions)
        return float(((row.anchors - row.starts + block) * used).sum()) * block

    @property
    def padding_share(self) -> float:
        """Share of the target's tokens that are padding."""
        return 1.0 - self.tokens / self.ids.numel()


class BatchMaker:
    """Makes batches out of sample numbers; used by one thread."""

    def __init__(
        self,
        dataset: Dataset,
        shape: RowShape,
        *,
        seed: int,
        vocabulary: int,
        pad_id: int,
        skipped: Skipped | None = None,
        findings: Findings | None = None,
    ) -> None:
        """`skipped` counts on what lengths found; `findings` is what an earlier attempt knew of samples."""
        self._dataset = dataset
        self._shape = shape
        self._seed = seed
        self._vocabulary = vocabulary
        self._pad_id = pad_id
        self._findings = findings or Findings(len(dataset))
        self.skipped = skipped or Skipped()
        """Samples left out so far. Those that content gives away count when the first epoch comes to them."""

    def batches_from(
        self,
        plan: Callable[[int], EpochPlan],
        first: int,
        entered: Callable[[EpochPlan], None] = lambda _plan: None,
    ) -> Iterator[Batch]:
        """The run's batches without end, from sequence number `first` on; earlier ones are not read.

        The same as what follows after `first` batches from 0, counts of unusable samples included.
        `entered` hears of each epoch's plan when its first batch here is due.
        """
        begun = plan(0).batches[:first]
        if begun:
            for sample in self._findings.unusable(np.concatenate(begun)).tolist():
                self.skipped.add(self._findings.reason(sample) or "", [sample])
        for epoch, this, at in epochs_from(plan, first):
            entered(this)
            yield from self.epoch(this, epoch, at, max(0, first - at))

    def widest(self, plan: EpochPlan, max_batch: int) -> list[tuple[int, int]]:
        """Rows and tokens of a row of the batches of `plan` that ask most of a target."""
        lengths, budget = self._dataset.lengths, self._shape.token_budget
        return widest_batches(plan, lengths, token_budget=budget, max_batch=max_batch)

    def target_shapes(self, plan: EpochPlan, max_batch: int) -> tuple[list[PackedShape], list[PaddedShape]]:
        """The shapes of a target's graphs for batches like those of `plan`, by either layout."""
        lengths, budget = self._dataset.lengths, self._shape.token_budget
        return (
            packed_shapes(plan, lengths, token_budget=budget, max_batch=max_batch),
            padded_shapes(plan, lengths, token_budget=budget, max_batch=max_batch),
        )

    def epoch(self, plan: EpochPlan, epoch: int, first_sequence: int, start: int = 0) -> Iterator[Batch]:
        """The batches of one epoch, whose first has the number `first_sequence`, from its `start`-th on."""
        for number in range(start, len(plan.batches)):
            bucket = int(plan.buckets[number])
            yield self.make(plan.batches[number], bucket, epoch, first_sequence + number)

    def make(self, samples: Ints, bucket: int, epoch: int, sequence: int) -> Batch:
        """The batch of `samples`. A sample that cannot be used keeps its place and gets no anchor."""
        shape = self._shape
        numbers = [int(sample) for sample in samples]
        documents = [self._document(sample, epoch) for sample in numbers]
        ids = np.concatenate([ids for ids, _ in documents], dtype=np.int64)
        supervised = np.concatenate([supervised for _, supervised in documents])
        lengths = np.asarray([len(ids) for ids, _ in documents])
        ends = np.cumsum(lengths)
        starts = ends - lengths
        position = np.arange(len(ids)) - np.repeat(starts, lengths)

        last = np.zeros(len(ids), np.bool_)
        last[ends - 1] = True  # of its document: what follows is another's
        places = eligible_places(supervised, last)
        cuts = np.searchsorted(places, starts)
        split = np.split(places, cuts[1:])
        of_document = [candidates(each, shape.anchor_choice, shape.block_size) for each in split]
        shares = share_slots([len(each) for each in of_document], shape.anchors)
        anchors = np.concatenate(
            [
                draw(each, share, (self._seed, epoch, sample))
                for each, share, sample in zip(of_document, shares, numbers, strict=True)
            ]
        )
        owner = np.repeat(np.arange(len(numbers)), shares)
        labels, valid = _labels(ids, supervised, anchors, ends[owner], shape.block_size)

        row, used = empty_row(shape), slice(0, len(anchors))
        row.positions[: len(ids)] = torch.from_numpy(position)
        row.starts[used] = torch.from_numpy(starts[owner])
        row.anchors[used] = torch.from_numpy(anchors)
        row.block_tokens[used, 0] = torch.from_numpy(ids[anchors])
        row.block_positions[used] += torch.from_numpy(position[anchors])[:, None]
        row.labels[used] = torch.from_numpy(labels)
        row.weights[used] = torch.from_numpy(valid * shape.block_weights)
        padded = np.full((len(numbers), int(lengths.max())), self._pad_id, np.int64)
        padded[np.arange(padded.shape[1]) < lengths[:, None]] = ids
        eligible = np.diff(cuts, append=len(places))
        return Batch(
            sequence=sequence,
            epoch=epoch,
            bucket=bucket,
            samples=numbers,
            ids=torch.from_numpy(padded),
            lengths=lengths.tolist(),
            row=row,
            weight=float(row.weights.sum(dtype=torch.float64)),
            supervised=len(places),
            drawn=len(anchors),
            documents=int((eligible > 0).sum()),
            covered=sum(share > 0 for share in shares),
        )

    def _document(self, sample: int, epoch: int) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.bool_]]:
        """Ids and what is supervised of `sample`; of one that cannot be used pads, and nothing."""
        fresh = not self._findings.known(sample)
        if fresh:
            reason = self._dataset.look(sample, self._vocabulary, self._shape.mask_token_id)
            self._findings.set(sample, reason)
        reason = self._findings.reason(sample)
        if reason is None:
            return self._dataset.ids(sample), self._dataset.supervised(sample)
        if fresh or epoch == 0:
            self.skipped.add(reason, [sample])
        length = int(self._dataset.lengths[sample])
        return np.full(length, self._pad_id, np.int64), np.zeros(length, np.bool_)


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


def full_row(shape: RowShape) -> Row:
    """A row in which every slot draws and every label counts: the most work a row can be."""
    row = empty_row(shape)
    row.positions.copy_(torch.arange(shape.token_budget))
    places = torch.arange(shape.anchors) * shape.token_budget // shape.anchors
    row.starts.zero_()
    row.anchors.copy_(places)
    row.block_positions += places[:, None]
    row.weights.fill_(1.0)
    return row


def _labels(
    ids: Ints, supervised: npt.NDArray[np.bool_], anchors: Ints, ends: Ints, block_size: int
) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Labels [anchors, B-1] after each anchor of a row, and which of them carry loss.

    A block may run past the end of its document (`ends`, for each anchor) or into a prompt; from there on
    nothing counts, because in serving a block ends there too.
    """
    index = anchors[:, None] + np.arange(1, block_size)
    inside = index < ends[:, None]
    index = np.minimum(index, len(ids) - 1)
    valid = np.logical_and.accumulate(inside & supervised[index], axis=1)
    return np.where(valid, ids[index], 0), valid
