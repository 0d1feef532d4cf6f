"""One drafter replica: its model, its static buffers, its step; one thread, one device.

A step runs the replica's rows (forward, backward, added into the flat gradient), reduces with the other
replicas, and takes the same AdamW step as they do. Everything a compiled function reads lies in buffers
that are filled in place, since a captured graph needs addresses that stay.

Shapes: C context tokens, A anchor slots, B block size, Q = A*B, D width, W features, V vocabulary.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from remote_payload import crash
from remote_payload.job import Job
from remote_payload.train import execution, fp8
from remote_payload.train.arrivals import Arrivals
from remote_payload.train.batch import Row, RowShape, empty_row, full_row
from remote_payload.train.devices import compute_dtype, synchronise, turn
from remote_payload.train.drafter import Drafter, DrafterConfig, Joined, Mask, RotaryTable, initialise
from remote_payload.train.features import Features
from remote_payload.train.init_from import load_initial
from remote_payload.train.init_from_target import copy_layers
from remote_payload.train.kernels import Kernels
from remote_payload.train.mask import TILE
from remote_payload.train.objective import (
    BlockScores,
    Objective,
    block_loss,
    chunk_scores,
    kernel_chunk_scores,
    slots_in_use,
)
from remote_payload.train.optimizer import Optimizer, adamw
from remote_payload.train.output_head import OutputHead
from remote_payload.train.replay import difference
from remote_payload.train.row_buffer import RowBuffer
from remote_payload.train.row_mask import DENSE, RowMask
from remote_payload.train.statistics import Statistics
from remote_payload.train.target import Target
from remote_payload.train.warm_up import StepDown, WarmUp
from remote_payload.train.weights import FlatWeights, SumPlace

CLEARLY_SLOWER = 1.1
"""Compiled steps that take this much longer than eager ones are given up; less is noise of two timings."""


def run_drafter(
    drafter: Drafter,
    features: Tensor,
    rotary: RotaryTable,
    x: Tensor,
    block_rotary: RotaryTable,
    mask: Mask,
    joined: Joined,
) -> Tensor:
    """The function that is compiled, one clone of it for each replica."""
    return drafter.train_row(features, rotary, x, block_rotary, mask, joined)


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
        place: SumPlace | None = None,
    ) -> None:
        """Build the model on `device` with the weights that every replica starts with.

        `init_from` is the released drafter whose weights those are, when there is one. `target` lends its
        embedding and head; a replica on another device takes a copy of them. `place` is where the reduction
        wants the sum of gradients; None: where any reduction finds it.
        """
        self.number = number
        self.device = device
        self.shape = shape
        self._layout = statistics
        self.dtype = compute_dtype(job.compute_dtype, device)
        self.drafter = Drafter.blank(config)
        if init_from is not None:
            load_initial(self.drafter, init_from)
        else:
            initialise(self.drafter, torch.Generator().manual_seed(job.seed))
            if job.init_from_target:
                copy_layers(self.drafter, target, job.init_from_target)
        self.drafter.to(device)
        parts = fp8.PARTS[job.fp8]
        self.drafter.train_in_fp8(parts)
        replicas = len(job.drafters)
        one_row = device.type == "cuda" and job.rows_per_step in (0, replicas)
        self.weights = FlatWeights(
            self.drafter,
            self.dtype,
            adjacent=self.drafter.adjacent(),
            direct=one_row and replicas == 1,
            gradient=self.dtype if one_row and self.dtype == torch.bfloat16 else torch.float32,
            place=place or (SumPlace.ALONE if replicas == 1 else SumPlace.IN_FLOAT32),
        )
        kv, *gate_up = self.weights.joined
        self._joined = Joined(kv, gate_up)
        self.optimizer = Optimizer(self.weights, job)
        self._embedding, self._head = _frozen(target, device, self.dtype, fp8.HEAD in parts)
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
        self._buffer = RowBuffer(shape, device)
        self.row = self._buffer.row
        self.statistics = statistics.zeros(device)
        self.kernels = Kernels(job.attention, config, shape, fp8.MLP in parts)
        self._row_mask = RowMask(self.row.starts, self.row.anchors, self.kernels.sizes)
        self._run: Any = run_drafter
        self._chunk: Any = chunk_scores
        self.rung = execution.EAGER
        """How steps run now; a replay compiles nothing, whatever else happens in the process."""
        self._gradients: tuple[Tensor, ...] = ()
        """Of the newest row, by the weights' leaves."""
        self._captured: tuple[Tensor, ...] = ()
        """Where a replay leaves them."""
        self._row_graph: execution.Graph | None = None
        self._step_graph: execution.Graph | None = None
        self._filled = 0
        columns = self.features.shape[1] + (0 if self.teacher is None else config.width)
        self._arrivals = Arrivals.of(job, device, shape.token_budget, columns)

    @property
    def parameters(self) -> int:
        """Trained numbers."""
        return self.weights.masters.numel()

    def warm_up(self, wanted: str) -> WarmUp:
        """Try the rungs of the ladder on synthetic rows and keep the highest that works and is fast.

        Called in turn, under `execution.WARM_UP_LOCK`. Leaves the weights and the optimizer as they were.
        Raises JobError for an `execution` that cannot work here.
        """
        start = time.perf_counter()
        execution.configure()
        result = WarmUp(*execution.decide(wanted, self.device))
        cuda = self.device.type == "cuda"
        if cuda:
            self.kernels.prove(result, self._head, self.objective, self.dtype)
            self.drafter.run_swiglu(self.kernels.runs_swiglu(result.execution))
        if result.execution == execution.EAGER or not cuda:
            result.step_s[execution.EAGER] = self._time_step()
        if result.execution != execution.EAGER:
            result = self._climb(wanted, result)
        if result.execution == execution.EAGER:
            self.use(execution.EAGER)
        result.attention = self._row_mask.kind
        result.loss_kernels = self.kernels.loss and result.execution != execution.EAGER
        result.swiglu_kernels = self.kernels.runs_swiglu(result.execution)
        if result.execution != execution.EAGER and cuda and result.attention == DENSE:
            result.reason += (
                f"; dense mask, since token_budget or anchors * block_size is no multiple of {TILE},"
                " or block_size does not divide it"
            )
        self._clear()
        result.seconds = time.perf_counter() - start
        return result

    def _climb(self, wanted: str, result: WarmUp) -> WarmUp:
        """The compiled rungs; once more without kernels that, though proved, fail in a step."""
        first = copy.deepcopy(result)
        self._try_compiled(wanted, result)
        while self.kernels.give_up(result, first):
            result = copy.deepcopy(first)
            self._try_compiled(wanted, result)
        return result

    def _try_compiled(self, wanted: str, result: WarmUp) -> None:
        """The rung `compiled`, and from there `graph`."""
        try:
            self.use(result.execution)
            compiled_s = self._time_step()
            self.optimizer.rehearse()
        except Exception as error:  # whatever inductor or its compiler raises, eager still trains
            result.down(execution.EAGER, f"compiling failed: {crash.one_line(error)}")
            return
        result.step_s[execution.COMPILED] = compiled_s
        eager_s = result.eager_step_s
        if eager_s and wanted == "auto" and compiled_s > CLEARLY_SLOWER * eager_s:
            result.down(
                execution.EAGER,
                f"eager is faster here: {eager_s:.3f} s a step against {compiled_s:.3f} s compiled",
            )
        elif result.execution == execution.GRAPH:
            self._try_graph(result)

    def _try_graph(self, result: WarmUp) -> None:
        """The rung `graph`: capture, and compare what a replay makes of another row."""
        try:
            self._row_graph = execution.Graph(self._forward_backward, self.device)
            self._captured, self._gradients = self._gradients, ()
            if differing := self._compare_replay():
                raise RuntimeError(differing)
            self.weights.collect(self._captured, first=True)
            # Entering a capture also gives back what compiled passes held: from here on only replays run.
            self._step_graph = execution.Graph(self.optimizer.apply, self.device)
            self.rung = execution.GRAPH
            result.step_s[execution.GRAPH] = self._time_step()
        except Exception as error:  # also for lack of memory: the graph has a pool of its own
            self._row_graph = self._step_graph = None
            self._captured = self._gradients = ()
            self.rung = execution.COMPILED
            result.down(execution.COMPILED, f"capturing failed: {crash.one_line(error)}")

    def step_down(self, reason: str) -> StepDown:
        """Go on eagerly, in the middle of a run."""
        old = self.rung
        self.use(execution.EAGER)
        return StepDown(old, self.rung, reason)

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
            width = self.features.shape[1]
            with self._arrivals.bring(features) as packed:
                self.features[: self._filled].copy_(packed[:, :width], non_blocking=True)
                if self.teacher is not None:
                    self.teacher[: self._filled].copy_(packed[:, width:], non_blocking=True)
        self._buffer.fill(row)

    def run_row(self, row: Row, bucket: int, first: bool) -> None:
        """Forward and backward of the loaded `row`, added to this step's gradient and statistics."""
        self.bucket.fill_(bucket)
        if self._row_graph is not None:
            self._row_graph.replay()
            self.weights.collect(self._captured, first)
        else:
            self._forward_backward(slots_in_use(row.weights))
            self.weights.collect(self._gradients, first)
            self._gradients = ()

    def step(self, total_weight: float, learning_rate: float) -> None:
        """The optimizer's step on the reduced gradient; see `Optimizer.step`."""
        if self._step_graph is None:
            self.optimizer.step(total_weight, learning_rate)
        else:
            self.optimizer.prepare(total_weight, learning_rate)
            self._step_graph.replay()

    def snapshot(self) -> dict[str, Tensor]:
        """A copy of the drafter's weights by name, in the compute type."""
        return {
            name: value.detach().clone() for name, value in self.weights.named(self.weights.values).items()
        }

    def synchronise(self) -> None:
        """Wait until the device has done all that was asked of it."""
        synchronise(self.device)

    def _forward_backward(self, used: int | None = None) -> None:
        """What the row graph holds: the row's gradients by the weights' leaves, and its statistics."""
        scores = self.forward(used)
        self._gradients = torch.autograd.grad(scores.loss, self.weights.leaves)
        with torch.no_grad():
            self._layout.add(self.statistics, scores, self.row.weights, self.bucket)

    def forward(self, used: int | None = None) -> BlockScores:
        """Scores of the loaded row; `used` as in `block_loss`."""
        mine, shape = self.row, self.shape
        x = self._embedding(mine.block_tokens.flatten()).to(self.dtype)
        hidden = self._run(
            self.drafter,
            self.features,
            self.drafter.rotary(mine.positions, self.dtype),
            x,
            self.drafter.rotary(mine.block_positions.flatten(), self.dtype),
            self._row_mask.make(),
            self._joined,
        )
        return block_loss(
            hidden.view(shape.anchors, shape.block_size - 1, -1),
            self._head,
            mine.labels,
            mine.weights,
            mine.anchors,
            self.teacher,
            self.objective,
            self._chunk,
            used,
        )

    def use(self, choice: str, *, trees: bool = True) -> None:
        """Build the callables of a rung. FlexAttention is for compiled runs on a GPU: eager it is unsafe."""
        name = f"replica{self.number}"
        self.rung = execution.COMPILED if choice == execution.GRAPH else choice
        cuda = self.device.type == "cuda"
        compiled = choice != execution.EAGER
        self._row_graph = self._step_graph = None
        self._captured = ()
        tiled = compiled and cuda and self._row_mask.sizes.tiles_fit
        self._row_mask.kind = self.kernels.attention if tiled else DENSE
        self.drafter.run_swiglu(self.kernels.runs_swiglu(choice))
        self._run = execution.build(run_drafter, choice, name, trees=trees)
        chunk = kernel_chunk_scores if compiled and self.kernels.loss else chunk_scores
        self._chunk = execution.build(chunk, choice, name, trees=trees)
        if compiled and cuda:
            self.optimizer.use(execution.build(adamw, execution.COMPILED, name))
        elif self.weights.plain:
            self.optimizer.use(None)
        else:
            self.optimizer.use(adamw)

    def _time_step(self) -> float:
        """Seconds of a forward and backward pass on a full synthetic row, the better of two."""
        row = full_row(self.shape)
        self.load(None, row)
        self.run_row(row, 0, first=True)  # compiles, mostly on one core, so others may use the CPU
        self.synchronise()
        best = float("inf")
        for _ in range(2):
            with turn(self.device):
                start = time.perf_counter()
                self.run_row(row, 0, first=True)
                self.synchronise()
                best = min(best, time.perf_counter() - start)
        return best

    def _compare_replay(self) -> str | None:
        """How a replay of a row that was not captured differs from a compiled pass; None: hardly."""
        row = full_row(self.shape)
        row.anchors.div_(2, rounding_mode="floor")
        self.load(None, row)
        generator = torch.Generator(self.device).manual_seed(0)  # never the device's own: others may capture
        self.features.normal_(generator=generator)
        self._filled = self.shape.token_budget
        self._forward_backward()
        assert self._row_graph is not None
        self._row_graph.replay()
        compiled, self._gradients = self._gradients, ()
        return difference(self.weights.leaf_names, compiled, self._captured)

    def _clear(self) -> None:
        self.load(None, empty_row(self.shape))
        self.weights.local.zero_()
        self.weights.total.zero_()
        self.statistics.zero_()


def _frozen(
    target: Target, device: torch.device, dtype: torch.dtype, eight_bits: bool
) -> tuple[nn.Module, OutputHead]:
    """The target's embedding and head on `device`: its own where it is there already, else copies.

    `eight_bits`: the head's weights in fp8 besides, 2 bytes a number.
    """
    embedding, head = target.embedding, target.output
    if target.device != device:
        embedding = copy.deepcopy(embedding).to(device)
    bias = None if head.bias is None else head.bias.to(device, dtype)
    weight = head.weight.to(device, dtype)
    small = fp8.FrozenMatrix.of(weight) if eight_bits else None
    return embedding, dataclasses.replace(head, weight=weight, bias=bias, eight_bits=small)
