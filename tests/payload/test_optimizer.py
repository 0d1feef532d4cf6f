"""The step of a replica against torch's own AdamW over separate parameters, and what it keeps account of."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remote_payload.job import Job
from remote_payload.train.optimizer import Optimizer
from remote_payload.train.weights import FlatWeights


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
        assert optimizer.read().norm == pytest.approx(float(norm), rel=1e-5)
    for (name, found), expected in zip(module.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5, msg=name)
    reading = optimizer.read()
    assert (reading.taken, reading.skipped, reading.bad_step) == (8, 0, 0)


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
                assert all(after[name].equal(value) for name, value in before.items() if name != "counts")
            give_gradient(weights, random_gradients(module, step))
            optimizer.step(2.0, 0.05)
    assert pairs[0][1].read().skipped == 2 and pairs[1][1].read().skipped == 0
    for name, value in pairs[0][1].state().items():
        assert value.equal(pairs[1][1].state()[name]) or name == "counts", name


def test_a_step_in_which_no_row_had_any_weight_divides_by_nothing() -> None:
    module = small_module()
    weights = FlatWeights(module, torch.float32)
    optimizer = Optimizer(weights, job_of(weight_decay=0.0))
    before = weights.masters.clone()
    optimizer.step(0.0, 0.1)
    assert weights.masters.equal(before) and optimizer.read().skipped == 0


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


def test_the_account_knows_the_newest_bad_step_and_the_longest_row_of_them() -> None:
    module = small_module()
    weights = FlatWeights(module, torch.float32)
    optimizer = Optimizer(weights, job_of())
    seen = []
    for step, bad in enumerate((False, True, True, True, False, True), 1):
        give_gradient(weights, random_gradients(module, step))
        if bad:
            weights.total[step] = float("inf")
        optimizer.step(2.0, 0.05)
        reading = optimizer.read()
        assert reading.taken == step and (reading.norm == float("inf")) == bad
        seen.append((reading.skipped, reading.in_row, reading.longest_in_row, reading.bad_step))
    assert seen == [(0, 0, 0, 0), (1, 1, 1, 2), (2, 2, 2, 3), (3, 3, 3, 4), (3, 0, 3, 4), (4, 1, 3, 6)]
    assert optimizer.read().bad_norm == float("inf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_that_took_over_a_state_goes_on_to_the_bit(dtype: torch.dtype) -> None:
    def advance(weights: FlatWeights, optimizer: Optimizer, steps: range) -> None:
        for step in steps:
            give_gradient(weights, random_gradients(small_module(), step))
            if step in (2, 4):
                weights.total[0] = float("inf")
            optimizer.step(1.0 + step, 0.05 / (step + 1))

    ready = []
    for seed in (0, 0, 7):  # the last one starts elsewhere
        weights = FlatWeights(small_module(seed), dtype)
        ready.append((weights, Optimizer(weights, job_of())))
    (whole, goes_through), (first, stops), (second, goes_on) = ready
    advance(whole, goes_through, range(9))
    advance(first, stops, range(5))
    kept = {name: value.detach().clone() for name, value in stops.state().items()}
    advance(first, stops, range(5, 6))  # what comes after does not reach into the copy
    addresses = {name: value.data_ptr() for name, value in goes_on.state().items() if name != "adam_step"}
    goes_on.load_state(kept)
    assert second.values.equal(second.masters.to(dtype))
    advance(second, goes_on, range(5, 9))
    for name, value in goes_through.state().items():
        assert goes_on.state()[name].equal(value), name
    assert goes_on.read() == dataclasses.replace(goes_through.read(), bad_norm=0.0) and second.values.equal(
        whole.values
    )
    assert all(goes_on.state()[name].data_ptr() == address for name, address in addresses.items())


def test_a_state_that_is_not_this_optimizers_is_refused_by_name() -> None:
    weights = FlatWeights(small_module(), torch.float32)
    optimizer = Optimizer(weights, job_of())
    state = {name: value.clone() for name, value in optimizer.state().items()}
    with pytest.raises(ValueError, match="exp_avg_sq"):
        optimizer.load_state({name: value for name, value in state.items() if name != "exp_avg_sq"})
    with pytest.raises(ValueError, match=r"'masters' is torch.float32 \(62,\): expected .* \(63,\)"):
        optimizer.load_state({**state, "masters": state["masters"][1:]})


def test_prepare_and_apply_are_a_step() -> None:
    module, twin = small_module(), small_module()
    weights, other = FlatWeights(module, torch.float32), FlatWeights(twin, torch.float32)
    optimizer, plain = Optimizer(weights, job_of()), Optimizer(other, job_of())
    for step in range(3):
        for flat in (weights, other):
            give_gradient(flat, random_gradients(module, step))
        optimizer.prepare(2.0 + step, 0.1)
        optimizer.apply()
        plain.step(2.0 + step, 0.1)
    assert weights.masters.equal(other.masters)
