"""Waiting in tests: for a condition, never for a time, and long enough for any machine."""

from __future__ import annotations

import asyncio
import linecache
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

PATIENCE_S = 60.0
"""However slow a machine is: what has not come about by then never will."""
_LOOK_S = 0.005
T = TypeVar("T")


def until(
    condition: Callable[[], T],
    what: str = "",
    *,
    seen: Callable[[], Any] | None = None,
    seconds: float = PATIENCE_S,
) -> T:
    """The first true value of `condition()`.

    An assertion names `what` was waited for in vain (else it quotes the line that waits) and tells `seen()`,
    or else the last value of the condition: what there was instead.
    """
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, _in_vain(what, seen() if seen else value, seconds)
        time.sleep(_LOOK_S)
    return value


async def until_shown(
    condition: Callable[[], object],
    *,
    seen: Callable[[], Any],
    settle: Callable[[], Awaitable[object]] | None = None,
) -> None:
    """As `until`, for a test whose own event loop has to run meanwhile; `settle` is awaited between looks."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, _in_vain("", seen(), PATIENCE_S)
        await asyncio.sleep(0.02)
        if settle:
            await settle()


def _in_vain(what: str, seen: Any, seconds: float) -> str:
    return f"waited {seconds:g} s for {what or _line_that_waits()}; instead: {seen}"


def _line_that_waits() -> str:
    """The source of the call that waits, past functions that only pass their condition on."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_name.startswith(("until", "wait_")):
        frame = frame.f_back
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
