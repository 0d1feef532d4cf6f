"""Training products of 8-bit numbers, twice as fast as 16-bit ones on Hopper and Ada: `torch._scaled_mm`.

Weights and what goes forward are e4m3 (3 bits of mantissa, 4.4e-6 of the greatest is still told from 0),
slopes e5m2 (2 bits, but 30 powers of two). Every matrix has one scale, from its greatest magnitude of this
very step, so nothing overflows and nothing is remembered from step to step. A scale a row would be more
precise only where rows differ by more than a float's exponent tells, and then the product by the weight,
which sums over rows, would need other scales than the one by the input; the kernels with one scale are also
the fastest (`python -m bench.fp8_products`, bench/NOTES.md).

Forward may round partial sums (fast accumulation); products of slopes do not, and they sum over up to the
vocabulary. Masters, sums of gradients and everything between the products stay as they are, and so does the
drafter that is evaluated and exported. A NaN makes a scale of NaN, and that a gradient of NaN, which the
optimizer leaves out; an infinity does too.

Passes over memory in an MLP (bytes a step: each matrix in 16 bits is read twice, once for its greatest
magnitude, and written twice in 8): input, SwiGLU's output, both slopes and both weights, 6 bytes a number. At
the 8b shapes 3.1 GB a layer beside the 1.6 of SwiGLU itself.

Each product with what goes before it is one operator of torch, opaque to the compiler, so eager, compiled
and captured steps run the same kernels. Nothing is read by the host. On a CPU the operators work too, slowly,
for tests; jobs are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from remote_payload.job import JobError
from remote_payload.train import swiglu

FORWARD = torch.float8_e4m3fn
"""Of weights and of what goes forward."""
SLOPE = torch.float8_e5m2
"""Of gradients."""

HEAD, MLP, PROJECTIONS = "head", "mlp", "projections"
PARTS: dict[str, frozenset[str]] = {
    "none": frozenset(),
    HEAD: frozenset({HEAD}),
    MLP: frozenset({MLP}),
    "head+mlp": frozenset({HEAD, MLP}),
    "all": frozenset({HEAD, MLP, PROJECTIONS}),
}
"""What a job's `fp8` stands for."""

MULTIPLE = 16
"""Sides of an 8-bit product are multiples of it."""

LEAST = 1e-30
"""Greatest magnitudes below are taken for it, so that no scale overflows."""

_SLOT, _SCALE = 64, 32
"""As in `fp8_kernels`, which not every machine can import."""


def refuse(device: torch.device) -> str | None:
    """Why 8-bit products cannot run on `device` with this torch; None where they can."""
    if not hasattr(torch, "_scaled_mm"):
        return f"this torch ({torch.__version__}) has no _scaled_mm; expected 2.11 or later"
    if device.type != "cuda":
        return f"{device} has no 8-bit matrix units; expected a GPU of compute capability 8.9 or more"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        name = torch.cuda.get_device_name(device)
        return f"{device} ({name}, compute capability {major}.{minor}) has no 8-bit matrix units; 8.9 has"
    return None


def check_fp8(fp8: str, devices: list[str], sizes: dict[str, dict[str, int]]) -> None:
    """Refuse a job's `fp8` that cannot run. Raises JobError.

    Args:
        devices: of the drafter replicas.
        sizes: the sides of each part's products by their names.
    """
    parts = PARTS[fp8]
    for device in devices if parts else []:
        if reason := refuse(torch.device(device)):
            raise JobError(f"fp8 = {fp8!r}: {reason}, or fp8 = 'none'")
    for part in sorted(parts):
        for name, size in sizes[part].items():
            if size % MULTIPLE:
                raise JobError(
                    f"fp8 = {fp8!r}: {name} is {size}; 8-bit products of the {part} need a multiple of"
                    f" {MULTIPLE}; leave the {part} out"
                )


class FrozenMatrix(NamedTuple):
    """A matrix [V, D] that never changes, in 8 bits and both layouts: 2 bytes a number, as in bfloat16."""

    values: Tensor
    """[V, D]"""
    turned: Tensor
    """[D, V]"""
    scale: Tensor
    """Float32 scalar."""

    @classmethod
    def of(cls, matrix: Tensor) -> FrozenMatrix:
        """`matrix` in 8 bits; its number of rows is a multiple of `MULTIPLE`."""
        assert len(matrix) % MULTIPLE == 0
        slots = _slots(1, matrix)
        values, turned = _both(matrix.detach().contiguous(), FORWARD, slots[0])
        return cls(values, turned, slots[0, _SCALE])

    def product(self, x: Tensor) -> Tensor:
        """`x @ matrix.T` [..., V] of `x` [..., D], in the type of `x`."""
        values, scale = quantised(x.flatten(0, -2), FORWARD, x.abs().amax())
        flat: Tensor = _product(values, self.values, scale, self.scale, x.dtype, True)
        return flat.view(*x.shape[:-1], flat.shape[-1])

    def by_input(self, slope: Tensor, bound: Tensor, dtype: torch.dtype) -> Tensor:
        """`slope @ matrix` [..., D], in `dtype`, of `slope` [..., V], no number of which is above `bound`.

        A bound that is known beforehand spares a pass over the slope; 30 powers of two forgive a loose one.
        """
        values, scale = quantised(slope.flatten(0, -2), SLOPE, bound)
        return self._by_values(values, scale, dtype).view(*slope.shape[:-1], -1)

    def by_written(
        self, write: Callable[[Tensor, torch.dtype], Tensor], bound: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """`by_input` [N, D] of a slope that `write(times, dtype)` makes, [N, V], multiplied by `times`."""
        times, scale = scales_of(SLOPE, bound)
        return self._by_values(write(times, SLOPE), scale, dtype)

    def _by_values(self, values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        product: Tensor = _product(values, self.turned, scale, self.scale, dtype, False)
        return product


def scales_of(dtype: torch.dtype, greatest: Tensor) -> tuple[Tensor, Tensor]:
    """What to multiply numbers up to `greatest` by for `dtype`, and what to multiply them by afterwards."""
    top = torch.finfo(dtype).max
    greatest = greatest.float()
    greatest = torch.where(greatest < LEAST, LEAST, greatest)
    return top / greatest, greatest / top


def quantised(x: Tensor, dtype: torch.dtype, greatest: Tensor) -> tuple[Tensor, Tensor]:
    """`x` in 8 bits and the float32 scalar to multiply it by; `greatest`: no |x| is above it.

    Plain operations, for the compiler to fuse with whatever makes `x`. What rounding lifts above the greatest
    8-bit number becomes that one; a NaN stays one.
    """
    top = torch.finfo(dtype).max
    times, scale = scales_of(dtype, greatest)
    return (x.float() * times).clamp(-top, top).to(dtype), scale


def mlp(x: Tensor, gate_up: Tensor, down: Tensor, kernels: bool = False) -> Tensor:
    """`down @ (silu(gate) * up)` of `x` [N, D], with `gate_up` [2F, D] and `down` [D, F]; [N, D].

    Differentiable by all three matrices; gradients have their types. `kernels`: SwiGLU by our own.
    """
    output: Tensor = _mlp(x, gate_up, down, kernels)[0]
    return output


def linear(x: Tensor, matrix: Tensor) -> Tensor:
    """`x @ matrix.T` [N, M] of `x` [N, K] and `matrix` [M, K]; differentiable by both."""
    output: Tensor = _linear(x, matrix)[0]
    return output


def _slots(count: int, like: Tensor) -> Tensor:
    return torch.zeros(count, _SLOT, dtype=torch.float32, device=like.device)


def room(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """An 8-bit [N, K] and its turned [K, N'], N' the next multiple of `MULTIPLE`."""
    rows, columns = shape
    padded = rows + -rows % MULTIPLE
    return (
        torch.empty(rows, columns, dtype=dtype, device=device),
        torch.empty(columns, padded, dtype=dtype, device=device),
    )


def _both(x: Tensor, dtype: torch.dtype, slot: Tensor) -> tuple[Tensor, Tensor]:
    """`x` [N, K] in 8 bits and turned; its scale in `slot`."""
    if not x.is_cuda:
        return _plain(x, dtype, slot)
    from remote_payload.train import fp8_kernels

    values, turned = room((len(x), x.shape[1]), dtype, x.device)
    fp8_kernels.cast(x, values, turned, slot, torch.finfo(dtype).max, LEAST)
    return values, turned


def _plain(x: Tensor, dtype: torch.dtype, slot: Tensor) -> tuple[Tensor, Tensor]:
    """What the kernels do, by plain operations."""
    greatest = x.abs().amax().float()
    values, scale = quantised(x, dtype, greatest)
    slot[0], slot[_SCALE] = greatest, scale
    return values, F.pad(values.float().t(), (0, -len(x) % MULTIPLE)).to(dtype).contiguous()


def _times(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    """`a @ b.T` of `a` [N, K] and `b` [M, K] in 8 bits."""
    return torch._scaled_mm(a, b.t(), scale_a=a_scale, scale_b=b_scale, out_dtype=dtype, use_fast_accum=fast)


@torch.library.custom_op(
    "dflashctl::fp8_product",
    mutates_args=(),
    schema="(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, ScalarType dtype, bool fast) -> Tensor",
)
def _product(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    return _times(a.contiguous(), b, a_scale, b_scale, dtype, fast)


@_product.register_fake
def _(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    return a.new_empty(len(a), len(b), dtype=dtype)


@torch.library.custom_op(
    "dflashctl::fp8_linear",
    mutates_args=(),
    schema="(Tensor x, Tensor matrix) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _linear(x: Tensor, matrix: Tensor) -> tuple[Tensor, ...]:
    slots = _slots(2, x)
    values, x_turned = _both(x.contiguous(), FORWARD, slots[0])
    weight, weight_turned = _both(matrix.contiguous(), FORWARD, slots[1])
    output = _times(values, weight, slots[0, _SCALE], slots[1, _SCALE], x.dtype, True)
    return output, x_turned, weight_turned, slots


@_linear.register_fake
def _(x: Tensor, matrix: Tensor) -> tuple[Tensor, ...]:
    return (
        x.new_empty(len(x), len(matrix)),
        _turned_like(x, FORWARD),
        _turned_like(matrix, FORWARD),
        _slots(2, x),
    )


@torch.library.custom_op(
    "dflashctl::fp8_linear_backward",
    mutates_args=(),
    schema="(Tensor slope, Tensor x_turned, Tensor weight_turned, Tensor slots, bool by_input)"
    " -> (Tensor, Tensor)",
)
def _linear_backward(
    slope: Tensor, x_turned: Tensor, weight_turned: Tensor, slots: Tensor, by_input: bool
) -> tuple[Tensor, ...]:
    mine, dtype = _slots(1, slope), slope.dtype
    values, turned = _both(slope.contiguous(), SLOPE, mine[0])
    scale = mine[0, _SCALE]
    if by_input:
        by_x = _times(values, weight_turned, scale, slots[1, _SCALE], dtype, False)
    else:
        by_x = slope.new_empty(0)
    return by_x, _times(turned, x_turned, scale, slots[0, _SCALE], dtype, False)


@_linear_backward.register_fake
def _(
    slope: Tensor, x_turned: Tensor, weight_turned: Tensor, slots: Tensor, by_input: bool
) -> tuple[Tensor, ...]:
    by_x = slope.new_empty(len(slope), len(weight_turned)) if by_input else slope.new_empty(0)
    return by_x, slope.new_empty(slope.shape[1], len(x_turned))


@torch.library.custom_op(
    "dflashctl::fp8_mlp",
    mutates_args=(),
    schema="(Tensor x, Tensor gate_up, Tensor down, bool kernels)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _mlp(x: Tensor, gate_up: Tensor, down: Tensor, kernels: bool) -> tuple[Tensor, ...]:
    slots = _slots(4, x)
    scales = slots[:, _SCALE]
    values, x_turned = _both(x.contiguous(), FORWARD, slots[0])
    weight, gate_up_turned = _both(gate_up.contiguous(), FORWARD, slots[1])
    between = _times(values, weight, scales[0], scales[1], x.dtype, True)
    hidden = swiglu.forward(between) if kernels else swiglu.exact(between).to(x.dtype)
    values, hidden_turned = _both(hidden, FORWARD, slots[2])
    del hidden
    weight, down_turned = _both(down.contiguous(), FORWARD, slots[3])
    output = _times(values, weight, scales[2], scales[3], x.dtype, True)
    return output, x_turned, gate_up_turned, between, hidden_turned, down_turned, slots


@_mlp.register_fake
def _(x: Tensor, gate_up: Tensor, down: Tensor, kernels: bool) -> tuple[Tensor, ...]:
    between = x.new_empty(len(x), len(gate_up))
    return (
        x.new_empty(len(x), len(down)),
        _turned_like(x, FORWARD),
        _turned_like(gate_up, FORWARD),
        between,
        _turned_like(between[:, : down.shape[1]], FORWARD),
        _turned_like(down, FORWARD),
        _slots(4, x),
    )


@torch.library.custom_op(
    "dflashctl::fp8_mlp_backward",
    mutates_args=(),
    schema="(Tensor slope, Tensor x_turned, Tensor gate_up_turned, Tensor between, Tensor hidden_turned,"
    " Tensor down_turned, Tensor slots, bool kernels) -> (Tensor, Tensor, Tensor)",
)
def _mlp_backward(
    slope: Tensor,
    x_turned: Tensor,
    gate_up_turned: Tensor,
    between: Tensor,
    hidden_turned: Tensor,
    down_turned: Tensor,
    slots: Tensor,
    kernels: bool,
) -> tuple[Tensor, ...]:
    mine, dtype = _slots(2, slope), slope.dtype
    scales, slopes = slots[:, _SCALE], mine[:, _SCALE]
    values, turned = _both(slope.contiguous(), SLOPE, mine[0])
    by_hidden = _times(values, down_turned, slopes[0], scales[3], dtype, False)
    by_down = _times(turned, hidden_turned, slopes[0], scales[2], dtype, False)
    if kernels:
        by_between = swiglu.backward(between, by_hidden)
    else:
        by_between = swiglu.slopes(between, by_hidden).to(dtype)
    values, turned = _both(by_between, SLOPE, mine[1])
    del by_hidden, by_between
    by_x = _times(values, gate_up_turned, slopes[1], scales[1], dtype, False)
    return by_x, _times(turned, x_turned, slopes[1], scales[0], dtype, False), by_down


@_mlp_backward.register_fake
def _(
    slope: Tensor,
    x_turned: Tensor,
    gate_up_turned: Tensor,
    between: Tensor,
    hidden_turned: Tensor,
    down_turned: Tensor,
    slots: Tensor,
    kernels: bool,
) -> tuple[Tensor, ...]:
    return (
        slope.new_empty(len(slope), len(x_turned)),
        slope.new_empty(between.shape[1], len(x_turned)),
        slope.new_empty(slope.shape[1], len(hidden_turned)),
    )


def _turned_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    rows, columns = x.shape
    return x.new_empty(columns, rows + -rows % MULTIPLE, dtype=dtype)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save what backward reads, which nobody differentiates."""
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _keep_mlp(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _keep(ctx, inputs, output)
    ctx.kernels = inputs[3]


def _linear_slopes(ctx: Any, slope: Tensor, *_: Any) -> tuple[Tensor | None, Tensor]:
    by_input = bool(ctx.needs_input_grad[0])
    by_x, by_matrix = _linear_backward(slope, *ctx.saved_tensors, by_input)
    return by_x if by_input else None, by_matrix


def _mlp_slopes(ctx: Any, slope: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    slopes: tuple[Tensor, ...] = _mlp_backward(slope, *ctx.saved_tensors, ctx.kernels)
    return (*slopes, None)


_linear.register_autograd(_linear_slopes, setup_context=_keep)
_mlp.register_autograd(_mlp_slopes, setup_context=_keep_mlp)
