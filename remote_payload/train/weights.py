"""A replica's weights and gradients as flat tensors.

The drafter's parameters are views of one flat tensor in the compute type. Reduction, clipping, AdamW and a
checkpoint each are then one operation over a few tensors, and every address stays where it is for the life
of the run, which CUDA graphs need. Masters are float32, as AdamW's moments are: pure bfloat16 AdamW is a
suspected cause of NaN (z-lab/dflash #115).

Matrices that read the same input may lie side by side and be trained as one; their names and shapes stay
those of the released checkpoints. Gradients are taken by `leaves` and never accumulate in `Tensor.grad`:
where a step is one row of one replica, the optimizer reads them where autograd left them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class FlatWeights:
    """Flat storage of a module's parameters, matrices first, then norms."""

    def __init__(
        self,
        module: nn.Module,
        dtype: torch.dtype,
        replicas: int = 1,
        *,
        adjacent: Sequence[Sequence[str]] = (),
        direct: bool = False,
    ) -> None:
        """Move the parameters of `module` into flat storage of `dtype` on their device.

        Args:
            adjacent: names of matrices that are to lie one below the other, group by group.
            direct: a step is one row of one replica, so that `local` and `total` need not exist.
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
        self.direct = direct
        size = 0 if direct else self.masters.numel()
        self.local = torch.zeros(size, dtype=torch.float32, device=self.masters.device)
        """The gradient over this replica's rows of a step; empty when `direct`."""
        self.total = torch.zeros_like(self.local) if replicas > 1 else self.local
        """The gradient over all rows and replicas of a step."""
        self.newest: list[Tensor] = []
        """The gradients of the newest row, when `direct`."""

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
        parts = self.local.split([leaf.numel() for leaf in self.leaves])
        for part, gradient in zip(parts, gradients, strict=True):
            if first:
                part.copy_(gradient.flatten())
            else:
                part.add_(gradient.flatten())

    def slopes(self) -> list[tuple[Tensor, slice]]:
        """The step's gradient in parts [n], of matrices or of norms, and which flat numbers each is for."""
        cut = slice(0, self.decayed), slice(self.decayed, self.masters.numel())
        if not self.direct:
            return [(self.total[part], part) for part in cut]
        out, begin = [], 0
        matrices = [gradient for gradient in self.newest if gradient.ndim >= 2]
        for gradient in matrices:
            out.append((gradient.flatten(), slice(begin, begin + gradient.numel())))
            begin += gradient.numel()
        return [*out, (torch.cat(self.newest[len(matrices) :]), cut[1])]

    def publish(self) -> None:
        """Copy the masters into the compute type."""
        if self.values is not self.masters:
            self.values.copy_(self.masters)
