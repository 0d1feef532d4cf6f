"""The program around the screen: keys, the thread that reads, and the mirror that writes.

The app owns no truth and does no I/O but the keyboard's: a thread reads the mirror (`ticker`), pure
functions make lines of its `RunState`, and widgets show lines. `q` detaches: it ends this process and
nothing else. Only the run on the screen is mirrored; another one is chosen in the picker.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import ClassVar

import textual
from textual import on
from textual.app import SystemCommand
from textual.binding import Binding, BindingType
from textual.driver import Driver
from textual.filter import LineFilter
from textual.screen import Screen

from controller import paths
from controller.defect_report import write_report
from controller.errors import INTERNAL_EXIT_CODE, DflashctlError, LocalStateError, UsageError
from controller.health import age_text
from controller.mirror import Mirror
from controller.run_state import RunState
from controller.tui import themes
from controller.tui.log_view import LogView
from controller.tui.run_actions import RunActions
from controller.tui.run_screen import RunScreen
from controller.tui.snapshot import Snapshot, Watched, explained
from controller.tui.terminal import driver_for, end_with_terminal, has_size
from controller.tui.ticker import PERIOD_S, Ticker

STUCK_PERIODS = 5
"""Periods without a snapshot after which the first line says that this view is stuck."""


class RunApp(RunActions):
    """The view of the run that is mirrored in `directory`."""

    TITLE = "dflashctl"
    CSS_PATH = "app.tcss"
    COMMAND_PALETTE_DISPLAY = "^p"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("1", "tab('log')", "log", show=False, tooltip="the log"),
        Binding("2", "tab('curves')", "curves", show=False, tooltip="curves: loss, tau, queues, GPUs ..."),
        Binding("3", "tab('threads')", "threads", show=False, tooltip="the trainer's threads"),
        Binding("4", "tab('events')", "events", show=False, tooltip="what happened"),
        Binding("slash", "find", "find", key_display="/", tooltip="find in the log (regex)"),
        Binding("n", "next_match(False)", "next", show=False, tooltip="next match"),
        Binding("N", "next_match(True)", "previous", show=False, tooltip="previous match"),
        Binding("f", "follow", "follow", tooltip="follow the log's end, or stay"),
        Binding("z", "zoom", "zoom", show=False, tooltip="give the tab the panels' room, or give it back"),
        Binding("x", "crash", "crash", show=False, tooltip="show or hide how the run died"),
        Binding("left_square_bracket", "gpus(-1)", "GPUs up", show=False, key_display="[",
                tooltip="scroll the GPUs up"),
        Binding("right_square_bracket", "gpus(1)", "GPUs down", show=False, key_display="]",
                tooltip="scroll the GPUs down"),
        Binding("y", "copy", "copy", tooltip="copy what is shown (terminal clipboard and a file)"),
        Binding("r", "pick", "runs", tooltip="look at another run, or another host of this one"),
        Binding("R", "reconnect", "reconnect", show=False, tooltip="reconnect now"),
        Binding("S", "stop_run", "stop", tooltip="stop the run (asks for its name)"),
        Binding("c", "checkpoint", "checkpoint", show=False, tooltip="have a checkpoint written now"),
        Binding("d", "doctor", "doctor", show=False, tooltip="examine the run's place"),
        Binding("l", "launch", "launch", show=False, tooltip="launch a job from a form"),
        Binding("ctrl+t", "theme", "theme", show=False, key_display="^t", tooltip="dark or light"),
        Binding("ctrl+l", "redraw", "redraw", show=False, key_display="^l", tooltip="draw the screen anew"),
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
        opener: Callable[[Path], Watched] | None = None,
    ) -> None:
        """`period_s` None: no thread; the app reads once at the start, and whenever `tick` is called.

        `opener` makes a mirror, not started, for a run; None: runs are only read, but for that of `mirror`.
        """
        super().__init__()
        self.mirror = mirror
        self._opener = opener
        self._clock = clock
        self._period_s = period_s
        self._taken_at = time.monotonic()
        self._directory = directory
        self._state = RunState()
        self._asked_for_mirror = False
        self._on_light = themes.OnLight()
        self.crash_report: Path | None = None
        """Where it is written how this view failed; None: it did not."""
        self._ticker = self._new_ticker(directory)
        shown = [b for b in self.BINDINGS if isinstance(b, Binding) and b.show]
        self._keys = [("1-4", "tabs"), *((b.key_display or b.key, b.description) for b in shown)]
        self._run_screen = RunScreen(self._keys)
        for theme in themes.THEMES:
            self.register_theme(theme)
        self.theme = themes.remembered()

    def _new_ticker(self, directory: Path) -> Ticker:
        return Ticker(
            directory,
            lambda state: self.post_message(Snapshot(state, directory)),
            clock=self._clock,
            period_s=self._period_s or PERIOD_S,
        )

    @property
    def directory(self) -> Path:
        """The mirror folder of the run that is shown."""
        return self._directory

    @property
    def state(self) -> RunState:
        """The run's newest state."""
        return self._state

    def say(self, note: str) -> None:
        """Say something for some seconds."""
        self._run_screen.say(note, 6.0)

    def get_driver_class(self) -> type[Driver]:
        """What reads this terminal's keys and writes to it."""
        return driver_for(super().get_driver_class())

    def get_line_filters(self) -> list[LineFilter]:
        """The filters of Textual, and that of the light theme."""
        filters = list(super().get_line_filters())
        return filters if self.current_theme.dark else [self._on_light, *filters]

    async def on_mount(self) -> None:
        """Begin to read."""
        if self._period_s is not None:
            self._mind_signals()  # before anything is drawn
        await self.push_screen(self._run_screen)  # and not as the default one, which cannot be switched
        self._begin_reading()
        if self._period_s is not None:
            self.set_interval(2 * self._period_s, self._watch_reader)

    def on_unmount(self) -> None:
        """End the thread."""
        self._ticker.stop()

    def tick(self) -> None:
        """Read and show once, in this thread."""
        self._show(self._ticker.tick())
        self._run_screen.log_view.tick()

    def _begin_reading(self) -> None:
        threaded = self._period_s is not None
        self.call_after_refresh(lambda: self._run_screen.log_view.open(self._directory, threaded=threaded))
        self.call_after_refresh(self._ticker.start if threaded else self.tick)

    def _begin_mirror(self) -> None:
        assert self._opener is not None
        directory = self._directory
        try:
            mirror = self._opener(directory)
        except DflashctlError as error:
            self.call_later(self.say, error.message)
            return
        except Exception as error:  # a defect of ours must be seen: this view would get no news
            self.call_later(self.say, f"{type(error).__name__}: {error}")
            return
        if directory == self._directory and self.is_running:
            self.mirror = mirror
            mirror.start()

    def _mind_signals(self) -> None:
        """SIGTERM and a closed terminal detach, so that the terminal is left as it was found."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            with contextlib.suppress(ValueError, NotImplementedError, RuntimeError):  # not the main thread
                loop.add_signal_handler(number, self.action_detach)

    @on(Snapshot)
    def _on_snapshot(self, message: Snapshot) -> None:
        if message.source == self._directory:  # else: the last one of the run before
            self._show(message.state)
        if not self._asked_for_mirror and self.mirror is None and self._opener is not None:
            # In a thread, and only now: what connects takes longer to import than a screen to draw.
            threading.Thread(target=self._begin_mirror, name="tui-mirror", daemon=True).start()
        self._asked_for_mirror = True

    def _show(self, state: RunState) -> None:
        self._taken_at = time.monotonic()
        self._state = state = explained(state, self.mirror)
        self.notice_checkpoint(state)
        if self._run_screen.complete:
            self._run_screen.take(state)
            self._run_screen.log_view.rest(state.ended and state.connection == "ended")
        self._ticker.taken()

    def _watch_reader(self) -> None:
        """A reader that has failed or hangs must not leave LIVE on the screen."""
        silent = time.monotonic() - self._taken_at
        if self._period_s is not None and silent > STUCK_PERIODS * self._ticker.pause_s:
            error = self._ticker.error
            why = f"{type(error).__name__}: {error}" if error else "the mirror folder does not answer"
            self._run_screen.show_trouble(f"{age_text(silent)}  {why}")

    def look_at_run(self, directory: Path) -> None:
        """Show the run that is mirrored in `directory` instead; its mirror begins, the other's ends."""
        if directory == self._directory:
            return
        self._ticker.stop(0.0)
        if self.mirror is not None:
            self.mirror.stop(0.0)  # its thread ends by itself
        self.mirror, trouble = None, ""
        if self._opener is not None:
            try:
                self.mirror = self._opener(directory)
            except DflashctlError as error:
                trouble = error.message
        if self.mirror is not None:
            self.mirror.start()
        self._directory, self._state = directory, RunState()
        self.asked_checkpoint = None
        self._taken_at = time.monotonic()
        self._ticker = self._new_ticker(directory)
        self._run_screen = RunScreen(self._keys)
        self.switch_screen(self._run_screen)
        self._begin_reading()
        if trouble:
            self.call_after_refresh(self.say, trouble)

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """What the command palette offers: the actions of the keys, by the words of the help."""
        for binding in self.BINDINGS:
            if isinstance(binding, Binding) and binding.action not in ("help", "command_palette"):
                key = binding.key_display or binding.key
                title = f"{binding.description.capitalize()} ({key})"
                yield SystemCommand(title, binding.tooltip, partial(self.run_action, binding.action))
        yield SystemCommand("Help (?)", "all keys, and what each column means", self.action_help)

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

    @on(LogView.OlderWanted)
    def _on_older_wanted(self) -> None:
        """A mirror that has all it was to have goes on with what it left out."""
        if isinstance(self.mirror, Mirror) and not self.mirror.running:
            self.mirror.start()

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
        try:
            where = paths.kept(paths.state_root() / "copied.txt", f"{text}\n")
        except LocalStateError as error:
            self._run_screen.say(f"copied to the terminal's clipboard; no file: {error.message}")
            return
        self._run_screen.say(f"copied, also to {where}")

    def action_reconnect(self) -> None:
        """Try to connect now."""
        if self.mirror is None:
            self._run_screen.say("this view only reads; it has no connection")
            return
        if isinstance(self.mirror, Mirror) and not self.mirror.running:
            self.mirror.start()
        self.mirror.poke()
        self._run_screen.say("reconnecting now")

    def action_help(self) -> None:
        """Show all keys, and what each column means."""
        from controller.tui.help import HelpScreen

        self.push_screen(HelpScreen())

    def action_pick(self) -> None:
        """Choose another run."""
        from controller.tui.picker import RunPicker

        def answered(directory: Path | None) -> None:
            if directory is not None:
                self.call_later(self.look_at_run, directory)  # once the picker is gone

        self.push_screen(
            RunPicker(self._directory, self._opener, clock=self._clock, period_s=self._period_s), answered
        )

    def action_gpus(self, rows: int) -> None:
        """Scroll the GPUs."""
        self._run_screen.scroll_gpus(rows)

    def action_theme(self) -> None:
        """Dark or light, from now on."""
        dark, light = (theme.name for theme in themes.THEMES)
        self.theme = light if self.theme == dark else dark
        themes.remember(self.theme)
        self.action_redraw()
        self.say("light theme" if self.theme == light else "dark theme")

    def action_redraw(self) -> None:
        """Draw every cell anew, whatever the terminal shows."""
        self.refresh(layout=True)
        for widget in self.screen.walk_children():
            widget.refresh()

    def action_suspend_process(self) -> None:
        """Sleep (Ctrl-Z). The mirror is let go of first, or other views would wait for its lock."""
        again = self.mirror
        if again is not None:
            again.stop()
        super().action_suspend_process()  # returns when the process is continued
        if again is not None and again is self.mirror:
            again.start()
        self.action_redraw()

    def action_detach(self) -> None:
        """Leave; the training goes on."""
        if self.mirror is not None:
            self.mirror.stop(0.0)  # it ends while the terminal is restored
        self.exit(0)

    def _fatal_error(self) -> None:
        """A defect of this view: written to a file; the terminal gets one line, and itself back."""
        error = self._exception or sys.exception()
        if error is not None:
            state = self._state
            run = f"{state.run_id or '?'}, {state.health.headline}, attempt {state.attempt}"
            self.crash_report = write_report(error, {"textual": textual.__version__, "run": run})
        self._close_messages_no_wait()


def run_tui(directory: Path, mirror: Watched | None, opener: Callable[[Path], Watched] | None = None) -> int:
    """Show the run mirrored in `directory` until the user leaves; returns the exit code.

    `mirror`, not yet started, is started and stopped here. Without one, `opener` makes it once the screen is
    drawn, and those for other runs; with neither the view only reads. Raises UsageError without a terminal
    that has a size.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError(
            "tui needs a terminal", "for scripts there is `dflashctl status --json` and `logs --follow`"
        )
    if not has_size(sys.stdout.fileno()):
        raise UsageError("the terminal says that it is 0x0", "tell it a size: stty rows 40 columns 120")
    os.environ.setdefault("TEXTUAL_ANIMATIONS", "none")
    end_with_terminal(sys.stdin.fileno())
    if mirror is not None:
        mirror.start()
    app = None
    try:
        app = RunApp(directory, mirror, opener=opener)
        app.run()
    finally:
        last = mirror if app is None else app.mirror
        if last is not None:
            last.stop(0.2)
    if app.return_code and app.return_code != 0:
        where = f"its report: {app.crash_report}" if app.crash_report else "no report could be written"
        print(f"error: the view failed, a defect of dflashctl; the run goes on; {where}", file=sys.stderr)
        return INTERNAL_EXIT_CODE
    # The interpreter's last collection walks every object of Textual: 0.3 s after `q` on a busy machine.
    gc.freeze()
    return app.return_code or 0
