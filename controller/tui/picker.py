"""The picker (`r`): the runs that this machine knows, live, to look at another one.

Only the run that is looked at is mirrored all the time. While the picker is open, the newest runs that have
not ended (`MOST_MIRRORS` of them) are mirrored too, so that their rows live; closing it ends those mirrors.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, Protocol

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.screen import ModalScreen

from controller.errors import DflashctlError
from controller.tui.line_widgets import Lines, LineView
from controller.tui.lines import line, remote
from controller.tui.palette import CHOSEN, HEADING, KEY, LABEL, VALUE, WARN
from controller.tui.run_list import RunRow, run_rows, run_table

MOST_MIRRORS = 6
PERIOD_S = 1.0


class Mirrored(Protocol):
    """What the picker needs of a mirror."""

    def start(self) -> None:
        """Begin to mirror."""

    def stop(self, timeout: float = ...) -> None:
        """End within about `timeout` seconds."""


class RunPicker(ModalScreen[Path | None]):
    """Chooses the mirror folder of a run; None: none was chosen."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "choose", "look at it", tooltip="look at this run"),
        Binding("up,k", "move(-1)", "up", show=False, tooltip="the run above"),
        Binding("down,j", "move(1)", "down", show=False, tooltip="the run below"),
        Binding("home", "move(-100000)", "first", show=False, tooltip="the newest run"),
        Binding("end", "move(100000)", "last", show=False, tooltip="the oldest run"),
        Binding("escape,r,q", "dismiss(None)", "close", tooltip="stay with this run"),
    ]

    class Looked(Message):
        """The runs as they are now."""

        def __init__(self, rows: Sequence[RunRow], error: str = "") -> None:
            super().__init__()
            self.rows, self.error = rows, error

    def __init__(
        self,
        current: Path,
        opener: Callable[[Path], Mirrored] | None,
        *,
        clock: Callable[[], float] = time.time,
        period_s: float | None = PERIOD_S,
    ) -> None:
        """`opener` makes a mirror that is not started; None: none is wanted. `period_s` None: look once."""
        super().__init__()
        self._current, self._opener, self._clock, self._period_s = current, opener, clock, period_s
        self._rows: Sequence[RunRow] = ()
        self._error = ""
        self._chosen = current
        self._mirrors: dict[Path, Mirrored] = {}
        self._stop = threading.Event()

    def compose(self) -> ComposeResult:
        """A title, the names of the columns, the runs, the keys."""
        yield Lines(id="picker-title")
        yield Lines(id="picker-names")
        yield LineView(id="picker-runs")
        yield Lines(id="picker-keys")

    def on_mount(self) -> None:
        """Look, now and every second."""
        self.query_one("#picker-title", Lines).set_lines([line(("Runs", HEADING), ("  being read", LABEL))])
        keys = line()
        for binding in self.BINDINGS:
            assert isinstance(binding, Binding)
            if binding.show:
                shown = binding.key.split(",")[0].replace("escape", "Esc").replace("enter", "Enter")
                keys.append(f" {shown}", style=KEY)
                keys.append(f" {binding.description} ", style=LABEL)
        self.query_one("#picker-keys", Lines).set_lines([keys])
        if self._period_s is None:
            self._look()
        else:
            threading.Thread(target=self._run, name="tui-picker", daemon=True).start()

    def on_unmount(self) -> None:
        """End the mirrors."""
        self._stop.set()
        for mirror in list(self._mirrors.values()):
            mirror.stop(0.0)

    # the thread

    def _run(self) -> None:
        assert self._period_s is not None
        while not self._stop.is_set():
            self._look()
            self._stop.wait(self._period_s)
        for mirror in list(self._mirrors.values()):  # one may have been made meanwhile
            mirror.stop(0.0)

    def _look(self) -> None:
        rows = self._rows
        try:
            rows = run_rows(self._clock())
            self.post_message(self.Looked(rows))
            self._keep_up(rows)
        except DflashctlError as error:
            self.post_message(self.Looked((), error.message))
        except Exception as error:  # a defect must be seen and not end the looking
            self.post_message(self.Looked(rows, f"{type(error).__name__}: {error}"))

    def _keep_up(self, rows: Sequence[RunRow]) -> None:
        """Mirrors for the newest runs that have not ended."""
        if self._opener is None:
            return
        going = [r.directory for r in rows if not r.health.word.ended and r.directory != self._current]
        for directory in going[:MOST_MIRRORS]:
            if directory in self._mirrors or self._stop.is_set():
                continue
            try:
                mirror = self._opener(directory)
            except DflashctlError:  # its place.json is damaged: it stays as it was last heard
                continue
            self._mirrors[directory] = mirror
            mirror.start()

    # the screen

    @on(Looked)
    def _on_looked(self, message: Looked) -> None:
        self._rows, self._error = message.rows, message.error
        self._draw()

    def on_resize(self) -> None:
        """Another width has other columns."""
        self._draw()

    def _draw(self) -> None:
        if not self.query("#picker-keys"):
            return
        view = self.query_one("#picker-runs", LineView)
        names, lines = run_table(self._rows, max(20, view.scrollable_content_region.width - 2))
        for row, text in zip(self._rows, lines, strict=True):
            if row.directory == self._chosen:
                text.stylize_before(CHOSEN, 0, len(text.plain))
        marked = [
            line(
                ("▸" if row.directory == self._current else " ", KEY),
                ("›" if row.directory == self._chosen else " ", VALUE),
                text,
            )
            for row, text in zip(self._rows, lines, strict=True)
        ]
        view.styles.height = max(3, len(marked))  # at most what app.tcss allows
        view.set_lines(marked or [line(("  none is known: dflashctl launch starts one", LABEL))])
        title = line(("Runs", HEADING), (f"  {len(self._rows)} known here, newest first", LABEL))
        if self._error:
            title.append_text(remote(f"  {self._error}", WARN))
        self.query_one("#picker-title", Lines).set_lines([title])
        self.query_one("#picker-names", Lines).set_lines([Text("  ").append_text(names)])

    def action_move(self, rows: int) -> None:
        """Choose a run above or below."""
        if not self._rows:
            return
        places = [row.directory for row in self._rows]
        at = places.index(self._chosen) if self._chosen in places else 0
        at = max(0, min(len(places) - 1, at + rows))
        self._chosen = places[at]
        self._draw()
        view = self.query_one("#picker-runs", LineView)
        top, height = view.scroll_offset.y, view.size.height
        if not top <= at < top + height:
            view.scroll_to(y=at if at < top else at - height + 1, animate=False, immediate=True)

    def action_choose(self) -> None:
        """Look at the chosen run."""
        known = any(row.directory == self._chosen for row in self._rows)
        self.dismiss(self._chosen if known else None)
