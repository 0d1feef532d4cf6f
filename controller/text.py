"""Untrusted bytes to safe text: what a terminal may be given of a remote log, name or traceback.

A log line can hold escape sequences that move the cursor, rename the window or ask the terminal to answer;
a progress bar is one line of 90,000 characters; a multi-byte character can lie across two chunks. What
leaves this module is printable text: no control or bidirectional-override characters, tabs expanded, one
state per `\\r` bar (the last that was not empty), at most `MAX_COLUMNS` characters a line. Rich markup is
not touched: whoever shows a line uses `rich.text.Text` or `markup=False`.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import Final

MAX_COLUMNS: Final = 4096
"""Most characters of one line that a view is given; the mirror keeps every byte."""

KEPT: Final = 4 * MAX_COLUMNS
"""Most raw characters held of one line: escape sequences take some of them."""

_ESCAPE = re.compile(
    r"\x1b(?:"
    r"\[[0-?]*[ -/]*[@-~]?"  # CSI
    r"|[\]PX^_][^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"  # OSC, DCS, SOS, PM, APC up to their end
    r"|[ -/]*[0-~]?)"
    r"|\x9b[0-?]*[ -/]*[@-~]?"
    r"|[\x9d\x90\x98\x9e\x9f][^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
)
# C0 without tab, DEL, C1, line and paragraph separators, marks that reorder text, lone surrogates
_UNSAFE = re.compile(
    "[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)
_PLAIN_CHUNK = re.compile(  # a chunk without any of these needs only to be split
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


def safe_line(text: str) -> str:
    """One line that is safe to show: line ends and other control characters become spaces or vanish."""
    one = " ".join(part for part in map(newest_state, text.replace("\r\n", "\n").split("\n")) if part)
    return shown(one)


def last_line(said: bytes, otherwise: str = "it said nothing") -> str:
    """The last line that is not blank of what a command of the place said, safe to print."""
    lines = said.decode(errors="replace").strip().splitlines()
    return safe_line(lines[-1]) if lines else otherwise


def safe_lines(text: str) -> list[str]:
    """The lines of a text (a traceback), each safe to show."""
    lines = text.replace("\r\n", "\n").split("\n")
    if lines[-1] == "":
        lines.pop()
    return [shown(newest_state(line)) for line in lines]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table for a terminal: every column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


class LineDecoder:
    """Bytes of a log, in pieces of any size, to safe lines.

    Holds at most one unfinished line, and of that no more than it may show.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._state = ""  # the newest state of the unfinished line, raw
        self._shown_before = ""  # its last state that was not empty
        self._dropped = 0  # characters of it that were not kept

    def feed(self, data: bytes) -> list[str]:
        """The lines that `data` completes."""
        return self._split(self._decoder.decode(data))

    def finish(self) -> list[str]:
        """The unfinished line, if there is one: nothing more will come."""
        lines = self._split(self._decoder.decode(b"", final=True))
        if self._state or self._shown_before:
            lines.append(self.partial)
        self._reset()
        return lines

    def restart(self) -> None:
        """Forget the unfinished line: what comes next does not continue it."""
        self._decoder.reset()
        self._reset()

    @property
    def partial(self) -> str:
        """The unfinished line as it stands, safe to show."""
        if self._state.strip() or not self._shown_before:
            return shown(self._state, self._dropped)
        return shown(self._shown_before)

    def _reset(self) -> None:
        self._state = self._shown_before = ""
        self._dropped = 0

    def _split(self, text: str) -> list[str]:
        parts = text.split("\n")
        rest = parts.pop()
        lines: list[str] = []
        if parts:
            self._extend(parts[0])
            lines.append(self.partial)
            self._reset()
            if _PLAIN_CHUNK.search(text) is None:
                lines += [p if len(p) <= MAX_COLUMNS else shown(p) for p in parts[1:]]
            else:
                lines += [shown(newest_state(p)) for p in parts[1:]]
        self._extend(rest)
        return lines

    def _extend(self, text: str) -> None:
        # A \r at the very end may belong to \r\n or be the end of a state: only what follows tells.
        if "\r" in text:
            states = (self._state + text).split("\r")
            self._state = states.pop()
            self._dropped = 0
            for state in reversed(states):
                if state.strip():
                    self._shown_before = state[:KEPT]
                    break
        else:
            self._state += text
        if len(self._state) > KEPT:
            self._dropped += len(self._state) - KEPT
            self._state = self._state[:KEPT]


def newest_state(line: str) -> str:
    """The newest state, of those that are not empty, of a line that `\\r` draws anew (a progress bar)."""
    if "\r" not in line:
        return line
    return next((state for state in reversed(line.split("\r")) if state.strip()), "")


def shown(raw: str, dropped: int = 0) -> str:
    """What may be shown of one state of a line, of which `dropped` characters are not in `raw`."""
    kept = raw[:KEPT]
    if _UNSAFE.search(kept):
        kept = _UNSAFE.sub("", _ESCAPE.sub("", kept))
    kept = kept.expandtabs(8)
    hidden = max(0, len(kept) - MAX_COLUMNS) + max(0, len(raw) - KEPT) + dropped
    if not hidden:
        return kept
    mark = f" … (+{hidden} characters)"
    return kept[: MAX_COLUMNS - len(mark)] + mark
