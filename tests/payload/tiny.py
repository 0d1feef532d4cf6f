"""A tiny real run: a random Qwen3 of a few thousand parameters and a small Arrow dataset, on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 97
MASK = 96


def write_model(folder: Path, **changes: Any) -> Path:
    """Save a random Qwen3 (6 layers, width 32) into `folder`."""
    torch.manual_seed(1)
    config = Qwen3Config(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 512,
            "eos_token_id": 1,
            "pad_token_id": 0,
            "tie_word_embeddings": True,
            **changes,
        }
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def write_arrow(
    path: Path, samples: list[list[int]], prompts: list[int], kinds: list[str] | None = None
) -> Path:
    """Write an Arrow IPC file of `samples` with their prompt lengths."""
    columns = {
        "input_ids": pa.array(samples, pa.list_(pa.int32())),
        "prompt_length": pa.array(prompts, pa.int32()),
        "kind": pa.array(kinds or ["all"] * len(samples)),
    }
    table = pa.table(columns)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return path


def random_samples(
    count: int, seed: int = 0, low: int = 12, high: int = 60
) -> tuple[list[list[int]], list[int]]:
    """`count` samples of random ids, and a prompt length of each."""
    random = np.random.default_rng(seed)
    lengths = random.integers(low, high, count)
    samples = [random.integers(2, MASK, n).tolist() for n in lengths]
    return samples, [int(random.integers(2, n - 4)) for n in lengths]


def job_values(folder: Path, **changes: Any) -> dict[str, Any]:
    """Keys of a job over a model and a dataset that are written into `folder`."""
    samples, prompts = random_samples(24)
    held, held_prompts = random_samples(4, seed=9)
    if not (folder / "model").exists():
        write_model(folder / "model")
    return {
        "target": str(folder / "model"),
        "targets": ["cpu"],
        "drafters": ["cpu"],
        "dataset": str(write_arrow(folder / "train.arrow", samples, prompts)),
        "held_out": str(write_arrow(folder / "held.arrow", held, held_prompts, ["one", "two"] * 2)),
        "token_budget": 128,
        "max_batch": 4,
        "bucket_edges": [0, 24, 40, 64],
        "layers": 1,
        "block_size": 4,
        "mask_token_id": MASK,
        "taps": 3,
        "anchors": 16,
        "learning_rate": 1e-2,
        "steps": 6,
        "eval_prompts": 4,
        "eval_max_new_tokens": 8,
        "execution": "eager",
        "cpu_threads": 1,
        **changes,
    }
