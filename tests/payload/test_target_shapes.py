"""Shapes of a target's graphs: which batches they hold, and what they waste."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remote_payload.train.buckets import EpochPlan, bucket_of, plan_epoch
from remote_payload.train.target_shapes import (
    MOST_GRAPHS,
    OVERSIZE,
    PackedShape,
    PaddedShape,
    packed_shapes,
    padded_shapes,
)

EDGES = [0, 770, 1216, 1728, 2432, 3296, 8193]
BUDGET, ROWS = 32768, 64


def plan_of(
    lengths: np.ndarray, epoch: int = 0, budget: int = BUDGET, most: int = ROWS, edges: list[int] = EDGES
) -> EpochPlan:
    return plan_epoch(
        lengths, bucket_of(lengths, edges), token_budget=budget, max_batch=most, seed=0, epoch=epoch
    )


def texts(count: int = 20_000) -> np.ndarray:
    """Lengths as those of conversations: most short, some very long."""
    drawn = np.random.default_rng(0).lognormal(5.3, 0.9, count)
    return np.clip(drawn.astype(np.int64), 8, 8192)


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=80),
    most=st.integers(1, 9),
    budget=st.integers(64, 300),
)
def test_the_first_packed_shape_holds_every_batch_of_every_epoch(
    lengths: list[int], most: int, budget: int
) -> None:
    array = np.asarray(lengths, np.int64)
    plans = [plan_of(array, epoch, budget, most, [0, 20, 40, 65]) for epoch in range(3)]
    shapes = packed_shapes(plans[0], array, token_budget=budget, max_batch=most)
    assert 1 <= len(shapes) <= MOST_GRAPHS and len(set(shapes)) == len(shapes)
    assert all(shape.tokens <= budget for shape in shapes)
    for plan in plans:
        assert all(shapes[0].holds(array[batch].tolist()) for batch in plan.batches)


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=80),
    most=st.integers(1, 9),
    budget=st.integers(64, 300),
)
def test_padded_shapes_hold_by_the_rule_of_batches_whatever_an_epoch_brings(
    lengths: list[int], most: int, budget: int
) -> None:
    """Rows times longest within the budget is all that is known of a later epoch's batch."""
    array = np.asarray(lengths, np.int64)
    plan = plan_of(array, 0, budget, most, [0, 20, 40, 65])
    shapes = padded_shapes(plan, array, token_budget=budget, max_batch=most)
    assert len(shapes) <= MOST_GRAPHS
    assert all(shape.tokens <= OVERSIZE * budget for shape in shapes)
    for shape in shapes:
        rows = min(most, budget // shape.longest)
        assert rows == 0 or shape.holds([shape.longest] * rows)


@pytest.mark.parametrize("epoch", [0, 3])
def test_packed_shapes_waste_little_where_rows_would_be_mostly_padding(epoch: int) -> None:
    lengths = texts()
    shapes = packed_shapes(plan_of(lengths), lengths, token_budget=BUDGET, max_batch=ROWS)
    batches = [lengths[batch].tolist() for batch in plan_of(lengths, epoch).batches]
    run = sum(min(s.tokens for s in shapes if s.holds(batch)) for batch in batches)
    real = sum(map(sum, batches))
    padded = sum(len(batch) * max(batch) for batch in batches)
    assert real < 0.45 * padded
    assert run < 1.12 * real


@pytest.mark.parametrize("epoch", [0, 3])
def test_padded_shapes_waste_little_beside_the_batches_own_padding(epoch: int) -> None:
    lengths = texts()
    shapes = padded_shapes(plan_of(lengths), lengths, token_budget=BUDGET, max_batch=ROWS)
    run = padded = eager = 0
    for batch in plan_of(lengths, epoch).batches:
        of_batch = lengths[batch].tolist()
        own = len(of_batch) * max(of_batch)
        fit = [shape.tokens for shape in shapes if shape.holds(of_batch)]
        eager += not fit
        run += min(fit, default=own)
        padded += own
    assert run < 1.08 * padded
    assert eager < 0.06 * len(plan_of(lengths, epoch).batches)


def test_a_shape_holds_what_exceeds_it_nowhere() -> None:
    packed, padded = PackedShape(100, 3, 60), PaddedShape(3, 60)
    assert packed.holds([60, 20, 20]) and padded.holds([60, 60, 60])
    assert not packed.holds([60, 41]) and not packed.holds([61]) and not packed.holds([1] * 4)
    assert not padded.holds([61]) and not padded.holds([1] * 4)
