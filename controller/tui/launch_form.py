"""`l`: a run is launched from a list of jobs; the effective job is shown before anything is sent.

The form reads only files of this machine (the payload's jobs, hosts.toml). The launch itself is that of the
command line, in a thread; what it narrates and why it failed appear in the form.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.screen import ModalScreen
from textual.widgets import Input

from controller import inventory, jobs
from controller.errors import DflashctlError, UsageError
from controller.inventory import Host
from controller.narration import Say
from controller.tui import background
from controller.tui.dialogs import error_lines, wrapped
from controller.tui.line_widgets import Lines, LineView
from controller.tui.lines import hanging, line, remote
from controller.tui.palette import BAD, FAINT, GOOD, HEADING, KEY, LABEL, PLAIN, TAB_ON, VALUE
from remote_payload.job import Job

if TYPE_CHECKING:
    from controller.launch import LaunchedRun

Launch = Callable[[Host, Job, str, Say], "LaunchedRun"]


def launch_job(host: Host, job: Job, name: str, say: Say) -> LaunchedRun:
    """The launch of the command line; imports what connects only now."""
    from controller.launch import launch

    return launch(host, job, name, say=say)


class LaunchForm(ModalScreen[Path | None]):
    """Launches a job; gives the mirror folder of the new run, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+s", "start", "start it", key_display="^s", tooltip="launch the job that is shown"),
        Binding("up", "job(-1)", "job", show=False, priority=True, tooltip="the job above"),
        Binding("down", "job(1)", "job", show=False, priority=True, tooltip="the job below"),
        Binding("pageup", "page(-1)", "page", show=False, priority=True, tooltip="read the job upward"),
        Binding("pagedown", "page(1)", "page", show=False, priority=True, tooltip="read the job downward"),
        Binding("escape", "leave", "close", tooltip="launch nothing"),
    ]

    def __init__(self, launch: Launch = launch_job) -> None:
        super().__init__()
        self._launch = launch
        self._names = jobs.names()
        self._chosen: tuple[Host, str, Job] | None = None
        self._launching = False
        self._said: list[str] = []

    def compose(self) -> ComposeResult:
        """Jobs, place and changes above the effective job."""
        yield Lines(id="launch-title")
        yield Lines(id="launch-jobs")
        first = self._names[0] if self._names else ""
        for name, value, placeholder in (
            ("job", first, "a job of the list, or a file: jobs/mine.toml"),
            ("host", "", "empty: the default of hosts.toml"),
            ("set", "", "learning_rate=3e-4 steps=2000"),
        ):
            with Horizontal():
                yield Lines(id=f"launch-label-{name}")
                yield Input(value=value, id=f"launch-{name}", compact=True, placeholder=placeholder)
        yield Lines(id="launch-rule")
        yield LineView(id="launch-effective")
        yield Lines(id="launch-keys")

    def on_mount(self) -> None:
        """Show the first job."""
        self.query_one("#launch-title", Lines).set_lines([line(("Launch a run", HEADING))])
        self.query_one("#launch-rule", Lines).set_lines([line(("what will run", HEADING))])
        for name, label in (("job", "job"), ("host", "place"), ("set", "changes")):
            self.query_one(f"#launch-label-{name}", Lines).set_lines([line((label, LABEL))])
        keys = line()
        for key, word in (("↑↓", "job"), ("Tab", "field"), ("PgUp PgDn", "read"), ("^s", "start it"),
                          ("Esc", "close")):  # fmt: skip
            keys.append(f" {key}", style=KEY)
            keys.append(f" {word} ", style=LABEL)
        self.query_one("#launch-keys", Lines).set_lines([keys])
        self.query_one("#launch-job", Input).focus()
        self._check()

    def _value(self, name: str) -> str:
        return self.query_one(f"#launch-{name}", Input).value.strip()

    @on(Input.Changed)
    def _on_changed(self) -> None:
        if not self._launching:
            self._check()

    def _check(self) -> None:
        """Read what the fields say, and show the effective job or what is wrong."""
        self._chosen = None
        wide = max(30, self.size.width - 8)
        try:
            try:
                changes = shlex.split(self._value("set"))
            except ValueError as error:
                raise UsageError(
                    f"changes: {error}", "Write key=value, with quotes around spaces."
                ) from error
            name, job = jobs.load(self._value("job"), changes)
            host = inventory.choose(self._value("host") or None)
        except DflashctlError as error:
            self._show(
                [line(("✗ this cannot be launched", BAD)), *error_lines(error.message, error.hint, wide)]
            )
        else:
            self._chosen = (host, name, job)
            self._show(self._effective(host, name, job, wide))
        listed = line(("jobs    ", LABEL))
        for one in self._names:
            listed.append(f" {one} ", style=TAB_ON if one == self._value("job") else PLAIN)
            listed.append(" ")
        self.query_one("#launch-jobs", Lines).set_lines([listed])

    def _effective(self, host: Host, name: str, job: Job, width: int) -> list[Text]:
        place = f"{host.name} ({host.kind}, {host.address}), workspace {host.workspace}"
        rows = [line(("✓ ", GOOD), remote(name, VALUE), (" on ", LABEL), remote(place, PLAIN)), line()]
        for text in job.to_toml().splitlines():
            if text.startswith("#"):
                rows += hanging(line(("# ", FAINT)), remote(text.removeprefix("# "), FAINT), width)
            else:
                key, equals, value = text.partition(" = ")
                rows.append(line(remote(key, LABEL), equals, remote(value, VALUE)))
        return rows

    def _show(self, lines: list[Text]) -> None:
        view = self.query_one("#launch-effective", LineView)
        view.set_lines(lines)
        if not self._launching:
            view.scroll_home(animate=False)

    def action_job(self, by: int) -> None:
        """Choose another job of the list."""
        if self._launching or not self._names:
            return
        now = self._value("job")
        at = self._names.index(now) if now in self._names else -by
        self.query_one("#launch-job", Input).value = self._names[(at + by) % len(self._names)]

    def action_page(self, pages: int) -> None:
        """Read on in the effective job."""
        view = self.query_one("#launch-effective", LineView)
        view.scroll_relative(y=pages * max(1, view.size.height - 1), animate=False)

    def action_leave(self) -> None:
        """Close the form; a launch that is under way goes on."""
        self.dismiss(None)

    def action_start(self) -> None:
        """Launch what is shown."""
        if self._launching or self._chosen is None:
            return
        self._launching, self._said = True, []
        host, name, job = self._chosen
        self._narrate()
        background.begin(self, "launch", lambda say: self._launch(host, job, name, say))

    def _narrate(self, *more: Text) -> None:
        rows = [line(("launching", HEADING), ("  Esc leaves it to itself", LABEL))]
        for said in self._said:
            rows += wrapped(said, max(30, self.size.width - 8))
        self._show([*rows, *more])

    @on(background.Told)
    def _on_told(self, message: background.Told) -> None:
        self._said.append(message.text)
        self._narrate()

    @on(background.Done)
    def _on_done(self, message: background.Done) -> None:
        message.stop()
        self._launching = False
        if not message.error:
            self.dismiss(message.result.local_dir)
            return
        self._launching = True  # what was said stays, above the error
        self._narrate(line(), *error_lines(message.error, message.hint, max(30, self.size.width - 8)))
        self._launching = False
