"""A replica's weights and gradients as flat tensors.

The drafter's parameters are views of one flat tensor in the compute type. Reduction, clipping, AdamW and a
checkpoint each are then one operation over a few tensors, and every address stays where it is for the life
of the run, which CUDA graphs need. Masters are float32, as AdamW's moments are: pure bfloat16 AdamW is a
suspected cause of NaN (z-lab/dflash #115).

Matrices that read the same input may lie side by side and be trained as one; their names and shapes stay
those of the released checkpoints. Gradients are taken by `leaves` and never accumulate in `Tensor.grad`:
where a step is one row of one replica, the optimizer reads them where autograd left them.

For a sum over replicas the flat gradient is cut into buckets of whole leaves, each marked when it is
collected, so that the sum of one can begin while the next is collected (`train/communication.py`).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch
from torch import Tensor, nn

BUCKET_BYTES = 2**26
"""From this size on a bucket ends with the leaf that made it so large; NCCL is at full speed there."""


class SumPlace(enum.Enum):
    """Where the sum of the gradient over replicas lies."""

    ALONE = enum.auto()
    """There is one replica and nothing to sum."""
    IN_PLACE = enum.auto()
    """It takes the place of the replica's own."""
    BESIDE = enum.auto()
    """In a tensor of its own, of the same type."""
    IN_FLOAT32 = enum.auto()
    """In a float32 tensor of its own."""


class FlatWeights:
    """Flat storage of a module's parameters, matrices first, then norms."""

    def __init__(
        self,
        module: nn.Module,
        dtype: torch.dtype,
        *,
        adjacent: Sequence[Sequence[str]] = (),
        direct: bool = False,
        gradient: torch.dtype = torch.float32,
        place: SumPlace = SumPlace.ALONE,
    ) -> None:
        """Move the parameters of `module` into flat storage of `dtype` on their device.

        Args:
            adjacent: names of matrices that are to lie one below the other, group by group.
            direct: a step is one row of one replica, so that `local` and `total` need not exist.
            gradient: type of `local`; float32 wherever rows are added up in it.
            place: where `total` lies.
        """
        parameters = dict(module.named_parameters())
        grouped = [name for group in adjacent for name in group]
        rest = [name for name in parameters if name not in grouped]
        self.names = grouped + sorted(rest, key=lambda name: parameters[name].ndim < 2)
        named = [(name, parameters[name]) for name in self.names]
        self.shapes = [parameter.shape for _, parameter in named]
        self.decayed = sum(p.numel() for _, p in named if p.ndim >= 2)
        """How many of the flat numbers belong to matrices, which weight decay is for."""
        self.masters = torch.cat([parameter.detach().float().flatten() for _, parameter in named])
        self.values = self.masters if dtype == torch.float32 else self.masters.to(dtype)
        for (_, parameter), value in zip(named, self.split(self.values), strict=True):
            parameter.data = value
            parameter.grad = None
        self.joined: list[Tensor] = []
        """The groups of `adjacent` as one matrix each, views of `values`."""
        begin = 0
        for group in adjacent:
            rows, columns = sum(len(parameters[name]) for name in group), parameters[group[0]].shape[1]
            whole = self.values[begin : begin + rows * columns].view(rows, columns)
            self.joined.append(whole.detach().requires_grad_())
            begin += rows * columns
        self.leaves: list[Tensor] = [*self.joined, *(p for name, p in named if name not in grouped)]
        """What the training forward is differentiated by, in the order of the flat numbers."""
        self.leaf_names = [
            *(f"{group[0]} to {group[-1]}" for group in adjacent),
            *(name for name, _ in named if name not in grouped),
        ]
        """The names of what each leaf holds."""
        self.direct = direct
        size = 0 if direct else self.masters.numel()
        self.local = torch.zeros(size, dtype=gradient, device=self.masters.device)
        """The gradient over this replica's rows of a step; empty when `direct`."""
        self.total = self.local
        """The gradient over all rows and replicas of a step."""
        if place in (SumPlace.BESIDE, SumPlace.IN_FLOAT32):
            self.total = torch.zeros_like(
                self.local, dtype=gradient if place is SumPlace.BESIDE else torch.float32
            )
        self.buckets, self._last_leaves = self._cut()
        """Parts of the flat gradient, in order; each ends where a leaf does."""
        self.ready: list[torch.cuda.Event] = []
        """Of each bucket, when `local` has it: marks on the stream that collects, renewed by every row."""
        if place is not SumPlace.ALONE and self.masters.is_cuda:
            self.ready = [torch.cuda.Event() for _ in self.buckets]
        self.newest: list[Tensor] = []
        """The gradients of the newest row, when `direct`."""

    @property
    def plain(self) -> bool:
        """Whether `total` is a flat float32 tensor, which torch's own AdamW wants."""
        return not self.direct and self.total.dtype == torch.float32

    def split(self, flat: Tensor) -> list[Tensor]:
        """Views of a flat tensor in the parameters' shapes."""
        parts = flat.split([shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a flat tensor by the parameters' names."""
        return dict(zip(self.names, self.split(flat), strict=True))

    def collect(self, gradients: Sequence[Tensor], first: bool) -> None:
        """Add the gradients of one row by `leaves` to `local`, or begin with them."""
        if self.direct:
            assert first
            self.newest = list(gradients)
            return
        bucket = 0
        for number, (part, gradient) in enumerate(zip(self._by_leaf(self.local), gradients, strict=True)):
            if first:
                part.copy_(gradient.flatten())
            else:
                part.add_(gradient.flatten())
            if self.ready and number == self._last_leaves[bucket]:
                self.ready[bucket].record()
                bucket += 1

    def slopes(self) -> list[tuple[Tensor, slice]]:
        """The step's gradient in parts [n], of matrices or of norms, and which flat numbers each is for."""
        cut = slice(0, self.decayed), slice(self.decayed, self.masters.numel())
        if self.plain:
            return [(self.total[part], part) for part in cut]
        out, begin = [], 0
        matrices = sum(leaf.ndim >= 2 for leaf in self.leaves)
        gradients = self.newest if self.direct else self._by_leaf(self.total)
        for gradient in gradients[:matrices]:
            out.append((gradient.flatten(), slice(begin, begin + gradient.numel())))
            begin += gradient.numel()
        norms = torch.cat(list(gradients[matrices:])) if self.direct else self.total[cut[1]]
        return [*out, (norms, cut[1])]

    def publish(self) -> None:
        """Copy the masters into the compute type."""
        if self.values is not self.masters:
            self.values.copy_(self.masters)

    def _by_leaf(self, flat: Tensor) -> Sequence[Tensor]:
        parts: Sequence[Tensor] = flat.split([leaf.numel() for leaf in self.leaves])
        return parts

    def _cut(self) -> tuple[list[slice], list[int]]:
        """The buckets, and the number of the last leaf of each."""
        buckets: list[slice] = []
        last: list[int] = []
        begin = end = 0
        for number, leaf in enumerate(self.leaves):
            end += leaf.numel()
            if (end - begin) * self.local.element_size() >= BUCKET_BYTES or number == len(self.leaves) - 1:
                buckets.append(slice(begin, end))
                last.append(number)
                begin = end
        return buckets, last
