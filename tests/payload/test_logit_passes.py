"""The operators over logits and of SwiGLU by plain operations: as the objective and autograd have them."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from remote_payload.train import execution, fp8, logit_passes, swiglu
from remote_payload.train.objective import (
    FROM_DISTRIBUTIONS,
    FROM_LABELS,
    ChunkScores,
    Objective,
    by_kernels,
    chunk_scores,
    kernel_chunk_scores,
)
from remote_payload.train.output_head import OutputHead

ALL = (*FROM_LABELS, *FROM_DISTRIBUTIONS)


def case(
    dtype: torch.dtype, scale: float, eight_bits: bool, device: str = "cpu"
) -> tuple[Tensor, OutputHead, Tensor, Tensor, Tensor]:
    """Hidden states [6, 7, 32], a head of 208 tokens, labels that are often right, weights, and a teacher.

    The teacher is near in the first blocks and far in the last: where it is the same, the slope of LK has no
    value, since it jumps where q is p.
    """
    g = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(shape, generator=g).to(device, dtype) for shape in ((6, 7, 32), (208, 32), (208,))
    )
    small = fp8.FrozenMatrix.of(weight) if eight_bits else None
    head = OutputHead(weight, bias, scale, None, small)
    right = head.drafted(hidden).argmax(-1)
    any_label = torch.randint(0, 208, (6, 7), generator=g).to(device)
    labels = torch.where(torch.rand(6, 7, generator=g).to(device) < 0.6, right, any_label)
    weights = torch.exp(-torch.arange(7) / 4.0) * (torch.arange(7) < torch.randint(1, 8, (6, 1), generator=g))
    away = torch.randn((6, 7, 32), generator=g).to(device, dtype)
    teacher = hidden + away * torch.linspace(0.1, 1.0, 6, device=device, dtype=dtype)[:, None, None]
    return hidden, head, labels, weights.to(device), teacher


def of(name: str, **numbers: float) -> Objective:
    """An objective in which every part counts."""
    return Objective(name=name, whole_block=3.0, kl_share=0.7, **numbers)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize(
    ("dtype", "eight_bits"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
def test_a_chunk_by_the_operators_is_the_chunk_by_plain_operations(
    name: str, scale: float, dtype: torch.dtype, eight_bits: bool
) -> None:
    hidden, head, labels, weights, teacher = case(dtype, scale, eight_bits)
    kind = of(name)
    given = (hidden, head, labels, weights, teacher if kind.needs_teacher else None, kind)
    found: ChunkScores = kernel_chunk_scores(*given)
    wanted = chunk_scores(*given)
    assert found.hits.equal(wanted.hits) and found.gradient.dtype == dtype
    torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.ce, wanted.ce, rtol=1e-5, atol=1e-5)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    most = float(wanted.gradient.float().abs().max())
    torch.testing.assert_close(found.gradient, wanted.gradient, rtol=tolerance, atol=tolerance * most)


@pytest.mark.parametrize("name", ["ce", *FROM_DISTRIBUTIONS])
@pytest.mark.parametrize("spoilt", [0, 1], ids=["drafter", "target"])
def test_logits_that_are_not_finite_are_seen_in_loss_and_gradient(name: str, spoilt: int) -> None:
    hidden, head, labels, weights, teacher = case(torch.float32, 1.0, False)
    assert float(weights[1, 6]) == 0 or float(weights[1, 0]) > 0
    if name == "ce" and spoilt:
        return
    both = [head.drafted(hidden), head.logits(teacher)]
    both[spoilt][1, 0, 9] = math.nan
    found = by_kernels(both[0], None if name == "ce" else both[1], head, labels, weights, of(name))
    assert not bool(found.loss.isfinite()) and not bool(found.gradient[1, 0].isfinite().any())
    assert bool(found.gradient[0].isfinite().all())


@pytest.mark.filterwarnings("default")  # what torch warns of while it compiles
@pytest.mark.slow
@pytest.mark.parametrize(("name", "eight_bits"), [("dpace", True), ("forward_kl", False), ("lk", True)])
def test_a_compiled_chunk_by_the_operators_is_the_eager_one(
    name: str, eight_bits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, head, labels, weights, teacher = case(torch.bfloat16, 0.25, eight_bits)
    kind = of(name)
    given = (hidden, head, labels, weights, teacher if kind.needs_teacher else None, kind)
    wanted = chunk_scores(*given)
    plain_scan, read = logit_passes._plain_scan, []
    monkeypatch.setattr(logit_passes, "_plain_scan", lambda *a: read.append(1) or plain_scan(*a))
    found = execution.build(kernel_chunk_scores, execution.COMPILED, "test")(*given)
    assert read == [1] and found.hits.equal(wanted.hits)
    torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-4, atol=1e-4)
    most = float(wanted.gradient.float().abs().max())
    torch.testing.assert_close(found.gradient, wanted.gradient, rtol=2e-2, atol=2e-2 * most)


@pytest.mark.filterwarnings("default")  # what torch warns of while it compiles
@pytest.mark.slow
def test_a_compiled_mlp_by_the_operators_is_the_eager_one() -> None:
    between = torch.randn(6, 20, requires_grad=True)
    hidden_wanted = swiglu.swiglu(between)
    slope = torch.randn(6, 10)
    (slopes_wanted,) = torch.autograd.grad(hidden_wanted, between, slope)
    made = execution.build(swiglu.swiglu, execution.COMPILED, "test")(between, True)
    torch.testing.assert_close(made, hidden_wanted)
    torch.testing.assert_close(torch.autograd.grad(made, between, slope)[0], slopes_wanted)


@pytest.mark.slow
def test_what_the_operators_promise_the_compiler_holds() -> None:
    logits, taught, labels = torch.randn(5, 33), torch.randn(5, 33), torch.randint(0, 33, (5,))
    quick = ("test_schema", "test_faketensor")
    for target, count, checks in ((None, 2, quick), (taught, 4, (*quick, "test_aot_dispatch_dynamic"))):
        torch.library.opcheck(logit_passes._scan, (logits, labels, target), test_utils=checks)
        norms = logit_passes._norms(logit_passes.scan(logits, labels, target))
        given = (logits, labels, target, norms, [torch.rand(5) for _ in range(count)], torch.bfloat16)
        torch.library.opcheck(logit_passes._slopes, given, test_utils=checks)
    torch.library.opcheck(logit_passes._overlap, (logits, taught, *norms))
    between = torch.randn(4, 10, requires_grad=True)
    torch.library.opcheck(swiglu.forward, (between,))
    torch.library.opcheck(swiglu.backward, (between.detach(), torch.randn(4, 5)))


def test_the_slope_of_swiglu_s_operator_is_that_of_its_plain_form() -> None:
    between = torch.randn(6, 20, dtype=torch.float32, requires_grad=True)
    gate, up = between.chunk(2, -1)
    slope = torch.randn(10, 6).T  # not contiguous, as a product may leave it
    found, wanted = swiglu.forward(between), F.silu(gate) * up
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(
        torch.autograd.grad(found, between, slope), torch.autograd.grad(wanted, between, slope)
    )
    assert swiglu.swiglu(between).equal(wanted)
