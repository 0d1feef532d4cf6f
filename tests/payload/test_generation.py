"""Decoding with a cache of fixed size says what transformers' own generate says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
)

from remote_payload.tools import generation
from remote_payload.tools.generation import FixedSteps, generate_greedy, greedy, refuse_fixed
from remote_payload.train.target import text_config

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.5,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
PROMPTS = [[1, 9, 2], [1, 10, 11, 12, 13, 14, 15, 16, 17, 2], [5], [7] * 6, [1, 20, 21, 2]]


def model_of(config: Any, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(4)
    model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return model.to(device, dtype).eval()


def silent(_line: str) -> None:
    pass


@pytest.mark.parametrize(
    "config",
    [LlamaConfig(**SIZES), Qwen3Config(**SIZES), LlamaConfig(**SIZES | {"num_key_value_heads": 4})],
    ids=["llama", "qwen3", "without-groups"],
)
def test_a_cache_of_fixed_size_says_what_generate_says(config: Any) -> None:
    model = model_of(config)
    assert refuse_fixed(model) is None
    fixed = FixedSteps(model, 0, silent)
    for prompts, most in ((PROMPTS, 30), (PROMPTS[:1], 1), (PROMPTS, 2)):
        assert fixed.answer(prompts, most) == generate_greedy(model, prompts, most, 0)
    # What a text says in its middle now ends it, and the others go on.
    model.generation_config.eos_token_id = max(fixed.answer(PROMPTS, 30), key=len)[12]
    ended = FixedSteps(model, 0, silent).answer(PROMPTS, 30)
    assert ended == generate_greedy(model, PROMPTS, 30, 0)
    assert min(map(len, ended)) < 30
    assert text_config(model.config)._attn_implementation == "sdpa"


def test_work_that_is_replayed_is_the_same_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU with a graph that calls the step anew: whether the loop around it is right."""
    graphs = []

    class Replayed:
        def __init__(self, work: Any, device: torch.device) -> None:
            self.replay = work
            graphs.append(self)

    monkeypatch.setattr(generation, "Graph", Replayed)
    model = model_of(LlamaConfig(**SIZES))
    fixed = FixedSteps(model, 0, silent)
    fixed._by_graph = True
    for _ in range(2):
        assert fixed.answer(PROMPTS, 30) == generate_greedy(model, PROMPTS, 30, 0)
    assert len(graphs) == 2


def test_a_graph_that_says_something_else_is_not_trusted_and_costs_no_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Frozen:
        def __init__(self, work: Any, device: torch.device) -> None:
            pass

        def replay(self) -> None:
            pass

    monkeypatch.setattr(generation, "Graph", Frozen)
    model = model_of(LlamaConfig(**SIZES))
    lines: list[str] = []
    fixed = FixedSteps(model, 0, lines.append)
    fixed._by_graph = True
    assert fixed.answer(PROMPTS, 30) == generate_greedy(model, PROMPTS, 30, 0)
    assert lines == ["Decoding kernel by kernel: the graph of a step says something else than the step"]


def test_what_does_not_fit_into_the_memory_at_once_is_answered_in_halves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = FixedSteps._answered
    sizes = []

    def small(self: FixedSteps, prompts: Sequence[Sequence[int]], most: int) -> list[list[int]]:
        sizes.append(len(prompts))
        if len(prompts) > 2:
            raise torch.OutOfMemoryError
        return whole(self, prompts, most)

    monkeypatch.setattr(FixedSteps, "_answered", small)
    model = model_of(LlamaConfig(**SIZES))
    fixed = FixedSteps(model, 0, silent)
    for _ in range(2):
        assert fixed.answer(PROMPTS, 12) == generate_greedy(model, PROMPTS, 12, 0)
    assert sizes == [5, 2, 2, 1, 2, 2, 1]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MistralConfig(**SIZES, sliding_window=8), "attend to everything"),
        (GptOssConfig(**SIZES, num_local_experts=2), "attention is"),
        (Qwen3_5TextConfig(**SIZES), ""),
    ],
    ids=["sliding", "sinks", "linear"],
)
def test_a_model_that_needs_more_than_such_a_cache_is_left_to_generate(config: Any, reason: str) -> None:
    assert reason in (refuse_fixed(model_of(config)) or pytest.fail("not refused"))


def test_on_a_cpu_transformers_generates() -> None:
    model = model_of(LlamaConfig(**SIZES))
    assert greedy(model, 0, silent)(PROMPTS, 5) == generate_greedy(model, PROMPTS, 5, 0)


def test_what_fails_with_fixed_steps_is_answered_by_generate_and_said_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Fails:
        def __init__(self, *_given: Any) -> None:
            pass

        def answer(self, *_given: Any) -> None:
            raise RuntimeError("no kernel for this device")

    model = model_of(LlamaConfig(**SIZES))
    expected = generate_greedy(model, PROMPTS, 5, 0)
    lines: list[str] = []
    monkeypatch.setattr(generation, "FixedSteps", Fails)
    monkeypatch.setattr(generation, "on_gpu", lambda _model: True)
    answer = greedy(model, 0, lines.append)
    assert answer(PROMPTS, 5) == answer(PROMPTS, 5) == expected
    assert len(lines) == 1 and "no kernel for this device" in lines[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_a_graph_says_what_plain_steps_say() -> None:
    model = model_of(LlamaConfig(**SIZES | {"head_dim": 16}), "cuda:0")
    lines: list[str] = []
    fixed = FixedSteps(model, 0, lines.append)
    prompts = PROMPTS * 20
    for most in (30, 40):
        assert fixed.answer(prompts, most) == generate_greedy(model, prompts, most, 0)
    assert fixed._by_graph and fixed._proved and not lines
