"""`pull`: files of a run to this machine."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from controller import completion
from controller.commands.options import JsonOption
from controller.errors import UsageError
from controller.narration import is_quiet, say


def pull(
    run: Annotated[
        str,
        typer.Argument(
            help="The run's id, or its beginning; `-` for the newest run.", autocompletion=completion.runs
        ),
    ] = "-",
    what: Annotated[
        list[str] | None,
        typer.Argument(
            help=f"{', '.join(completion.WHAT)}, checkpoints/step-N, exports/NAME. Nothing: list.",
            autocompletion=completion.what,
        ),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="DIR", readable=False, help="Folder for the files. [./RUN]"),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Bring files of a run here, each of them verified.

    A transfer that broke off goes on where it was. Prints the path of every file. Without WHAT, lists what
    there is.

    \b
    dflashctl pull
    dflashctl pull demo-1130 checkpoints/best --to ~/drafters
    dflashctl pull - log events
    """
    import dataclasses

    from controller.paths import find_run
    from controller.pull import listing
    from controller.pull import pull as pull_files
    from controller.text import safe_line

    try:
        directory = find_run(None if run == "-" else run)
    except UsageError as error:
        if run.partition("/")[0] in completion.WHAT:
            raise UsageError(error.message, f"Of the newest run: dflashctl pull - {run}") from error
        raise
    if not what:
        for name, size in listing(directory, say=say):
            print(json.dumps({"file": name, "size": size}) if as_json else f"{size:>15,} {safe_line(name)}")
        return 0
    meter = Meter()
    try:
        pulled = pull_files(directory, what, to or Path(directory.parent.name), say=say, progress=meter.show)
    finally:
        meter.clear()
    for file in pulled:
        print(json.dumps(dataclasses.asdict(file)) if as_json else file.path)
    new = [file for file in pulled if file.new]
    size = sum(file.size for file in new)
    say(f"{len(new)} of {len(pulled)} files are new, {size / 2**20:,.1f} MiB, in {meter.seconds:.1f} s")
    return 0


class Meter:
    """How far a pull is, rewritten in place on a terminal."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._shown = 0.0
        self._first: int | None = None
        self._wide = 0

    @property
    def seconds(self) -> float:
        """Since the pull began."""
        return time.monotonic() - self._begun

    def show(self, file: str, here: int, total: int) -> None:
        """Show that `here` of `total` bytes are here, `file` being on its way."""
        now = time.monotonic()
        self._first = here if self._first is None else self._first
        if is_quiet() or not sys.stderr.isatty() or (now - self._shown < 0.2 and here < total):
            return
        self._shown = now
        pace = (here - self._first) / max(now - self._begun, 1e-3)
        room = min(100, shutil.get_terminal_size().columns - 1)  # a wrapped line could not be rewritten
        line = f"{here / 2**20:,.1f} of {total / 2**20:,.1f} MiB, {pace / 2**20:,.0f} MiB/s, {file}"[:room]
        print(f"\r{line.ljust(self._wide)}", end="", file=sys.stderr, flush=True)
        self._wide = len(line)

    def clear(self) -> None:
        """Wipe the line."""
        if self._wide:
            print(f"\r{' ' * self._wide}\r", end="", file=sys.stderr, flush=True)
            self._wide = 0
