"""A traceback as lines: code in colours, this project's frames marked, those of libraries stepped back.

Folders that say nothing (the payload's digest, site-packages) are left out, so that the line number is still
on a narrow screen; what is still too long is folded.
"""

from __future__ import annotations

import functools
import re

from rich.style import Style
from rich.syntax import Syntax, SyntaxTheme
from rich.text import Text

from controller.text import safe_lines
from controller.tui.palette import BAD, GREEN, GREY, INK, LABEL, ORANGE, PLAIN, PURPLE, SKY

_PAYLOAD = re.compile(r"/[^\s\"]*/payloads/[0-9a-f]{8,}/")
_PACKAGES = re.compile(r"/[^\s\"]*/(?:site|dist)-packages/|/[^\s\"]*/lib/python3[0-9.]*/")
_OWN = Style(color=ORANGE, bold=True)
_AWAY = Style(dim=True)
_LAST_FRAMES = ("  [Previous line repeated", "    ^", "    ~")


class _Colours(SyntaxTheme):
    """Python in the colours of Okabe and Ito."""

    _STYLES = (
        ("Token.Keyword", Style(color=SKY)),
        ("Token.Operator.Word", Style(color=SKY)),
        ("Token.Literal.String", Style(color=GREEN)),
        ("Token.Literal.Number", Style(color=PURPLE)),
        ("Token.Name.Builtin", Style(color=SKY)),
        ("Token.Comment", Style(color=GREY)),
    )

    def get_style_for_token(self, token_type: object) -> Style:
        """The style of one kind of token."""
        name = str(token_type)
        return next((style for start, style in self._STYLES if name.startswith(start)), Style(color=INK))

    def get_background_style(self) -> Style:
        """None."""
        return Style()


_SYNTAX = Syntax("", "python", theme=_Colours())


def code(text: str) -> Text:
    """One line of Python in colours."""
    shown = _SYNTAX.highlight(text)
    shown.rstrip()
    shown.no_wrap, shown.end = True, ""
    return shown


@functools.lru_cache(maxsize=32)
def traceback_lines(text: str, width: int) -> tuple[Text, ...]:
    """The lines of a traceback's `text`, folded at `width`; its own first line is left out."""
    rows: list[Text] = []
    own = False
    lines = safe_lines(text)
    if lines and lines[0].startswith("Traceback (most recent call last)"):
        del lines[0]  # a heading says so
    for number, content in enumerate(lines):
        if content.lstrip().startswith('File "'):
            own = "/remote_payload/" in content
            content = _PACKAGES.sub("", _PAYLOAD.sub("", content))
            row = Text(f"▸ {content.lstrip()}" if own else content, style=_OWN if own else LABEL)
        elif number == len(lines) - 1 and content.strip():
            row = Text(content, style=BAD)
        elif not content.startswith(" "):
            own, row = False, Text(content, style=PLAIN)
        elif content.startswith(_LAST_FRAMES):
            row = Text(content, style=_OWN if own else LABEL)
        else:
            row = code(content)
            if not own:
                row.stylize(_AWAY)
        for start in range(0, max(1, len(row)), max(20, width)):
            part = row[start : start + max(20, width)]
            part.no_wrap, part.end = True, ""
            rows.append(part)
    return tuple(rows)
