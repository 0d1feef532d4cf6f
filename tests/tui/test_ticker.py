from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from controller.run_reader import RunReader
from controller.run_state import RunState
from controller.tui.app import RunApp
from controller.tui.ticker import Ticker
from tests.tui import golden
from tests.tui.conftest import screen_text
from tests.waiting import until, until_shown


async def test_a_reader_that_fails_is_said_and_never_leaves_live_on_the_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = golden.healthy().write(tmp_path)
    poll = RunReader.poll
    broken = threading.Event()

    def poll_or_fail(self: RunReader, now: float, *, history: bool = True) -> RunState:
        if broken.is_set():
            raise MemoryError("[no] memory")
        return poll(self, now, history=history)

    monkeypatch.setattr(RunReader, "poll", poll_or_fail)
    app = RunApp(directory, clock=lambda: golden.NOW, period_s=0.05)
    async with app.run_test(size=(80, 24)) as pilot:

        async def shows(shown: str) -> None:
            await until_shown(lambda: shown in screen_text(pilot), seen=lambda: screen_text(pilot))

        await shows("LIVE")
        broken.set()
        await shows("MemoryError: [no] memory")
        assert "THIS VIEW IS STUCK" in screen_text(pilot)
        assert "LIVE" not in screen_text(pilot)
        broken.clear()
        await shows("LIVE")


def test_the_next_tick_waits_until_the_screen_has_taken_the_last(tmp_path: Path) -> None:
    golden.healthy().write(tmp_path)
    delivered: list[RunState] = []
    ticker = Ticker(tmp_path, delivered.append, clock=lambda: golden.NOW, period_s=0.01)
    ticker.start()
    try:
        until(lambda: delivered)
        time.sleep(0.2)
        assert len(delivered) == 1, "nobody took it"
        ticker.taken()
        until(lambda: len(delivered) == 2)
    finally:
        ticker.stop()
