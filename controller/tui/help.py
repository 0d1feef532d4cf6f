"""The list of keys, made of the bindings themselves."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen

from controller.tui.lines import Lines, line
from controller.tui.palette import HEADING, KEY, LABEL, PLAIN


class HelpScreen(ModalScreen[None]):
    """All keys of the app."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,question_mark,q", "dismiss", "close")]

    def compose(self) -> ComposeResult:
        """One panel."""
        yield Lines()

    def on_mount(self) -> None:
        """List the bindings."""
        rows = [line(("Keys", HEADING)), line()]
        for binding in self.app.BINDINGS:
            assert isinstance(binding, Binding)
            key = binding.key_display or binding.key
            rows.append(line((f"{key:>4}  ", KEY), (binding.tooltip or binding.description, PLAIN)))
        rows += [
            line(),
            line(("Reading the log: arrows, page keys; End follows again.", LABEL)),
            line(("On a plot: + and - zoom, arrows pan, r resets.", LABEL)),
        ]
        self.query_one(Lines).set_lines(rows)
