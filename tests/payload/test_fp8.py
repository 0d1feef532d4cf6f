"""Training products of 8-bit numbers: rounding, layouts and gradients against float64, and what refuses them.

torch multiplies 8-bit matrices on a CPU too, so everything but the Triton kernels is tried here as it is.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from remote_payload.job import Job, JobError
from remote_payload.tools.synthetic import random_ends, random_rows
from remote_payload.train import fp8, swiglu
from remote_payload.train.batch import RowShape
from remote_payload.train.contract import RESOLVED
from remote_payload.train.devices import on_device
from remote_payload.train.drafter import DrafterConfig, fp8_sizes
from remote_payload.train.objective import FROM_DISTRIBUTIONS, FROM_LABELS, Objective, block_loss
from remote_payload.train.output_head import OutputHead
from remote_payload.train.replica import Replica
from remote_payload.train.statistics import Statistics

CPU = torch.device("cpu")
TYPES = pytest.mark.parametrize("dtype", [fp8.FORWARD, fp8.SLOPE])
BITS = {fp8.FORWARD: 3, fp8.SLOPE: 2}
"""Of the mantissa."""

CONFIG = DrafterConfig(
    layers=2,
    width=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    ffn=96,
    norm_eps=1e-6,
    rope_theta=1e6,
    vocabulary=256,
    tap_layers=(1, 2, 3),
    target_layers=6,
    block_size=8,
    mask_token_id=255,
    max_positions=4096,
)
SHAPE = RowShape(token_budget=64, anchors=10, block_size=8, mask_token_id=255, gamma=4.0)


def drawn(*shape: int, seed: int = 0, times: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * times).bfloat16()


def alike(mine: Tensor, exact: Tensor) -> float:
    """The cosine between two tensors of any size."""
    one, other = (t.detach().double().flatten() for t in (mine, exact))
    return float((one / one.norm()) @ (other / other.norm()))


def plain_mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (x @ gate_up.T).chunk(2, -1)
    return (F.silu(gate) * up) @ down.T


# Rounding


@TYPES
@settings(deadline=None, max_examples=50)
@given(power=st.integers(-100, 100), seed=st.integers(0, 99))
def test_numbers_are_rounded_to_within_half_a_step_of_the_mantissa_at_any_size(
    dtype: torch.dtype, power: int, seed: int
) -> None:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)) * 2.0**power
    values, scale = fp8.quantised(x, dtype, x.abs().amax())
    assert values.dtype == dtype and scale.dtype == torch.float32 and scale.shape == ()
    back = values.double() * scale.double()
    greatest = max(float(x.abs().max()), fp8.LEAST)
    tiny = greatest / torch.finfo(dtype).max * torch.finfo(dtype).tiny  # below it steps are of one size
    bound = torch.maximum(x.double().abs(), torch.tensor(tiny, dtype=torch.float64)) * 2.0 ** -(
        BITS[dtype] + 1
    )
    assert bool(((back - x.double()).abs() <= bound * (1 + 1e-5)).all())


@TYPES
def test_zeros_stay_zeros_and_the_scale_is_finite(dtype: torch.dtype) -> None:
    x = torch.zeros(4, 16)
    values, scale = fp8.quantised(x, dtype, x.abs().amax())
    assert bool((values.float() == 0).all()) and 0 < float(scale) < math.inf


@TYPES
def test_what_rises_above_the_bound_becomes_the_greatest_number_and_no_infinity(dtype: torch.dtype) -> None:
    values, scale = fp8.quantised(torch.tensor([[1.0, -1.0001, 1e30]]), dtype, torch.tensor(1.0))
    assert (values.float() * scale).tolist() == [[1.0, -1.0, 1.0]]


@TYPES
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_makes_every_number_of_a_product_not_finite(
    dtype: torch.dtype, bad: float
) -> None:
    x = drawn(16, 32)
    x[3, 4] = bad
    slots = fp8._slots(1, x)
    values, turned = fp8._both(x, dtype, slots[0])
    scale = slots[0, fp8._SCALE]
    other, one = fp8.quantised(drawn(16, 32, seed=1), fp8.FORWARD, torch.tensor(4.0))
    product = fp8._times(values, other, scale, one, torch.bfloat16, False)
    assert not bool(product.isfinite().any())
    assert turned.shape == (32, 16)


@TYPES
@pytest.mark.parametrize("rows", [16, 23])
def test_the_turned_matrix_is_the_transposed_one_with_zeros_up_to_a_multiple(
    dtype: torch.dtype, rows: int
) -> None:
    x = drawn(rows, 48)
    values, turned = fp8._both(x, dtype, fp8._slots(1, x)[0])
    assert values.is_contiguous() and turned.is_contiguous()
    assert turned.shape == (48, -(-rows // 16) * 16)
    assert turned[:, :rows].float().equal(values.float().T)
    assert bool((turned[:, rows:].float() == 0).all())


# Products and their gradients


KERNELS = pytest.mark.parametrize("kernels", [False, True])
"""Of SwiGLU: plain operations, or its operators."""


@KERNELS
@pytest.mark.parametrize("rows", [48, 30])
def test_an_mlp_and_its_gradients_are_those_of_float64_within_the_rounding(
    rows: int, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = []
    for name in ("forward", "backward"):
        right = getattr(swiglu, name)
        monkeypatch.setattr(swiglu, name, lambda *given, right=right: used.append(1) or right(*given))
    given = [drawn(rows, 64), drawn(192, 64, seed=1, times=0.1), drawn(64, 96, seed=2, times=0.1)]
    slope = drawn(rows, 64, seed=3)
    mine = [t.clone().requires_grad_() for t in given]
    exact = [t.double().requires_grad_() for t in given]
    output, wanted = fp8.mlp(*mine, kernels), plain_mlp(*exact)
    assert output.dtype == torch.bfloat16 and alike(output, wanted) > 0.995
    slopes = torch.autograd.grad(output, mine, slope)
    assert len(used) == 2 * kernels
    for found, right in zip(slopes, torch.autograd.grad(wanted, exact, slope.double()), strict=True):
        assert found.dtype == torch.bfloat16 and found.shape == right.shape
        assert alike(found, right) > 0.99
        assert float(found.double().norm() / right.norm()) == pytest.approx(1, abs=0.03)


def test_an_mlp_of_numbers_that_8_bits_hold_is_exact() -> None:
    """With gates so large that SwiGLU is gate * up, and powers of two throughout, no rounding is left."""
    x, gate_up = torch.zeros(16, 32), torch.zeros(32, 32)
    x[:, 0] = 2.0 ** (torch.arange(16) % 3)
    gate_up[:16, 0], gate_up[16:, 0] = 64.0, 1.0
    output = fp8.mlp(x.bfloat16(), gate_up.bfloat16(), torch.eye(32, 16).bfloat16()).float()
    assert output[:, :16].equal((64.0 * x[:, :1] ** 2).expand(-1, 16)) and bool((output[:, 16:] == 0).all())


@pytest.mark.parametrize("by_input", [True, False])
def test_a_projection_and_its_gradients_are_those_of_float64_within_the_rounding(by_input: bool) -> None:
    x, matrix, slope = drawn(22, 64), drawn(32, 64, seed=1), drawn(22, 32, seed=2)
    mine = [x.clone().requires_grad_(by_input), matrix.clone().requires_grad_()]
    exact = [t.detach().double().requires_grad_() for t in mine]
    output, wanted = fp8.linear(*mine), exact[0] @ exact[1].T
    assert alike(output, wanted) > 0.998
    output.backward(slope)
    wanted.backward(slope.double())
    for found, right in zip(mine, exact, strict=True):
        if found.requires_grad:
            assert found.grad is not None and right.grad is not None and alike(found.grad, right.grad) > 0.995
    assert (mine[0].grad is not None) == by_input


@KERNELS
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["x", "slope", "weight"])
def test_a_gradient_of_what_is_not_finite_is_not_finite_either(where: str, bad: float, kernels: bool) -> None:
    given = {"x": drawn(16, 64), "weight": drawn(192, 64, seed=1), "slope": drawn(16, 64, seed=3)}
    given[where][1, 2] = bad
    inputs = [t.requires_grad_() for t in (given["x"], given["weight"], drawn(64, 96, seed=2))]
    slopes = torch.autograd.grad(fp8.mlp(*inputs, kernels), inputs, given["slope"])
    assert not any(bool(slope.isfinite().all()) for slope in slopes)


@pytest.mark.parametrize("times", [1e-25, 1e-8, 1e4, 1e15])
def test_slopes_of_any_size_keep_their_direction(times: float) -> None:
    given = [drawn(32, 64), drawn(192, 64, seed=1, times=0.1), drawn(64, 96, seed=2, times=0.1)]
    mine, slope = [t.requires_grad_() for t in given], drawn(32, 64, seed=3)
    once = torch.autograd.grad(fp8.mlp(*mine), mine, slope)
    again = torch.autograd.grad(fp8.mlp(*mine), mine, slope * times)
    for one, other in zip(once, again, strict=True):
        assert alike(one, other) > 0.997


@pytest.mark.parametrize(
    ("operator", "arguments"),
    [
        (fp8._linear, (drawn(22, 64), drawn(32, 64))),
        (fp8._mlp, (drawn(22, 64), drawn(96, 64), drawn(64, 48), False)),
        (fp8._mlp, (drawn(22, 64), drawn(96, 64), drawn(64, 48), True)),
    ],
)
def test_operators_are_to_torch_what_they_say(operator: Any, arguments: tuple[Any, ...]) -> None:
    """Schemas, shapes and strides without values, and gradients by the compiler's own tracing."""
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    given = [t.clone().requires_grad_() if isinstance(t, Tensor) else t for t in arguments]
    torch.library.opcheck(operator, given, test_utils=checks)


def test_nothing_is_read_by_the_host() -> None:
    with FakeTensorMode():
        inputs = [torch.randn(*s, requires_grad=True) for s in ((16, 64), (96, 64), (64, 48))]
        fp8.mlp(*inputs).sum().backward()
        fp8.linear(inputs[0], inputs[1]).sum().backward()
        matrix = fp8.FrozenMatrix(
            *(torch.empty(s).to(fp8.FORWARD) for s in ((32, 64), (64, 32))), torch.ones(())
        )
        slope = matrix.product(inputs[0].detach())
        assert matrix.by_input(slope, slope.abs().amax(), torch.bfloat16).shape == (16, 64)


# The head


@pytest.mark.parametrize("name", [*FROM_LABELS, *FROM_DISTRIBUTIONS])
@pytest.mark.parametrize("end", [{}, {"scale": 0.3, "soft_cap": 5.0}])
def test_the_loss_by_an_8_bit_head_is_that_of_16_bits_within_the_rounding(
    name: str, end: dict[str, float]
) -> None:
    slots, places, width, vocabulary = 20, 7, 64, 512
    weight = drawn(vocabulary, width, times=0.4)
    bias = drawn(vocabulary, seed=5, times=0.5) if end else None
    head = OutputHead(weight, bias, end.get("scale", 1.0), end.get("soft_cap"))
    small = dataclasses.replace(head, eight_bits=fp8.FrozenMatrix.of(weight))
    labels = torch.randint(0, vocabulary, (slots, places), generator=torch.Generator().manual_seed(1))
    weights = torch.exp(-torch.arange(places) / 4.0).repeat(slots, 1)
    weights[3, 4:], weights[-4:] = 0.0, 0.0
    teacher, anchors = drawn(64, width, seed=2), torch.arange(slots) * 2
    kind = Objective(name=name, whole_block=3.0)
    found = []
    for each in (head, small):
        hidden = drawn(slots, places, width, seed=3).requires_grad_()
        scores = block_loss(hidden, each, labels, weights, anchors, teacher, kind)
        scores.loss.backward()
        assert hidden.grad is not None and hidden.grad.dtype == torch.bfloat16
        assert bool((hidden.grad[-4:] == 0).all())
        found.append((float(scores.loss.detach()), hidden.grad))
    (loss, slope), (other, close) = found
    assert other == pytest.approx(loss, rel=0.01)
    assert alike(close, slope) > 0.99
    # Which place is a block's first error may change with a rounding, and with it what the place weighs.
    assert float(close.double().norm() / slope.double().norm()) == pytest.approx(1, abs=0.06)


def test_the_targets_own_logits_are_never_made_by_8_bit_products() -> None:
    weight, hidden = drawn(64, 32), drawn(5, 32, seed=1)
    head = OutputHead(weight, None, 1.0, None)
    small = dataclasses.replace(head, eight_bits=fp8.FrozenMatrix.of(weight))
    assert small.logits(hidden).equal(head.logits(hidden))
    assert small.choice(hidden).equal(head.choice(hidden))
    assert not small.drafted(hidden).equal(head.drafted(hidden))


def test_a_chunk_whose_slope_is_not_finite_leaves_no_finite_gradient_in_its_row() -> None:
    weight = drawn(64, 32)
    head = OutputHead(weight, None, 1.0, None, fp8.FrozenMatrix.of(weight))
    hidden = drawn(4, 3, 32, seed=1)
    hidden[1, 0, 0] = math.nan
    hidden.requires_grad_()
    labels, weights = torch.zeros(4, 3, dtype=torch.int64), torch.ones(4, 3)
    scores = block_loss(hidden, head, labels, weights, torch.zeros(4, dtype=torch.int64), None, Objective())
    scores.loss.backward()
    assert hidden.grad is not None and not bool(hidden.grad.isfinite().all())


# In a replica


def replica(choice: str, config: DrafterConfig = CONFIG, **changes: Any) -> Replica:
    values = {
        "target": "random",
        "dataset": "random",
        "mask_token_id": 255,
        "drafters": ["cpu"],
        "compute_dtype": "bfloat16",
        "fp8": choice,
        **changes,
    }
    torch.manual_seed(0)
    target = random_ends(config, CPU, torch.bfloat16)
    made = Replica(0, CPU, Job.from_mapping(values, "test"), config, SHAPE, Statistics(8, 1), target)
    made.warm_up("eager")
    made.load(None, random_rows(SHAPE, 256, 1)[0])
    made.features.normal_(generator=torch.Generator().manual_seed(0))
    return made


def gradient(choice: str, config: DrafterConfig = CONFIG) -> Tensor:
    made = replica(choice, config)
    made._forward_backward()
    return torch.cat([slope.flatten().float() for slope in made._gradients])


@pytest.fixture(scope="module")
def exact() -> Tensor:
    return gradient("none")


@pytest.mark.parametrize(
    ("choice", "bound"), [("head", 0.995), ("mlp", 0.995), ("head+mlp", 0.99), ("all", 0.98)]
)
def test_a_rows_gradient_keeps_its_direction_whatever_multiplies_8_bit_numbers(
    choice: str, bound: float, exact: Tensor
) -> None:
    found = gradient(choice)
    assert bound < alike(found, exact) < 1 - 1e-6


def test_each_choice_makes_exactly_its_products(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[str] = []
    for name in ("mlp", "linear", "_product"):
        real = getattr(fp8, name)
        monkeypatch.setattr(fp8, name, lambda *a, real=real, name=name: counted.append(name) or real(*a))
    found = {}
    for choice in fp8.PARTS:
        made = replica(choice)
        counted.clear()
        made._forward_backward()
        found[choice] = {name: counted.count(name) for name in ("mlp", "linear", "_product")}
    layers, chunks = CONFIG.layers, 1
    head, mlp, rest = {"_product": 2 * chunks}, {"mlp": layers}, {"linear": 2 + 3 * layers}
    nothing = dict.fromkeys(("mlp", "linear", "_product"), 0)
    assert found == {
        "none": nothing,
        "head": nothing | head,
        "mlp": nothing | mlp,
        "head+mlp": nothing | head | mlp,
        "all": nothing | head | mlp | rest,
    }


def test_what_is_evaluated_and_exported_is_in_16_bits() -> None:
    made = replica("all")
    assert {value.dtype for value in made.snapshot().values()} == {torch.bfloat16}
    assert made.weights.masters.dtype == torch.float32


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("default")  # what torch warns of while it compiles is no failed compilation
def test_compiled_steps_are_the_eager_ones_but_for_other_roundings() -> None:
    small = dataclasses.replace(CONFIG, layers=1)
    eager = gradient("head+mlp", small)
    with on_device(CPU):
        made = replica("head+mlp", small)
        result = made.warm_up("compiled")
        assert result.execution == "compiled", result.reason
        made.load(None, random_rows(SHAPE, 256, 1)[0])
        made.features.normal_(generator=torch.Generator().manual_seed(0))
        made._forward_backward()
    compiled = torch.cat([slope.flatten().float() for slope in made._gradients])
    assert alike(compiled, eager) > 0.999


# Refusals


def test_a_device_without_8_bit_units_is_refused_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(JobError, match=r"fp8 = 'mlp': cpu has no 8-bit matrix units; expected a GPU .* 8\.9"):
        fp8.check_fp8("mlp", ["cpu"], fp8_sizes(CONFIG))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(JobError, match=r"cuda:1 \(A100, compute capability 8\.0\) has no 8-bit matrix units"):
        fp8.check_fp8("mlp", ["cuda:1"], fp8_sizes(CONFIG))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    fp8.check_fp8("all", ["cuda:0"], fp8_sizes(CONFIG))
    monkeypatch.delattr(torch, "_scaled_mm")
    with pytest.raises(JobError, match=r"this torch \(.*\) has no _scaled_mm"):
        fp8.check_fp8("mlp", ["cuda:0"], fp8_sizes(CONFIG))
    fp8.check_fp8("none", ["cpu"], fp8_sizes(CONFIG))


@pytest.mark.parametrize(
    ("change", "choice", "said"),
    [
        ({"vocabulary": 50257}, "head", "the target's vocabulary is 50257"),
        ({"ffn": 1000}, "head+mlp", "the MLP's width is 1000"),
        ({"width": 72}, "head", "the target's width is 72"),
        ({"kv_heads": 1, "head_dim": 24, "heads": 2}, "all", "kv heads x head size is 24"),
    ],
)
def test_sides_that_are_no_multiple_of_16_are_refused_by_name(
    change: dict[str, int], choice: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8, "refuse", lambda device: None)
    with pytest.raises(JobError, match=f"fp8 = '{re.escape(choice)}'.*{said}.*multiple of 16"):
        fp8.check_fp8(choice, ["cuda:0"], fp8_sizes(dataclasses.replace(CONFIG, **change)))


def test_a_part_that_is_left_out_may_have_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "refuse", lambda device: None)
    fp8.check_fp8("mlp", ["cuda:0"], fp8_sizes(dataclasses.replace(CONFIG, vocabulary=50257)))


def test_fp8_with_float32_is_refused() -> None:
    with pytest.raises(JobError, match=r"fp8 = 'mlp' and compute_dtype = 'float32'"):
        replica("mlp", compute_dtype="float32")


def test_fp8_is_part_of_the_contract_and_no_resumed_run_may_change_it() -> None:
    field = next(field for field in dataclasses.fields(Job) if field.name == "fp8")
    assert not field.metadata["resumable"] and "fp8" not in RESOLVED
    assert field.default == "none" and set(fp8.PARTS) >= {field.default}
