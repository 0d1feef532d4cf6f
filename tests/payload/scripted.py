"""A drafter that is told the text, and how often to be right, so that every kind of round happens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from remote_payload.train.drafter import Drafter, DrafterConfig
from remote_payload.train.output_head import OutputHead
from remote_payload.train.target import Target, text_config

MASK = 66


def hidden_of_every_token(output: OutputHead) -> Tensor:
    """For each token a hidden state [V, D] whose first choice it is; found by a perceptron, one per token."""
    weight = output.weight.float()
    hidden = weight.clone()
    tokens = torch.arange(len(weight))
    for _ in range(2000):
        chosen = output.choice(hidden)
        wrong = chosen != tokens
        if not wrong.any():
            break
        hidden[wrong] += (weight - weight[chosen])[wrong]
    return hidden


class Scripted(Drafter):
    """Drafts `text`: in round n its first `right[n % len(right)]` guesses are so, and then others."""

    def __init__(
        self, target: Target, block_size: int, prompt: int, text: list[int], right: Sequence[int]
    ) -> None:
        config = DrafterConfig.for_target(
            text_config(target.model.config),
            layers=1,
            tap_layers=target.tap_layers,
            block_size=block_size,
            mask_token_id=MASK,
        )
        super().__init__(config)
        self.hidden = hidden_of_every_token(target.output)
        self.told = target.output.choice(
            self.hidden
        )  # the tokens that could be named, where they are themselves
        self.prompt, self.text, self.right = prompt, text, itertools.cycle(right)
        self.asked: list[int] = []
        self.eval().requires_grad_(False)

    def blocks(self, x: Tensor, positions: Tensor, context: Any, mask: Any) -> Tensor:
        place = int(positions[0]) - self.prompt
        right = next(self.right)
        self.asked.append(right)
        hidden = torch.zeros(len(x), self.hidden.shape[1])
        for k in range(1, len(x)):
            token = self.text[place + k] if place + k < len(self.text) else 3
            hidden[k] = self.hidden[token if k <= right else (token + 1) % len(self.hidden)]
        return hidden
