"""What runs on a device in every step asks the host for nothing: a precondition of graphs, and of speed.

Fake tensors have shapes and no values, so whatever would read one (`.item()`, a branch on it, a shape that
depends on it) raises. That finds every wait for a device without having one (TorchSpec #74).
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from remote_payload.train.objective import FROM_DISTRIBUTIONS, FROM_LABELS, Objective, block_loss
from remote_payload.train.optimizer import Optimizer
from remote_payload.train.output_head import OutputHead
from remote_payload.train.statistics import Statistics
from remote_payload.train.weights import FlatWeights
from tests.payload.test_optimizer import job_of

SLOTS, BLOCK, WIDTH, VOCABULARY, CONTEXT = 40, 5, 8, 211, 64


@pytest.fixture
def nothing_has_a_value() -> FakeTensorMode:
    return FakeTensorMode()


@pytest.mark.parametrize("name", [*FROM_LABELS, *FROM_DISTRIBUTIONS])
def test_the_loss_of_a_row_and_its_statistics_read_no_value(
    name: str, nothing_has_a_value: FakeTensorMode
) -> None:
    layout = Statistics(BLOCK, 3)
    kind = Objective(name=name)
    with nothing_has_a_value:
        hidden = torch.randn(SLOTS, BLOCK - 1, WIDTH, requires_grad=True)
        head = OutputHead(torch.randn(VOCABULARY, WIDTH), torch.randn(VOCABULARY), 0.5, 30.0)
        labels = torch.zeros(SLOTS, BLOCK - 1, dtype=torch.int64)
        weights, anchors = torch.rand(SLOTS, BLOCK - 1), torch.zeros(SLOTS, dtype=torch.int64)
        teacher = torch.randn(CONTEXT, WIDTH) if kind.needs_teacher else None
        scores = block_loss(hidden, head, labels, weights, anchors, teacher, kind)
        scores.loss.backward()
        vector = layout.zeros(torch.device("cpu"))
        layout.add(vector, scores, weights, torch.zeros((), dtype=torch.int64))
        assert hidden.grad is not None and hidden.grad.shape == hidden.shape
        for field in dataclasses.fields(scores):
            with pytest.raises(DataDependentOutputException):  # the measure: reading one does raise
                bool(getattr(scores, field.name).sum())


def test_a_step_of_the_optimizer_reads_no_value() -> None:
    weights = FlatWeights(nn.Sequential(nn.Linear(5, 7), nn.RMSNorm(7)), torch.bfloat16)
    optimizer = Optimizer(weights, job_of())
    before = weights.masters.clone()
    weights.total.fill_(1.0)
    optimizer.prepare(3.0, 1e-3)
    with FakeTensorMode(allow_non_fake_inputs=True):
        optimizer.apply()
        with pytest.raises(DataDependentOutputException):
            bool(optimizer.state()["counts"].sum())
    assert weights.masters.equal(before)  # nothing was computed
    optimizer.apply()
    assert not weights.masters.equal(before)
