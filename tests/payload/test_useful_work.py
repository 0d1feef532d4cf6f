"""Useful operations: counted as torch counts them, and told as a share of what the GPUs can do."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from remote_payload.train import useful_work
from remote_payload.train.batch import BatchMaker, RowShape
from remote_payload.train.dataset import Dataset
from remote_payload.train.flops import ForwardWork
from remote_payload.train.mask import dense_mask
from remote_payload.train.target import Target
from remote_payload.train.useful_work import UsefulWork, ceiling_of, matmul_ceiling
from tests.payload.tiny import MASK, VOCABULARY, random_samples, write_arrow, write_model

CPU = torch.device("cpu")


def products(target: Target, last_hidden: bool = False) -> int:
    """What torch counts of all matrix products of a pass over 3 x 40 tokens, attention aside."""
    with FlopCounterMode(display=False) as counter:
        target.features(torch.ones(3, 40, dtype=torch.int64), last_hidden)
    counts = {str(op): int(count) for op, count in counter.get_flop_counts()["Global"].items()}
    return sum(count for op, count in counts.items() if "attention" not in op and "bmm" not in op)


@pytest.mark.parametrize("last_hidden", [False, True])
def test_the_work_of_a_dense_targets_pass_is_that_of_its_matrix_products(
    tmp_path: Path, last_hidden: bool
) -> None:
    target = Target.load(write_model(tmp_path / "m"), (1, 3), device=CPU, dtype=torch.float32)
    work = ForwardWork.of(target, last_hidden)
    assert products(target, last_hidden) == work.per_token * 3 * 40
    assert work.per_pair == 4 * 4 * 8 * (6 if last_hidden else 4)
    assert work.flops([2, 3]) == work.per_token * 5 + work.per_pair * (3 + 6)


def test_of_experts_those_count_that_a_token_is_sent_to() -> None:
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    sizes |= {"moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2}
    config = Qwen3MoeConfig(**sizes)
    whole = ForwardWork.of(Target(Qwen3MoeForCausalLM(config), (1, 2)))
    attention = 32 * (2 * 4 * 8 + 2 * 2 * 8)
    per_layer = attention + 32 * 8 + 2 * 3 * 32 * 16  # projections, the router, two experts of three matrices
    assert whole.per_token == 2 * 3 * per_layer


def test_pairs_of_a_row_are_the_entries_of_its_mask(tmp_path: Path) -> None:
    shape = RowShape(token_budget=128, anchors=16, block_size=4, mask_token_id=MASK, gamma=4.0)
    samples, prompts = random_samples(24)
    dataset = Dataset.open(write_arrow(tmp_path / "a.arrow", samples, prompts))
    maker = BatchMaker(dataset, shape, seed=0, vocabulary=VOCABULARY, pad_id=0)
    for chosen in ([3], [0, 1], [5, 6, 7]):
        batch = maker.make(np.asarray(chosen), 0, 0, 0)
        mask = dense_mask(batch.row.starts, batch.row.anchors, 128, 4)
        in_use = mask.view(16, 4, -1)[: batch.drawn]
        assert batch.drawn and batch.pairs == int(in_use.sum())


def test_the_share_is_of_the_time_since_it_was_last_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    useful = UsefulWork(ceiling=100.0)
    useful.add(30.0)
    useful.add(45.0)
    now[0] += 3
    assert useful.share() == pytest.approx(75 / 300)
    useful.add(50.0)
    now[0] += 1
    assert useful.share() == pytest.approx(0.5)
    now[0] += 1
    assert useful.share() == 0.0
    assert useful.share() is None  # no time has passed
    assert UsefulWork().share() is None


def test_the_ceiling_counts_each_gpu_once_and_is_unknown_with_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def measured(device: torch.device) -> float:
        asked.append(str(device))
        return 1e12

    monkeypatch.setattr(useful_work, "matmul_ceiling", measured)
    monkeypatch.setattr(useful_work, "on_device", lambda _device: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert ceiling_of(["cuda:0", "cuda:1", "cuda:1"]) == 2e12
    assert asked == ["cuda:0", "cuda:1"]
    assert ceiling_of(["cpu"]) is None

    def fails(error: RuntimeError) -> None:
        def failing(_device: Any) -> float:
            raise error

        monkeypatch.setattr(useful_work, "matmul_ceiling", failing)

    for no_room in (torch.OutOfMemoryError(), RuntimeError("CUBLAS_STATUS_ALLOC_FAILED in cublasCreate")):
        fails(no_room)
        assert ceiling_of(["cuda:0"]) is None
    fails(RuntimeError("an illegal memory access"))
    with pytest.raises(RuntimeError, match="illegal"):
        ceiling_of(["cuda:0"])


@pytest.mark.slow
def test_a_product_of_known_work_is_timed() -> None:
    assert matmul_ceiling(CPU) > 1e8
