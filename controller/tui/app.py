"""The screen: a status line that is never wrong, panels in the order of attention, and a tab below them.

The app owns no truth and does no I/O but the keyboard's: a thread reads the mirror (`ticker`), pure
functions make lines of its `RunState`, and widgets show lines. What is not visible is not drawn. `q`
detaches: it ends this process and nothing else.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Protocol

from rich.text import Text
from textual import events, on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Grid, Horizontal, Vertical
from textual.message import Message
from textual.screen import ModalScreen
from textual.widgets import ContentSwitcher, Input

from controller import paths
from controller.errors import UsageError
from controller.run_state import RunState
from controller.tui.arrangement import Arrangement, arrange
from controller.tui.bucket_panel import bucket_lines
from controller.tui.crash_panel import crash_lines, has_crash
from controller.tui.curves import PLOTS, CurvePlot
from controller.tui.gpu_panel import gpu_lines, gpu_summary
from controller.tui.lines import Lines, LineView, line
from controller.tui.log_view import LogView
from controller.tui.overview import (
    detail_line,
    flow_line,
    learning_line,
    speed_line,
    status_line,
)
from controller.tui.palette import BAD, HEADING, KEY, LABEL, PLAIN, TAB_ON, THEME, WARN
from controller.tui.thread_panel import event_lines, thread_lines
from controller.tui.ticker import PERIOD_S, Ticker

TABS = ("log", "curves", "threads", "events")
SMALL_ROWS = 34
"""Below this height every tab but the log takes the panels' room."""


class Snapshot(Message):
    """One immutable state from the ticker; a newer one replaces it."""

    def __init__(self, state: RunState) -> None:
        super().__init__()
        self.state = state

    def can_replace(self, message: Message) -> bool:
        """Only the newest snapshot is of interest."""
        return isinstance(message, Snapshot)


class Watched(Protocol):
    """What the TUI needs of a mirror."""

    def start(self) -> None:
        """Begin to mirror."""

    def stop(self, timeout: float = ...) -> None:
        """End within about `timeout` seconds."""

    def poke(self) -> None:
        """Reconnect now."""


class TabBar(Lines):
    """The tabs' names; a click chooses one."""

    def on_click(self, event: events.Click) -> None:
        """Choose the tab under the pointer."""
        column = 0
        for name, label in zip(TABS, tab_labels(), strict=True):
            column += len(label) + 1
            if event.x < column:
                self.app.call_later(self.app.run_action, f"tab('{name}')")
                return


def tab_labels() -> list[str]:
    """` 1 Log ` and so on."""
    return [f" {number} {name.capitalize()} " for number, name in enumerate(TABS, 1)]


class HelpScreen(ModalScreen[None]):
    """All keys, from the bindings themselves."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,question_mark,q", "dismiss", "close", key_display="?")
    ]

    def compose(self) -> ComposeResult:
        """One panel."""
        yield Lines()

    def on_mount(self) -> None:
        """List the keys of the app."""
        rows = [line(("Keys", HEADING)), line()]
        for binding in self.app.BINDINGS:
            assert isinstance(binding, Binding)
            key = binding.key_display or binding.key
            rows.append(line((f"{key:>10}  ", KEY), (binding.tooltip or binding.description, PLAIN)))
        rows += [
            line(),
            line(("Reading the log: arrows, page keys; End follows again.", LABEL)),
            line(("On a plot: + and - zoom, arrows pan, r resets.", LABEL)),
        ]
        self.query_one(Lines).set_lines(rows)


class RunApp(App[int]):
    """The view of the run that is mirrored in `directory`."""

    TITLE = "dflashctl"
    CSS_PATH = "app.tcss"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("1", "tab('log')", "log", key_display="1", tooltip="the log"),
        Binding("2", "tab('curves')", "curves", key_display="2", tooltip="loss, tau, rate, gradient"),
        Binding("3", "tab('threads')", "threads", key_display="3", tooltip="the trainer's threads"),
        Binding("4", "tab('events')", "events", key_display="4", tooltip="what happened"),
        Binding("slash", "find", "find", key_display="/", tooltip="find in the log (regex)"),
        Binding("n", "next_match(False)", "next", show=False, tooltip="next match"),
        Binding("N", "next_match(True)", "previous", show=False, tooltip="previous match"),
        Binding("f", "follow", "follow", tooltip="follow the log's end, or stay"),
        Binding("z", "zoom", "zoom", tooltip="give the tab the panels' room, or give it back"),
        Binding("x", "crash", "crash", show=False, tooltip="show or hide how the run died"),
        Binding("y", "copy", "copy", tooltip="copy what is shown (terminal clipboard and a file)"),
        Binding("R", "reconnect", "reconnect", show=False, tooltip="reconnect now"),
        Binding("question_mark", "help", "help", key_display="?", tooltip="this help"),
        Binding("q,ctrl+c,ctrl+q", "detach", "detach", key_display="q",
                tooltip="detach: the training goes on", priority=False),
        Binding("ctrl+z", "suspend_process", "suspend", show=False, key_display="^z",
                tooltip="suspend this view"),
    ]  # fmt: skip

    def __init__(
        self,
        directory: Path,
        mirror: Watched | None = None,
        *,
        clock: Callable[[], float] = time.time,
        period_s: float | None = PERIOD_S,
    ) -> None:
        """`period_s` None: no thread; the app reads once at the start, and whenever `tick` is called."""
        super().__init__()
        self._directory = directory
        self._mirror = mirror
        self._threaded = period_s is not None
        self._ticker = Ticker(
            directory,
            lambda state: self.post_message(Snapshot(state)),
            clock=clock,
            period_s=period_s or PERIOD_S,
        )
        self._state = RunState()
        self._zoomed = False
        self._crash_hidden = False
        self._arrangement: Arrangement | None = None
        self._note = ""
        self._note_until = 0.0
        self.register_theme(THEME)
        self.theme = THEME.name

    @property
    def state(self) -> RunState:
        """The state on the screen."""
        return self._state

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
            with Vertical(id="side"):
                for plot in PLOTS[:3]:
                    yield CurvePlot(plot)
        yield TabBar(id="tabs")
        with ContentSwitcher(initial="log", id="body"):
            yield LogView(id="log")
            with Grid(id="curves"):
                for plot in PLOTS:
                    yield CurvePlot(plot)
            yield LineView(id="threads")
            yield LineView(id="events")
        yield Input(placeholder="find in the log (regular expression)", id="find", compact=True)
        yield Lines(id="footer")

    def on_mount(self) -> None:
        """Begin to read."""
        self.query_one("#events", LineView).stick_to_end = True
        self.query_one("#log", LogView).focus()
        if self._threaded:
            self._ticker.start()
        else:
            self.call_after_refresh(self.tick)

    def on_unmount(self) -> None:
        """End the thread."""
        self._ticker.stop()

    def tick(self) -> None:
        """Read and show once, in this thread."""
        self._take(self._ticker.tick())

    @on(Snapshot)
    def _on_snapshot(self, message: Snapshot) -> None:
        self._take(message.state)

    def on_resize(self) -> None:
        """Give every part its room."""
        self.call_after_refresh(self._draw)

    # drawing

    def _take(self, state: RunState) -> None:
        self._state = state
        self.query_one("#log", LogView).add(self._ticker.take_log())
        self._draw()

    def _draw(self) -> None:
        if not self.is_running:
            return
        state = self._state
        self._arrange()
        width = self.size.width
        self._lines("status", [status_line(state, width)])
        detail = None if self._crash_shown else detail_line(state, width)
        self._lines("detail", [detail] if detail else [])
        self._lines("learning", [learning_line(state, width)])
        self._lines("speed", [speed_line(state, width)])
        self._lines("tabs", [self._tab_line(width)])
        self._lines("footer", [self._footer_line()])
        self._draw_panels(state)
        body = self.query_one("#body", ContentSwitcher).current
        if body == "threads":
            self.query_one("#threads", LineView).set_lines(thread_lines(state, width - 1))
        elif body == "events":
            self.query_one("#events", LineView).set_lines(event_lines(state, width))
        elif body == "curves":
            for plot in self.query("#curves CurvePlot").results(CurvePlot):
                plot.show(state)

    def _draw_panels(self, state: RunState) -> None:
        arrangement = self._arrangement
        assert arrangement is not None
        if self._crash_shown:
            rows = crash_lines(state, self.size.width - 4)
            self.query_one("#crash", LineView).set_lines(rows)
            return
        columns = arrangement.panel_columns
        if arrangement.gpu_rows == 1:
            self._lines("gpus", [gpu_summary(state, columns)])
        elif arrangement.gpu_rows:
            self._lines("gpus", gpu_lines(state, columns)[: arrangement.gpu_rows])
        if arrangement.flow:
            self._lines("flow", [flow_line(state, columns)])
        if arrangement.bucket_rows:
            self._lines("buckets", bucket_lines(state, columns)[: arrangement.bucket_rows])
        if arrangement.thread_rows:
            threads = self.query_one("#middle-threads", LineView)
            threads.set_lines(thread_lines(state, columns - 1))
        if arrangement.curves_columns:
            for plot in self.query("#side CurvePlot").results(CurvePlot):
                if plot.display:
                    plot.show(state)

    def _lines(self, name: str, lines: list[Text]) -> None:
        self.query_one(f"#{name}", Lines).set_lines(lines)

    @property
    def _crash_shown(self) -> bool:
        return has_crash(self._state) and not self._crash_hidden and not self._zoomed

    def _arrange(self) -> None:
        """Give rows to widgets; only when the arrangement has changed."""
        state, size = self._state, self.size
        body = self.query_one("#body", ContentSwitcher).current
        small_tab = body != "log" and size.height < SMALL_ROWS
        crash = self._crash_shown
        progress = state.progress
        columns = size.width
        arrangement = arrange(
            size.width,
            size.height,
            gpus=len(state.gpus),
            buckets=len(progress.buckets) if progress else 0,
            threads=len(progress.threads) if progress else 0,
            detail=not crash and detail_line(state, columns) is not None,
            zoomed=self._zoomed or small_tab,
            crash=len(crash_lines(state, size.width - 4)) if crash else 0,
        )
        if arrangement == self._arrangement:
            return
        self._arrangement = arrangement
        for name in ("learning", "speed", "detail", "tabs", "footer", "flow"):
            self.query_one(f"#{name}").display = getattr(arrangement, name)
        crash_view, middle = self.query_one("#crash"), self.query_one("#middle")
        crash_view.display = arrangement.crash_rows > 0
        crash_view.styles.height = arrangement.crash_rows
        self.query_one("#gpus").display = arrangement.gpu_rows > 0
        self.query_one("#buckets").display = arrangement.bucket_rows > 0
        self.query_one("#middle-threads").display = arrangement.thread_rows > 0
        middle.display = arrangement.middle_rows > 0
        middle.styles.height = arrangement.middle_rows
        side, panels = self.query_one("#side"), self.query_one("#panels")
        side.display = arrangement.curves_columns > 0
        side.styles.width = arrangement.curves_columns
        panels.styles.width = arrangement.panel_columns
        for number, plot in enumerate(self.query("#side CurvePlot")):
            plot.display = number < arrangement.side_plots
        self.call_after_refresh(self._draw)

    def _tab_line(self, width: int) -> Text:
        current = self.query_one("#body", ContentSwitcher).current
        text = line()
        for name, label in zip(TABS, tab_labels(), strict=True):
            text.append(label, style=TAB_ON if name == current else LABEL)
            text.append(" ")
        log = self.query_one("#log", LogView)
        if self._note and time.monotonic() < self._note_until:
            right = line((self._note, WARN))
        elif self._ticker.error is not None:
            right = line((f"the reader failed: {type(self._ticker.error).__name__}", BAD))
        elif log.following:
            right = line(("follow ", LABEL), ("ON", PLAIN))
        else:
            waiting = f" · {log.waiting:,} new lines" if log.waiting else ""
            right = line(("follow ", LABEL), ("OFF", WARN), (waiting, WARN))
        room = width - text.cell_len - right.cell_len
        text.append(" " * max(1, room))
        text.append_text(right)
        return text

    def _footer_line(self) -> Text:
        text = line((" 1-4", KEY), (" tabs ", LABEL))
        for binding in self.BINDINGS:
            assert isinstance(binding, Binding)
            if not binding.show or binding.action.startswith("tab("):
                continue
            text.append(f" {binding.key_display or binding.key}", style=KEY)
            text.append(f" {binding.description} ", style=LABEL)
        if has_crash(self._state):
            text.append(" x", style=KEY)
            text.append(" crash ", style=LABEL)
        return text

    def _say(self, note: str, seconds: float = 4.0) -> None:
        self._note, self._note_until = note, time.monotonic() + seconds
        self.set_timer(seconds + 0.1, self._draw)
        self._draw()

    # keys

    def action_tab(self, name: str) -> None:
        """Show another tab."""
        self.query_one("#body", ContentSwitcher).current = name
        focus = {"log": "#log", "threads": "#threads", "events": "#events"}.get(name)
        if focus:
            self.query_one(focus).focus()
        self._draw()
        self.call_after_refresh(self._draw)

    def action_zoom(self) -> None:
        """Give the tab the room of the panels, or give it back."""
        self._zoomed = not self._zoomed
        self._draw()

    def action_crash(self) -> None:
        """Show or hide how the run died."""
        self._crash_hidden = not self._crash_hidden
        self._draw()

    def action_follow(self) -> None:
        """Follow the log's end, or stay."""
        log = self.query_one("#log", LogView)
        log.set_following(not log.following)
        self._draw()

    @on(LogView.FollowChanged)
    def _on_follow_changed(self) -> None:
        self._draw()

    def action_find(self) -> None:
        """Ask what to find in the log."""
        self.action_tab("log")
        find = self.query_one("#find", Input)
        find.display = True
        find.focus()

    @on(Input.Submitted, "#find")
    def _on_find(self, event: Input.Submitted) -> None:
        event.input.display = False
        log = self.query_one("#log", LogView)
        log.focus()
        found = log.search(event.value)
        if event.value:
            self._say(f"{found:,} line{'s' * (found != 1)} match{'es' * (found == 1)}  n N go on")

    def on_key(self, event: events.Key) -> None:
        """Escape leaves the question, and forgets what was searched."""
        if event.key == "escape":
            self.query_one("#find", Input).display = False
            log = self.query_one("#log", LogView)
            log.search("")
            log.focus()

    def action_next_match(self, back: bool) -> None:
        """Go to the next or the previous match."""
        self.query_one("#log", LogView).next_match(back=back)

    def action_copy(self) -> None:
        """Copy the crash, or what the tab shows, by OSC 52 and into a file."""
        body = self.query_one("#body", ContentSwitcher).current
        if self._crash_shown:
            text = "\n".join(t.plain for t in self.query_one("#crash", LineView).lines)
        elif body in ("threads", "events"):
            text = "\n".join(t.plain for t in self.query_one(f"#{body}", LineView).lines)
        else:
            text = self.query_one("#log", LogView).visible_text()
        self.copy_to_clipboard(text)
        where = paths.state_root() / "copied.txt"
        try:
            where.parent.mkdir(parents=True, exist_ok=True)
            where.write_text(text + "\n", "utf-8")
        except OSError as error:
            self._say(f"copied to the terminal's clipboard; no file: {error.strerror}")
            return
        self._say(f"copied, also to {where}")

    def action_reconnect(self) -> None:
        """Try to connect now."""
        if self._mirror is None:
            self._say("another process mirrors this run")
            return
        self._mirror.poke()
        self._say("reconnecting now")

    def action_help(self) -> None:
        """Show all keys."""
        self.push_screen(HelpScreen())

    def action_detach(self) -> None:
        """Leave; the training goes on."""
        self.exit(0)


def run_tui(directory: Path, mirror: Watched | None) -> int:
    """Show the run mirrored in `directory` until the user leaves; returns the exit code.

    `mirror`, not yet started, is started and stopped here; None: only look at what is there. Raises
    UsageError without a terminal.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError(
            "tui needs a terminal", "for scripts there is `dflashctl status --json` and `logs --follow`"
        )
    os.environ.setdefault("TEXTUAL_ANIMATIONS", "none")
    if mirror is not None:
        mirror.start()
    try:
        app = RunApp(directory, mirror)
        app.run()
    finally:
        if mirror is not None:
            mirror.stop(0.2)
    return app.return_code or 0
