"""Colours that a log brought with it, shown in colours of ours; no other escape sequence has any effect.

Only SGR sequences (`ESC [ ... m`) mean something here, and of them colour, bold, faint, italic and underline:
not blinking, nor hidden text. The sixteen named colours become those of Okabe and Ito, so that a log's red
is the red of everything else; a background becomes a dark ink's ground, so that no text vanishes in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from rich.color import Color
from rich.style import Style
from rich.text import Text

from controller.log_spans import Row
from controller.text import shown
from controller.tui.palette import BLACK, GREEN, GREY, INK, PURPLE, SKY, VERMILLION, YELLOW

_SGR = re.compile(r"\x1b\[([0-9;:]{0,64})m")
_NAMED = (GREY, VERMILLION, GREEN, YELLOW, SKY, PURPLE, SKY, INK)
_MARKS: dict[int, dict[str, bool]] = {
    1: {"bold": True}, 2: {"dim": True}, 3: {"italic": True}, 4: {"underline": True},
    22: {"bold": False, "dim": False}, 23: {"italic": False}, 24: {"underline": False},
}  # fmt: skip


def coloured(row: Row, style: Style) -> Text | None:
    """The row's text with its own colours on top of `style`; None: it has none."""
    if "\x1b[" not in row.raw:
        return None
    text = Text(style=style, no_wrap=True, end="")
    plain = row.text
    at = 0
    for part, part_style in _parts(row.raw):
        # Every part is a beginning of what is left of the safe text, tabs apart, or nothing of it is shown.
        safe = shown(part)
        if part_style is None or not safe:
            continue
        found = plain.find(safe, at)
        if found < 0:
            break
        text.append(plain[at:found])
        text.append(safe, style=part_style)
        at = found + len(safe)
    text.append(plain[at:])
    return text


def _parts(raw: str) -> Iterator[tuple[str, Style | None]]:
    style: Style | None = None
    at = 0
    for found in _SGR.finditer(raw):
        if found.start() > at:
            yield raw[at : found.start()], style
        style = _after(style, found[1])
        at = found.end()
    yield raw[at:], style


def _after(style: Style | None, codes: str) -> Style | None:
    """The style after an SGR sequence; None is the plain one."""
    numbers = [int(code[:4]) if code else 0 for code in codes.replace(":", ";").split(";")]
    while numbers:
        code = numbers.pop(0)
        if code == 0:
            style = None
            continue
        new = None
        if code in _MARKS:
            new = Style(**_MARKS[code])  # type: ignore[arg-type]
        elif code in (38, 48):
            colour = _extended(numbers)
            new = Style(color=colour) if colour and code == 38 else None
        elif 30 <= code <= 37 or 90 <= code <= 97:
            new = Style(color=_NAMED[code % 10])
        elif code == 39:
            new = Style(color=INK)
        elif 40 <= code <= 47 or 100 <= code <= 107:
            new = Style(color=BLACK, bgcolor=_NAMED[code % 10])
        elif code == 49:
            style = Style(bold=style.bold, italic=style.italic, color=INK) if style else None
        if new is not None:
            style = new if style is None else style + new
    return style


def _extended(numbers: list[int]) -> Color | None:
    """The colour of `38;5;N` or `38;2;R;G;B`, whose parts are taken from `numbers`."""
    kind = numbers.pop(0) if numbers else 0
    taken = [numbers.pop(0) for _ in range({5: 1, 2: 3}.get(kind, 0)) if numbers]
    if not taken or any(part > 255 for part in taken):
        return None
    if kind == 5:
        number = taken[0]
        return Color.parse(_NAMED[number % 8]) if number < 16 else Color.from_ansi(number)
    return Color.from_rgb(*taken) if len(taken) == 3 else None
