"""tau on held-out prompts by real speculative decoding, and the check that its text is the target's own.

Runs in a thread of its own on a copy of the drafter's weights and beside a target thread on the same target,
so that training goes on meanwhile.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from remote_payload.train.dataset import Dataset
from remote_payload.train.decode import Decoded, Decoder, differs
from remote_payload.train.drafter import Drafter, DrafterConfig
from remote_payload.train.target import Target


class LossyDecoding(RuntimeError):
    """Speculative greedy text differs from the target's own: a bug, never a matter of training."""


@dataclasses.dataclass(frozen=True, slots=True)
class HeldOutPrompt:
    """A prompt that training never sees."""

    ids: list[int]
    kind: str


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """One evaluation; `record` is its event."""

    tau: float
    """Mean tokens of a round, over all rounds."""
    record: dict[str, Any]


def held_out_prompts(dataset: Dataset, count: int, vocabulary: int) -> list[HeldOutPrompt]:
    """`count` prompts (fewer if there are fewer), taken from all kinds in turn.

    A prompt is what stands before the first supervised token. Samples where that is nothing, or holds an id
    outside the `vocabulary`, are left out.
    """
    kinds = dataset.texts("kind") or ["all"] * len(dataset)
    by_kind: dict[str, list[list[int]]] = defaultdict(list)
    for sample, kind in enumerate(kinds):
        prompt = dataset.ids(sample)[~np.logical_or.accumulate(dataset.supervised(sample))].tolist()
        if prompt and min(prompt) >= 0 and max(prompt) < vocabulary:
            by_kind[kind].append(prompt)
    order = sorted(
        ((place, kind) for kind, prompts in by_kind.items() for place in range(len(prompts))),
    )
    return [HeldOutPrompt(by_kind[kind][place], kind) for place, kind in order[:count]]


class Evaluation:
    """Evaluates drafters against one target; the target's own texts are decoded once and kept."""

    def __init__(self, prompts: list[HeldOutPrompt], ends: set[int], most: int) -> None:
        self._prompts = prompts
        self._ends = ends
        self._most = most
        self._own: list[Decoded] = []

    def run(
        self, target: Target, drafter: Drafter, step: int, go_on: Callable[[int, int], bool]
    ) -> Report | None:
        """Decode every prompt with `drafter`; None when `go_on(done, all)`, asked after each, says no.

        Raises LossyDecoding in float32, where the texts must be equal; in other types it is counted.
        """
        decoder = Decoder(target, self._ends, self._most)
        dtype = next(target.model.parameters()).dtype
        drafted: list[Decoded] = []
        mismatches = 0
        for number, prompt in enumerate(self._prompts):
            ids = torch.tensor(prompt.ids, device=target.device)
            if len(self._own) == number:
                self._own.append(decoder.plain(ids))
            drafted.append(decoder.speculative(ids, drafter))
            if differs(self._own[number], drafted[-1], dtype):
                mismatches += 1
                if dtype == torch.float32:
                    raise LossyDecoding(
                        f"held-out prompt {number} ({prompt.kind}): speculative text"
                        f" {drafted[-1].tokens} is not the target's own {self._own[number].tokens}"
                    )
            if not go_on(number + 1, len(self._prompts)):
                return None
        return self._report(drafted, step, mismatches, drafter.config.block_size)

    def _report(self, drafted: list[Decoded], step: int, mismatches: int, block_size: int) -> Report:
        rounds = [given for text in drafted for given in text.rounds]
        macro = [mean(text.rounds) for text in drafted if text.rounds]
        by_kind: dict[str, list[int]] = defaultdict(list)
        count: dict[str, int] = defaultdict(int)
        for prompt, text in zip(self._prompts, drafted, strict=True):
            by_kind[prompt.kind] += text.rounds
            count[prompt.kind] += 1
        seconds = sum(text.seconds for text in drafted)
        tokens = sum(len(text.tokens) for text in drafted)
        plain_seconds = sum(text.seconds for text in self._own)
        record = {
            "step": step,
            "tau": round(mean(rounds), 4),
            "tau_macro": round(mean(macro), 4),
            "acceptance": [
                round(mean([float(given > place) for given in rounds]), 4) for place in range(1, block_size)
            ],
            "prompts": len(drafted),
            "tokens": tokens,
            "mismatches": mismatches,
            "by_kind": {
                kind: {"tau": round(mean(given), 4), "prompts": count[kind]}
                for kind, given in sorted(by_kind.items())
            },
            "tokens_per_s": round(tokens / seconds, 2),
            "plain_tokens_per_s": round(sum(len(text.tokens) for text in self._own) / plain_seconds, 2),
            "seconds": round(seconds, 2),
        }
        return Report(tau=mean(rounds), record=record)


def mean(values: list[int] | list[float]) -> float:
    """The mean, or 1.0 of nothing: without a round every token came from the target."""
    return sum(values) / len(values) if values else 1.0


def drafter_with(
    config: DrafterConfig, weights: dict[str, Tensor], device: torch.device, dtype: torch.dtype
) -> Drafter:
    """A drafter of the sizes in `config` on `device` with a copy of `weights`, for decoding."""
    drafter = Drafter(config).to(device, dtype)
    drafter.load_state_dict(weights)
    return drafter.eval().requires_grad_(False)
