"""A module's parameters and gradients as views of flat tensors."""

from __future__ import annotations

import torch
from torch import nn

from remote_payload.train.weights import FlatWeights


def small_module(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7, bias=False), nn.RMSNorm(7), nn.Linear(7, 3, bias=False))


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
            gradients = torch.autograd.grad(module(row).pow(2).sum(), weights.leaves)
            weights.collect(gradients, number == 0)
    sum(twin(row).pow(2).sum() for row in rows).backward()
    for name, parameter in twin.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(weights.named(weights.local)[name], parameter.grad)
    assert all(parameter.grad is None for parameter in module.parameters())
