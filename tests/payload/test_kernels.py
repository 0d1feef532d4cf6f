"""The Triton kernels over logits and of SwiGLU, against float64.

On a GPU as they are run; without one under Triton's interpreter, which needs the package triton:
`TRITON_INTERPRET=1 pytest tests/payload/test_kernels.py`.
"""

from __future__ import annotations

import math
import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from remote_payload.train import execution, fp8, swiglu
from remote_payload.train.objective import FROM_LABELS, Objective, chunk_scores
from tests.payload.test_logit_passes import case as chunk_case

pytest.importorskip("triton")
logit_kernels = pytest.importorskip("remote_payload.train.logit_kernels")
swiglu_kernels = pytest.importorskip("remote_payload.train.swiglu_kernels")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CUT = 2 if INTERPRETED else 1
"""The interpreter cuts off where a GPU rounds, which may be wrong by twice as much."""
DEVICE = "cpu" if INTERPRETED else "cuda:0"
pytestmark = [pytest.mark.filterwarnings("default")]  # the interpreter's own, of numpy
if not INTERPRETED:
    pytestmark += [
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    ]

BOTH = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
not_interpreted = pytest.mark.skipif(INTERPRETED, reason="the interpreter loses a carry in 8 bits")
WIDTHS = pytest.mark.parametrize("width", [1, 17, 2048, 2049, 5000, 10240])
"""Less than a pass of the loop, whole passes, and passes with a rest that 16 divides or does not."""


def drawn(*shape: int, seed: int = 0, times: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * times).to(DEVICE, dtype)


def labels_of(rows: int, width: int) -> Tensor:
    """The first and the last token among them."""
    labels = torch.randint(0, width, (rows,), generator=torch.Generator().manual_seed(1))
    labels[0], labels[-1] = 0, width - 1
    return labels.to(DEVICE)


def scan(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    log_label, bases, totals = (torch.full((len(labels),), -7.0, device=DEVICE) for _ in range(3))
    hits = torch.zeros(len(labels), dtype=torch.bool, device=DEVICE)
    logit_kernels.scan(logits, labels, log_label, hits, bases, totals)
    return log_label, hits, bases, totals


def slopes(logits: Tensor, labels: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    _, _, bases, totals = scan(logits, labels)
    made = torch.full(logits.shape, 7.0, device=DEVICE).to(dtype)
    logit_kernels.slopes(logits, labels, bases, totals, weights, made)
    return made


def exact_slopes(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    wide = logits.double()
    onehot = F.one_hot(labels, wide.shape[1])
    return (wide.softmax(-1) - onehot) * weights[:, None].double()


@WIDTHS
@BOTH
@pytest.mark.parametrize("times", [0.5, 20.0, 3000.0])
def test_a_scan_finds_log_probabilities_and_hits(width: int, dtype: torch.dtype, times: float) -> None:
    logits, labels = drawn(6, width, times=times, dtype=dtype), labels_of(6, width)
    labels[2:4] = logits[2:4].float().argmax(-1)
    log_label, hits, bases, totals = scan(logits, labels)
    exact = logits.double().log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    torch.testing.assert_close(log_label.double(), exact, atol=2e-6 * (1 + times), rtol=1e-6)
    assert hits.equal(logits.float().argmax(-1) == labels)
    whole = (bases.double() + totals.double().log2()) * math.log(2)
    torch.testing.assert_close(
        whole, logits.double().logsumexp(-1), atol=2e-6 * (1 + times) + 1e-5, rtol=1e-6
    )


@WIDTHS
def test_of_equal_logits_the_first_alone_is_a_hit(width: int) -> None:
    logits = torch.full((5, width), -3.0, device=DEVICE, dtype=torch.bfloat16)
    labels = labels_of(5, width)
    assert scan(logits, labels)[1].equal(labels == 0)
    logits[:, width // 2] = logits[:, width - 1] = 4.0
    labels[:] = torch.tensor([width // 2, width - 1, width // 2, 0, width - 1])
    assert scan(logits, labels)[1].equal(logits.float().argmax(-1) == labels)


@WIDTHS
@pytest.mark.parametrize("times", [0.5, 3000.0])
@pytest.mark.parametrize(
    ("dtype", "made", "rounding"),
    [
        (torch.bfloat16, torch.bfloat16, 2**-8 * CUT),
        (torch.float32, torch.float32, 2e-5),
        pytest.param(torch.bfloat16, torch.float8_e5m2, 2**-3, marks=not_interpreted),
    ],
)
def test_slopes_are_those_of_float64_but_for_rounding(
    width: int, times: float, dtype: torch.dtype, made: torch.dtype, rounding: float
) -> None:
    logits, labels = drawn(6, width, times=times, dtype=dtype), labels_of(6, width)
    labels[3] = logits[3].float().argmax()
    weights = torch.tensor([1.0, 0.3, 0.0, 1.0, 2e4, 0.5], device=DEVICE)
    if made == torch.float8_e5m2:
        weights *= 1024.0  # as if its scale had been taken: smaller numbers have fewer bits
        weights[4] = 50000.0
    found, exact = slopes(logits, labels, weights, made), exact_slopes(logits, labels, weights)
    # A probability of almost 1 less 1 has the error of the probability.
    least = 1e-4 if made == torch.float8_e5m2 else 0.0
    absolute = weights[:, None].double() * (1e-6 + 2e-7 * times) + least
    assert bool(((found.double() - exact).abs() <= rounding * exact.abs() + absolute).all())
    assert bool((found[2].float() == 0).all())


def test_the_greatest_8_bit_slope_is_the_type_s_own_and_not_infinite() -> None:
    logits = torch.zeros(2, 100, device=DEVICE, dtype=torch.bfloat16)
    logits[0, 5] = 300.0
    top = torch.finfo(torch.float8_e5m2).max
    weights = torch.full((2,), top, device=DEVICE)
    made = slopes(logits, torch.tensor([7, 7], device=DEVICE), weights, torch.float8_e5m2).float()
    assert float(made[0, 5]) == top and float(made[0, 7]) == -top and bool(made.isfinite().all())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 2047, 2048, 4999])
@pytest.mark.parametrize("made", [torch.bfloat16, torch.float8_e5m2])
def test_what_is_not_finite_spoils_its_row_and_no_other(place: int, bad: float, made: torch.dtype) -> None:
    logits, labels = drawn(3, 5000), labels_of(3, 5000)
    logits[1, place] = bad
    weights = torch.tensor([1.0, 0.0, 1.0], device=DEVICE)
    log_label, hits, _, _ = scan(logits, labels)
    assert log_label.isfinite().tolist() == [True, False, True] and not bool(hits[1])
    finite = slopes(logits, labels, weights, made).float().isfinite()
    assert bool(finite[0].all()) and bool(finite[2].all()) and not bool(finite[1].any())


def test_logits_of_no_probability_change_nothing() -> None:
    logits, labels = drawn(2, 5000), torch.tensor([4000, 4500], device=DEVICE)
    logits[:, :3000] = -math.inf
    exact = logits.double().log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    torch.testing.assert_close(scan(logits, labels)[0].double(), exact, atol=1e-5, rtol=1e-6)
    ones = torch.ones(2, device=DEVICE)
    found = slopes(logits, labels, ones, torch.float32)
    torch.testing.assert_close(found.double(), exact_slopes(logits, labels, ones), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("rows", "ffn"), [(1, 8), (16, 256), (37, 300), (50, 1001)])
@pytest.mark.parametrize("times", [1.0, 200.0])
@BOTH
def test_swiglu_and_its_slopes_are_those_of_float64_but_for_rounding(
    rows: int, ffn: int, times: float, dtype: torch.dtype
) -> None:
    between, slope = drawn(rows, 2 * ffn, times=times, dtype=dtype), drawn(rows, ffn, seed=1, dtype=dtype)
    hidden, made = torch.full_like(slope, 7.0), torch.full_like(between, 7.0)
    swiglu_kernels.forward(between, hidden)
    swiglu_kernels.backward(between, slope, made)
    wide = between.double().requires_grad_()
    gate, up = wide.chunk(2, -1)
    exact = F.silu(gate) * up
    (exact_made,) = torch.autograd.grad(exact, wide, slope.double())
    relative = 2**-8 * CUT if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(hidden.double(), exact.detach(), rtol=relative, atol=1e-5 * times)
    torch.testing.assert_close(made.double(), exact_made, rtol=relative, atol=1e-5 * times)


@pytest.mark.parametrize("place", [(0, 0), (20, 350), (36, 599)])
def test_a_nan_between_or_in_the_slope_stays_one(place: tuple[int, int]) -> None:
    between, slope = drawn(37, 600), drawn(37, 300, seed=1)
    between[place] = math.nan
    hidden, made = torch.zeros_like(slope), torch.zeros_like(between)
    swiglu_kernels.forward(between, hidden)
    swiglu_kernels.backward(between, slope, made)
    row, column = place[0], place[1] % 300
    assert bool(hidden[row, column].isnan()) and int(hidden.isnan().sum()) == 1
    assert bool(made[row, column].isnan())
    slope[3, 4] = math.nan
    swiglu_kernels.backward(between, slope, made)
    assert bool(made[3, 4].isnan()) and bool(made[3, 304].isnan())


@not_interpreted
@pytest.mark.parametrize("eight_bits", [False, True])
@pytest.mark.parametrize("name", FROM_LABELS)
def test_a_compiled_chunk_by_the_kernels_is_the_eager_one(name: str, eight_bits: bool) -> None:
    given = chunk_case(torch.bfloat16, 0.25, eight_bits, DEVICE)
    hidden, head, labels, weights = given
    if eight_bits and fp8.refuse(torch.device(DEVICE)):
        pytest.skip("no 8-bit matrix units")
    kind = Objective(name=name, whole_block=3.0)
    chunk = execution.build(chunk_scores, execution.COMPILED, "test")
    found, wanted = (way(hidden, head, labels, weights, None, kind) for way in (chunk, chunk_scores))
    assert found.hits.equal(wanted.hits) and found.gradient.dtype == hidden.dtype
    torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-3, atol=1e-3)
    most = float(wanted.gradient.float().abs().max())
    torch.testing.assert_close(found.gradient, wanted.gradient, rtol=2e-2, atol=2e-2 * most)
    hidden[1, 0, 3] = math.nan
    spoilt = chunk(hidden, head, labels, weights, None, kind)
    assert not bool(spoilt.loss.isfinite()) and not bool(spoilt.gradient.isfinite().all())


@not_interpreted
def test_a_compiled_swiglu_is_the_eager_one_in_both_directions() -> None:
    between, slope = drawn(64, 512).requires_grad_(), drawn(64, 256, seed=1)
    ways = execution.build(swiglu.swiglu, execution.COMPILED, "test"), swiglu.swiglu
    (found, found_slope), (wanted, wanted_slope) = (
        (made := way(between), torch.autograd.grad(made, between, slope)[0]) for way in ways
    )
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(found_slope, wanted_slope, rtol=2e-2, atol=2e-2)
