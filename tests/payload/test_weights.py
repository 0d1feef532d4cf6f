"""Flat weights and their AdamW against torch's own over separate parameters."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remote_payload.job import Job
from remote_payload.train.weights import FlatWeights, Optimizer, learning_rate


def job_of(**changes: Any) -> Job:
    values = {"target": "t", "dataset": "d", "mask_token_id": 1, "weight_decay": 0.1, "clip": 0.5, **changes}
    return Job.from_mapping(values, "test")


def small_module(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7, bias=False), nn.RMSNorm(7), nn.Linear(7, 3, bias=False))


def give_gradient(weights: FlatWeights, gradients: dict[str, Tensor]) -> None:
    for name, value in weights.named(weights.total).items():
        value.copy_(gradients[name])


def random_gradients(module: nn.Module, seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(p.shape, generator=g) for name, p in module.named_parameters()}


def test_parameters_become_views_of_flat_storage_and_keep_their_values() -> None:
    module = small_module()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    weights = FlatWeights(module, torch.float32)
    assert weights.decayed == 5 * 7 + 7 * 3 and weights.masters.numel() == 5 * 7 + 7 * 3 + 7
    for name, parameter in module.named_parameters():
        assert parameter.equal(before[name]) and weights.named(weights.values)[name].equal(before[name])
    weights.values.fill_(2.0)
    assert all(bool((parameter == 2).all()) for parameter in module.parameters())


def test_backward_adds_into_the_flat_gradient_and_rows_add_up() -> None:
    module, twin = small_module(), small_module()
    weights = FlatWeights(module, torch.float32)
    rows = [torch.randn(4, 5), torch.randn(2, 5)]
    for _ in range(2):  # twice: a step begins anew
        for number, row in enumerate(rows):
            module(row).pow(2).sum().backward()
            weights.collect(number == 0)
    sum(twin(row).pow(2).sum() for row in rows).backward()
    for name, parameter in twin.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(weights.named(weights.local)[name], parameter.grad)
    assert bool((weights.gradient == 0).all())


@pytest.mark.parametrize("clip", [0.5, 1e6], ids=["clipped", "unclipped"])
def test_steps_are_those_of_torch_adamw_over_single_parameters_with_clipping(clip: float) -> None:
    module, twin = small_module(), small_module()
    job = job_of(clip=clip)
    weights = FlatWeights(module, torch.float32)
    optimizer = Optimizer(weights, job)
    theirs = torch.optim.AdamW(
        [
            {"params": [p for p in twin.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in twin.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
    )
    for step in range(8):
        gradients, total_weight, rate = random_gradients(twin, step), 3.7 + step, 0.03 / (step + 1)
        for name, parameter in twin.named_parameters():
            parameter.grad = gradients[name] / total_weight
        norm = nn.utils.clip_grad_norm_(twin.parameters(), clip)
        for group in theirs.param_groups:
            group["lr"] = rate
        theirs.step()
        give_gradient(weights, gradients)
        optimizer.step(total_weight, rate)
        torch.testing.assert_close(optimizer.norm, norm)
    for (name, found), expected in zip(module.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5, msg=name)
    assert int(optimizer.skipped) == 0


def test_weight_decay_shrinks_matrices_and_never_norms() -> None:
    module = small_module()
    weights = FlatWeights(module, torch.float32)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    Optimizer(weights, job_of(weight_decay=0.5)).step(1.0, 0.1)  # the gradient is zero
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter, before[name] * (0.95 if parameter.ndim > 1 else 1.0))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_gradient_that_is_not_finite_leaves_everything_as_it_was_and_is_counted(bad: float) -> None:
    module, twin = small_module(), small_module()
    pairs = []
    for one in (module, twin):
        weights = FlatWeights(one, torch.float32)
        pairs.append((weights, Optimizer(weights, job_of())))
    for step in range(5):
        for number, (weights, optimizer) in enumerate(pairs):
            if number == 0 and step in (0, 2):
                give_gradient(weights, random_gradients(module, 99))
                weights.total[3] = bad
                before = {name: value.clone() for name, value in optimizer.state().items()}
                optimizer.step(2.0, 0.05)
                after = optimizer.state()
                assert all(after[name].equal(value) for name, value in before.items())
            give_gradient(weights, random_gradients(module, step))
            optimizer.step(2.0, 0.05)
    assert int(pairs[0][1].skipped) == 2 and int(pairs[1][1].skipped) == 0
    for name, value in pairs[0][1].state().items():
        assert value.equal(pairs[1][1].state()[name]), name


def test_a_step_in_which_no_row_had_any_weight_divides_by_nothing() -> None:
    module = small_module()
    weights = FlatWeights(module, torch.float32)
    optimizer = Optimizer(weights, job_of(weight_decay=0.0))
    before = weights.masters.clone()
    optimizer.step(0.0, 0.1)
    assert weights.masters.equal(before) and int(optimizer.skipped) == 0


def test_masters_stay_float32_and_small_steps_are_not_lost_in_bfloat16() -> None:
    module = small_module()
    weights = FlatWeights(module, torch.bfloat16)
    assert all(p.dtype == torch.bfloat16 for p in module.parameters())
    optimizer = Optimizer(weights, job_of(weight_decay=0.0, clip=1e9))
    start = weights.masters.clone()
    gradients = {name: torch.ones(p.shape) for name, p in module.named_parameters()}
    for _ in range(100):
        give_gradient(weights, gradients)
        optimizer.step(1.0, 1e-5)  # a hundredth of what bfloat16 tells apart near 1
    torch.testing.assert_close(weights.masters, start - 1e-3, atol=2e-5, rtol=0)
    assert weights.values.equal(weights.masters.to(torch.bfloat16))


def test_the_rate_rises_over_the_warm_up_and_falls_along_half_a_cosine() -> None:
    job = job_of(learning_rate=2.0, warmup=0.1)
    rates = [learning_rate(step, 100, job) for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * (step + 1) for step in range(10)])
    assert max(rates) == 2.0 and rates[55] == pytest.approx(1.0) and 0 < rates[99] < 0.01
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0.0), (1, 1.0), (2, 0.5), (3, 1.0)])
def test_the_rate_is_sane_in_runs_of_very_few_steps(steps: int, warmup: float) -> None:
    job = job_of(learning_rate=1.0, warmup=warmup)
    assert all(0 < learning_rate(step, steps, job) <= 1 for step in range(steps))
