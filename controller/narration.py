"""What dflashctl says beside its data: lines on stderr, and how many of them (`--quiet`, `--verbose`).

Warnings, errors and news of the connection are said always: `--quiet` leaves out what merely tells how far
things are. `--verbose` adds the commands that are run elsewhere, and where an error came from.
"""

from __future__ import annotations

import enum
import sys
import traceback
from collections.abc import Callable

Say = Callable[[str], None]
"""Told one line of narration."""


class Loudness(enum.IntEnum):
    """How much is said."""

    QUIET = 0
    NORMAL = 1
    VERBOSE = 2


_loudness = Loudness.NORMAL
_ALWAYS = ("warning:", "error:", "hint:", "notify:")


def set_loudness(loudness: Loudness) -> None:
    """Say as much from now on."""
    global _loudness
    _loudness = loudness


def say(text: str) -> None:
    """One line of narration; one that begins with `warning:` and the like is said even when quiet."""
    if _loudness > Loudness.QUIET or text.startswith(_ALWAYS):
        print(text, file=sys.stderr, flush=True)


def detail(text: str) -> None:
    """One line for `--verbose`."""
    if _loudness >= Loudness.VERBOSE:
        print(f"+ {text}", file=sys.stderr, flush=True)


def explain(error: BaseException) -> None:
    """Where an error came from, for `--verbose`."""
    if _loudness >= Loudness.VERBOSE:
        print("".join(traceback.format_exception(error)), end="", file=sys.stderr, flush=True)


def is_quiet() -> bool:
    """Whether progress is not to be shown either."""
    return _loudness is Loudness.QUIET
