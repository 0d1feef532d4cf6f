"""SwiGLU of one product's gate and up: one pass forward, one backward.

A compiler makes the joined slope by a concatenation, and fuses that with masks, so that everything is read
twice. Here it is an operator, opaque to the compiler, whose kernels warm-up proves (`swiglu_choice`); on a
CPU plain operations do the same. Without them `F.silu(gate) * up` is all there is.

Shapes: N rows, F width of the MLP.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def swiglu(between: Tensor, kernels: bool = False) -> Tensor:
    """silu(gate) * up, [N, F], of gate and up side by side, [N, 2F]; differentiable.

    `kernels`: by our own, for compiled steps on a GPU.
    """
    if kernels:
        hidden: Tensor = forward(between)
        return hidden
    gate, up = between.chunk(2, -1)
    return F.silu(gate) * up


@torch.library.custom_op("dflashctl::swiglu", mutates_args=(), schema="(Tensor between) -> Tensor")
def forward(between: Tensor) -> Tensor:
    """silu(gate) * up, [N, F], of gate and up side by side, [N, 2F]."""
    if not between.is_cuda:
        return exact(between).to(between.dtype)
    from remote_payload.train import swiglu_kernels

    hidden = _half(between)
    swiglu_kernels.forward(between.contiguous(), hidden)
    return hidden


def _half(between: Tensor) -> Tensor:
    return between.new_empty(len(between), between.shape[1] // 2)


@torch.library.custom_op(
    "dflashctl::swiglu_backward", mutates_args=(), schema="(Tensor between, Tensor slope) -> Tensor"
)
def backward(between: Tensor, slope: Tensor) -> Tensor:
    """Slopes of gate and up side by side, [N, 2F], from that of their product, [N, F]."""
    if not between.is_cuda:
        return slopes(between, slope).to(between.dtype)
    from remote_payload.train import swiglu_kernels

    made = _whole(between, slope)
    swiglu_kernels.backward(between.contiguous(), slope.contiguous(), made)
    return made


def _whole(between: Tensor, slope: Tensor) -> Tensor:
    return between.new_empty(between.shape)


def exact(between: Tensor) -> Tensor:
    """silu(gate) * up, [N, F] float32, by plain operations."""
    gate, up = between.float().chunk(2, -1)
    return F.silu(gate) * up


def slopes(between: Tensor, slope: Tensor) -> Tensor:
    """Slopes of gate and up side by side, [N, 2F] float32, from that of their product, [N, F], plainly."""
    gate, up = between.float().chunk(2, -1)
    share = gate.sigmoid()
    by_gate = slope.float() * up * share * (1 + gate * (1 - share))
    return torch.cat([by_gate, slope.float() * gate * share], -1)


def _keep(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _slopes(ctx: Any, slope: Tensor) -> Tensor:
    made: Tensor = backward(ctx.saved_tensors[0], slope)
    return made


forward.register_fake(_half)
backward.register_fake(_whole)
forward.register_autograd(_slopes, setup_context=_keep)
