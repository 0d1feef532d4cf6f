"""The target's decoder as graphs run it: attention of known structure, and nothing decided from data.

transformers looks at position ids to see whether rows are packed, which waits for the device once in every
forward pass; while a graph is captured or a function is traced it cannot look, takes rows for packed, and
makes a dense mask of L x L for each of them: right, but at a fraction of the speed. A model whose attention
has a name without a function for masks is given none (masking_utils; read in 5.17 and 5.24). So these are the
same decoder with another name in its config, and with attention that knows without a mask what is seen:

- causal, for rows without padding before a token: sdpa with `is_causal`, which takes the fast kernels, and a
  window's mask where a layer has one;
- by documents, for a row of packed ones: FlashAttention as torch brings it (2.11 and later), given the bounds
  of the documents, by the arguments that transformers has for that.

Module by module a view is a shallow copy, so that weights, buffers and hooks are those of the model, and
whoever else runs the model sees nothing of it. Whether a model's masks are really these is not believed but
proved (`target_pass.py`).
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

CAUSAL = "dflash_causal"
DOCUMENTS = "dflash_documents"
"""Names of attention in a config."""


def causal_view(decoder: nn.Module) -> nn.Module:
    """`decoder`, which attends by sdpa, for rows that are padded at their end at most."""
    AttentionInterface.register(CAUSAL, attend_causally)
    return _view(decoder, CAUSAL, {}, {})


def document_view(decoder: nn.Module) -> nn.Module:
    """`decoder`, which attends by sdpa, for one row of documents; called with their bounds.

    The bounds are `cu_seq_lens_q` [documents + 1] int32 and `max_length_q`, tokens of the longest.
    """
    AttentionInterface.register(DOCUMENTS, attend_in_documents)
    return _view(decoder, DOCUMENTS, {}, {})


def compile_layers(view: nn.Module, layers: nn.ModuleList, name: str) -> None:
    """Let inductor run the layers of a view; `layers` are the model's own, whose copies are meant.

    One function for all shapes, since it is called in warm-up alone: what runs later are graphs of it. Its
    own norms are taken back, because inductor fuses them with what stands beside them.
    """
    unfuse_norms(view)
    kinds: set[type] = {type(layer) for layer in layers}
    compiled: dict[Any, Any] = {}
    for module in view.modules():
        if type(module) in kinds:
            forward: Any = type(module).forward
            if forward not in compiled:
                compiled[forward] = execution.build(forward, execution.COMPILED, name, dynamic=True)
            module.forward = compiled[forward].__get__(module)


def attend_causally(
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


def attend_in_documents(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **_options: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each document of `query` [1, H, T, d]; windows as in `attend_causally`.

    Raises RuntimeError for a layer that wants what this is not, or was not given the bounds.
    """
    if cu_seq_lens_q is None or attention_mask is not None or is_causal is False or position_bias is not None:
        raise RuntimeError(f"{type(module).__name__} does not attend within documents by their bounds alone")
    found = torch.ops.dflashctl.document_attention(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        cu_seq_lens_q,
        max_length_q,
        scaling,
        -1 if sliding_window is None else sliding_window - 1,
    )
    return found[None], None


def _document_attention(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scale: float | None, back: int
) -> Tensor:
    """FlashAttention over [T, H, d] and, for keys and values, [T, g, d]; nothing after the last bound.

    One operator for a compiler, whatever torch's own becomes. `back`: tokens before it that one sees, or -1.
    """
    attended: Tensor = torch.ops.aten._flash_attention_forward(
        query.contiguous(),
        key,
        value,
        bounds,
        bounds,
        longest,
        longest,
        0.0,
        True,
        False,
        scale=scale,
        window_size_left=back,
        window_size_right=0,
    )[0]
    return attended.contiguous()


def _as_queries(query: Tensor, *_others: Any) -> Tensor:
    return query.new_empty(query.shape)


OPERATOR = "dflashctl::document_attention"
torch.library.define(
    OPERATOR,
    "(Tensor query, Tensor key, Tensor value, Tensor bounds, SymInt longest, float? scale, int back)"
    " -> Tensor",
)
torch.library.impl(OPERATOR, "CUDA", _document_attention)
torch.library.register_fake(OPERATOR, _as_queries)


def _view(module: nn.Module, name: str, modules: dict[int, nn.Module], configs: dict[int, Any]) -> nn.Module:
    """A copy of the tree of modules; each module and config once, however often it is used."""
    if id(module) in modules:
        return modules[id(module)]
    view = modules[id(module)] = copy.copy(module)
    view._modules = {
        key: None if child is None else _view(child, name, modules, configs)
        for key, child in module._modules.items()
    }
    config = getattr(module, "config", None)
    if hasattr(config, "_attn_implementation_internal"):
        if id(config) not in configs:
            configs[id(config)] = copy.copy(config)
            # Not by its property, which would set it in the configs that the copy shares, too.
            configs[id(config)]._attn_implementation_internal = name
        view.config = configs[id(config)]
    return view
