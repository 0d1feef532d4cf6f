"""Targets with random weights, for measurements to which what they say is nothing."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from bench.shapes import Shape
from remote_payload.train.fused_norms import fuse_norms
from remote_payload.train.target import Target

_FAMILIES: dict[str, Any] = {"llama": LlamaForCausalLM, "qwen3": Qwen3ForCausalLM}


def qwen3_config(shape: Shape) -> Qwen3Config:
    """A Qwen3 of the shape's width and depth."""
    return Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.target_layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=True,
    )


def random_target(config: Any, device: torch.device, dtype: torch.dtype, taps: tuple[int, ...]) -> Target:
    """The Llama or Qwen3 of a Hugging Face config, made on `device`.

    Main thread only, since it sets torch's default type meanwhile.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model: Any = _FAMILIES[config.model_type](config)
    finally:
        torch.set_default_dtype(before)
    if device.type == "cuda":
        fuse_norms(model)  # as `Target.load` does
        torch.cuda.synchronize(device)
    return Target(model.to(device), taps)
