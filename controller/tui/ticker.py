"""The one thread of the TUI: reads the mirror once a second and hands over what it found.

The next tick starts only after the last has ended and the screen has taken it, so a slow disk or a busy
screen makes ticks rarer and never makes a queue. The state travels as one immutable snapshot. The log has a
thread of its own (`log_feed`), since a search in gigabytes must not make the state old.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from controller.health import Word
from controller.run_reader import RunReader
from controller.run_state import RunState

PERIOD_S = 1.0
RESTING_S = 10.0
"""Of a run that has ended and is here whole; it may be resumed yet."""

FIRST_SCREEN_S = 0.15
"""Left to the first screen, drawn of the small files alone, before history is read behind it."""

CATCHING_UP_S = 0.05
"""Pause between polls while history is unread or the first news is on its way."""


class Ticker:
    """Polls the mirror in `directory` and calls `deliver(state)` from its thread."""

    def __init__(
        self,
        directory: Path,
        deliver: Callable[[RunState], object],
        *,
        clock: Callable[[], float] = time.time,
        period_s: float = PERIOD_S,
    ) -> None:
        self._reader = RunReader(directory)
        self._deliver = deliver
        self._clock = clock
        self._period_s = period_s
        self.pause_s = period_s
        """Until the next tick, as far as is known."""
        self._stop = threading.Event()
        self._taken = threading.Event()
        self._thread: threading.Thread | None = None
        self.error: Exception | None = None
        """Why the last tick failed, a defect of ours; None when it did not. The next one tries again."""

    def start(self) -> None:
        """Begin ticking."""
        # A daemon: a disk that hangs must not keep the terminal.
        self._thread = threading.Thread(target=self._run, name="tui-ticker", daemon=True)
        self._thread.start()

    def stop(self, timeout: float = 0.2) -> None:
        """End; waits at most `timeout` seconds for a read that is under way."""
        self._stop.set()
        self._taken.set()
        if self._thread is not None:
            self._thread.join(timeout)

    def tick(self, *, history: bool = True) -> RunState:
        """Read once, in the caller's thread; without `history` only what is quickly read."""
        return self._reader.poll(self._clock(), history=history)

    def taken(self) -> None:
        """The screen has taken what was delivered; from any thread."""
        self._taken.set()

    def _run(self) -> None:
        first = True
        while not self._stop.is_set():
            began = time.monotonic()
            period = self._period_s
            try:
                state = self.tick(history=not first)
                self.error = None
                self._taken.clear()
                self._deliver(state)
                if first:
                    period = FIRST_SCREEN_S
                elif state.unread_bytes or state.health.word is Word.CONNECTING:
                    period = CATCHING_UP_S + time.monotonic() - began
                elif state.ended and state.connection == "ended":
                    period = RESTING_S * self._period_s
            except Exception as error:
                self.error = error
                self._taken.set()
            first = False
            self.pause_s = max(period, self._period_s)
            self._stop.wait(max(0.0, period - (time.monotonic() - began)))
            if not self._stop.is_set():
                self._taken.wait(5.0)
