"""Tiny random targets of many families, on disk: what differs between them is what a trainer trips over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

VOCABULARY = 67
WIDTH = 24
LAYERS = 5
WINDOW = 8

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 40,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "tie_word_embeddings": False,
}
NO_HEAD_DIM = {name: value for name, value in SIZES.items() if name != "head_dim"}
MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": LAYERS,  # as deep as the text model: its list of layers must not be taken for it
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SIZES),
    "llama tied": ("Llama", SIZES | {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", NO_HEAD_DIM),
    "qwen3": ("Qwen3", SIZES),
    "qwen3-moe": ("Qwen3Moe", SIZES | MOE),
    "gemma2, windows and soft caps": (
        "Gemma2",
        SIZES | {"sliding_window": WINDOW, "final_logit_softcapping": 4.0},
    ),
    "gemma3, windows": ("Gemma3Text", SIZES | {"sliding_window": WINDOW, "sliding_window_pattern": 2}),
    "mistral, windows": ("Mistral", SIZES | {"sliding_window": WINDOW}),
    "phi, partial rotary and biases": (
        "Phi",
        NO_HEAD_DIM | {"partial_rotary_factor": 0.5, "num_attention_heads": 3, "num_key_value_heads": 3},
    ),
    "glm, partial rotary": ("Glm", SIZES | {"partial_rotary_factor": 0.5}),
    "gpt-oss, sinks and windows": ("GptOss", SIZES | MOE | {"sliding_window": WINDOW}),
    "cohere, scaled logits": ("Cohere", NO_HEAD_DIM | {"logit_scale": 0.25, "tie_word_embeddings": True}),
    "granite, divided logits": (
        "Granite",
        NO_HEAD_DIM | {"logits_scaling": 4.0, "embedding_multiplier": 3.0},
    ),
    "qwen3-next, linear attention": (
        "Qwen3Next",
        SIZES
        | MOE
        | {
            "layer_types": ["linear_attention", "full_attention"] * 2 + ["linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "shared_expert_intermediate_size": 16,
            "decoder_sparse_step": 1,
        },
    ),
    "lfm2, convolutions": (
        "Lfm2",
        NO_HEAD_DIM
        | {
            "layer_types": ["conv", "full_attention"] * 2 + ["conv"],
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "gemma3 in a vision model": ("Gemma3", {}),
    "mistral3 in a vision model": ("Mistral3", {}),
}  # fmt: skip


def write_family(folder: Path, family: str, **changes: Any) -> Path:
    """Save a random model of `family`, one of FAMILIES, whose texts wander, into `folder`."""
    name, values = FAMILIES[family]
    torch.manual_seed(19)
    if name == "Gemma3":
        text = SIZES | {"sliding_window": WINDOW, "sliding_window_pattern": 2} | changes
        ids = {"image_token_index": 64, "boi_token_index": 65, "eoi_token_index": 63}
        config = transformers.Gemma3Config(
            text_config=text, vision_config=VISION, tie_word_embeddings=False, **ids
        )
        model: Any = transformers.Gemma3ForConditionalGeneration(config)
    elif name == "Mistral3":
        text = SIZES | {"model_type": "mistral", "sliding_window": None} | changes
        vision = VISION | {"model_type": "pixtral", "head_dim": 8}
        config = transformers.Mistral3Config(
            text_config=text, vision_config=vision, image_token_index=64, tie_word_embeddings=False
        )
        model = transformers.Mistral3ForConditionalGeneration(config)
    else:
        config = getattr(transformers, f"{name}Config")(**values | changes)
        model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config)
    roughen(model)
    model.save_pretrained(folder)
    settings = {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": 2}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


@torch.no_grad()
def roughen(model: nn.Module) -> None:
    """Weights large enough that greedy text is neither constant nor undecided, and no two layers alike."""
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape)
        parameter.add_(noise * (0.25 if parameter.ndim > 1 else 0.1))
