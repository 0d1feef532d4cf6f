"""One drafter replica: its model, its static buffers, its step; one thread, one device.

A step runs the replica's rows (forward, backward, added into the flat gradient), reduces with the other
replicas, and takes the same AdamW step as they do. Everything a compiled function reads lies in buffers
that are filled in place, since CUDA graphs will need addresses that stay.

Shapes: C context tokens, A anchor slots, B block size, Q = A*B, D width, W features, V vocabulary.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from remote_payload import crash
from remote_payload.job import Job
from remote_payload.train import execution
from remote_payload.train.batch import Row, RowShape, empty_row
from remote_payload.train.devices import compute_dtype, turn
from remote_payload.train.drafter import Drafter, DrafterConfig, Mask, initialise
from remote_payload.train.features import Features
from remote_payload.train.init_from import load_initial
from remote_payload.train.init_from_target import copy_layers
from remote_payload.train.mask import TILE, block_mask, dense_mask, mask_mod, tiles_fit
from remote_payload.train.metrics import Statistics
from remote_payload.train.objective import BlockScores, Objective, block_loss, chunk_scores, slots_in_use
from remote_payload.train.optimizer import Optimizer
from remote_payload.train.output_head import OutputHead
from remote_payload.train.target import Target
from remote_payload.train.weights import FlatWeights

CLEARLY_SLOWER = 1.1
"""Compiled steps that take this much longer than eager ones are given up; less is noise of two timings."""


@dataclasses.dataclass(frozen=True, slots=True)
class WarmUp:
    """What warm-up decided, and what it measured."""

    execution: str
    reason: str
    seconds: float
    eager_step_s: float | None
    compiled_step_s: float | None


def run_drafter(
    drafter: Drafter, features: Tensor, positions: Tensor, x: Tensor, block_positions: Tensor, mask: Mask
) -> Tensor:
    """The function that is compiled, one clone of it for each replica."""
    return drafter(features, positions, x, block_positions, mask)  # type: ignore[no-any-return]


class Replica:
    """A drafter on one device, trained in lockstep with its like."""

    def __init__(
        self,
        number: int,
        device: torch.device,
        job: Job,
        config: DrafterConfig,
        shape: RowShape,
        statistics: Statistics,
        target: Target,
        init_from: Path | None = None,
    ) -> None:
        """Build the model on `device` with the weights that every replica starts with.

        `init_from` is the released drafter whose weights those are, when there is one.

        `target` lends its embedding and head; a replica on another device takes a copy of them.
        """
        self.number = number
        self.device = device
        self.shape = shape
        self._layout = statistics
        self.dtype = compute_dtype(job.compute_dtype, device)
        self.drafter = Drafter(config)
        initialise(self.drafter, torch.Generator().manual_seed(job.seed))
        if init_from is not None:
            load_initial(self.drafter, init_from)
        elif job.init_from_target:
            copy_layers(self.drafter, target, job.init_from_target)
        self.drafter.to(device)
        self.weights = FlatWeights(self.drafter, self.dtype, len(job.drafters))
        self.optimizer = Optimizer(self.weights, job)
        self._embedding, self._head = _frozen(target, device, self.dtype)
        self.objective = Objective.of(job, shape)
        self.features = torch.zeros(
            shape.token_budget, len(config.tap_layers) * config.width, dtype=self.dtype, device=device
        )
        self.teacher = (
            torch.zeros(shape.token_budget, config.width, dtype=self.dtype, device=device)
            if self.objective.needs_teacher
            else None
        )
        """The target's last hidden states of the row, where the objective needs them."""
        self.bucket = torch.zeros((), dtype=torch.int64, device=device)
        self.row: Row = Row(**{k: t.to(device) for k, t in empty_row(shape).tensors().items()})
        self.statistics = statistics.zeros(device)
        self._sees = mask_mod(self.row.starts, self.row.anchors, shape.token_budget, shape.block_size)
        self._run: Any = run_drafter
        self._chunk: Any = chunk_scores
        self._tiled = False
        self._filled = 0
        self._held: collections.deque[tuple[Features, torch.cuda.Event]] = collections.deque()

    @property
    def parameters(self) -> int:
        """Trained numbers."""
        return self.weights.masters.numel()

    def warm_up(self, wanted: str) -> WarmUp:
        """Try the rungs of the ladder on a synthetic row and keep the one that works and is fast.

        Called in turn, under `execution.WARM_UP_LOCK`. Leaves the weights as they were.
        """
        start = time.perf_counter()
        choice, reason = execution.decide(wanted, self.device)
        cuda = self.device.type == "cuda"
        eager_s = None if cuda and choice == execution.COMPILED else self._time_step()
        compiled_s = None
        if choice == execution.COMPILED:
            try:
                self._use(execution.COMPILED)
                compiled_s = self._time_step()
            except Exception as error:  # whatever inductor or its compiler raises, eager still trains
                choice, reason = execution.EAGER, f"compiling failed: {crash.one_line(error)}"
            if compiled_s and eager_s and wanted == "auto" and compiled_s > CLEARLY_SLOWER * eager_s:
                choice = execution.EAGER
                reason = f"eager is faster here: {eager_s:.3f} s a step against {compiled_s:.3f} s compiled"
        if choice == execution.EAGER:
            self._use(choice)
        if choice == execution.COMPILED and cuda and not self._tiled:
            reason += (
                f"; dense mask, since token_budget or anchors * block_size is no multiple of {TILE},"
                " or block_size does not divide it"
            )
        self._clear()
        return WarmUp(choice, reason, time.perf_counter() - start, eager_s, compiled_s)

    def load(self, features: Features | None, row: Row) -> None:
        """Fill the static buffers with one row; None: a row without any context.

        What an earlier, longer row left behind is cleared: nobody sees it, but a weight of 0 times a NaN is
        a NaN, and one bad batch would spoil those after it.
        """
        filled, self._filled = self._filled, 0 if features is None else len(features.packed)
        for buffer in (self.features, self.teacher):
            if buffer is not None:
                buffer[self._filled : filled].zero_()
        if features is not None:
            if features.ready is not None:
                features.ready.wait()
            width = self.features.shape[1]
            self.features[: self._filled].copy_(features.packed[:, :width], non_blocking=True)
            if self.teacher is not None:
                self.teacher[: self._filled].copy_(features.packed[:, width:], non_blocking=True)
            if self.device.type == "cuda":
                self._hold(features)
        for name, tensor in row.tensors().items():
            getattr(self.row, name).copy_(tensor, non_blocking=True)

    def run_row(self, row: Row, bucket: int, first: bool) -> None:
        """Forward and backward of the loaded `row`, added to this step's gradient and statistics."""
        self.bucket.fill_(bucket)
        scores = self._forward(slots_in_use(row.weights))
        scores.loss.backward()
        self.weights.collect(first)
        with torch.no_grad():
            self._layout.add(self.statistics, scores, self.row.weights, self.bucket)

    def snapshot(self) -> dict[str, Tensor]:
        """A copy of the drafter's weights by name, in the compute type."""
        return {
            name: value.detach().clone() for name, value in self.weights.named(self.weights.values).items()
        }

    def synchronise(self) -> None:
        """Wait until the device has done all that was asked of it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _forward(self, used: int | None) -> BlockScores:
        mine, shape = self.row, self.shape
        x = self._embedding(mine.block_tokens.flatten()).to(self.dtype)
        hidden = self._run(
            self.drafter, self.features, mine.positions, x, mine.block_positions.flatten(), self._mask()
        )
        return block_loss(
            hidden.view(shape.anchors, shape.block_size, -1),
            self._head,
            mine.labels,
            mine.weights,
            mine.anchors,
            self.teacher,
            self.objective,
            self._chunk,
            used,
        )

    def _mask(self) -> Mask:
        row, shape = self.row, self.shape
        if self._tiled:
            return block_mask(row.starts, row.anchors, shape.token_budget, shape.block_size, self._sees)
        return dense_mask(row.starts, row.anchors, shape.token_budget, shape.block_size)

    def _use(self, choice: str) -> None:
        """Build the callables of a rung. FlexAttention is for compiled runs on a GPU: eager it is unsafe."""
        shape = self.shape
        fits = tiles_fit(shape.token_budget, shape.anchors, shape.block_size)
        self._tiled = choice == execution.COMPILED and self.device.type == "cuda" and fits
        self._run = execution.build(run_drafter, choice, f"replica{self.number}")
        self._chunk = execution.build(chunk_scores, choice, f"replica{self.number}")

    def _time_step(self) -> float:
        """Seconds of a forward and backward pass on a full synthetic row, the better of two."""
        self.load(None, _full_row(self.shape))
        self._forward(None).loss.backward()  # compiles, mostly on one core, so others may use the CPU
        best = float("inf")
        for _ in range(2):
            with turn(self.device):
                start = time.perf_counter()
                self._forward(None).loss.backward()
                self.synchronise()
                best = min(best, time.perf_counter() - start)
        return best

    def _clear(self) -> None:
        self.load(None, empty_row(self.shape))
        self.weights.gradient.zero_()
        self.statistics.zero_()

    def _hold(self, features: Features) -> None:
        """Keep features until the copy from them is done; their memory belongs to another stream."""
        event = torch.cuda.Event()
        event.record()
        self._held.append((features, event))
        while self._held and self._held[0][1].query():
            self._held.popleft()


def _frozen(target: Target, device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, OutputHead]:
    """The target's embedding and head on `device`: its own where it is there already, else copies."""
    embedding, head = target.embedding, target.output
    if target.device != device:
        embedding = copy.deepcopy(embedding).to(device)
    bias = None if head.bias is None else head.bias.to(device, dtype)
    return embedding, dataclasses.replace(head, weight=head.weight.to(device, dtype), bias=bias)


def _full_row(shape: RowShape) -> Row:
    """A row in which every slot draws and every label counts: the most work a row can be."""
    row = empty_row(shape)
    row.positions.copy_(torch.arange(shape.token_budget))
    places = torch.arange(shape.anchors) * shape.token_budget // shape.anchors
    row.starts.zero_()
    row.anchors.copy_(places)
    row.block_positions += places[:, None]
    row.weights.fill_(1.0)
    return row
