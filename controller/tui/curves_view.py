"""The tab of the curves: all panels in a grid, a cursor through all of them, and one enlarged by Enter."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.message import Message

from controller import figures
from controller.plots import PLOTS, Look, step_window
from controller.run_state import RunState
from controller.tui.curves import Drawn
from controller.tui.line_widgets import LineView
from controller.tui.lines import line
from controller.tui.palette import LABEL, PLAIN

LEAST_ROWS = 8
"""A panel lower than this says nothing; what does not fit is scrolled to."""


class CurvesView(LineView):
    """The curves of a `RunState`."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "cursor(-1)", "back", show=False, tooltip="cursor: values at an earlier step"),
        Binding("right", "cursor(1)", "on", show=False, tooltip="cursor: values at a later step"),
        Binding("shift+left", "cursor(-10)", "back", show=False, tooltip="cursor: ten columns back"),
        Binding("shift+right", "cursor(10)", "on", show=False, tooltip="cursor: ten columns on"),
        Binding("up", "choose(-1)", "up", show=False, tooltip="choose the curve above"),
        Binding("down", "choose(1)", "down", show=False, tooltip="choose the curve below"),
        Binding("tab", "choose_next", "next", show=False, tooltip="choose the next curve"),
        Binding("plus,equals_sign", "zoom(0.5)", "nearer", show=False, key_display="+",
                tooltip="zoom in around the cursor, or at the end"),
        Binding("minus", "zoom(2.0)", "farther", show=False, key_display="-", tooltip="zoom out"),
        Binding("L", "log", "log", show=False, tooltip="logarithmic or linear scale"),
        Binding("enter", "enlarge", "enlarge", show=False, tooltip="give one curve all the room, or back"),
        Binding("0", "reset", "whole", show=False, tooltip="the whole run, no cursor"),
    ]  # fmt: skip

    class Changed(Message):
        """Zoom, cursor or choice are others now."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._room = LEAST_ROWS
        self._state = RunState()
        self._drawn = Drawn()
        self._look = Look()
        self._chosen = 0
        self._enlarged = False

    def show(self, state: RunState) -> None:
        """Draw the curves of `state`."""
        self._state = state
        if self.is_mounted and self.size.width:
            self.set_lines(self._grid())

    def on_resize(self) -> None:
        """Another size has another grid."""
        self.show(self._state)

    def status(self) -> Text:
        """Where the cursor is, and what of the run is shown; for the tabs' line."""
        look = self._look
        text = line()
        window = step_window(self._state, PLOTS[self._chosen], look)
        if look.cursor is not None and window is not None:
            text.append("cursor step ", style=LABEL)
            text.append(figures.count(window.at(look.cursor)), style=PLAIN)
        if not look.whole:
            text.append(f"  zoom {1 / (look.end - look.start):.0f}×", style=PLAIN)
        if look.log:
            text.append("  log", style=PLAIN)
        return text if text.plain else line(("←→ values  +- zoom  L log  ⏎ enlarge", LABEL))

    @property
    def _columns(self) -> int:
        width = self.size.width
        return 1 if self._enlarged or width < 70 else 2 if width < 130 else 3

    def _grid(self) -> list[Text]:
        width, height, columns = self.size.width - 1, self.size.height, self._columns
        if self._enlarged:
            plot = PLOTS[self._chosen]
            rows = self._drawn.panel(self._state, plot, width, max(2, height - 1), self._look, chosen=True)
            return [*rows, line((plot.help, LABEL))]
        deep = -(-len(PLOTS) // columns)
        visible = max(1, min(deep, height // LEAST_ROWS))
        room = max(2, height // visible)
        wide = (width - (columns - 1)) // columns
        lines: list[Text] = []
        for row in range(deep):
            panels = [
                self._drawn.panel(self._state, PLOTS[n], wide, room, self._look, chosen=n == self._chosen)
                for n in range(row * columns, min(len(PLOTS), (row + 1) * columns))
            ]
            for parts in zip(*panels, strict=True):
                text = line()
                for number, part in enumerate(parts):
                    text.append(" " if number else "")
                    text.append_text(part)
                lines.append(text)
        self._room = room
        return lines

    def _again(self, look: Look | None = None) -> None:
        if look is not None:
            self._look = look
        self.show(self._state)
        self.post_message(self.Changed())

    def action_cursor(self, columns: int) -> None:
        """Move the cursor."""
        wide = max(8, self.size.width // self._columns - 8)
        self._again(self._look.moved(columns / wide))

    def action_choose(self, rows: int) -> None:
        """Choose another curve, a row above or below."""
        step = rows if self._enlarged else rows * self._columns
        chosen = self._chosen + step
        if 0 <= chosen < len(PLOTS):
            self._chosen = chosen
        self._into_view()

    def action_choose_next(self) -> None:
        """Choose the next curve."""
        self._chosen = (self._chosen + 1) % len(PLOTS)
        self._into_view()

    def _into_view(self) -> None:
        self._again()
        if not self._enlarged:
            top = self._chosen // self._columns * self._room
            if not self.scroll_offset.y <= top <= self.scroll_offset.y + self.size.height - self._room:
                self.scroll_to(y=top, animate=False, immediate=True)

    def action_zoom(self, factor: float) -> None:
        """Nearer or farther."""
        self._again(self._look.zoomed(factor))

    def action_log(self) -> None:
        """Logarithmic or linear."""
        self._again(dataclasses.replace(self._look, log=not self._look.log))

    def action_enlarge(self) -> None:
        """Give the chosen curve all the room, or give it back."""
        self._enlarged = not self._enlarged
        self._again()
        if self._enlarged:
            self.scroll_home(animate=False, immediate=True)
        else:
            self._into_view()

    def action_reset(self) -> None:
        """The whole run again."""
        self._again(Look(log=self._look.log))
