"""Speculative decoding with a drafter, and plain decoding of the same target: the only honest evaluation.

Greedy, one text at a time, both sides with a KV cache, plain SDPA. A round: the drafter fills a block
[last token, MASK...] in one pass; the target reads the block in one pass; the run of drafted tokens that
equals the target's own choices is accepted, and the target's next choice comes on top. tau of a round is
accepted + 1. Greedy text equals the target's own token for token, but for ties: reading a block and reading
tokens one by one round differently, so a first difference where the target's two best logits lie closer
than a stated gap is a tie and no mismatch.

Shapes: S context tokens, B block size, D width, W features, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import time

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from remote_payload.train.drafter import Drafter
from remote_payload.train.target import Target

TIE_GAP = {torch.float32: 1e-3, torch.bfloat16: 0.125, torch.float16: 0.125}
"""Gap of the two best logits below which two ways to compute them may choose differently."""


@dataclasses.dataclass(slots=True)
class Decoded:
    """One decoded text."""

    tokens: list[int]
    """New tokens, up to and with the end token."""
    seconds: float
    rounds: list[int] = dataclasses.field(default_factory=list)
    """Tokens that each round gave (accepted + 1); empty for plain decoding."""
    gaps: list[float] = dataclasses.field(default_factory=list)
    """Gap between the two best logits at each token; plain decoding only."""


class Decoder:
    """Decodes prompts with one target and, for speculation, one drafter on the same device."""

    def __init__(self, target: Target, ends: set[int], most: int) -> None:
        """`ends` are the ids that end a text, `most` the most new tokens."""
        self._target = target
        self._ends = ends
        self._most = most

    @torch.no_grad()
    def plain(self, prompt: Tensor) -> Decoded:
        """The target's own greedy text after `prompt` [S]."""
        start = time.perf_counter()
        cache = self._new_cache()
        logits = self._target.logits(prompt[None], cache)[0, -1]
        decoded = Decoded(tokens=[], seconds=0.0)
        while True:
            best = logits.float().topk(2)
            token = int(best.indices[0])
            decoded.tokens.append(token)
            decoded.gaps.append(float(best.values[0] - best.values[1]))
            if token in self._ends or len(decoded.tokens) == self._most:
                break
            logits = self._target.logits(torch.tensor([[token]], device=prompt.device), cache)[0, -1]
        self._target.tapped()
        decoded.seconds = time.perf_counter() - start
        return decoded

    @torch.no_grad()
    def speculative(self, prompt: Tensor, drafter: Drafter) -> Decoded:
        """The same text by rounds of drafting and verification, after `prompt` [S]."""
        start = time.perf_counter()
        config, device = drafter.config, prompt.device
        embedding, head = self._target.embedding, self._target.head
        dtype = drafter.fc.weight.dtype
        cache = self._new_cache()
        token = int(self._target.logits(prompt[None], cache)[0, -1].argmax())
        features = self._target.tapped()[0]
        decoded = Decoded(tokens=[token], seconds=0.0)
        context: list[tuple[Tensor, Tensor]] = []
        read = len(prompt)  # tokens in the target's cache; the newest token is not among them
        while token not in self._ends and len(decoded.tokens) < self._most:
            new = torch.arange(read - len(features), read, device=device)
            context = _grown(context, drafter.context(features.to(dtype), new))
            block = torch.full((config.block_size,), config.mask_token_id, device=device)
            block[0] = token
            positions = torch.arange(read, read + config.block_size, device=device)
            hidden = drafter.blocks(embedding(block).to(dtype), positions, context, None)
            block[1:] = F.linear(hidden[1:].to(head.dtype), head).argmax(-1)
            own = self._target.logits(block[None], cache)[0].argmax(-1)
            taps = self._target.tapped()[0]
            given = self._accept(block[1:].tolist(), own.tolist())
            _crop(cache, config.block_size - len(given))
            features = taps[: len(given)]
            read += len(given)
            token = given[-1]
            decoded.tokens += given
            decoded.rounds.append(len(given))
        decoded.tokens = decoded.tokens[: self._most]
        decoded.seconds = time.perf_counter() - start
        return decoded

    def _accept(self, drafted: list[int], own: list[int]) -> list[int]:
        """The tokens of a round: `drafted` [B-1] as far as it equals `own` [B], then the target's next."""
        given: list[int] = []
        for guess, choice in zip([*drafted, None], own, strict=True):
            given.append(choice)
            if guess != choice or choice in self._ends:
                break
        return given

    def _new_cache(self) -> DynamicCache:
        cache = DynamicCache(config=self._target.model.config)
        record = getattr(cache, "activate_past_recording", None)
        if record:  # sliding-window and linear-attention layers can only be cropped after it
            record()
        return cache


def differs(plain: Decoded, other: Decoded, dtype: torch.dtype) -> bool:
    """Whether `other` is another text than the target's own, ties aside."""
    if plain.tokens == other.tokens:
        return False
    pairs = zip(plain.tokens, other.tokens, plain.gaps, strict=False)
    gap = next((gap for mine, theirs, gap in pairs if mine != theirs), None)
    return gap is None or gap >= TIE_GAP[dtype]


def _grown(
    context: list[tuple[Tensor, Tensor]], new: list[tuple[Tensor, Tensor]]
) -> list[tuple[Tensor, Tensor]]:
    if not context:
        return new
    return [
        (torch.cat([keys, k]), torch.cat([values, v]))
        for (keys, values), (k, v) in zip(context, new, strict=True)
    ]


def _crop(cache: DynamicCache, tokens: int) -> None:
    """Take back the last `tokens` of the cache; a positive size is refused by recent transformers."""
    if tokens:
        cache.crop(-tokens)
