"""A replica's weights, gradients and AdamW state as flat tensors.

The drafter's parameters are views of one flat tensor in the compute type, and their gradients of another.
Reduction, clipping, AdamW and a checkpoint each are then one operation over a few tensors, and every address
stays where it is for the life of the run, which CUDA graphs need. Masters and moments are float32: pure
bfloat16 AdamW is a suspected cause of NaN (z-lab/dflash #115).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from remote_payload.job import Job


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


class Optimizer:
    """AdamW over a replica's flat masters; every replica takes the same step."""

    def __init__(self, weights: FlatWeights, job: Job) -> None:
        self._weights = weights
        self._clip = job.clip
        cut = weights.decayed
        groups = []
        for part, decay in ((slice(0, cut), job.weight_decay), (slice(cut, None), 0.0)):
            master = nn.Parameter(weights.masters[part])
            master.grad = weights.total[part]
            groups.append({"params": [master], "weight_decay": decay})
        self._adamw = torch.optim.AdamW(
            groups, lr=job.learning_rate, betas=(job.betas[0], job.betas[1]), fused=True
        )
        device = weights.masters.device
        self.norm = torch.zeros((), device=device)
        """The gradient's norm before clipping, of the newest step."""
        self.skipped = torch.zeros((), device=device)
        """Steps that were left out because their gradient was not finite."""
        self.bad_step = torch.zeros((), dtype=torch.int64, device=device)
        """The newest of them, from 1; 0: none."""
        self.bad_norm = torch.zeros((), device=device)
        """Its gradient's norm."""
        self._taken = 0

    def step(self, total_weight: float, learning_rate: float) -> None:
        """One AdamW step on `total / total_weight`, clipped. Nothing here waits for the device.

        Args:
            total_weight: loss weights of all rows of the step; 0 when no row had any.
            learning_rate: of this step.

        A gradient that is not finite changes nothing and is counted. All replicas hold the same reduced
        gradient, so they decide the same.
        """
        total = self._weights.total
        scale = 1.0 / total_weight if total_weight else 0.0
        self.norm = torch.linalg.vector_norm(total) * scale
        bad = ~torch.isfinite(self.norm)
        total.mul_((self._clip / (self.norm + 1e-6)).clamp(max=1.0) * scale)
        # The fused kernel leaves a step out when `found_inf` is set; that is how GradScaler does it too.
        self._adamw.found_inf = bad.float()  # type: ignore[attr-defined]
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        self._taken += 1
        self.skipped += bad
        self.bad_step.masked_fill_(bad, self._taken)
        self.bad_norm = torch.where(bad, self.norm, self.bad_norm)
        self._weights.publish()

    def state(self) -> dict[str, Tensor]:
        """Masters, both moments and the step count, flat, for a checkpoint."""
        states = [self._adamw.state[group["params"][0]] for group in self._adamw.param_groups]
        joined = {
            key: torch.cat([state[key].flatten() for state in states])
            for key in ("exp_avg", "exp_avg_sq")
            if all(key in state for state in states)
        }
        steps = {"adam_step": torch.stack([s["step"].cpu() for s in states])} if joined else {}
        return {"masters": self._weights.masters, **joined, **steps}


def learning_rate(step: int, steps: int, job: Job) -> float:
    """Of step 0..steps-1: a linear rise over `job.warmup` of them, then half a cosine down to 0."""
    rise = max(1, round(job.warmup * steps))
    if step < rise:
        return job.learning_rate * (step + 1) / rise
    return job.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))
