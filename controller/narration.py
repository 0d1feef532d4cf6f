"""What dflashctl says beside its data: lines on stderr, and how many of them (`--quiet`, `--verbose`).

Errors of places hold what a server, a login or a payload said: no escape sequence of it leaves this module.

Warnings, errors and news of the connection are said always: `--quiet` leaves out what merely tells how far
things are. `--verbose` adds the commands that are run elsewhere, and where an error came from.
"""

from __future__ import annotations

import enum
import sys
import traceback
from collections.abc import Callable

from controller.text import safe_lines

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
    """A line of narration, or a table; what begins with `warning:` and the like also when quiet."""
    if _loudness > Loudness.QUIET or text.startswith(_ALWAYS):
        _print(text)


def detail(text: str) -> None:
    """One line for `--verbose`."""
    if _loudness >= Loudness.VERBOSE:
        _print(f"+ {text}")


def explain(error: BaseException) -> None:
    """Where an error came from, for `--verbose`."""
    if _loudness >= Loudness.VERBOSE:
        _print("".join(traceback.format_exception(error)))


def _print(text: str) -> None:
    print("\n".join(safe_lines(text)), file=sys.stderr, flush=True)


def is_quiet() -> bool:
    """Whether progress is not to be shown either."""
    return _loudness is Loudness.QUIET
