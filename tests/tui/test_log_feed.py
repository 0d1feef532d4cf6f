"""The thread that reads the log: what fails in it is said, and it goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from controller.log_file import LogFile
from controller.tui import log_feed
from controller.tui.log_feed import LogFeed
from controller.tui.log_page import LogPage
from tests.tui import golden
from tests.waiting import until


def test_a_log_that_cannot_be_shown_once_is_said_so_and_shown_as_soon_as_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_feed, "PERIOD_S", 0.01)
    monkeypatch.setattr(log_feed, "TROUBLED_S", 0.01)
    works, row = False, LogFile.row

    def failing(file: LogFile, span: object) -> object:
        if not works:
            raise RecursionError("\x1b[2J too deep")
        return row(file, span)  # type: ignore[arg-type]

    monkeypatch.setattr(LogFile, "row", failing)
    pages: list[LogPage] = []
    feed = LogFeed(golden.healthy().write(tmp_path), pages.append, threaded=True)
    feed.start()
    try:
        until(lambda: [page for page in pages if "RecursionError" in page.note])
        works = True
        feed.show(7, None)
        (page, *_) = until(lambda: [page for page in pages if page.rows])
    finally:
        feed.stop(60)
    assert page.ticket == 7
    assert page.rows[-1].text.startswith("step  12345")
