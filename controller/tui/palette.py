"""Colours and shapes: a state is a word, a shape and a colour, so that none of them is needed alone.

The colours are the set of Okabe and Ito (2008), which stays apart for every kind of colour vision; no
meaning hangs on red against green. With NO_COLOR Textual removes them, and word and shape remain.
"""

from __future__ import annotations

from rich.style import Style
from textual.theme import Theme

from controller.gpu_state import GpuWord
from controller.health import SHAPES, Word
from controller.run_events import Level

BLACK = "#000000"
ORANGE = "#E69F00"
SKY = "#56B4E9"
GREEN = "#009E73"
YELLOW = "#F0E442"
BLUE = "#0072B2"
VERMILLION = "#D55E00"
PURPLE = "#CC79A7"
OKABE_ITO = (BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILLION, PURPLE)
"""Okabe and Ito, Color Universal Design, 2008."""

GREY = "#8A8F98"
RULE = "#3A3F47"
INK = "#D8DCE2"
PAPER = "#101317"

THEME = Theme(
    name="okabe-ito",
    primary=SKY,
    secondary=PURPLE,
    accent=ORANGE,
    warning=YELLOW,
    error=VERMILLION,
    success=GREEN,
    foreground=INK,
    background=PAPER,
    surface=PAPER,
    panel="#1B1F25",
    dark=True,
)

LABEL = Style(color=GREY)
VALUE = Style(color=INK, bold=True)
PLAIN = Style(color=INK)
FAINT = Style(color=GREY, dim=True)
GOOD = Style(color=GREEN)
WARN = Style(color=YELLOW, bold=True)
BAD = Style(color=VERMILLION, bold=True)
HEADING = Style(color=SKY, bold=True)
RULE_STYLE = Style(color=RULE)
KEY = Style(color=ORANGE, bold=True)
CHOSEN = Style(bgcolor="#2B333D")
TAB_ON = Style(color=BLACK, bgcolor=SKY, bold=True)


def _chip(background: str, ink: str = BLACK) -> Style:
    return Style(color=ink, bgcolor=background, bold=True)


_GOOD, _AWAY, _DEAD = _chip(GREEN), _chip(YELLOW), _chip(VERMILLION, "#FFFFFF")

_STATE_STYLES: dict[Word, Style] = {
    Word.LIVE: _GOOD,
    Word.LAUNCHING: _chip(SKY),
    Word.CONNECTING: _AWAY,
    Word.STOPPING: _chip(ORANGE),
    Word.RESTARTING: _chip(ORANGE),
    Word.ENDING: _chip(ORANGE),
    Word.STALLED: _chip(ORANGE),
    Word.STALE: _AWAY,
    Word.RECONNECTING: _AWAY,
    Word.REFUSED: _AWAY,
    Word.UNKNOWN: _AWAY,
    Word.FINISHED: _chip(BLUE, "#FFFFFF"),
    Word.STOPPED: _chip(BLUE, "#FFFFFF"),
    Word.FAILED: _DEAD,
    Word.KILLED: _DEAD,
    Word.LOST: _DEAD,
}

STATES = {word: (SHAPES[word], style) for word, style in _STATE_STYLES.items()}
"""Shape and style of each state."""

GPU_WORDS: dict[GpuWord, Style] = {
    GpuWord.WORKING: GOOD,
    GpuWord.IDLE: _chip(YELLOW),
    GpuWord.FULL: _chip(ORANGE),
    GpuWord.HOT: _chip(VERMILLION, "#FFFFFF"),
    GpuWord.THROTTLED: _chip(ORANGE),
    GpuWord.LOST: _chip(VERMILLION, "#FFFFFF"),
    GpuWord.NO_DATA: LABEL,
}

LEVELS: dict[Level, tuple[str, Style]] = {
    Level.INFO: ("·", PLAIN),
    Level.GOOD: ("✓", GOOD),
    Level.WARNING: ("!", WARN),
    Level.BAD: ("✗", BAD),
}

CURVE_COLOURS = {
    "loss": GREY,
    "loss_ema": ORANGE,
    "tau": GREEN,
    "tau_estimate": SKY,
    "tokens_per_s": SKY,
    "gradient_norm": PURPLE,
    "learning_rate": YELLOW,
    "step_s": ORANGE,
    "queue_batches": SKY,
    "queue_features": ORANGE,
}

ROLE_COLOURS = {"T": SKY, "D": ORANGE, "TD": GREEN}
"""By the letters of a GPU's roles."""
