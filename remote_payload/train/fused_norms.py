"""The target's RMS norms by torch's fused kernel, where that computes the same.

transformers writes a norm as seven passes over memory, four of them in float32. By a count of bytes they
are a fifth to a quarter of the forward pass of a Qwen3 of 4 billion numbers, the longer half of a step when
target and drafter share a GPU (bench/NOTES.md). torch has one kernel for it. Families differ in their norms
(Gemma multiplies by 1 + weight): a module is given the kernel only after both gave the same numbers for
random input in float32.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_EPSILONS = ("variance_epsilon", "eps")


@torch.no_grad()
def fuse_norms(model: nn.Module) -> int:
    """Give every RMS norm of `model` torch's kernel where the two agree; how many there were.

    The results differ from the module's own by rounding alone: in 16 bits it rounds twice, the kernel once.
    """
    fused = 0
    for module in model.modules():
        weight: Any = getattr(module, "weight", None)
        epsilon = next((getattr(module, name) for name in _EPSILONS if hasattr(module, name)), None)
        named = type(module).__name__.endswith("RMSNorm")
        if not named or isinstance(module, nn.RMSNorm) or not isinstance(weight, Tensor):
            continue
        if weight.ndim == 1 and isinstance(epsilon, float) and _agrees(module, weight, epsilon):
            module.forward = functools.partial(_norm, weight, epsilon)
            fused += 1
    return fused


def unfuse_norms(model: nn.Module) -> None:
    """Give the norms of `model` their own code back: for a copy of it that inductor fuses otherwise."""
    for module in model.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, functools.partial) and forward.func is _norm:
            del module.__dict__["forward"]


def _norm(weight: Tensor, epsilon: float, x: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), epsilon)


def _agrees(module: nn.Module, weight: Tensor, epsilon: float) -> bool:
    """Whether `module` is the plain norm: for input of usual and of tiny size, where epsilon counts."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, len(weight), generator=generator).to(weight.device)
    x[1] *= epsilon**0.5
    try:
        mine = module(x)
    except (RuntimeError, TypeError):  # it wants other input, so it is another kind of norm
        return False
    wanted = F.rms_norm(x, weight.shape, weight.float(), epsilon)
    same: bool = mine.shape == wanted.shape and torch.allclose(mine.float(), wanted, rtol=1e-5, atol=1e-6)
    return same
