"""The chunked loss against plain cross-entropy and autograd, and what counts as accepted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from remote_payload.train import objective
from remote_payload.train.batch import RowShape
from remote_payload.train.objective import (
    BlockScores,
    accepted,
    block_loss,
    chunk_loss,
    chunk_size,
    default_gamma,
    weighted_first,
)


def random_row(
    slots: int, block: int, width: int, vocabulary: int, seed: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states [A, B, D], head [V, D], labels and weights [A, B-1]; a good third of the weights is 0."""
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(slots, block, width, generator=g, dtype=dtype)
    head = torch.randn(vocabulary, width, generator=g, dtype=dtype)
    labels = torch.randint(0, vocabulary, (slots, block - 1), generator=g)
    weights = torch.rand(slots, block - 1, generator=g)
    weights[torch.rand(slots, block - 1, generator=g) < 0.4] = 0.0
    return hidden, head, labels, weights


def plain(hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor) -> BlockScores:
    """The loss in the words of the paper, whole logits, autograd."""
    logits = hidden[:, 1:] @ head.T
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return BlockScores((each * weights.flatten()).sum(), logits.argmax(-1) == labels)


def fused(hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor) -> BlockScores:
    order, used = weighted_first(weights)
    return block_loss(hidden, head, labels, weights, order, used, chunk_loss)


@settings(deadline=None, max_examples=40)
@given(
    slots=st.integers(1, 13),
    block=st.integers(2, 9),
    vocabulary=st.integers(2, 37),
    most=st.integers(1, 40),
    seed=st.integers(0, 999),
)
def test_chunked_loss_hits_and_gradient_are_those_of_plain_cross_entropy(
    slots: int, block: int, vocabulary: int, most: int, seed: int
) -> None:
    hidden, head, labels, weights = random_row(slots, block, 5, vocabulary, seed, torch.float64)
    mine, theirs = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    expected = plain(theirs, head, labels, weights)
    expected.loss.backward()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objective, "MOST_ROWS", most)
        found = fused(mine, head, labels, weights)
        (found.loss * 3.0).backward()
    torch.testing.assert_close(found.loss.double(), expected.loss, atol=1e-4, rtol=1e-5)
    assert mine.grad is not None and theirs.grad is not None
    torch.testing.assert_close(mine.grad, 3.0 * theirs.grad, atol=1e-6, rtol=1e-5)
    assert bool((mine.grad[:, 0] == 0).all())  # the anchor's own place predicts nothing
    counted = weights > 0
    assert found.hits[counted].equal(expected.hits[counted])


def test_the_gradient_is_float32_exact_to_a_few_roundings() -> None:
    hidden, head, labels, weights = random_row(64, 8, 32, 501, 3, torch.float32)
    mine, exact = hidden.clone().requires_grad_(), hidden.double().requires_grad_()
    fused(mine, head, labels, weights).loss.backward()
    plain(exact, head.double(), labels, weights).loss.backward()
    assert mine.grad is not None and exact.grad is not None
    torch.testing.assert_close(mine.grad.double(), exact.grad, atol=5e-6, rtol=2e-5)


def test_logits_far_from_zero_neither_overflow_nor_vanish() -> None:
    hidden, head, labels, weights = random_row(3, 4, 8, 11, 1, torch.float32)
    weights.fill_(1.0)
    mine = (hidden * 300).requires_grad_()
    found = fused(mine, head, labels, weights)
    found.loss.backward()
    expected = plain((hidden * 300).double(), head.double(), labels, weights)
    assert float(expected.loss) > 1000
    torch.testing.assert_close(found.loss.double(), expected.loss, rtol=1e-5, atol=0)
    assert mine.grad is not None and mine.grad.isfinite().all()


def test_a_row_without_any_label_has_loss_zero_and_gradient_zero() -> None:
    hidden, head, labels, weights = random_row(4, 4, 8, 11, 1, torch.float32)
    mine = hidden.requires_grad_()
    found = fused(mine, head, labels, torch.zeros_like(weights))
    found.loss.backward()
    assert float(found.loss.detach()) == 0.0
    assert mine.grad is not None and bool((mine.grad == 0).all())


@pytest.mark.parametrize(("rows", "most"), [(1, 512), (512, 512), (513, 512), (1790, 512), (7, 3), (9, 1)])
def test_chunks_are_equal_and_as_few_as_allowed(
    rows: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objective, "MOST_ROWS", most)
    size, fewest = chunk_size(rows), -(-rows // most)
    assert size <= most and -(-rows // size) == fewest and size * fewest - rows < fewest


@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=9))
def test_weighted_places_come_first_and_every_place_once(used: list[list[bool]]) -> None:
    weights = torch.tensor(used).float()
    order, count = weighted_first(weights)
    flat = weights.flatten()[order]
    assert count == sum(map(sum, used))
    assert sorted(order.tolist()) == list(range(weights.numel()))
    assert bool((flat[:count] > 0).all()) and bool((flat[count:] == 0).all())


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
    assert accepted(hits, weights).tolist() == slow


def test_the_decay_is_the_papers_for_its_block_sizes() -> None:
    assert [default_gamma(block) for block in (16, 10, 8, 4)] == [7.0, 5.0, 4.0, 4.0]
    shape = RowShape(token_budget=64, anchors=2, block_size=8, mask_token_id=1, gamma=default_gamma(8))
    expected = [np.exp(-(k - 1) / 4.0) for k in range(1, 8)]
    np.testing.assert_allclose(shape.block_weights, expected, rtol=1e-6)
