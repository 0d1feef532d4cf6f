"""How a batch lies before a target in a graph: packed into one row, or as padded rows.

Packed, nothing is computed for padding but what a graph's shape leaves over: where texts of very unequal
length make padded rows of which 40 % are real tokens, of packed ones 90 % are. Positions begin anew with
each document, and attention is kept within documents by their bounds (`target_attention.py`). It needs a
model that attends by sdpa in 16 bits, and hands positions and bounds on to every layer that looks at other
tokens. Padded rows ask nothing of a model. Warm-up proves which holds.

Everything that a pass reads travels as one piece of int64 from page-locked memory. It is written by numpy,
in one thread: torch would divide arrays of this size among all cores, and wait for the last of them.

Shapes: B rows or documents, L tokens of the longest, n real tokens, T tokens of a graph, W features of a
token.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from remote_payload.train.target import Target
from remote_payload.train.target_attention import causal_view, document_view
from remote_payload.train.target_shapes import PackedShape, PaddedShape

Shape = TypeVar("Shape", PackedShape, PaddedShape)


@dataclasses.dataclass(frozen=True, slots=True)
class Layout(abc.ABC, Generic[Shape]):
    """One way to lay a batch out."""

    shapes: Sequence[Shape]
    """Those of its graphs, the first with most tokens."""

    name = ""

    def fitting(self, lengths: list[int]) -> Shape | None:
        """The shape that runs documents of these lengths at least cost, or None."""
        fit = [shape for shape in self.shapes if shape.holds(lengths)]
        return min(fit, key=lambda shape: shape.cost, default=None)

    def only_for(self, batches: Iterable[list[int]]) -> Self:
        """With no shapes but those that run batches of these lengths."""
        used = {self.fitting(lengths) for lengths in batches}
        return dataclasses.replace(self, shapes=[shape for shape in self.shapes if shape in used])

    @abc.abstractmethod
    def view(self, target: Target, part: nn.Module) -> nn.Module:
        """`part` of the target's decoder as graphs run it. Raises RuntimeError where it cannot be."""

    @abc.abstractmethod
    def trial(self, shape: Shape) -> list[int]:
        """Lengths of documents that fill the shape."""

    @abc.abstractmethod
    def usual(self, shape: Shape) -> list[int]:
        """Lengths of documents as batches have them, to time the shape by."""

    @abc.abstractmethod
    def size(self, shape: Shape) -> int:
        """Most numbers that `stage` makes."""

    @abc.abstractmethod
    def stage(self, shape: Shape, ids: Tensor, lengths: list[int], pinned: bool) -> Tensor:
        """All that a pass over right-padded `ids` [B, L] reads, int64 in main memory."""

    @abc.abstractmethod
    def run(
        self, shape: Shape, staged: Tensor, target: Target, last_hidden: bool, part: nn.Module, out: Tensor
    ) -> None:
        """Fill `out` [T, W] from what was staged; both lie where they will at each replay."""

    @abc.abstractmethod
    def collect(self, shape: Shape, staged: Tensor, out: Tensor, real: int) -> Tensor:
        """Features of the n real tokens, [n, W], in memory of their own."""


@dataclasses.dataclass(frozen=True, slots=True)
class Packed(Layout[PackedShape]):
    """All documents in one row: ids, positions, and bounds of the documents, those not used at its end."""

    name = "packed"

    def view(self, target: Target, part: nn.Module) -> nn.Module:
        """See `Layout`."""
        if target.dtype == torch.float32:
            raise RuntimeError("attention within packed documents needs 16 bits, and the target is float32")
        if target.attention != "sdpa":
            raise RuntimeError(f"packed documents need sdpa, and this model attends by {target.attention}")
        return document_view(part)

    def trial(self, shape: PackedShape) -> list[int]:
        """Long ones, and between them two short ones, if there is room for them."""
        wanted = [shape.longest, 1, shape.longest, min(37, shape.longest)] + [shape.longest] * shape.documents
        lengths: list[int] = []
        for length in wanted[: shape.documents]:
            lengths.append(min(length, shape.tokens - sum(lengths)))
        return [length for length in lengths if length]

    def usual(self, shape: PackedShape) -> list[int]:
        """As many as it has room for, of one length."""
        documents = min(shape.documents, shape.tokens)
        return [min(shape.longest, shape.tokens // documents)] * documents

    def size(self, shape: PackedShape) -> int:
        """See `Layout`."""
        return 2 * shape.tokens + shape.documents + 1

    def stage(self, shape: PackedShape, ids: Tensor, lengths: list[int], pinned: bool) -> Tensor:
        """See `Layout`."""
        staged = torch.empty(self.size(shape), dtype=torch.int64, pin_memory=pinned)
        row, positions, bounds = (part.numpy() for part in self._parts(shape, staged))
        of_row = np.asarray(lengths)
        ends = of_row.cumsum()
        real = int(ends[-1])
        row[:real] = ids.numpy().reshape(-1)[real_places(lengths, ids.shape[1])]
        row[real:] = 0
        positions[:real] = np.arange(real) - (ends - of_row).repeat(of_row)
        positions[real:] = 0
        bounds[0] = 0
        bounds[1 : len(lengths) + 1] = ends
        bounds[len(lengths) + 1 :] = real
        return staged

    def run(
        self,
        shape: PackedShape,
        staged: Tensor,
        target: Target,
        last_hidden: bool,
        part: nn.Module,
        out: Tensor,
    ) -> None:
        """See `Layout`."""
        row, positions, wide = self._parts(shape, staged)
        bounds, longest = wide.to(torch.int32), shape.longest
        target.features(
            row[None],
            last_hidden,
            part=part,
            out=out[None],
            position_ids=positions[None],
            cu_seq_lens_q=bounds,
            cu_seq_lens_k=bounds,
            max_length_q=longest,
            max_length_k=longest,
        )

    def collect(self, shape: PackedShape, staged: Tensor, out: Tensor, real: int) -> Tensor:
        """See `Layout`."""
        return out[:real].clone()

    def _parts(self, shape: PackedShape, staged: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        row, positions, bounds = staged[: self.size(shape)].split(
            [shape.tokens, shape.tokens, shape.documents + 1]
        )
        return row, positions, bounds


@dataclasses.dataclass(frozen=True, slots=True)
class Padded(Layout[PaddedShape]):
    """Rows padded at their end: ids, and the places of real tokens."""

    name = "padded"

    def view(self, target: Target, part: nn.Module) -> nn.Module:
        """See `Layout`; other attention than sdpa stays as it is, at the cost of its masks."""
        return causal_view(part) if target.attention == "sdpa" else part

    def trial(self, shape: PaddedShape) -> list[int]:
        """All of them as long as it has room for."""
        return [shape.longest] * shape.rows

    def usual(self, shape: PaddedShape) -> list[int]:
        """The same."""
        return self.trial(shape)

    def size(self, shape: PaddedShape) -> int:
        """See `Layout`."""
        return 2 * shape.tokens

    def stage(self, shape: PaddedShape, ids: Tensor, lengths: list[int], pinned: bool) -> Tensor:
        """See `Layout`."""
        places = real_places(lengths, shape.longest)
        staged = torch.empty(shape.tokens + len(places), dtype=torch.int64, pin_memory=pinned)
        rows, longest = ids.shape
        numbers = staged.numpy()
        padded = numbers[: shape.tokens].reshape(shape.rows, shape.longest)
        padded[:] = 0
        padded[:rows, :longest] = ids.numpy()
        numbers[shape.tokens :] = places
        return staged

    def run(
        self,
        shape: PaddedShape,
        staged: Tensor,
        target: Target,
        last_hidden: bool,
        part: nn.Module,
        out: Tensor,
    ) -> None:
        """See `Layout`."""
        ids = staged[: shape.tokens].view(shape.rows, shape.longest)
        target.features(ids, last_hidden, part=part, out=out.view(*ids.shape, -1))

    def collect(self, shape: PaddedShape, staged: Tensor, out: Tensor, real: int) -> Tensor:
        """See `Layout`."""
        return out.index_select(0, staged[shape.tokens : shape.tokens + real])


def real_places(lengths: list[int], longest: int) -> npt.NDArray[np.int64]:
    """Where the real tokens of right-padded rows of `longest` tokens stand in one line of all, [n]."""
    of_row = np.asarray(lengths, np.int64)
    pads = longest - of_row
    return np.arange(sum(lengths), dtype=np.int64) + (pads.cumsum() - pads).repeat(of_row)
