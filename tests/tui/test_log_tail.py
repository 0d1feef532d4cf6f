from __future__ import annotations

import json
from pathlib import Path

import pytest

from controller.tui import log_tail
from controller.tui.log_tail import LogNews, LogTail


class Log:
    """A mirrored log and what mirror.json says of it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.generation, self.start = folder, 1, 0
        (folder / "train.log").touch()
        self.say()

    def say(self) -> None:
        size = (self.folder / "train.log").stat().st_size
        entry = {"generation": self.generation, "size": size, "extents": [[self.start, size]]}
        (self.folder / "mirror.json").write_text(json.dumps({"files": {"train.log": entry}}))

    def add(self, data: bytes) -> None:
        with (self.folder / "train.log").open("ab") as file:
            file.write(data)
        self.say()


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path)


def lines_of(news: LogNews | None) -> tuple[str, ...]:
    assert news is not None
    return news.lines


def test_new_lines_come_once_and_an_unfinished_one_as_it_stands(log: Log) -> None:
    tail = LogTail(log.folder)
    assert tail.poll() is None
    log.add(b"one\ntwo\nthr")
    news = tail.poll()
    assert news == LogNews(lines=("one", "two"), partial="thr")
    assert tail.poll() is None
    log.add(b"ee\n")
    assert lines_of(tail.poll()) == ("three",)


def test_a_long_log_is_opened_at_its_last_lines(log: Log) -> None:
    log.add(b"".join(b"line %d\n" % n for n in range(50_000)))
    news = LogTail(log.folder).poll()
    assert lines_of(news) == tuple(f"line {n}" for n in range(49_000, 50_000))
    assert news is not None
    assert news.skipped_bytes == 0


def test_a_line_of_a_megabyte_at_the_end_hides_no_others(log: Log) -> None:
    log.add(b"before\n" + b"x" * 1_000_000 + b"\nafter\n")
    found = lines_of(LogTail(log.folder).poll())
    assert (found[0], found[-1]) == ("before", "after")
    assert len(found[1]) == 4096


def test_a_flood_is_passed_over_to_its_end_and_the_amount_is_said(log: Log) -> None:
    tail = LogTail(log.folder)
    log.add(b"start\n")
    tail.poll()
    flood = b"".join(b"flood %06d %s\n" % (n, b"y" * 80) for n in range(20_000))
    log.add(flood)
    news = tail.poll()
    assert news is not None
    assert news.lines[-1].startswith("flood 019999")
    assert len(news.lines[0]) == 93, "it begins with a whole line"
    kept = sum(len(text) + 1 for text in news.lines)
    assert kept <= log_tail.PIECE_BYTES * log_tail.KEPT_PIECES
    assert news.skipped_bytes == len(flood) - kept


def test_a_log_that_began_anew_is_said_to(log: Log) -> None:
    tail = LogTail(log.folder)
    log.add(b"old\nhalf")
    tail.poll()
    (log.folder / "train.log").write_bytes(b"new\n")
    log.generation = 2
    log.say()
    news = tail.poll()
    assert news == LogNews(lines=("new",), restarted=True)


def test_a_hole_before_the_tail_is_not_text(log: Log) -> None:
    with (log.folder / "train.log").open("wb") as file:
        file.seek(1 << 30)
        file.write(b"tail\n")
    log.start = 1 << 30
    log.say()
    assert lines_of(LogTail(log.folder).poll()) == ("tail",)
