"""Dark and light: two Textual themes, and a filter that turns the dark palette into the light one.

Panels are drawn in the dark palette's colours, whatever the theme; on their way to the terminal each colour
is replaced by the one of the set of Okabe and Ito that can be read on light paper. So no panel knows of
themes, and what was drawn once is right in both. The choice is remembered in the state folder.
"""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache

from rich.color import Color
from rich.segment import Segment
from rich.style import Style
from textual.color import Color as Background
from textual.filter import LineFilter
from textual.theme import Theme

from controller import paths
from controller.errors import LocalStateError
from controller.tui.palette import (
    BLACK,
    BLUE,
    GREY,
    INK,
    ORANGE,
    PAPER,
    PURPLE,
    RULE,
    SKY,
    THEME,
    VERMILLION,
    YELLOW,
)

LIGHT_PAPER = "#FBFBF8"
LIGHT_INK = "#1B1F25"
LIGHT_GREY = "#5B616A"
LIGHT_RULE = "#C4C8CE"

LIGHT = Theme(
    name="okabe-ito-light",
    primary=BLUE,
    secondary=PURPLE,
    accent=VERMILLION,
    warning=ORANGE,
    error=VERMILLION,
    success="#009E73",
    foreground=LIGHT_INK,
    background=LIGHT_PAPER,
    surface=LIGHT_PAPER,
    panel="#ECEDEA",
    dark=False,
)

THEMES = (THEME, LIGHT)

_CHOSEN = "tui-theme"
"""File of the state folder."""

_ON_LIGHT = {
    INK: LIGHT_INK,
    GREY: LIGHT_GREY,
    RULE: LIGHT_RULE,
    PAPER: LIGHT_PAPER,
    SKY: BLUE,
    ORANGE: VERMILLION,
    YELLOW: ORANGE,
}
"""What stands for a text colour of the dark palette on light paper; others stay."""

_TRIPLETS = {Color.parse(dark).triplet: Color.parse(light) for dark, light in _ON_LIGHT.items()}
_YELLOW, _PAPER = Color.parse(YELLOW).triplet, Color.parse(PAPER).triplet
_LIGHT_PAPER = Color.parse(LIGHT_PAPER).triplet
_WARNING = Style(color=BLACK, bgcolor=YELLOW)


class OnLight(LineFilter):
    """Segments in the dark palette to ones for light paper."""

    def apply(self, segments: list[Segment], background: Background) -> list[Segment]:
        """The same texts in other colours."""
        return [
            Segment(text, on_light(style) if style else style, control) for text, style, control in segments
        ]


@lru_cache(4096)
def on_light(style: Style) -> Style:
    """The style for light paper; a warning, bold yellow, becomes black on yellow."""
    ink, paper = style.color, style.bgcolor
    plain = paper is None or paper.triplet in (_PAPER, _LIGHT_PAPER)
    if not plain or ink is None:  # a chip stays as it is, on its own colour
        return style
    if ink.triplet == _YELLOW and style.bold:
        return style + _WARNING
    new = _TRIPLETS.get(ink.triplet)
    return style if new is None else style + Style(color=new)


def remembered() -> str:
    """The name of the theme that was chosen last."""
    try:
        name = (paths.state_root() / _CHOSEN).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return THEME.name
    return name if name in [theme.name for theme in THEMES] else THEME.name


def remember(name: str) -> None:
    """Keep the choice; a state folder that cannot be written forgets it."""
    with suppress(LocalStateError):
        paths.kept(paths.state_root() / _CHOSEN, f"{name}\n")
