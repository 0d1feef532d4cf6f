"""The program around the screen: keys, the thread that reads, and the mirror that writes.

The app owns no truth and does no I/O but the keyboard's: a thread reads the mirror (`ticker`), pure
functions make lines of its `RunState`, and widgets show lines. `q` detaches: it ends this process and
nothing else.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Protocol

from textual import on
from textual.app import App
from textual.binding import Binding, BindingType
from textual.message import Message

from controller import paths
from controller.errors import UsageError
from controller.health import age_text
from controller.run_state import RunState
from controller.tui.help import HelpScreen
from controller.tui.palette import THEME
from controller.tui.run_screen import RunScreen
from controller.tui.ticker import PERIOD_S, Ticker

STUCK_PERIODS = 5
"""Periods without a snapshot after which the first line says that this view is stuck."""


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


class RunApp(App[int]):
    """The view of the run that is mirrored in `directory`."""

    TITLE = "dflashctl"
    CSS_PATH = "app.tcss"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("1", "tab('log')", "log", show=False, tooltip="the log"),
        Binding("2", "tab('curves')", "curves", show=False, tooltip="loss, tau, rate, gradient"),
        Binding("3", "tab('threads')", "threads", show=False, tooltip="the trainer's threads"),
        Binding("4", "tab('events')", "events", show=False, tooltip="what happened"),
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
                tooltip="detach: the training goes on"),
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
        self._mirror = mirror
        self._period_s = period_s
        self._taken_at = time.monotonic()
        self._directory = directory
        self._ticker = Ticker(
            directory,
            lambda state: self.post_message(Snapshot(state)),
            clock=clock,
            period_s=period_s or PERIOD_S,
        )
        shown = [b for b in self.BINDINGS if isinstance(b, Binding) and b.show]
        keys = [("1-4", "tabs"), *((b.key_display or b.key, b.description) for b in shown)]
        self._run_screen = RunScreen(keys)
        self.register_theme(THEME)
        self.theme = THEME.name

    def get_default_screen(self) -> RunScreen:
        """The run's screen."""
        return self._run_screen

    def on_mount(self) -> None:
        """Begin to read."""
        self.call_after_refresh(self._open_log)
        if self._period_s is None:
            self.call_after_refresh(self.tick)
        else:
            self.call_after_refresh(self._ticker.start)
            self.set_interval(2 * self._period_s, self._watch_reader)

    def on_unmount(self) -> None:
        """End the thread."""
        self._ticker.stop()

    def tick(self) -> None:
        """Read and show once, in this thread."""
        self._show(self._ticker.tick())
        self._run_screen.log_view.tick()

    def _open_log(self) -> None:
        self._run_screen.log_view.open(self._directory, threaded=self._period_s is not None)

    @on(Snapshot)
    def _on_snapshot(self, message: Snapshot) -> None:
        self._show(message.state)

    def _show(self, state: RunState) -> None:
        self._taken_at = time.monotonic()
        if self._run_screen.is_mounted and self._run_screen.query("#footer"):
            self._run_screen.take(state)
        self._ticker.taken()

    def _watch_reader(self) -> None:
        """A reader that has failed or hangs must not leave LIVE on the screen."""
        silent = time.monotonic() - self._taken_at
        if self._period_s is not None and silent > STUCK_PERIODS * self._period_s:
            error = self._ticker.error
            why = f"{type(error).__name__}: {error}" if error else "the mirror folder does not answer"
            self._run_screen.show_trouble(f"{age_text(silent)}  {why}")

    # keys

    def action_tab(self, name: str) -> None:
        """Show another tab."""
        self._run_screen.show_tab(name)

    def action_zoom(self) -> None:
        """Give the tab the room of the panels, or give it back."""
        self._run_screen.toggle_zoom()

    def action_crash(self) -> None:
        """Show or hide how the run died."""
        self._run_screen.toggle_crash()

    def action_follow(self) -> None:
        """Follow the log's end, or stay."""
        log = self._run_screen.log_view
        log.set_following(not log.following)

    def action_find(self) -> None:
        """Ask what to find in the log."""
        self._run_screen.ask_find()

    def action_next_match(self, back: bool) -> None:
        """Go to the next or the previous match."""
        self._run_screen.log_view.next_match(back=back)

    def action_copy(self) -> None:
        """Copy by OSC 52 and into a file, and say so."""
        text = self._run_screen.copied_text()
        self.copy_to_clipboard(text)
        where = paths.state_root() / "copied.txt"
        try:
            where.parent.mkdir(parents=True, exist_ok=True)
            where.write_text(text + "\n", "utf-8")
        except OSError as error:
            said = error.strerror or type(error).__name__
            self._run_screen.say(f"copied to the terminal's clipboard; no file: {said}")
            return
        self._run_screen.say(f"copied, also to {where}")

    def action_reconnect(self) -> None:
        """Try to connect now."""
        if self._mirror is None:
            self._run_screen.say("this view only reads; it has no connection")
            return
        self._mirror.poke()
        self._run_screen.say("reconnecting now")

    def action_help(self) -> None:
        """Show all keys."""
        self.push_screen(HelpScreen())

    def action_detach(self) -> None:
        """Leave; the training goes on."""
        if self._mirror is not None:
            self._mirror.stop(0.0)  # it ends while the terminal is restored
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
    # The interpreter's last collection walks every object of Textual: 0.3 s after `q` on a busy machine.
    gc.freeze()
    return app.return_code or 0
