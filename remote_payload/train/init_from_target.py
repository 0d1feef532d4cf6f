"""Start drafter layers from layers of the target: same sizes, same meaning of their inputs.

On small data this is worth more than many steps: without it the demo's drafter stays near tau 1.1. A
target without per-head norms on queries and keys (Llama) is copied too; the drafter's own norms then start at
one and the projections learn around them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from remote_payload.job import JobError
from remote_payload.train.drafter import Drafter
from remote_payload.train.target import Target

_MATRICES = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "input_layernorm",
    "post_attention_layernorm",
)
_OPTIONAL = ("self_attn.q_norm", "self_attn.k_norm")


@torch.no_grad()
def copy_layers(drafter: Drafter, target: Target, layers: list[int]) -> None:
    """Copy target layer `layers[i]` into drafter layer i, and the target's final norm.

    Raises JobError when the target has no such layer, or one that is built differently.
    """
    for number, source_number in enumerate(layers):
        if not 0 <= source_number < len(target.layers):
            raise JobError(
                f"init_from_target names layer {source_number}: the target has layers 0 to"
                f" {len(target.layers) - 1}"
            )
        source, mine = target.layers[source_number], drafter.layers[number]
        for name in (*_MATRICES, *_OPTIONAL):
            given = _weight(source, name)
            if given is None and name in _OPTIONAL:
                continue
            wanted = _weight(mine, name)
            assert wanted is not None
            if given is None or given.shape != wanted.shape:
                found = "no such weight" if given is None else f"shape {tuple(given.shape)}"
                raise JobError(
                    f"init_from_target: layer {source_number} of the target has {found} for {name},"
                    f" the drafter needs {tuple(wanted.shape)}; leave init_from_target out"
                )
            wanted.copy_(given)
        _check_same(number, source_number, mine, source)
    final = _weight(target.model.get_decoder(), "norm")
    if final is not None and final.shape == drafter.norm.weight.shape:
        drafter.norm.weight.copy_(final)


def _check_same(number: int, source_number: int, mine: nn.Module, source: nn.Module) -> None:
    """Refuse a layer that would mean something else with the same weights.

    Gemma has norms more than the drafter, and its norms scale by 1 + weight; a bias has no place in the
    drafter, and a layer without it is another one.
    """
    copied = {f"{name}.weight" for name in (*_MATRICES, *_OPTIONAL)}
    more = sorted({name for name, _ in source.named_parameters()} - copied)
    weight = _weight(mine, "input_layernorm")
    x = torch.linspace(-2.0, 2.0, len(weight)).to(weight)
    for name in ("input_layernorm", "post_attention_layernorm"):
        theirs = getattr(source, name)(x.to(_weight(source, name)))
        if not torch.allclose(theirs.to(x), getattr(mine, name)(x), rtol=0.05, atol=0.05):
            more.append(f"another kind of {name}")
    if more:
        raise JobError(
            f"init_from_target: layer {source_number} of the target has {', '.join(more[:3])}, which drafter"
            f" layer {number} lacks; leave init_from_target out"
        )


def _weight(module: nn.Module, name: str) -> Any:
    """The weight of a submodule by its dotted name, or None."""
    for part in name.split("."):
        if not hasattr(module, part):
            return None
        module = getattr(module, part)
    return getattr(module, "weight", None)
