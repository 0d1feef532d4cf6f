"""The shapes that are measured: drafters for Qwen3-8B, Qwen3-4B and SmolLM2-135M (as `bench.train_smollm2`
trains it), and a small one that only shows life."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A drafter over one packed row."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    target_layers: int
    layers: int = 5
    taps: int = 5
    context: int = 8192
    anchors: int = 512
    block_size: int = 16

    @property
    def queries(self) -> int:
        """Q, block tokens of a row."""
        return self.anchors * self.block_size


SHAPES = {
    "8b": Shape(
        width=4096, heads=32, kv_heads=8, head_dim=128, ffn=12288, vocabulary=151936, target_layers=36
    ),
    "4b": Shape(
        width=2560, heads=32, kv_heads=8, head_dim=128, ffn=9728, vocabulary=151936, target_layers=36
    ),
    "smollm2": Shape(
        width=576,
        heads=9,
        kv_heads=3,
        head_dim=64,
        ffn=1536,
        vocabulary=49152,
        target_layers=30,
        context=32768,
        anchors=2048,
    ),
    "tiny": Shape(
        width=64,
        heads=4,
        kv_heads=2,
        head_dim=16,
        ffn=128,
        vocabulary=512,
        target_layers=6,
        layers=2,
        taps=3,
        context=512,
        anchors=16,
    ),
}
