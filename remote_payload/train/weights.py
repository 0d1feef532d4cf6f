"""A replica's weights and gradients as flat tensors.

The drafter's parameters are views of one flat tensor in the compute type, and their gradients of another.
Reduction, clipping, AdamW and a checkpoint each are then one operation over a few tensors, and every address
stays where it is for the life of the run, which CUDA graphs need. Masters are float32, as AdamW's moments
are: pure bfloat16 AdamW is a suspected cause of NaN (z-lab/dflash #115).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class FlatWeights:
    """Flat storage of a module's parameters, matrices first, then norms."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, replicas: int = 1) -> None:
        """Move the parameters of `module` into flat storage of `dtype` on their device."""
        named = sorted(module.named_parameters(), key=lambda item: item[1].ndim < 2)
        self.names = [name for name, _ in named]
        self.shapes = [parameter.shape for _, parameter in named]
        self.decayed = sum(p.numel() for _, p in named if p.ndim >= 2)
        """How many of the flat numbers belong to matrices, which weight decay is for."""
        device = named[0][1].device
        self.masters = torch.cat([parameter.detach().float().flatten() for _, parameter in named])
        self.values = self.masters if dtype == torch.float32 else self.masters.to(dtype)
        self.gradient = torch.zeros_like(self.values)
        """What backward adds to, in the compute type."""
        self.local = torch.zeros(self.masters.numel(), dtype=torch.float32, device=device)
        """The gradient over this replica's rows of a step."""
        self.total = torch.zeros_like(self.local) if replicas > 1 else self.local
        """The gradient over all rows and replicas of a step."""
        for (_, parameter), value, slope in zip(
            named, self.split(self.values), self.split(self.gradient), strict=True
        ):
            parameter.data = value
            parameter.grad = slope

    def split(self, flat: Tensor) -> list[Tensor]:
        """Views of a flat tensor in the parameters' shapes."""
        parts = flat.split([shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a flat tensor by the parameters' names."""
        return dict(zip(self.names, self.split(flat), strict=True))

    def collect(self, first: bool) -> None:
        """Add the gradient of one row to `local` (or begin with it), and clear it for the next."""
        if first:
            self.local.copy_(self.gradient)
        else:
            self.local.add_(self.gradient)
        self.gradient.zero_()

    def publish(self) -> None:
        """Copy the masters into the compute type."""
        if self.values is not self.masters:
            self.values.copy_(self.masters)
