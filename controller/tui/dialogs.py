"""Small questions and answers over the run's screen: is it really to be stopped, and what went wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.style import Style
from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen
from textual.widgets import Input

from controller.text import safe_lines
from controller.tui.line_widgets import Lines, LineView
from controller.tui.lines import hanging, line, remote
from controller.tui.palette import BAD, HEADING, KEY, LABEL, PLAIN, VALUE, WARN


def wrapped(text: str, width: int, style: Style = PLAIN) -> list[Text]:
    """The lines of `text`, cleaned, folded at words to `width` columns."""
    return [part for row in safe_lines(text) for part in hanging(line(), line((row, style)), width)]


class StopQuestion(ModalScreen[bool]):
    """Asks for the run's name before it is stopped; any other text stops nothing."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(False)", "cancel")]

    def __init__(self, run_id: str, where: str, step: str) -> None:
        super().__init__()
        self._run_id, self._where, self._step = run_id, where, step

    def compose(self) -> ComposeResult:
        """What will happen, and the question."""
        yield Lines(id="stop-text")
        yield Input(placeholder="the run's name; Esc leaves it training", id="stop-name", compact=True)
        yield Lines(id="stop-answer")

    def on_mount(self) -> None:
        """Say what will happen."""
        self.query_one("#stop-text", Lines).set_lines(
            [
                line(("Stop this run?", HEADING)),
                line(),
                line("  ", remote(self._run_id, VALUE), ("  on ", LABEL), remote(self._where, PLAIN)),
                line((f"  at step {self._step}", LABEL)),
                line(),
                line(("It writes a checkpoint and ends; `dflashctl resume` goes on.", PLAIN)),
                line(("Type its name to stop it:", PLAIN)),
            ]
        )
        self.query_one(Input).focus()

    @on(Input.Submitted)
    def _on_answer(self, event: Input.Submitted) -> None:
        event.stop()
        if event.value.strip() == self._run_id:
            self.dismiss(True)
            return
        said = "that is not its name; nothing was stopped" if event.value.strip() else "its name, please"
        self.query_one("#stop-answer", Lines).set_lines([line((said, WARN))])


class Notice(ModalScreen[None]):
    """Lines that are read and closed: a report, or an error with its hint."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,enter,q", "dismiss(None)", "close")]

    def __init__(self, title: str, lines: Sequence[Text] = ()) -> None:
        super().__init__()
        self._title, self._rows = title, list(lines)

    def compose(self) -> ComposeResult:
        """A title, the lines, how to close it."""
        yield Lines(id="notice-title")
        yield LineView(id="notice-lines")
        yield Lines(id="notice-keys")

    def on_mount(self) -> None:
        """Show the lines."""
        self.query_one("#notice-title", Lines).set_lines([line((self._title, HEADING))])
        keys = line((" Esc", KEY), (" close  ", LABEL), ("↑↓", KEY), (" scroll", LABEL))
        self.query_one("#notice-keys", Lines).set_lines([keys])
        self.show(self._rows)
        self.query_one(LineView).focus()

    def show(self, lines: Sequence[Text]) -> None:
        """Show other lines."""
        self._rows = list(lines)
        for view in self.query(LineView):
            view.styles.height = max(1, len(self._rows))  # at most what app.tcss allows
            view.set_lines(self._rows)


def error_lines(error: str, hint: str, width: int) -> list[Text]:
    """An error and what to do about it."""
    rows = wrapped(error, width, BAD)
    if hint:
        rows += [line(), *wrapped(hint, width, PLAIN)]
    return rows
