"""The thread that reads the log for its view, which asks and is given pages, and reads no file itself.

Requests are done in their order, between them the thread looks for new bytes and goes on with a search, a
slice at a time. Without a thread (tests, pictures) every request is done at once. However fast the log
grows, a page costs the same: it is read backwards from the end.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from controller.errors import LocalStateError
from controller.figures import amount
from controller.log_file import LogFile
from controller.log_scan import LogScan, Matches
from controller.mirror import ask_for_whole_log
from controller.tui.log_page import Found, LogPage
from controller.tui.log_prefix import prefix_of
from controller.tui.log_shown import ShownLog, Way

RESTING_S = 10.0
"""Between looks at the log of a run that has ended."""

PERIOD_S = 0.5
"""Between two looks for new bytes."""

TROUBLED_S = 5.0
"""Until the next try after one that failed."""

AROUND = 400
"""Lines of a page before and behind the place where the view stands."""

BUSY_S = 0.2
"""How long the thread searches before it tells how far it is."""


class LogFeed:
    """Reads the log in the mirror folder `directory` and calls `deliver(page)` from its thread."""

    def __init__(self, directory: Path, deliver: Callable[[LogPage], object], *, threaded: bool) -> None:
        self._directory = directory
        self._deliver = deliver
        self._threaded = threaded
        self._file = LogFile(directory)
        self._shown = ShownLog(self._file)
        self._requests: collections.deque[Callable[[], None]] = collections.deque()
        self._wake = threading.Event()
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._ticket = 0
        self._anchor: int | None = None
        self._search: LogScan | None = None
        self._search_matches: Matches | None = None
        self._seeking: Iterator[int | None] | None = None
        self._found_none = ""
        """What is said when the line that is looked for is not there."""
        self.resting = False
        """Whether nothing more is expected; it is still looked at, but rarely."""
        self._counted_to = 0
        self._new_lines = 0
        self._prefixes: set[str] = set()
        self._restarts_told = 0

    def start(self) -> None:
        """Begin; the first page comes at once."""
        self._later(self._look_and_show)
        if self._threaded:
            # A daemon: a disk that hangs must not keep the terminal.
            self._thread = threading.Thread(target=self._run, name="tui-log", daemon=True)
            self._thread.start()

    def stop(self, timeout: float = 0.1) -> None:
        """End; waits at most `timeout` seconds for a read that is under way."""
        self._stopped = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout)

    def tick(self) -> None:
        """Without a thread: look for new bytes now."""
        if not self._threaded:
            self._look()

    # requests of the view; `ticket` comes back in the page

    def show(self, ticket: int, anchor: int | None) -> None:
        """Give the lines around `anchor`, or follow the end when it is None."""

        def do() -> None:
            self._ticket = ticket
            if anchor is None:
                self._new_lines = 0
            elif self._anchor is None:
                self._counted_to = self._file.end
            let_go = anchor is None and self._file.replaced
            self._anchor = anchor
            if let_go:
                self._look()
            self._show()

        self._later(do)

    def show_start(self, ticket: int) -> None:
        """Give the oldest lines, and go there."""
        self._later(lambda: self._go(ticket, 0))

    def seek(self, ticket: int, matches: Matches, start: int, *, back: bool, what: str) -> None:
        """Go to the next line that matches: behind the one at `start`, or before it. Otherwise a note says
        that there is no `what`.
        """

        def do() -> None:
            place = start if back else self._shown.stop_of(start)
            self._seek(ticket, matches, [(place, back)], f"no {what} {'above' if back else 'below'}")

        self._later(do)

    def seek_around(self, ticket: int, matches: Matches, start: int) -> None:
        """Go to the last line that matches, up to the one at `start`; without any to the first behind it."""

        def do() -> None:
            place = self._shown.stop_of(start)
            self._seek(ticket, matches, [(place, True), (place, False)], "no line matches")

        self._later(do)

    def search(self, matches: Matches | None) -> None:
        """Count the lines that match, from now on; None: no more."""

        def do() -> None:
            self._search_matches = matches
            self._search = LogScan(self._shown.matching(matches)) if matches else None
            self._show()

        self._later(do)

    def filter(self, ticket: int, matches: Matches | None, anchor: int | None) -> None:
        """Show only the lines that match; None: all. Stay at `anchor`, or follow the end."""

        def do() -> None:
            self._shown.filter(matches)
            if self._search_matches is not None:
                self._search = LogScan(self._shown.matching(self._search_matches))
            self._ticket, self._anchor = ticket, anchor
            self._show()

        self._later(do)

    def older(self) -> None:
        """Ask the mirror for the bytes that are missing."""

        def do() -> None:
            if not self._file.missing:
                self._say("the log is here from its first byte")
                return
            try:
                ask_for_whole_log(self._directory)
            except LocalStateError as error:
                self._say(error.message)
                return
            self._show(note=f"asked for the {amount(self._file.missing)} that are missing", asked=True)

        self._later(do)

    def save(self, path: Path, span: tuple[int, int] | None) -> None:
        """Write the lines from the first to the last of `span`, or all that are shown, to `path`."""
        self._later(lambda: self._say(self._shown.save(path, span, lambda: self._stopped)))

    # the thread

    def _later(self, request: Callable[[], None]) -> None:
        self._requests.append(request)
        if self._threaded:
            self._wake.set()
            return
        self._serve()
        while self._work(float("inf")):
            pass

    def _run(self) -> None:
        while not self._stopped:
            try:
                self._serve()
                busy = self._work(BUSY_S)
                if not busy:
                    self._wake.wait(RESTING_S if self.resting else PERIOD_S)
                    self._wake.clear()
                if not self._requests:
                    self._look()
            except Exception as error:  # a defect of ours: said, and the next look tries again
                said = f"the log cannot be read: {type(error).__name__}: {error}"
                self._deliver(LogPage(ticket=-1, note=said))  # no page of lines: making one may be what fails
                self._wake.clear()
                self._wake.wait(TROUBLED_S)

    def _serve(self) -> None:
        while self._requests and not self._stopped:
            self._requests.popleft()()

    def _work(self, most_s: float) -> bool:
        """Search on for `most_s` seconds, or until something is asked for; whether there may be more."""
        until = time.monotonic() + most_s
        worked = False
        while time.monotonic() < until and not self._requests and not self._stopped:
            if self._seeking is not None:
                self._seek_on(self._seeking)
            elif not any(scan.step(self._file.read, self._file.extents) for scan in self._scans()):
                break
            worked = True
        if worked and not self._requests:
            self._show()
        return worked and self._threaded

    def _scans(self) -> list[LogScan]:
        return [scan for scan in (self._shown.scan, self._search) if scan is not None]

    def _seek(self, ticket: int, matches: Matches, ways: list[Way], none: str) -> None:
        self._ticket, self._found_none = ticket, none
        self._seeking = self._shown.search(matches, ways)

    def _seek_on(self, seeking: Iterator[int | None]) -> None:
        """Look at one slice more."""
        try:
            found = next(seeking)
        except StopIteration:
            self._seeking = None
            self._say(self._found_none)
        else:
            if found is not None:
                self._seeking = None
                self._go(self._ticket, found)

    def _look_and_show(self) -> None:
        self._file.refresh()
        self._counted_to = self._file.end
        self._show()

    def _look(self) -> None:
        """Take what is new."""
        if not self._file.refresh(hold=self._anchor is not None):
            return
        file = self._file
        if file.restarts != self._restarts_told:
            self._restarts_told = file.restarts
            self._counted_to, self._new_lines = file.end, 0
            for scan in self._scans():
                scan.restart()
        if self._anchor is not None:
            self._count_new()
        if self._scans():
            self._work(BUSY_S if self._threaded else float("inf"))
        self._show()

    def _count_new(self) -> None:
        end = self._file.end
        while self._counted_to < end:
            block = self._file.read(self._counted_to, min(end, self._counted_to + (8 << 20)))
            if not block:
                break
            self._new_lines += block.count(b"\n")
            self._counted_to += len(block)

    def _go(self, ticket: int, place: int) -> None:
        self._ticket = ticket
        if self._anchor is None:
            self._counted_to = self._file.end
        self._anchor = place
        self._show(goto=place)

    # pages

    def _say(self, note: str) -> None:
        self._show(note=note)

    def _show(self, *, goto: int | None = None, note: str = "", asked: bool = False) -> None:
        file = self._file
        end = file.end
        if self._anchor is None:
            before, behind = self._shown.before(end, AROUND), []
        else:
            anchor = min(self._anchor, end)
            before, behind = self._shown.before(anchor, AROUND), self._shown.behind(anchor, AROUND)
        rows = tuple(file.row(span) for span in (*before, *behind))
        self._prefixes.update(filter(None, (prefix_of(row.text) for row in rows[-100:])))
        self._deliver(
            LogPage(
                ticket=self._ticket,
                rows=rows,
                at_start=not before or not self._shown.before(before[0].start, 1),
                at_end=not behind or not self._shown.behind(behind[-1].stop, 1),
                goto=goto,
                end=end,
                missing=file.missing,
                new_lines=self._new_lines,
                replaced=file.replaced,
                restarts=file.restarts,
                search=_found(self._search),
                filter=_found(self._shown.scan),
                prefixes=tuple(sorted(self._prefixes)),
                note=note,
                asked=asked,
            )
        )


def _found(scan: LogScan | None) -> Found | None:
    return None if scan is None else Found(count=len(scan.found), done=scan.done)
