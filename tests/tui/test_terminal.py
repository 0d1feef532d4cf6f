from __future__ import annotations

import os
import pty
import termios
import threading
from collections.abc import Iterator

import pytest

from controller.tui import terminal
from controller.tui.terminal import has_size


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A terminal that nobody has given a size."""
    for name in ("COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    main, side = pty.openpty()
    yield side
    os.close(main)
    os.close(side)


def test_a_terminal_of_no_size_is_found_to_be_none_within_its_limit(
    side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "_SIZE_S", 0.1)
    assert not has_size(side)


def test_a_terminal_that_is_sized_a_moment_later_is_waited_for(
    side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "_SIZE_S", 60.0)
    later = threading.Timer(0.1, termios.tcsetwinsize, (side, (24, 80)))
    later.start()
    assert has_size(side)
    later.join()


def test_columns_and_lines_take_the_place_of_a_size(side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    assert has_size(side)
