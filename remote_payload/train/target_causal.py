"""The target's decoder for rows without padding before a token: causal, and nothing decided from data.

transformers looks at position ids to see whether rows are packed, which waits for the device once in every
forward pass; while a graph is captured or a function is traced it cannot look, takes rows for packed, and
makes a dense mask of L x L for each of them: right, but at a fraction of the speed. A model whose attention
has a name without a function for masks is given none (masking_utils; read in 5.17 and 5.24). So this is the
same decoder with another name in its config: `sdpa` with `is_causal`, which takes the fast kernels, and a
window's mask where a layer has one. Module by module it is a shallow copy, so that weights, buffers and hooks
are those of the model, and whoever else runs the model sees nothing of it.

Whether a model's masks are really these is not believed but proved (`target_pass.py`).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from remote_payload.train import execution
from remote_payload.train.fused_norms import unfuse_norms

NAME = "dflash_causal"
"""The attention's name in a config."""


def causal_view(decoder: nn.Module) -> nn.Module:
    """`decoder`, which attends by sdpa, without transformers' masks; it shares all weights and hooks."""
    AttentionInterface.register(NAME, attend)
    return _view(decoder, {}, {})


def compile_layers(view: nn.Module, layers: nn.ModuleList, name: str) -> None:
    """Let inductor run the layers of a view; `layers` are the model's own, whose copies are meant.

    One function for all shapes, since it is called in warm-up alone: what runs later are graphs of it. Its
    own norms are taken back, because inductor fuses them with what stands beside them.
    """
    unfuse_norms(view)
    kinds, compiled = {type(layer) for layer in layers}, {}
    for module in view.modules():
        if type(module) in kinds:
            forward: Any = type(module).forward
            if forward not in compiled:
                compiled[forward] = execution.build(forward, execution.COMPILED, name, dynamic=True)
            module.forward = compiled[forward].__get__(module)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention of `query` [B, H, L, d]; a window of W sees the token itself and W - 1 before it."""
    length = query.shape[2]
    if attention_mask is None and sliding_window is not None and length >= sliding_window:
        place = torch.arange(length, device=query.device)
        back = place[:, None] - place
        attention_mask = ((back >= 0) & (back < sliding_window))[None, None]
    attended: tuple[Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, **options
    )
    return attended


def _view(module: nn.Module, modules: dict[int, nn.Module], configs: dict[int, Any]) -> nn.Module:
    """A copy of the tree of modules; each module and config once, however often it is used."""
    if id(module) in modules:
        return modules[id(module)]
    view = modules[id(module)] = copy.copy(module)
    view._modules = {
        name: None if child is None else _view(child, modules, configs)
        for name, child in module._modules.items()
    }
    config = getattr(module, "config", None)
    if hasattr(config, "_attn_implementation_internal"):
        if id(config) not in configs:
            configs[id(config)] = copy.copy(config)
            # Not by its property, which would set it in the configs that the copy shares, too.
            configs[id(config)]._attn_implementation_internal = NAME
        view.config = configs[id(config)]
    return view
