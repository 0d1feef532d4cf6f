"""How one line of a log looks: errors by their words, its clock, its rank, its colours."""

from __future__ import annotations

import re

from rich.style import Style
from rich.text import Text

from controller.figures import amount
from controller.log_spans import Row
from controller.tui.ansi import coloured
from controller.tui.lines import line
from controller.tui.log_prefix import PREFIX
from controller.tui.palette import BAD, GOOD, LABEL, PLAIN, SKY, TAB_ON, WARN

BAD_LINE = re.compile(
    r"\b(error|exception|traceback|fatal|killed|out of memory|nan)\b|\w+(Error|Exception)\b", re.IGNORECASE
)
_WARN_LINE = re.compile(r"\b(warn(ing)?|deprecated|skipp(ed|ing)|retry(ing)?|recompil\w+)\b", re.IGNORECASE)
_GOOD_LINE = re.compile(r"\b(ready|checkpoint|finished|evaluation)\b", re.IGNORECASE)
_CLOCK = re.compile(r"\[?(\d{4}-\d\d-\d\d[T ])?\d\d:\d\d:\d\d([.,]\d+)?\]? ")

_NAME = Style(color=SKY)


def gap_text(row: Row) -> str:
    """What stands in the place of bytes that are not here."""
    return f"⋯ {amount(row.stop - row.start)} older bytes are not on this machine: o copies them ⋯"


def styled(row: Row, pattern: re.Pattern[str] | None) -> Text:
    """The row as it is shown, with what `pattern` finds marked."""
    if row.gap:
        return line((gap_text(row), WARN))
    content = row.text
    if BAD_LINE.search(content):
        style = BAD
    elif _WARN_LINE.search(content):
        style = WARN
    elif _GOOD_LINE.search(content):
        style = GOOD
    else:
        style = PLAIN
    text = coloured(row, PLAIN)
    if text is None:
        text = Text(content, style=style, no_wrap=True, end="")
    if clock := _CLOCK.match(content):
        text.stylize(LABEL, 0, clock.end())
    if named := PREFIX.match(content[:80]):
        text.stylize(_NAME, named.start(1), named.end(1))
    if pattern is not None:
        text.highlight_regex(pattern, TAB_ON)
    return text
