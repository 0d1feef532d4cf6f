"""tau and acceptance: what decoding prompts gave, text by text, and the figures made of it.

The figures are sums over texts and nothing else, so texts that several processes decoded make the very
record that one process would have made. The keys of a record are a contract; docs/rundir.md lists them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from remote_payload.train.decode import Decoded, allowed_gap, first_difference


@dataclasses.dataclass(frozen=True, slots=True)
class DecodedText:
    """One prompt, decoded plainly and by rounds of drafting."""

    prompt: int
    """Its number among the prompts, from 0."""
    kind: str
    tokens: int
    """New tokens, by rounds."""
    seconds: float
    rounds: list[int]
    """Tokens that each round gave (accepted + 1)."""
    plain_tokens: int
    plain_seconds: float
    differs_at: int | None = None
    """The first token that is not the target's own; None: the texts are equal."""
    gap: float | None = None
    """Between the target's two best logits there; infinite where one text just ends."""
    most_gap: float | None = None
    """The gap up to which rounding explains it."""

    @classmethod
    def of(
        cls, prompt: int, kind: str, own: Decoded, drafted: Decoded, dtype: torch.dtype, logit_gap: float
    ) -> DecodedText:
        """Compare a text with the target's `own`; `dtype` and `logit_gap` as in `allowed_gap`."""
        parted = first_difference(own, drafted)
        return cls(
            prompt=prompt,
            kind=kind,
            tokens=len(drafted.tokens),
            seconds=drafted.seconds,
            rounds=drafted.rounds,
            plain_tokens=len(own.tokens),
            plain_seconds=own.seconds,
            differs_at=parted.place if parted else None,
            gap=parted.gap if parted else None,
            most_gap=allowed_gap(parted.best, dtype, logit_gap) if parted else None,
        )

    @property
    def not_lossless(self) -> str | None:
        """A sentence when the text is not the target's own and rounding does not explain it."""
        if self.differs_at is None:
            return None
        assert self.gap is not None and self.most_gap is not None
        if self.gap <= self.most_gap:
            return None
        return (
            f"held-out prompt {self.prompt} ({self.kind}): token {self.differs_at} is not the target's own;"
            f" its two best logits are {self.gap:.3g} apart there, and rounding explains up to"
            f" {self.most_gap:.3g}"
        )


def figures(texts: Sequence[DecodedText], block_size: int) -> dict[str, Any]:
    """tau, acceptance, equality and speed of `texts`; a round that gave n tokens accepted n - 1 drafted ones.

    `acceptance` at place k is the share of rounds that accepted k drafted tokens or more,
    `conditional_acceptance` that share among the rounds that accepted k - 1.
    """
    rounds = [given for text in texts for given in text.rounds]
    reached = [sum(given > place for given in rounds) for place in range(block_size)]
    by_kind: dict[str, list[DecodedText]] = defaultdict(list)
    for text in texts:
        by_kind[text.kind].append(text)
    tokens, plain_tokens = (
        sum(values) for values in ([t.tokens for t in texts], [t.plain_tokens for t in texts])
    )
    diverged = [text for text in texts if text.differs_at is not None]
    return {
        "tau": round(pooled(texts), 4),
        "tau_macro": round(macro(texts), 4),
        "acceptance": [round(count / max(1, len(rounds)), 4) for count in reached[1:]],
        "conditional_acceptance": [
            round(count / before, 4) if before else None for before, count in itertools.pairwise(reached)
        ],
        "prompts": len(texts),
        "tokens": tokens,
        "by_kind": {
            kind: {"tau": round(pooled(of), 4), "tau_macro": round(macro(of), 4), "prompts": len(of)}
            for kind, of in sorted(by_kind.items())
        },
        "text_equal": len(texts) - len(diverged),
        "diverged": len(diverged),
        "diverged_allowed": sum(text.not_lossless is None for text in diverged),
        "largest_gap": max((text.gap for text in diverged if text.gap is not None), default=None),
        "tokens_per_s": round(tokens / sum(text.seconds for text in texts), 2),
        "plain_tokens_per_s": round(plain_tokens / sum(text.plain_seconds for text in texts), 2),
    }


def pooled(texts: Sequence[DecodedText]) -> float:
    """Tokens of a round, over all rounds."""
    return _mean([given for text in texts for given in text.rounds])


def macro(texts: Sequence[DecodedText]) -> float:
    """Tokens of a round, each text's own mean counting once, as in the paper."""
    return _mean([_mean(text.rounds) for text in texts if text.rounds])


def _mean(values: Sequence[float]) -> float:
    """The mean, or 1.0 of nothing: without a round every token came from the target."""
    return sum(values) / len(values) if values else 1.0
