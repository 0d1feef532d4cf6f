"""The Triton kernels over logits and of SwiGLU, against float64.

On a GPU as they are run; without one under Triton's interpreter, which needs the package triton:
`TRITON_INTERPRET=1 pytest tests/payload/test_kernels.py`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from remote_payload.train import execution, fp8, logit_passes, swiglu
from remote_payload.train.logit_choice import choose_kernels
from remote_payload.train.objective import chunk_scores, kernel_chunk_scores
from remote_payload.train.output_head import OutputHead
from remote_payload.train.swiglu_choice import choose_swiglu
from tests.payload.test_logit_passes import ALL, of
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
    logit_kernels.slopes(logits, labels, bases, totals, weights, weights, made)
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


def scan_both(logits: Tensor, labels: Tensor, taught: Tensor) -> list[Tensor]:
    made = [torch.full((len(labels),), -7.0, device=DEVICE) for _ in range(7)]
    made[1] = torch.zeros(len(labels), dtype=torch.bool, device=DEVICE)
    logit_kernels.scan(logits, labels, *made[:4], taught, *made[4:])
    return made


def overlap(logits: Tensor, labels: Tensor, taught: Tensor) -> tuple[Tensor, Tensor]:
    _, _, bases, totals, _, taught_bases, taught_totals = scan_both(logits, labels, taught)
    accepted, short = (torch.full((len(labels),), -7.0, device=DEVICE) for _ in range(2))
    logit_kernels.overlap(logits, bases, totals, taught, taught_bases, taught_totals, accepted, short)
    return accepted, short


def taught_slopes(
    logits: Tensor, labels: Tensor, taught: Tensor, factors: list[Tensor], dtype: torch.dtype
) -> Tensor:
    """Of own, label, target and, where there are four factors, of what is short."""
    _, _, bases, totals, _, *norms = scan_both(logits, labels, taught)
    made = torch.full(logits.shape, 7.0, device=DEVICE).to(dtype)
    logit_kernels.slopes(logits, labels, bases, totals, *factors[:2], made, taught, *norms, *factors[2:])
    return made


def near(logits: Tensor, times: float) -> Tensor:
    """Logits of a target: near those of the drafter in the first rows, another distribution in the last."""
    away = torch.linspace(0.02, 1.5, len(logits), device=DEVICE)[:, None]
    return (logits.float() + drawn(*logits.shape, seed=5, times=times) * away).to(logits.dtype)


@WIDTHS
@BOTH
@pytest.mark.parametrize("times", [0.5, 20.0, 3000.0])
@pytest.mark.parametrize("offset", [0.0, 2000.0])
def test_a_scan_of_both_finds_their_divergence_and_all_else_as_without_the_target(
    width: int, dtype: torch.dtype, times: float, offset: float
) -> None:
    logits, labels = drawn(6, width, times=times, dtype=dtype), labels_of(6, width)
    labels[2:4] = logits[2:4].float().argmax(-1)
    taught = near(logits, times)
    taught[4:] += offset  # the same distribution, but for rounding: a divergence does not see it
    found = scan_both(logits, labels, taught)
    for one, other in zip(found, scan(logits, labels), strict=False):
        assert one.equal(other)
    p, q = taught.double().log_softmax(-1), logits.double().log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    torch.testing.assert_close(found[4].double(), kl, atol=2e-6 * (1 + times) + 3e-7 * offset, rtol=2e-6)
    whole = (found[5].double() + found[6].double().log2()) * math.log(2)
    torch.testing.assert_close(
        whole, taught.double().logsumexp(-1), atol=2e-6 * (1 + times + offset) + 1e-5, rtol=1e-6
    )


@WIDTHS
def test_a_target_that_says_the_same_diverges_by_nothing_and_slopes_cancel(width: int) -> None:
    logits, labels = drawn(3, width, times=3000.0), labels_of(3, width)
    same = torch.ones(3, device=DEVICE)
    assert bool((scan_both(logits, labels, logits)[4].abs() <= 1e-6).all())
    found = taught_slopes(logits, labels, logits, [same, same * 0, same], torch.float32)
    assert float(found.abs().max()) <= 1e-6


@WIDTHS
@BOTH
@pytest.mark.parametrize("times", [0.5, 20.0, 3000.0])
def test_an_overlap_is_what_both_distributions_share(width: int, dtype: torch.dtype, times: float) -> None:
    logits, labels = drawn(6, width, times=times, dtype=dtype), labels_of(6, width)
    taught = near(logits, times)
    accepted, short = overlap(logits, labels, taught)
    q, p = logits.double().softmax(-1), taught.double().softmax(-1)
    torch.testing.assert_close(accepted.double(), torch.minimum(q, p).sum(-1), atol=1e-5, rtol=1e-5)
    # Where both are the same but for rounding, either may be called the lesser one.
    sure, close = (q < p * (1 - 1e-5)), (q - p).abs() <= 1e-5 * p
    least = torch.where(sure, q, 0.0).sum(-1)
    most = least + torch.where(close & ~sure, q, 0.0).sum(-1)
    room = 1e-5 + 1e-5 * most
    assert bool(((short.double() >= least - room) & (short.double() <= most + room)).all())


@WIDTHS
@pytest.mark.parametrize("times", [0.5, 3000.0])
@pytest.mark.parametrize("lk", [False, True], ids=["kl", "lk"])
@pytest.mark.parametrize(
    ("dtype", "made", "rounding"),
    [
        (torch.bfloat16, torch.bfloat16, 2**-8 * CUT),
        (torch.float32, torch.float32, 2e-5),
        pytest.param(torch.bfloat16, torch.float8_e5m2, 2**-3, marks=not_interpreted),
    ],
)
def test_slopes_against_a_target_are_those_of_float64_but_for_rounding(
    width: int, times: float, lk: bool, dtype: torch.dtype, made: torch.dtype, rounding: float
) -> None:
    logits, labels = drawn(6, width, times=times, dtype=dtype), labels_of(6, width)
    labels[3] = logits[3].float().argmax()
    taught = near(logits, times)
    own = torch.tensor([1.0, 0.3, 0.0, 1.0, 2e4, 0.5], device=DEVICE)
    if made == torch.float8_e5m2:
        own *= 1024.0  # as if its scale had been taken: smaller numbers have fewer bits
        own[4] = 25000.0
    factors = [own, own * 0.3, own * 0.7, *([own * 0.9] if lk else [])]
    found = taught_slopes(logits, labels, taught, factors, made).double()
    q, p = logits.double().softmax(-1), taught.double().softmax(-1)
    onehot = F.one_hot(labels, width)
    exact = (q - 0.3 * onehot - 0.7 * p) * own[:, None].double()
    # A difference has the errors of its parts.
    part = (q + onehot + p) * own[:, None].double()
    least = 1e-4 if made == torch.float8_e5m2 else 1e-30
    room = rounding * exact.abs() + (1e-6 + 2e-7 * times) * part + least
    right = (found - exact).abs() <= room
    if lk:
        less = 0.9 * q * own[:, None].double()
        right_less = (found - (exact - less)).abs() <= room + rounding * less
        close = (q - p).abs() <= 1e-5 * p
        right = torch.where(close, right | right_less, torch.where(q < p, right_less, right))
    assert bool(right.all())
    assert bool((found[2] == 0).all())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 2047, 2048, 4999])
@pytest.mark.parametrize("spoilt", [0, 1], ids=["drafter", "target"])
def test_what_is_not_finite_in_either_spoils_divergence_and_slopes_of_its_row_and_no_other(
    place: int, bad: float, spoilt: int
) -> None:
    both, labels = [drawn(3, 5000), drawn(3, 5000, seed=3)], labels_of(3, 5000)
    both[spoilt][1, place] = bad
    logits, taught = both
    assert scan_both(logits, labels, taught)[4].isfinite().tolist() == [True, False, True]
    weights = torch.tensor([1.0, 0.0, 1.0], device=DEVICE)
    for count in (3, 4):
        made = taught_slopes(logits, labels, taught, [weights] * count, torch.bfloat16)
        finite = made.float().isfinite()
        assert bool(finite[0].all()) and bool(finite[2].all()) and not bool(finite[1].any())


def test_a_token_that_the_drafter_cannot_say_makes_the_divergence_infinite() -> None:
    logits, labels = drawn(2, 5000), torch.tensor([40, 4500], device=DEVICE)
    taught = drawn(2, 5000, seed=3)
    logits[0, 3000] = -math.inf
    kl = scan_both(logits, labels, taught)[4]
    assert float(kl[0]) == math.inf and bool(kl[1].isfinite())


class OnGpu(Tensor):
    """On a GPU, by its own account: the operators hand it to the kernels."""

    is_cuda = True


def by_kernels_alone(operator: Any) -> Callable[..., Any]:
    """An operator that never takes plain operations, for the interpreter."""

    def run(*given: Any) -> Any:
        found = operator._init_fn(*(x.as_subclass(OnGpu) if isinstance(x, Tensor) else x for x in given))
        plain = [x.as_subclass(Tensor) for x in ([found] if isinstance(found, Tensor) else found)]
        return plain[0] if isinstance(found, Tensor) else plain

    return run


@pytest.mark.parametrize("width", [208, 4100])
@pytest.mark.parametrize("name", ALL)
def test_the_proof_of_a_warm_up_takes_the_kernels(
    name: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if INTERPRETED:
        for operator in ("_scan", "_overlap", "_slopes"):
            monkeypatch.setattr(logit_passes, operator, by_kernels_alone(getattr(logit_passes, operator)))
    called = []
    right = logit_kernels.slopes
    monkeypatch.setattr(logit_kernels, "slopes", lambda *given: called.append(1) or right(*given))
    head = OutputHead(drawn(width, 16), None, 0.7, None)
    assert choose_kernels(head, of(name), 7) == (
        True,
        "loss, first choices and slopes of random logits are those of plain operations",
    )
    assert called


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


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """SwiGLU's operators run the kernels, also under the interpreter."""
    if INTERPRETED:
        for operator in ("forward", "backward"):
            monkeypatch.setattr(swiglu, operator, by_kernels_alone(getattr(swiglu, operator)))


@pytest.mark.parametrize("ffn", [48, 1001])
@BOTH
def test_the_proof_of_a_warm_up_takes_swiglu_s_kernels(
    ffn: int, dtype: torch.dtype, operators: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []
    for name in ("forward", "backward"):
        right = getattr(swiglu_kernels, name)
        monkeypatch.setattr(
            swiglu_kernels, name, lambda *given, right=right: called.append(1) or right(*given)
        )
    assert choose_swiglu([7680, 119], ffn, torch.device(DEVICE), dtype) == (
        True,
        "output and slopes of random numbers are those of plain operations",
    )
    assert len(called) == 2 * 3 * 2


@pytest.mark.parametrize(("name", "what"), [("forward", "output"), ("backward", "slopes")])
def test_the_proof_of_a_warm_up_finds_a_tile_that_swiglu_s_kernels_left_out(
    name: str, what: str, operators: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(swiglu_kernels, name)

    def leaves_out(*given: Tensor) -> None:
        right(*given)
        given[-1][33, -60:] = 0.0

    monkeypatch.setattr(swiglu_kernels, name, leaves_out)
    taken, reason = choose_swiglu([119], 256, torch.device(DEVICE), torch.bfloat16)
    assert not taken and f"our own are not used: a tile of {what} of numbers of 1 is off by" in reason


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
@pytest.mark.parametrize("name", ALL)
def test_a_compiled_chunk_by_the_kernels_is_the_eager_one(name: str, eight_bits: bool) -> None:
    hidden, head, labels, weights, teacher = chunk_case(torch.bfloat16, 0.25, eight_bits, DEVICE)
    if eight_bits and fp8.refuse(torch.device(DEVICE)):
        pytest.skip("no 8-bit matrix units")
    kind = of(name)
    given = (hidden, head, labels, weights, teacher if kind.needs_teacher else None, kind)
    chunk = execution.build(kernel_chunk_scores, execution.COMPILED, "test")
    found, wanted = chunk(*given), chunk_scores(*given)
    assert found.hits.equal(wanted.hits) and found.gradient.dtype == hidden.dtype
    torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-3, atol=1e-3)
    most = float(wanted.gradient.float().abs().max())
    torch.testing.assert_close(found.gradient, wanted.gradient, rtol=2e-2, atol=2e-2 * most)
    hidden[1, 0, 3] = math.nan
    spoilt = chunk(*given)
    assert not bool(spoilt.loss.isfinite()) and not bool(spoilt.gradient.isfinite().all())


@not_interpreted
def test_a_compiled_swiglu_is_the_eager_one_in_both_directions() -> None:
    between, slope = drawn(64, 512).requires_grad_(), drawn(64, 256, seed=1)
    compiled = execution.build(swiglu.swiglu, execution.COMPILED, "test")
    found, wanted = compiled(between, True), swiglu.swiglu(between)
    found_slope, wanted_slope = (torch.autograd.grad(made, between, slope)[0] for made in (found, wanted))
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(found_slope, wanted_slope, rtol=2e-2, atol=2e-2)
