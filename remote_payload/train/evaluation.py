"""tau on held-out prompts by real speculative decoding, and the check that its text is the target's own.

Needs a target, a drafter and prompts, and nothing of a run: training (`evaluating.py`) and the `evaluate`
command both use it. What is made of the decoded texts stands in `tau.py`.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from remote_payload.train import target_cache
from remote_payload.train.dataset import Dataset
from remote_payload.train.decode import Decoded, Decoder
from remote_payload.train.drafter import Drafter, DrafterConfig
from remote_payload.train.target import Target
from remote_payload.train.tau import DecodedText, figures, pooled
from remote_payload.train.unusable import NO_MASK, NULL, OTHER_LENGTH

LOGIT_GAP = 0.25
"""Widest gap of the two best 16-bit logits at which two readings may choose differently, by default.

Between 16 and 32, where the best logit of most models lies, one step of bfloat16 is 0.125. Read twice, either
logit may move by a step, and in opposite directions: two steps. Measured on SmolLM2-135M-Instruct in
bfloat16, 584 tokens read alone and all at once: the gap changed by 0.125 at the 90th percentile, 0.25 at the
99th, 0.375 at most (best logits up to 43, where the bound is 0.5). Of 16 texts of 40 tokens, read in blocks
of 8, 5 parted, at gaps of 0.25 or less.
"""


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
    not_lossless: tuple[str, ...] = ()
    """One sentence for each text that rounding does not explain: a bug, never a matter of training."""
    texts: tuple[DecodedText, ...] = ()


def held_out_prompts(dataset: Dataset, count: int, vocabulary: int) -> list[HeldOutPrompt]:
    """`count` prompts (fewer if there are fewer), taken from all kinds in turn.

    A prompt is what stands before the first supervised token. Samples where that is nothing, or holds an id
    outside the `vocabulary`, are left out, and those where nothing says what is supervised.
    """
    kinds = dataset.texts("kind") or ["all"] * len(dataset)
    found: list[HeldOutPrompt] = []
    of_kind: Counter[str] = Counter()
    for sample, kind in enumerate(kinds):
        if of_kind[kind] == count or dataset.look(sample, vocabulary) in (NULL, OTHER_LENGTH, NO_MASK):
            continue
        prompt = dataset.ids(sample)[~np.logical_or.accumulate(dataset.supervised(sample))].tolist()
        if prompt and min(prompt) >= 0 and max(prompt) < vocabulary:
            of_kind[kind] += 1
            found.append(HeldOutPrompt(prompt, kind))
    return in_turn(found)[:count]


def in_turn(prompts: Iterable[HeldOutPrompt]) -> list[HeldOutPrompt]:
    """The first of each kind by its name, then the second of each, and so on."""
    place: Counter[str] = Counter()
    keyed = []
    for prompt in prompts:
        keyed.append((place[prompt.kind], prompt.kind, prompt))
        place[prompt.kind] += 1
    return [prompt for *_, prompt in sorted(keyed, key=lambda item: item[:2])]


class Evaluation:
    """Evaluates drafters against one target; the target's own texts are decoded once and kept."""

    def __init__(
        self, prompts: list[HeldOutPrompt], ends: set[int], most: int, logit_gap: float = LOGIT_GAP
    ) -> None:
        """`ends` are the ids that end a text, `most` the most new tokens; `logit_gap` as in `allowed_gap`."""
        self._prompts = prompts
        self._ends = ends
        self._most = most
        self._logit_gap = logit_gap
        self._own: list[Decoded] = []

    def check(self, target: Target) -> None:
        """Raises JobError when `target` cannot be decoded losslessly here."""
        target_cache.check(target)

    def run(
        self,
        target: Target,
        drafter: Drafter,
        step: int = 0,
        go_on: Callable[[int, int], bool] = lambda _done, _of: True,
    ) -> Report | None:
        """Decode every prompt with `drafter`; None when `go_on(done, all)`, asked after each, says no.

        The drafter lies on the target's device, and the target taps the drafter's layers.
        """
        assert target.tap_layers == drafter.config.tap_layers
        began = time.monotonic()
        decoder = Decoder(target, self._ends, self._most)
        drafted: list[Decoded] = []
        for number, prompt in enumerate(self._prompts):
            ids = torch.tensor(prompt.ids, device=target.device)
            if len(self._own) == number:
                self._own.append(decoder.plain(ids))
            drafted.append(decoder.speculative(ids, drafter))
            if not go_on(number + 1, len(self._prompts)):
                return None
        texts = tuple(
            DecodedText.of(number, prompt.kind, own, text, target.dtype, self._logit_gap)
            for number, (prompt, own, text) in enumerate(zip(self._prompts, self._own, drafted, strict=True))
        )
        record = {
            "step": step,
            **figures(texts, drafter.config.block_size),
            "eval_s": round(time.monotonic() - began, 2),
        }
        wrong = tuple(text.not_lossless for text in texts if text.not_lossless)
        return Report(tau=pooled(texts), record=record, not_lossless=wrong, texts=texts)


def drafter_with(
    config: DrafterConfig, weights: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype
) -> Drafter:
    """A drafter of the sizes in `config` on `device` with a copy of `weights`, for decoding."""
    drafter = Drafter.blank(config, device, dtype)
    drafter.load_state_dict(weights)
    return drafter.eval().requires_grad_(False)
