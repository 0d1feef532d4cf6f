"""Floating-point operations of a drafter's training step, by formula.

Counted is the useful work, 2 a multiply-add, once forward and twice backward (by the input and by the
weight), whatever is recomputed and however much of a tile a mask leaves unused:

    fc            4 C W D                         forward and by the weight; the features are frozen
    layers        6 L [(C + Q) 2gd D + Q (2 hd D + 3 F D)]      k and v of context and block; q, o, the MLP
    attention     12 L hd S                       S: pairs of a query and a key that it sees
    head          4 A (B - 1) D V                 forward and by the input; the head is frozen

C context tokens, Q = A B block tokens, D width, W features, L layers, h heads, g key/value heads, d head
size, F the MLP's width, V vocabulary. Norms, rotary, softmax, AdamW are left out: they move bytes.
"""

from __future__ import annotations

from remote_payload.train.drafter import DrafterConfig


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
