"""The screen of one run: which widget has which rows, and which lines it shows.

It is given a `RunState` and keeps nothing else of the run. `arrangement` says what fits; what is not shown
is not drawn.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

from rich.text import Text
from textual import events, on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.screen import Screen
from textual.widgets import ContentSwitcher, Input

from controller.issue_report import issue_report, local_users
from controller.run_state import RunState
from controller.text import safe_line
from controller.tui.arrangement import Arrangement, arrange, gpus_per_row
from controller.tui.bucket_panel import bucket_lines
from controller.tui.crash_panel import crash_lines
from controller.tui.curves import Drawn, side_lines
from controller.tui.curves_view import CurvesView
from controller.tui.gpu_panel import gpu_lines, gpu_summary
from controller.tui.line_widgets import Lines, LineView
from controller.tui.lines import fitted, line, remote
from controller.tui.log_view import LogView
from controller.tui.overview import (
    detail_lines,
    flow_line,
    learning_line,
    speed_line,
    status_line,
)
from controller.tui.palette import KEY, LABEL, TAB_ON, WARN
from controller.tui.thread_panel import event_lines, thread_lines
from controller.tui.thread_tab import thread_tab_lines

LOG_KEYS = (("e", "error"), ("t", "only"), ("w", "wrap"), ("v", "select"), ("s", "save"))
"""Keys of the log that the key line names where there is room."""

TABS = ("log", "curves", "threads", "events")
SMALL_ROWS = 34
"""Below this height every tab but the log takes the panels' room."""


class TabBar(Lines):
    """The tabs' names; a click chooses one."""

    def on_click(self, event: events.Click) -> None:
        """Choose the tab under the pointer."""
        column = 0
        for name, label in zip(TABS, tab_labels(), strict=True):
            column += len(label) + 1
            if event.x < column:
                screen = self.screen
                assert isinstance(screen, RunScreen)
                screen.show_tab(name)
                return


def tab_labels() -> list[str]:
    """` 1 Log ` and so on."""
    return [f" {number} {name.capitalize()} " for number, name in enumerate(TABS, 1)]


class RunScreen(Screen[None]):
    """One run. `keys` are shown in the last row: a key and a word each."""

    def __init__(self, keys: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self._keys = tuple(keys)
        self._state = RunState()
        self._trouble = ""
        self._zoomed = False
        self._crash_hidden = False
        self._arrangement: Arrangement | None = None
        self._drawn = Drawn()
        self._first_gpu_row = 0
        self._note = ""
        self._note_until = 0.0
        self._answered: Callable[[str], None] = lambda text: None

    def compose(self) -> ComposeResult:
        """The screen from top to bottom."""
        for name in ("status", "detail", "learning", "speed"):
            yield Lines(id=name)
        yield LineView(id="crash")
        with Horizontal(id="middle"):
            with Vertical(id="panels"):
                yield Lines(id="gpus")
                yield Lines(id="flow")
                yield Lines(id="buckets")
                yield LineView(id="middle-threads")
            yield Lines(id="side")
        yield TabBar(id="tabs")
        with ContentSwitcher(initial="log", id="body"):
            yield LogView(id="log")
            yield CurvesView(id="curves")
            yield LineView(id="threads")
            yield LineView(id="events")
        yield Input(placeholder="find in the log (regular expression)", id="find", compact=True)
        yield Lines(id="footer")

    def on_mount(self) -> None:
        """Begin at the log."""
        self._view("events").stick_to_end = True
        self.set_focus(self.log_view)

    def on_resize(self) -> None:
        """Give every part its room."""
        self.call_after_refresh(self.draw)

    # what is shown

    @property
    def complete(self) -> bool:
        """Whether all its parts are there: they come after it, and at the end they go before it."""
        return any(child.id == "footer" for child in self.children)

    @property
    def log_view(self) -> LogView:
        """The log."""
        return self.query_one("#log", LogView)

    @property
    def curves_view(self) -> CurvesView:
        """The curves."""
        return self.query_one("#curves", CurvesView)

    @property
    def tab(self) -> str:
        """The tab that is shown."""
        return self.query_one("#body", ContentSwitcher).current or "log"

    def take(self, state: RunState) -> None:
        """Show `state`."""
        self._state = state
        self._trouble = ""
        self.draw()

    def show_trouble(self, trouble: str) -> None:
        """Say in the first line that what is shown is no longer kept up, and why."""
        self._trouble = trouble
        self.draw()

    def say(self, note: str, seconds: float = 4.0) -> None:
        """Show a note for some seconds; a part of it may be what the container said."""
        self._note, self._note_until = safe_line(note), time.monotonic() + seconds
        self.set_timer(seconds + 0.1, self.draw)
        self.draw()

    def show_tab(self, name: str) -> None:
        """Show another tab."""
        self.query_one("#body", ContentSwitcher).current = name
        self.set_focus(self.query_one(f"#{name}"))  # at once: keys may be typed ahead
        self.draw()
        self.call_after_refresh(self.draw)

    def scroll_gpus(self, rows: int) -> None:
        """Show GPUs further down or up, where not all have room."""
        arrangement = self._arrangement
        shown = arrangement.gpu_rows - 1 if arrangement else 0
        columns = arrangement.panel_columns if arrangement else 1
        deep = -(-len(self._state.gpus) // gpus_per_row(columns))
        self._first_gpu_row = max(0, min(self._first_gpu_row + rows, deep - shown))
        self.draw()

    def toggle_zoom(self) -> None:
        """Give the tab the room of the panels, or give it back."""
        self._zoomed = not self._zoomed
        self.draw()

    def toggle_crash(self) -> None:
        """Show or hide how the run died."""
        self._crash_hidden = not self._crash_hidden
        self.draw()

    def copied_text(self) -> str:
        """What a copy takes: selected lines of the log, how the run died, or what the tab shows."""
        if self.tab == "log" and self.log_view.selecting:
            return self.log_view.visible_text()
        if self._crash_shown or (self.tab == "threads" and self._state.has_crash):
            return issue_report(self._state, self._state.last_words, users=local_users())
        if self.tab in ("threads", "events", "curves"):
            return "\n".join(text.plain for text in self._view(self.tab).lines)
        return self.log_view.visible_text()

    # finding

    def ask_find(self) -> None:
        """Ask what to find in the log."""
        self._ask("find in the log (regular expression)", self.log_view.search)

    def action_ask_filter(self) -> None:
        """Ask which lines of the log to show."""
        seen = ", ".join(self.log_view.prefixes[:8])
        self._ask(f"only lines of {seen or 'a rank or thread'}, or a regular expression; empty: all",
                  self.log_view.filter)  # fmt: skip

    def _ask(self, question: str, answered: Callable[[str], None]) -> None:
        self.show_tab("log")
        self._answered = answered
        find = self.query_one("#find", Input)
        find.placeholder = question
        find.value = ""
        find.display = True
        self.set_focus(find)  # at once: what is typed ahead is the answer

    @on(Input.Submitted, "#find")
    def _on_find(self, event: Input.Submitted) -> None:
        event.input.display = False
        self.set_focus(self.log_view)
        self._answered(event.value)

    def on_key(self, event: events.Key) -> None:
        """Escape leaves the question; then the log's selection, search and filter, one after the other."""
        if event.key == "escape":
            find = self.query_one("#find", Input)
            if find.display:
                find.display = False
                self.set_focus(self.log_view)
            elif self.tab == "log":
                self.log_view.escape()

    @on(CurvesView.Changed)
    @on(LogView.Changed)
    def _on_tab_changed(self) -> None:
        self._lines("tabs", [self._tab_line(self.size.width)])

    @on(LogView.Said)
    def _on_log_said(self, message: LogView.Said) -> None:
        self.say(message.text, 6.0)

    # drawing

    def draw(self) -> None:
        """Make every visible part show the state."""
        if not self.complete:
            return
        state, width = self._state, self.size.width
        arrangement = self._arrange()
        self._lines("status", [self._status_line(width)])
        self._lines("detail", detail_lines(state, width, arrangement.detail_rows))
        self._lines("learning", [learning_line(state, width)])
        self._lines("speed", [speed_line(state, width)])
        self._lines("tabs", [self._tab_line(width)])
        self._lines("footer", [self._footer_line()])
        self._draw_panels(arrangement)
        if self.tab == "threads":
            self._view("threads").set_lines(thread_tab_lines(state, width - 1))
        elif self.tab == "events":
            self._view("events").set_lines(event_lines(state, width - 1))
        elif self.tab == "curves":
            self.curves_view.show(state)

    def _draw_panels(self, arrangement: Arrangement) -> None:
        state, columns = self._state, arrangement.panel_columns
        if arrangement.crash_rows:
            self._view("crash").set_lines(crash_lines(state, self.size.width - 4))
        if arrangement.gpu_rows == 1:
            self._lines("gpus", [gpu_summary(state, columns)])
        elif arrangement.gpu_rows:
            self._lines("gpus", gpu_lines(state, columns, arrangement.gpu_rows, self._first_gpu_row))
        if arrangement.flow:
            self._lines("flow", [flow_line(state, columns)])
        if arrangement.bucket_rows:
            self._lines("buckets", bucket_lines(state, columns, arrangement.bucket_rows))
        if arrangement.thread_rows:
            self._view("middle-threads").set_lines(thread_lines(state, columns - 1))
        if arrangement.curves_columns:
            self._lines("side", side_lines(state, self._drawn, arrangement.curves_columns,
                                           arrangement.middle_rows, arrangement.side_plots))  # fmt: skip

    def _lines(self, name: str, lines: list[Text]) -> None:
        self.query_one(f"#{name}", Lines).set_lines(lines)

    def _view(self, name: str) -> LineView:
        return self.query_one(f"#{name}", LineView)

    @property
    def _crash_shown(self) -> bool:
        hidden = self._crash_hidden or self._zoomed or self.tab == "threads"  # which has it
        return self._state.has_crash and not hidden

    def _arrange(self) -> Arrangement:
        """Give rows to widgets, where the arrangement has changed."""
        state, size, crash = self._state, self.size, self._crash_shown
        progress = state.progress
        arrangement = arrange(
            size.width,
            size.height,
            gpus=len(state.gpus),
            buckets=len(progress.buckets) if progress else 0,
            threads=len(progress.threads) if progress else 0,
            detail=0 if crash else len(detail_lines(state, size.width)),
            zoomed=self._zoomed
            or self.tab == "curves"
            or (self.tab == "threads" and state.has_crash)
            or (self.tab != "log" and size.height < SMALL_ROWS),
            crash=len(crash_lines(state, size.width - 4)) if crash else 0,
        )
        if arrangement == self._arrangement:
            return arrangement
        self._arrangement = arrangement
        for name in ("learning", "speed", "tabs", "footer", "flow"):
            self.query_one(f"#{name}").display = getattr(arrangement, name)
        for name, rows in (
            ("detail", arrangement.detail_rows), ("crash", arrangement.crash_rows),
            ("gpus", arrangement.gpu_rows), ("buckets", arrangement.bucket_rows),
            ("middle-threads", arrangement.thread_rows), ("middle", arrangement.middle_rows),
            ("side", arrangement.curves_columns),
        ):  # fmt: skip
            self.query_one(f"#{name}").display = rows > 0
        self.query_one("#crash").styles.height = arrangement.crash_rows
        self.query_one("#middle").styles.height = arrangement.middle_rows
        self.query_one("#side").styles.width = arrangement.curves_columns
        self.query_one("#panels").styles.width = arrangement.panel_columns
        self.call_after_refresh(self.draw)
        return arrangement

    def _status_line(self, width: int) -> Text:
        if self._trouble:
            return line((" ? THIS VIEW IS STUCK ", TAB_ON), " ", remote(self._trouble, WARN))
        return status_line(self._state, width)

    def _tab_line(self, width: int) -> Text:
        text = line()
        for name, label in zip(TABS, tab_labels(), strict=True):
            text.append(label, style=TAB_ON if name == self.tab else LABEL)
            text.append(" ")
        if self._noted and not self.query_one("#footer").display:
            right = line((self._note, WARN))
        elif self.tab == "curves":
            right = self.curves_view.status()
        elif self.tab != "log":
            right = line()
        else:
            right = self.log_view.status_text(width - text.cell_len - 1)
        text.append(" " * max(1, width - text.cell_len - right.cell_len))
        text.append_text(right)
        return text

    @property
    def _noted(self) -> bool:
        return bool(self._note) and time.monotonic() < self._note_until

    def _footer_line(self) -> Text:
        if self._noted:
            return line((f" {self._note}", WARN))
        died, ended = self._state.has_crash, self._state.ended
        return key_line(self._keys, self.tab, self.size.width, died=died, ended=ended)


@functools.lru_cache(maxsize=8)
def key_line(keys: tuple[tuple[str, str], ...], tab: str, width: int, *, died: bool, ended: bool) -> Text:
    """The keys that do something now; with little room those of the log go first, and `? q` never."""
    shown = [("x", "crash")] if died else []
    shown += [key for key in keys if not (ended and key[0] == "S")]
    if tab == "log":
        shown[-2:-2] = LOG_KEYS
    parts = [
        (
            0 if key[0] in ("?", "q") else place + 100 * (key in LOG_KEYS),
            " ",
            line((f" {key[0]}", KEY), (f" {key[1]}", LABEL)),
        )
        for place, key in enumerate(shown, 1)
    ]
    return fitted(parts, width)
