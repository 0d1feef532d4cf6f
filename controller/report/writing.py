"""`report`: what the mirror holds of a run, written as a page beside which nothing else is needed."""

from __future__ import annotations

import time
from pathlib import Path

from controller.errors import LocalStateError, UsageError
from controller.log_file import LogFile
from controller.report.page import report_page
from controller.run_reader import RunReader
from remote_payload import rundir

LOG_LINES = 500


def page_of(directory: Path, now: float) -> str:
    """The page on the run mirrored in `directory`."""
    log = LogFile(directory)
    log.refresh()
    spans = [span for span in log.spans_before(log.end, LOG_LINES) if not span.gap]
    rows = [log.row(span).text for span in spans]
    return report_page(RunReader(directory).catch_up(now), rows, log_left_out=spans[0].start if spans else 0)


def write_report(directory: Path, out: Path | None) -> Path:
    """Write the page to `out`, or to `<run>.html` in the working folder; returns where.

    Whole or not at all. Raises UsageError when `out` is a folder or a device, LocalStateError when it cannot
    be written.
    """
    named = out or Path(f"{directory.parent.name}.html")
    target = named.resolve()  # a link stays, and what it names is new
    if target.is_dir():
        raise UsageError(f"--out {named}: is a folder", f"Name a file, say {target / 'report.html'}")
    if target.exists() and not target.is_file():  # the new file would take the place of /dev/null itself
        raise UsageError(f"--out {named}: is no plain file")
    page = page_of(directory, time.time())
    try:
        rundir.write_whole(target, page.encode("utf-8"))
    except OSError as error:
        raise LocalStateError(
            f"{target}: cannot be written ({error.strerror})", "Name another with --out."
        ) from error
    return target
