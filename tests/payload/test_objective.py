"""The chunked loss against the papers' own words and autograd, and what counts as accepted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from remote_payload.train import objective
from remote_payload.train.batch import RowShape
from remote_payload.train.objective import (
    BlockScores,
    Objective,
    accepted,
    block_loss,
    chunk_blocks,
    default_gamma,
    slots_in_use,
)
from remote_payload.train.output_head import OutputHead
from tests.payload.slow_objectives import slow_loss

NAMES = [*objective.FROM_LABELS, *objective.FROM_DISTRIBUTIONS]
ALL = [
    Objective(name="ce", whole_block=3.0),
    Objective(name="dpace", dpace_alpha=0.5),
    Objective(name="dpace", dpace_alpha=0.0),
    Objective(name="focal", focal_weight=0.3, whole_block=3.0),
    Objective(name="chain", focal_weight=0.3, chain_weight=5.0, whole_block=3.0),
    Objective(name="chain", focal_weight=0.0, chain_weight=40.0, whole_block=3.0),
    Objective(name="forward_kl"),
    Objective(name="forward_kl", kl_share=0.3),
    Objective(name="lk", lk_eta=3.0),
    Objective(name="lk", lk_eta=0.0),
]
KINDS = pytest.mark.parametrize("kind", ALL, ids=lambda o: f"{o.name}-{ALL.index(o)}")


class Case:
    """A random row: decaying weights with short tails, empty slots last, and labels that are often right."""

    def __init__(
        self,
        slots: int,
        block: int,
        vocabulary: int,
        seed: int,
        dtype: torch.dtype = torch.float64,
        **head: float,
    ) -> None:
        g = torch.Generator().manual_seed(seed)
        places, width, context = block - 1, 5, 3 * slots + block
        self.hidden = torch.randn(slots, block, width, generator=g, dtype=dtype)
        weight = torch.randn(vocabulary, width, generator=g, dtype=dtype)
        bias = torch.randn(vocabulary, generator=g, dtype=dtype) if head else None
        self.head = OutputHead(weight, bias, head.get("scale", 1.0), head.get("soft_cap"))
        lengths = torch.randint(1, block, (slots, 1), generator=g)
        decay = torch.exp(-torch.arange(places) / 4.0)
        self.weights = torch.where(torch.arange(places) < lengths, decay, 0.0)
        drawn = int(torch.randint(0, slots + 1, (), generator=g))
        self.weights[drawn:] = 0.0
        self.anchors = torch.randint(0, context - 1, (slots,), generator=g).sort().values
        self.anchors[drawn:] = 0
        self.teacher = torch.randn(context, width, generator=g, dtype=dtype)
        right = self.logits(self.hidden[:, 1:]).argmax(-1)
        any_label = torch.randint(0, vocabulary, (slots, places), generator=g)
        self.labels = torch.where(torch.rand(slots, places, generator=g) < 0.6, right, any_label)

    def logits(self, hidden: Tensor) -> Tensor:
        """As the target would make them."""
        logits = hidden @ self.head.weight.T
        if self.head.bias is not None:
            logits = logits + self.head.bias
        logits = logits * self.head.scale
        return (
            logits
            if self.head.soft_cap is None
            else self.head.soft_cap * (logits / self.head.soft_cap).tanh()
        )

    def slow(self, kind: Objective, kept: torch.dtype = torch.float64) -> tuple[Tensor, float, Tensor]:
        """Loss, divisor and gradient by whole logits, which lie in memory as `kept`: it may make ties."""
        hidden = self.hidden.clone().requires_grad_()
        index = self.anchors[:, None] + torch.arange(self.labels.shape[1])
        taught = self.logits(self.teacher[index.clamp(max=len(self.teacher) - 1)])
        logits = self.logits(hidden[:, 1:])
        logits, taught = (x + (x.to(kept).to(x.dtype) - x).detach() for x in (logits, taught))
        loss, divisor = slow_loss(logits, self.labels, self.weights, taught, kind)
        (gradient,) = torch.autograd.grad(loss, hidden) if loss.requires_grad else (torch.zeros_like(hidden),)
        return loss.detach(), divisor, gradient

    def fused(
        self, kind: Objective, used: int | None = None, times: float = 1.0
    ) -> tuple[BlockScores, Tensor]:
        """Scores and gradient of what is under test."""
        hidden = self.hidden.clone().requires_grad_()
        teacher = self.teacher if kind.needs_teacher else None
        scores = block_loss(
            hidden[:, 1:], self.head, self.labels, self.weights, self.anchors, teacher, kind, used=used
        )
        (scores.loss * times).backward()
        assert hidden.grad is not None
        return scores, hidden.grad


@settings(deadline=None, max_examples=12)
@given(
    slots=st.integers(1, 9),
    block=st.integers(2, 7),
    vocabulary=st.integers(2, 23),
    most=st.integers(1, 40),
    seed=st.integers(0, 999),
    head=st.sampled_from([{}, {"scale": 0.3}, {"soft_cap": 2.5, "scale": 1.5}]),
)
@KINDS
def test_loss_divisor_and_gradient_are_those_of_the_papers_words_over_whole_logits(
    kind: Objective, slots: int, block: int, vocabulary: int, most: int, seed: int, head: dict[str, float]
) -> None:
    case = Case(slots, block, vocabulary, seed, **head)
    loss, divisor, gradient = case.slow(kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objective, "MOST_ROWS", most)
        scores, found = case.fused(kind, times=3.0)
    torch.testing.assert_close(scores.loss.double(), loss, atol=2e-4, rtol=1e-5)
    assert float(scores.weight) == pytest.approx(divisor, rel=1e-6)
    torch.testing.assert_close(found, 3.0 * gradient, atol=1e-4, rtol=1e-5)
    assert bool((found[:, 0] == 0).all())  # the anchor's own place predicts nothing
    counted = case.weights > 0
    logits = case.logits(case.hidden[:, 1:])
    assert scores.hits[counted].equal((logits.argmax(-1) == case.labels)[counted])
    plain = torch.log_softmax(logits, -1).gather(-1, case.labels[..., None])[..., 0]
    torch.testing.assert_close(scores.ce.double(), -(plain * case.weights).sum(), atol=1e-4, rtol=1e-5)


@KINDS
def test_the_gradient_is_float32_exact_to_a_few_roundings(kind: Objective) -> None:
    case = Case(40, 8, 301, 3, torch.float32)
    _, found = case.fused(kind)
    case.hidden, case.teacher = case.hidden.double(), case.teacher.double()
    case.head = OutputHead(case.head.weight.double(), None, 1.0, None)
    _, _, exact = case.slow(kind)
    torch.testing.assert_close(found.double(), exact, atol=2e-5 * float(exact.abs().max()), rtol=5e-5)


@KINDS
def test_in_bfloat16_loss_and_gradient_are_those_of_the_rounded_inputs(kind: Objective) -> None:
    case = Case(40, 8, 301, 4, torch.bfloat16)
    scores, found = case.fused(kind)
    assert scores.loss.dtype == torch.float32 and found.dtype == torch.bfloat16
    case.hidden, case.teacher = case.hidden.double(), case.teacher.double()
    case.head = OutputHead(case.head.weight.double(), None, 1.0, None)
    loss, _, exact = case.slow(kind, torch.bfloat16)
    assert float(scores.loss.detach()) == pytest.approx(float(loss), rel=0.02)
    assert float(torch.cosine_similarity(found.double().flatten(), exact.flatten(), dim=0)) > 0.999


@KINDS
def test_a_hint_of_the_slots_in_use_changes_nothing(kind: Objective, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objective, "MOST_ROWS", 6)
    case = Case(9, 4, 11, 5)
    case.weights[5:] = 0.0
    assert slots_in_use(case.weights) <= 5
    (whole, gradient), (hinted, same) = case.fused(kind), case.fused(kind, slots_in_use(case.weights))
    assert gradient.equal(same) and whole.loss.equal(hinted.loss) and whole.ce.equal(hinted.ce)
    assert whole.hits[case.weights > 0].equal(hinted.hits[case.weights > 0])


@KINDS
def test_logits_far_from_zero_neither_overflow_nor_vanish(kind: Objective) -> None:
    case = Case(6, 4, 11, 1, torch.float32)
    case.weights = torch.ones(6, 3)
    case.hidden, case.teacher = case.hidden * 300, case.teacher * 300
    scores, gradient = case.fused(kind)
    assert scores.loss.isfinite() and gradient.isfinite().all()
    assert float(scores.ce) > 500


@KINDS
def test_a_row_without_any_label_has_loss_zero_and_gradient_zero(kind: Objective) -> None:
    case = Case(4, 4, 11, 1, torch.float32)
    case.weights = torch.zeros_like(case.weights)
    for used in (None, 0):
        scores, gradient = case.fused(kind, used)
        assert float(scores.loss.detach()) == 0.0 and float(scores.weight) == 0.0
        assert bool((gradient == 0).all())


@pytest.mark.parametrize("name", ["focal", "chain"])
def test_of_two_equal_logits_the_first_is_the_choice_as_in_decoding(name: str) -> None:
    case = Case(1, 3, 4, 0, torch.float32)
    case.head = OutputHead(torch.eye(4, 5), None, 1.0, None)
    case.hidden = torch.zeros(1, 3, 5)
    case.hidden[0, 1:, 1] = case.hidden[0, 1:, 2] = 2.0  # tokens 1 and 2 tie
    case.weights, case.labels = torch.ones(1, 2), torch.tensor([[1, 2]])
    kind = Objective(name=name, chain_weight=0.0, focal_weight=1.0, whole_block=2.0)
    scores, _ = case.fused(kind)
    assert scores.hits.tolist() == [[True, False]]
    loss, _, _ = case.slow(kind)
    torch.testing.assert_close(scores.loss.detach(), loss)


class Largest(TorchDispatchMode):
    """Notes how many numbers the largest tensor had that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple | list) else [made]:
            if isinstance(one, Tensor):
                self.numbers = max(
                    self.numbers, one.numel(), one.untyped_storage().nbytes() // one.element_size()
                )
        return made


@pytest.mark.parametrize("name", NAMES)
def test_no_operation_ever_makes_the_logits_of_more_than_a_chunk(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objective, "MOST_ROWS", 24)
    slots, block, vocabulary = 64, 5, 1009
    case = Case(slots, block, vocabulary, 2, torch.float32)
    with Largest() as seen:
        case.fused(Objective(name=name))
    assert 24 * vocabulary <= seen.numbers <= 24 * vocabulary + vocabulary
    assert seen.numbers < slots * (block - 1) * vocabulary / 10
    with Largest() as whole:  # the measure sees whole logits where there are any
        case.slow(Objective(name=name))
    assert whole.numbers >= slots * (block - 1) * vocabulary


@pytest.mark.parametrize(
    ("slots", "places", "most"), [(1, 15, 512), (512, 15, 512), (7, 3, 9), (9, 1, 1), (5, 9, 4)]
)
def test_chunks_are_whole_blocks_equal_and_as_few_as_allowed(
    slots: int, places: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objective, "MOST_ROWS", most)
    size = chunk_blocks(slots, places)
    fewest = -(-slots // max(1, most // places))
    assert (
        size * places <= max(most, places) and -(-slots // size) == fewest and size * fewest - slots < fewest
    )


def slow_accepted(hits: list[bool], weights: list[float]) -> int:
    for place, (hit, weight) in enumerate(zip(hits, weights, strict=True)):
        if not hit or weight == 0:
            return place
    return len(hits)


@given(
    st.lists(
        st.lists(st.tuples(st.booleans(), st.sampled_from([0.0, 0.3, 1.0])), min_size=5, max_size=5),
        min_size=1,
        max_size=8,
    )
)
def test_accepted_is_the_run_of_hits_from_the_first_label(blocks: list[list[tuple[bool, float]]]) -> None:
    hits = torch.tensor([[hit for hit, _ in block] for block in blocks])
    weights = torch.tensor([[weight for _, weight in block] for block in blocks])
    slow = [slow_accepted(h, w) for h, w in zip(hits.tolist(), weights.tolist(), strict=True)]
    assert accepted(hits, weights).sum(-1).tolist() == slow


def test_the_decay_is_the_papers_for_its_block_sizes() -> None:
    assert [default_gamma(block) for block in (16, 10, 8, 4)] == [7.0, 5.0, 4.0, 4.0]
    shape = RowShape(token_budget=64, anchors=2, block_size=8, mask_token_id=1, gamma=default_gamma(8))
    expected = [np.exp(-(k - 1) / 4.0) for k in range(1, 8)]
    np.testing.assert_allclose(shape.block_weights, expected, rtol=1e-6)
