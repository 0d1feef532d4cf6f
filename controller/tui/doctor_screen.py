"""`d`: the doctor's report about the run's place, as it comes from the place itself."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.text import Text
from textual import on

from controller.checkup import Report
from controller.inventory import Host
from controller.tui import background
from controller.tui.dialogs import Notice, error_lines, wrapped
from controller.tui.lines import line, remote
from controller.tui.palette import BAD, GOOD, LABEL, PLAIN, VALUE, WARN

_MARKS = {"ok": ("✓", GOOD), "warning": ("!", WARN), "failure": ("✗", BAD)}


def report_lines(report: Report, width: int) -> list[Text]:
    """A line for each check, and below it what to do."""
    rows = []
    wide = max((len(check.name) for check in report.checks), default=0)
    for check in report.checks:
        mark, style = _MARKS[check.level]
        first, *more = wrapped(check.seen, width - wide - 5) or [line()]
        rows.append(line((f"{mark} ", style), remote(f"{check.name:<{wide}}", VALUE), "  ", first))
        rows += [line(" " * (wide + 4), text) for text in more]
        if check.level != "ok" and check.todo:
            rows += [
                line((" " * (wide + 4) + "→ ", style), text) for text in wrapped(check.todo, width - wide - 7)
            ]
    failures = sum(check.level == "failure" for check in report.checks)
    warnings = sum(check.level == "warning" for check in report.checks)
    rows += [line(), line((f"{len(report.checks)} checks, {failures} failures, {warnings} warnings", LABEL))]
    return rows


class DoctorScreen(Notice):
    """Looks at `host` by `look`, in a thread, and shows the report."""

    def __init__(self, host: Host, look: Callable[[Host], Report]) -> None:
        super().__init__(f"Doctor: {host.name}")
        self._host, self._look = host, look
        self._began = time.monotonic()
        self._answered = False

    def on_mount(self) -> None:
        """Begin to look."""
        super().on_mount()
        self.set_interval(1.0, self._waiting)
        self._waiting()
        background.begin(self, "doctor", lambda say: self._look(self._host))

    def _waiting(self) -> None:
        if not self._answered:
            spent = time.monotonic() - self._began
            where = f"{self._host.name} ({self._host.kind}, {self._host.address})"
            self.show([line(("  looking at ", PLAIN), remote(where, VALUE), (f"  {spent:.0f} s", LABEL))])

    @on(background.Done)
    def _on_done(self, message: background.Done) -> None:
        message.stop()
        self._answered = True
        width = self.query_one("#notice-lines").size.width - 2
        if message.error:
            self.show(error_lines(message.error, message.hint, width))
        else:
            self.show(report_lines(message.result, width))
