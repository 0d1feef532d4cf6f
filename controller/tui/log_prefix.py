"""The rank or the thread that a line of a log names at its beginning, where loggers put it."""

from __future__ import annotations

import re

PREFIX = re.compile(
    r"\s*(?:\[?[\d/T:.,-]{8,26}\]?\s+){0,2}\[?((?:rank|default|drafter|target|replica|reader|evaluator|worker)"
    r"[ -]?\d*)\]?[:\s]",
    re.IGNORECASE,
)


def prefix_of(text: str) -> str:
    """The rank or thread that a line names at its beginning: `rank0`, `drafter-1`; empty: none."""
    found = PREFIX.match(text[:80])
    return found[1].lower().replace(" ", "-").rstrip("-") if found else ""
