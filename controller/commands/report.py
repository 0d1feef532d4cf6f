"""The command that writes a run's page: `report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from controller.commands.options import Run
from controller.narration import say


def report(
    run: Run = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            readable=False,
            help="Where to write it. RUN.html here if not given.",
        ),
    ] = None,
) -> int:
    """Write all about a run as one HTML page.

    Its curves, tables, configuration, crash and the end of its log. The page needs no network and no other
    file. Nothing is removed from it: hosts, paths and the log are in it as they are.

    \b
    dflashctl report
    dflashctl report demo-1130 --out /tmp/demo.html
    """
    from controller.paths import find_run
    from controller.report.writing import write_report
    from controller.watching import catch_up, mirrored

    directory = find_run(run)
    with mirrored(directory, once=True) as mirror:
        catch_up(directory, mirror)
    target = write_report(directory, out)
    say(f"written, {target.stat().st_size >> 10} KiB:")
    print(target)
    return 0
