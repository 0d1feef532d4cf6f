"""The list of keys, made of the bindings themselves, and what each column of each panel means."""

from __future__ import annotations

from typing import Any, ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen
from textual.widget import Widget

from controller.plots import PLOTS
from controller.tui import run_list
from controller.tui.curves_view import CurvesView
from controller.tui.line_widgets import Lines, LineView
from controller.tui.lines import hanging, line
from controller.tui.log_view import LogView
from controller.tui.palette import HEADING, KEY, LABEL, PLAIN, VALUE

Columns = tuple[tuple[str, str], ...]
Row = tuple[Text, Text]
"""A name and what it means."""

BLANK: Row = (Text(), Text())
WIDTH = 92
"""As app.tcss has it."""

FIRST_LINES: Columns = (
    ("● LIVE 1.2s", "state, and how old the newest news of it is"),
    ("ETA", "until the last step, at the rate since warm-up"),
    ("loss, ema", "of the newest step, and its debiased average over 50 steps"),
    ("tau @12k", "tokens a round by real decoding, at the step of that evaluation"),
    ("est", "the same as training's blocks promise it"),
    ("best", "the best decoded tau so far"),
    ("gnorm, lr", "norm of the gradient before clipping; learning rate"),
    ("tok/s, step", "context tokens a second; time of an optimizer step, and the rung it runs on"),
    ("MFU", "useful work of targets and drafters, of what matrix products reach on these GPUs"),
    ("recompiles", "of the drafter since its warm-up; 0 is right"),
    ("ckpt", "step of the newest checkpoint, and how long ago"),
    ("anchors", "part of the places where an anchor may be that had one"),
    ("! 2 events", "warnings and errors so far: tab 4"),
    ("wait", "part of the last seconds that these threads waited for the others"),
)

GPU_COLUMNS: Columns = (
    ("0 T", "number; T runs a target, D a drafter, - neither"),
    ("bar, 97%", "utilisation by nvidia-smi; in trouble a word stands there"),
    ("IDLE", "under 25 % although the run trains on it"),
    ("FULL", "97 % of its memory is used"),
    ("HOT", "88 °C, or a thermal limit"),
    ("THROTTLED", "slowed by the board: power brake, hardware slowdown"),
    ("LOST", "gone from nvidia-smi; its row stays"),
    ("MIG", "cut into slices, which have no utilisation"),
    ("71/140G", "memory used, and there, in GiB"),
    ("612W 64C", "power; temperature"),
)

BUCKET_COLUMNS: Columns = (
    ("tokens", "lengths of the bucket's samples, [from, to)"),
    ("batches", "trained on so far, over all epochs"),
    ("epoch", "batches of an epoch"),
    ("share", "the bucket's part of all batches; the bar shows it too"),
    ("pad", "part of its rows that is padding"),
    ("tok/s", "context tokens a second in its batches"),
    ("loss", "of its newest batches"),
    ("peak", "most memory of a GPU in its batches, in GiB"),
)

THREAD_COLUMNS: Columns = (
    ("thread", "its name; the one that failed first stands first"),
    ("device", "where it works"),
    ("state", "what it does, or what it waits for"),
    ("step, bucket", "what it works on"),
    ("sign", "how long ago it last gave a sign"),
    ("waited", "part of its time that it waited"),
)


class HelpScreen(ModalScreen[None]):
    """All keys, and all columns."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,question_mark,q", "dismiss", "close")]

    def compose(self) -> ComposeResult:
        """One panel that scrolls."""
        yield LineView(id="help-lines")
        yield Lines(id="help-keys")

    def on_mount(self) -> None:
        """Scroll by keys."""
        self.query_one(LineView).focus()
        keys = line((" ↑↓ PgDn", KEY), (" read on  ", LABEL), ("Esc", KEY), (" close", LABEL))
        self.query_one("#help-keys", Lines).set_lines([keys])

    def on_resize(self) -> None:
        """List the bindings and the columns."""
        view = self.query_one(LineView)
        rows = _keys("Keys", self.app)
        rows += [_row("^p", "command palette: the same actions by name"), BLANK]
        rows += [*_keys("On the log", LogView), BLANK, *_keys("On the curves", CurvesView), BLANK]
        for title, columns in (
            ("First lines", FIRST_LINES), ("GPUs", GPU_COLUMNS), ("Buckets", BUCKET_COLUMNS),
            ("Threads", THREAD_COLUMNS),
            ("Curves", tuple((plot.title, plot.help) for plot in PLOTS)),
            ("Runs", tuple((name, text) for name, _, text in run_list.COLUMNS)),
        ):  # fmt: skip
            rows += [(line((title, HEADING)), line()), *(_row(name, text) for name, text in columns), BLANK]
        width = min(WIDTH, self.size.width) - 5  # border, padding, scroll bar
        view.set_lines([part for lead, text in rows for part in hanging(lead, text, width)])


def _row(name: str, text: str) -> Row:
    return line((f"{name:>13}  ", KEY if len(name) < 3 else VALUE)), line((text, PLAIN))


def _keys(title: str, owner: Any | type[Widget]) -> list[Row]:
    rows = [(line((title, HEADING)), line())]
    for binding in owner.BINDINGS:
        if isinstance(binding, Binding) and binding.tooltip:
            names = binding.key_display or ", ".join(map(_named, binding.key.split(",")))
            rows.append((line((f"{names:>13}  ", KEY)), line((binding.tooltip, PLAIN))))
    return rows


_NAMES = {"plus": "+", "minus": "-", "left": "←", "right": "→", "up": "↑", "down": "↓", "slash": "/"}


def _named(key: str) -> str:
    key = key.replace("shift+", "⇧").replace("ctrl+", "^")
    start = key[:1] if key[:1] in "⇧^" else ""
    return start + _NAMES.get(
        key.removeprefix(start), key.removeprefix(start).capitalize() if len(key) > 2 else key
    )
