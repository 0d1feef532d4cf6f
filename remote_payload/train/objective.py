"""The loss over a row's blocks, through the target's frozen head.

The head is frozen, so the loss and the gradient of its input come out of one pass, a chunk of whole blocks
at a time, and logits of the whole vocabulary never exist whole. The sum is not normalised here: a step
divides by what all replicas and rows bring together (SpecForge #731, NeMo #2572: normalised per replica, a
short row counts as much as a long one).

Everything that changes from row to row is a tensor of a fixed shape, and nothing waits for the device, so a
step can be captured as a graph. Empty slots come last in a row; where no graph is captured the host may say
how many are in use, and the chunks after them are left out.

Shapes: A anchor slots, B block size, P = B - 1 places that predict something, C context tokens, D width,
V vocabulary, n blocks of a chunk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from remote_payload.job import Job
from remote_payload.train import logit_passes
from remote_payload.train.batch import Batch, RowShape
from remote_payload.train.distribution_losses import forward_kl, lk
from remote_payload.train.label_losses import ce, chain, dpace, focal
from remote_payload.train.logit_passes import Factors
from remote_payload.train.output_head import OutputHead

MOST_ROWS = 512
"""Most rows of logits alive at once on a CPU: 512 x 151,936 in float32 is under 0.5 GiB."""

GPU_SHARE = 128
"""Logits and their gradient take this part of a GPU's memory at most (a target's logits half as much again):
1,937 rows of 151,936 on an H200."""

FROM_LABELS = ("ce", "dpace", "focal", "chain")
FROM_DISTRIBUTIONS = ("forward_kl", "lk")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """What is minimised: one of the names with its numbers; their formulas are where they are computed."""

    name: str = "ce"
    kl_share: float = 1.0
    lk_eta: float = 3.0
    dpace_alpha: float = 0.5
    focal_weight: float = 0.3
    chain_weight: float = 40.0
    whole_block: float = 1.0
    """Decay weights of a block without a missing label, summed."""

    @classmethod
    def of(cls, job: Job, shape: RowShape) -> Objective:
        """The objective of a job for rows of `shape`."""
        return cls(
            name=job.objective,
            kl_share=job.kl_share,
            lk_eta=job.lk_eta,
            dpace_alpha=job.dpace_alpha,
            focal_weight=job.focal_weight,
            chain_weight=job.chain_weight,
            whole_block=float(shape.block_weights.sum()),
        )

    @property
    def needs_teacher(self) -> bool:
        """Whether it reads the target's last hidden states."""
        return self.name in FROM_DISTRIBUTIONS

    @property
    def reads_overlap(self) -> bool:
        """Whether it reads how much of the two distributions is the same."""
        return self.name == "lk"

    @property
    def by_block(self) -> bool:
        """Whether a step divides its sum by the number of blocks, and not by the labels' decay weights."""
        return self.name in ("dpace", "focal", "chain")

    def weight_of(self, batch: Batch) -> float:
        """What a batch adds to the number that a step divides its sum by."""
        return float(batch.drawn) if self.by_block else batch.weight


class ChunkScores(NamedTuple):
    """What a chunk of n blocks says."""

    loss: Tensor
    """The objective's sum, float32 scalar."""
    ce: Tensor
    """The sum of decayed cross-entropies, whatever the objective; float32 scalar."""
    gradient: Tensor
    """Of `loss` by the hidden states, [n, P, D]."""
    hits: Tensor
    """Whether each label was the drafter's first choice, [n, P] bool."""


ChunkFunction = Callable[[Tensor, OutputHead, Tensor, Tensor, Tensor | None, Objective], ChunkScores]


def chunk_scores(
    hidden: Tensor,
    head: OutputHead,
    labels: Tensor,
    weights: Tensor,
    teacher: Tensor | None,
    objective: Objective,
) -> ChunkScores:
    """Loss and gradient of a chunk of whole blocks; a function that is compiled.

    Args:
        hidden: the drafter's hidden states, [n, P, D]. teacher: the target's, or None.
        labels: [n, P] int64. weights: decay weights, 0 where there is no label, [n, P] float32.
    """
    taught = None if teacher is None else head.logits(teacher)
    return by_operations(head.drafted(hidden), taught, head, labels, weights, objective)


def kernel_chunk_scores(
    hidden: Tensor,
    head: OutputHead,
    labels: Tensor,
    weights: Tensor,
    teacher: Tensor | None,
    objective: Objective,
) -> ChunkScores:
    """`chunk_scores` by passes of our own, where `logit_choice` takes them."""
    taught = None if teacher is None else head.logits(teacher)
    return by_kernels(head.drafted(hidden), taught, head, labels, weights, objective)


def by_operations(
    logits: Tensor,
    taught: Tensor | None,
    head: OutputHead,
    labels: Tensor,
    weights: Tensor,
    objective: Objective,
) -> ChunkScores:
    """Scores of logits [n, P, V], the drafter's and those of the target (None: not needed)."""
    logits = logits.float()
    # Greatest and sum in these words are one pass for inductor. An argmax would be another; that the label is
    # the first of the greatest is found while the gradient is written.
    top = logits.amax(-1, keepdim=True)
    odds = (logits - top).exp()
    total = odds.sum(-1, keepdim=True)
    log_total = total.log() + top
    of_label = logits.gather(-1, labels[..., None])
    log_label = (of_label - log_total)[..., 0]
    # Finding the label by comparison and not by scatter keeps the chunk one fused pass.
    # In int32: 64 bits are several instructions for each logit on a GPU.
    place = torch.arange(logits.shape[-1], device=labels.device, dtype=torch.int32)
    label = labels[..., None].to(torch.int32)
    onehot = place == label
    earlier = ((logits >= top) & (place < label)).any(-1)
    hits = (of_label == top)[..., 0] & ~earlier
    kl = accepted = short = None
    if taught is not None:
        log_q, log_p = logits - log_total, F.log_softmax(taught.float(), -1)
        q, p = log_q.exp(), log_p.exp()
        kl = (p * (log_p - log_q)).sum(-1)
        if objective.reads_overlap:
            less = torch.where(q < p, q, 0.0)
            accepted, short = torch.minimum(p, q).sum(-1), less.sum(-1)
    read = _Places(log_label, hits, kl, accepted, short)
    plain, _ = ce(log_label, weights)
    loss, factors = _minimised(read, weights, objective)
    own, at_label = factors.own[..., None], torch.where(onehot, factors.of_label[..., None], 0.0)
    if factors.of_taught is None:
        slope = odds * (own / total) - at_label
    else:
        slope = q * own - at_label - factors.of_taught[..., None] * p
    if factors.of_short is not None:
        slope = slope - factors.of_short[..., None] * less
    bound = factors.bound()
    if head.soft_cap is not None:
        slope = slope * (1 - (logits / head.soft_cap).square())
    if head.scale != 1.0:
        slope, bound = slope * head.scale, bound * head.scale
    return ChunkScores(loss, plain, head.by_hidden(slope, bound), hits)


def by_kernels(
    logits: Tensor,
    taught: Tensor | None,
    head: OutputHead,
    labels: Tensor,
    weights: Tensor,
    objective: Objective,
) -> ChunkScores:
    """`by_operations` in passes of our own over the logits, of a head without a soft cap."""
    flat, places = logits.flatten(0, 1), labels.flatten()
    if taught is not None:
        taught = taught.flatten(0, 1)
    scores = logit_passes.scan(flat, places, taught)
    kl, accepted, short = scores.kl, None, None
    if objective.reads_overlap:
        assert taught is not None
        accepted, short = logit_passes.overlap(flat, taught, scores)
    read = _Places(scores.log_label, scores.hits, kl, accepted, short).of_shape(labels.shape)
    plain, _ = ce(read.log_label, weights)
    loss, factors = _minimised(read, weights, objective)
    factors = factors.times(head.scale)

    def write(times: Tensor | float, dtype: torch.dtype) -> Tensor:
        return logit_passes.slopes(flat, places, taught, scores, factors.times(times), dtype)

    by_hidden = head.by_written(write, factors.bound())
    return ChunkScores(loss, plain, by_hidden.unflatten(0, labels.shape), read.hits)


class _Places(NamedTuple):
    """What an objective reads of each place, [n, P]; of the last three what it needs."""

    log_label: Tensor
    """Log-probability of the label."""
    hits: Tensor
    """Whether the label is the first of the greatest logits."""
    kl: Tensor | None = None
    """KL(p || q) of the target's distribution p and the drafter's, q."""
    accepted: Tensor | None = None
    """The sum of min(p, q)."""
    short: Tensor | None = None
    """The sum of q where q < p."""

    def of_shape(self, shape: torch.Size) -> _Places:
        """The same with `shape`, [n, P]."""
        return _Places(*(None if each is None else each.view(shape) for each in self))  # type: ignore[arg-type]


def _minimised(read: _Places, weights: Tensor, objective: Objective) -> tuple[Tensor, Factors]:
    """The objective's sum and the factors of its gradient by the logits, [n, P]."""
    log_label, hits = read.log_label, read.hits
    if objective.name == "forward_kl":
        assert read.kl is not None
        return forward_kl(read.kl, log_label, weights, objective.kl_share)
    if objective.name == "lk":
        assert read.kl is not None and read.accepted is not None and read.short is not None
        return lk(read.kl, read.accepted, read.short, weights, objective.lk_eta)
    if objective.name == "dpace":
        loss, each = dpace(log_label, weights, objective.dpace_alpha)
    elif objective.name == "focal":
        loss, each = focal(log_label, weights, hits, objective.whole_block, objective.focal_weight)
    elif objective.name == "chain":
        whole, focal_weight = objective.whole_block, objective.focal_weight
        loss, each = chain(log_label, weights, hits, whole, focal_weight, objective.chain_weight)
    else:
        loss, each = ce(log_label, weights)
    return loss, Factors(each, each)


class _FrozenHeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: OutputHead,
        labels: Tensor,
        weights: Tensor,
        teacher: Tensor | None,
        index: Tensor,
        objective: Objective,
        chunk: ChunkFunction,
        used: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradient = torch.zeros_like(hidden)
        hits = torch.zeros(labels.shape, dtype=torch.bool, device=hidden.device)
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        plain = torch.zeros_like(loss)
        slots, places = labels.shape
        size = chunk_blocks(slots, places, most_rows(head.weight))
        for start in range(0, used, size):
            part = slice(start, start + size)
            taught = None if teacher is None else teacher[index[part]]
            scores = chunk(hidden[part], head, labels[part], weights[part], taught, objective)
            gradient[part], hits[part] = scores.gradient, scores.hits
            loss, plain = loss + scores.loss, plain + scores.ce
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(plain, hits)
        return loss, plain, hits

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0].to(gradient.dtype), *(None,) * 8


@dataclasses.dataclass(slots=True)
class BlockScores:
    """What a row's blocks say of the drafter, all on its device."""

    loss: Tensor
    """The objective's sum, scalar; differentiable."""
    ce: Tensor
    """The sum of decayed cross-entropies, scalar."""
    weight: Tensor
    """What the row adds to the number that the loss is divided by, scalar."""
    hits: Tensor
    """Whether each label was the drafter's first choice, [A, B-1] bool."""


def block_loss(
    hidden: Tensor,
    head: OutputHead,
    labels: Tensor,
    weights: Tensor,
    anchors: Tensor,
    teacher: Tensor | None,
    objective: Objective,
    chunk: ChunkFunction = chunk_scores,
    used: int | None = None,
) -> BlockScores:
    """The loss of a row.

    Args:
        hidden: final hidden states of the predicted tokens, [A, B-1, D].
        labels: [A, B-1]. weights: [A, B-1], 0 where there is no label.
        anchors: context index of each anchor, [A].
        teacher: the target's last hidden states of the row, [C, D]; None unless the objective needs them.
        chunk: `chunk_scores`, as it is or compiled.
        used: slots in use, counted from the first, where the host may say so; None: all of them.
    """
    slots, places = labels.shape
    size = chunk_blocks(slots, places, most_rows(head.weight))
    spare = -slots % size  # every chunk has the same shape, so that one compiled one does
    pad = (0, 0, 0, spare)
    index = anchors[:, None] + torch.arange(places, device=anchors.device)
    if teacher is not None:
        index = index.clamp(max=len(teacher) - 1)
    loss, plain, hits = _FrozenHeadLoss.apply(  # type: ignore[no-untyped-call]
        F.pad(hidden, (0, 0, *pad)),
        head,
        F.pad(labels, pad),
        F.pad(weights, pad),
        teacher,
        F.pad(index, pad),
        objective,
        chunk,
        slots + spare if used is None else used,
    )
    total = (weights[:, 0] > 0).sum() if objective.by_block else weights.sum()
    return BlockScores(loss=loss, ce=plain, weight=total, hits=hits[:slots])


def most_rows(head: Tensor) -> int:
    """Most rows of logits alive at once, for a head [V, D]; more of them fill a GPU better."""
    if head.device.type != "cuda":
        return MOST_ROWS
    memory = torch.cuda.get_device_properties(head.device).total_memory
    return max(MOST_ROWS, memory // GPU_SHARE // (2 * len(head) * head.element_size()))


def chunk_blocks(slots: int, places: int, rows: int | None = None) -> int:
    """Blocks of one chunk when `slots` blocks are cut into as few equal chunks as `rows` allows."""
    most = max(1, (rows or MOST_ROWS) // places)
    return -(-slots // -(-slots // most))


def slots_in_use(weights: Tensor) -> int:
    """How many slots of a row on the CPU are drawn; `weights` [A, B-1]. Empty slots come last."""
    return int((weights[:, 0] > 0).sum())


def needs_teacher(job: Job) -> bool:
    """Whether the job's objective reads the target's last hidden states."""
    return job.objective in FROM_DISTRIBUTIONS


def default_gamma(block_size: int) -> float:
    """The paper's decay by block size: 7 for 16, 5 for 10, 4 for 8 and smaller blocks."""
    return 7.0 if block_size > 10 else 5.0 if block_size > 8 else 4.0


def accepted(hits: Tensor, weights: Tensor) -> Tensor:
    """Whether each label would have been accepted, [A, B-1] bool: a hit, and all before it hits too.

    1 + their sum over drawn anchors is training's estimate of tau. It reads the corpus and not the target's
    own decoding, and blocks at a document's end are cut short: real decoding has the last word.
    """
    return (hits & (weights > 0)).to(torch.int64).cumprod(-1).bool()
