"""Floating-point operations of a drafter's training step and of a target's forward pass, by formula.

Counted is the useful work, 2 a multiply-add, once forward and twice backward (by the input and by the
weight), whatever is recomputed and however much of a tile a mask leaves unused:

    fc            4 C W D                         forward and by the weight; the features are frozen
    layers        6 L [(C + Q) 2gd D + Q (2 hd D + 3 F D)]      k and v of context and block; q, o, the MLP
    attention     12 L hd S                       S: pairs of a query and a key that it sees
    head          4 A (B - 1) D V                 forward and by the input; the head is frozen

C context tokens, Q = A B block tokens, D width, W features, L layers, h heads, g key/value heads, d head
size, F the MLP's width, V vocabulary. Norms, rotary, softmax, AdamW are left out: they move bytes.

A target's pass for features is 2 for each number of the matrices of the layers that run (of experts, the
share that a token is sent to), for each real token, and 4 h d for each pair of a token and one that it sees
in each layer, causally and over the whole document, whatever a window leaves out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from remote_payload.train.drafter import DrafterConfig
from remote_payload.train.target import Target, text_config
from remote_payload.train.target_config import size_of


def step_flops(config: DrafterConfig, context: int, anchors: int, pairs: float) -> float:
    """Useful work of one packed row.

    Args:
        context: C. anchors: A. pairs: S, over all queries; for one document with anchors spread evenly,
            Q (C / 2 + B).
    """
    queries = anchors * config.block_size
    width, heads, kv = config.width, config.heads * config.head_dim, config.kv_heads * config.head_dim
    features = len(config.tap_layers) * width
    layer = (context + queries) * 2 * kv * width + queries * (2 * heads * width + 3 * config.ffn * width)
    return (
        4.0 * context * features * width
        + 6.0 * config.layers * layer
        + 12.0 * config.layers * heads * pairs
        + 4.0 * anchors * (config.block_size - 1) * width * config.vocabulary
    )


@dataclasses.dataclass(frozen=True, slots=True)
class ForwardWork:
    """What a target's forward pass for features takes."""

    per_token: float
    per_pair: float

    @classmethod
    def of(cls, target: Target, last_hidden: bool = False) -> ForwardWork:
        """Of the layers up to the last tap, or with `last_hidden` of all."""
        config = text_config(target.model.config)
        layers = list(target.layers)[: None if last_hidden else max(target.tap_layers) + 1]
        experts = next((n for n in (size_of(config, name) for name in _EXPERTS) if n), 1)
        chosen = size_of(config, "num_experts_per_tok") or experts
        numbers = 0.0
        for layer in layers:
            for name, parameter in layer.named_parameters():
                if parameter.ndim > 1:
                    numbers += parameter.numel() * (chosen / experts if ".experts." in name else 1.0)
        heads = size_of(config, "num_attention_heads") or 0
        width = size_of(config, "head_dim") or config.hidden_size // max(1, heads)
        return cls(2.0 * numbers, 4.0 * heads * width * len(layers))

    def flops(self, lengths: Sequence[int]) -> float:
        """Useful work of a batch of documents of these `lengths` in tokens."""
        pairs = sum(length * (length + 1) / 2 for length in lengths)
        return self.per_token * sum(lengths) + self.per_pair * pairs


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""What families call the number of experts of a layer."""
