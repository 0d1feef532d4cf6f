"""What the log view is given: the lines around the place where it stands, and what is known of all others."""

from __future__ import annotations

import dataclasses

from controller.log_spans import Row


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """How a search or a filter stands: how many lines match so far, and whether that is all of them."""

    count: int = 0
    done: bool = True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogPage:
    """Lines in a row, of one moment; a place in the log is the byte where its line begins."""

    ticket: int = 0
    """The number of the view's request that it answers: one that answers another is passed over but for its
    `note`."""
    rows: tuple[Row, ...] = ()
    at_start: bool = True
    """Whether there is nothing to show before the rows."""
    at_end: bool = True
    goto: int | None = None
    """The line that was looked for: the view goes there."""
    end: int = 0
    """Bytes of the log."""
    missing: int = 0
    """Bytes of it that are not here."""
    new_lines: int = 0
    """Lines that came since the view stopped following."""
    replaced: bool = False
    """The log began anew; these rows are of the old one."""
    restarts: int = 0
    search: Found | None = None
    filter: Found | None = None
    prefixes: tuple[str, ...] = ()
    """Ranks and threads that lines of it began with, seen so far."""
    asked: bool = False
    """Whether the mirror was asked for bytes that are not here."""
    note: str = ""
    """What is to be said to the user, once."""
