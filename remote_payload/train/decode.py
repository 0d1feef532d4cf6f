"""Speculative decoding with a drafter, and plain decoding of the same target: the only honest evaluation.

Greedy, one text at a time, both sides with a KV cache. A round: the drafter fills a block [last token,
MASK...] in one pass; the target reads the block in one pass; the run of drafted tokens that equals the
target's own choices is accepted, and the target's next choice comes on top. tau of a round is accepted + 1.
Greedy text equals the target's own token for token, but for ties: reading a block and reading tokens one by
one round differently, so a first difference where the target's two best logits lie closer than `allowed_gap`
is a tie and no mismatch. Several texts at once would be cheaper on a GPU, but they accept different numbers
of tokens, and transformers' caches cannot take back more of one row than of another; with padding between
them, positions and windows would no longer be those of plain decoding.

Shapes: S context tokens, B block size, D width, W features, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
import time

import torch
from torch import Tensor

from remote_payload.train.drafter import Drafter
from remote_payload.train.target import Target
from remote_payload.train.target_cache import TargetCache

TIE_GAP_FLOAT32 = 1e-3
"""Gap of the two best float32 logits below which two ways to compute them may choose differently."""

ULP_OCTAVE = 16.0
"""From here to twice this, one step of bfloat16 is 0.125; it doubles with every doubling above."""


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
    best: list[float] = dataclasses.field(default_factory=list)
    """The best logit at each token; plain decoding only."""


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """Where a text first parts from the target's own."""

    place: int
    """Of the first token that differs, from 0."""
    gap: float
    """Between the target's two best logits there; infinite where one text just ends."""
    best: float
    """The target's best logit there."""


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
        cache = TargetCache(self._target)
        logits = cache.read(prompt, last=1)[-1]
        decoded = Decoded(tokens=[], seconds=0.0)
        while True:
            best, second = logits.float().topk(2).values.tolist()
            token = int(logits.argmax())  # of equal ones the first, as for a block; topk names any of them
            decoded.tokens.append(token)
            decoded.gaps.append(best - second)
            decoded.best.append(best)
            if token in self._ends or len(decoded.tokens) == self._most:
                break
            logits = cache.read(torch.tensor([token], device=prompt.device))[-1]
        self._target.forget_taps()
        decoded.seconds = time.perf_counter() - start
        return decoded

    @torch.no_grad()
    def speculative(self, prompt: Tensor, drafter: Drafter) -> Decoded:
        """The same text by rounds of drafting and verification, after `prompt` [S]."""
        start = time.perf_counter()
        config, device = drafter.config, prompt.device
        embedding, output = self._target.embedding, self._target.output
        dtype = drafter.fc.weight.dtype
        cache = TargetCache(self._target)
        token = int(cache.read(prompt, last=1)[-1].argmax())
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
            block[1:] = output.choice(hidden[1:])
            own = cache.read_block(block).argmax(-1)
            taps = self._target.tapped()[0]
            given = self._accept(block[1:].tolist(), own.tolist())
            cache.keep(len(given))
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


def first_difference(plain: Decoded, other: Decoded) -> Difference | None:
    """Where `other` parts from the target's own text; None when they are equal."""
    if plain.tokens == other.tokens:
        return None
    for place, (mine, theirs) in enumerate(zip(plain.tokens, other.tokens, strict=False)):
        if mine != theirs:
            return Difference(place, plain.gaps[place], plain.best[place])
    return Difference(min(len(plain.tokens), len(other.tokens)), math.inf, 0.0)


def allowed_gap(best: float, dtype: torch.dtype, bound: float) -> float:
    """The widest gap between the two best logits at which rounding explains another choice.

    In 16 bits it is `bound` for logits below 32, and doubles with every doubling of the best logit above
    that, as the steps between bfloat16 numbers do. In float32 it is `TIE_GAP_FLOAT32` whatever the bound.
    """
    if dtype == torch.float32:
        return TIE_GAP_FLOAT32
    octaves = math.floor(math.log2(max(abs(best), ULP_OCTAVE) / ULP_OCTAVE))
    return float(bound * 2**octaves)


def _grown(
    context: list[tuple[Tensor, Tensor]], new: list[tuple[Tensor, Tensor]]
) -> list[tuple[Tensor, Tensor]]:
    if not context:
        return new
    return [
        (torch.cat([keys, k]), torch.cat([values, v]))
        for (keys, values), (k, v) in zip(context, new, strict=True)
    ]
