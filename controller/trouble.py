"""What happens to the connection, for a person who reads a log: one line on stderr per change.

On a terminal the line is rewritten in place, with its countdown, and wiped before the log goes on; in a
file every change is one line of its own.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TextIO

from controller.errors import LocalStateError
from controller.health import age_text
from controller.run_records import number, text
from controller.text import safe_line
from controller.timing import Timing

if TYPE_CHECKING:
    from controller.mirror import Mirror

_PATIENCE_S: Final = 2.0
"""A connection that takes no longer is not worth a line."""


class Trouble:
    """Tells on `notes`; `at_line_start` says whether the log left the cursor at a line's start."""

    def __init__(self, notes: TextIO, at_line_start: Callable[[], bool]) -> None:
        self._notes = notes
        self._terminal = notes.isatty()
        self._at_line_start = at_line_start
        self._told = ""
        self._since = time.time()
        self._was_lost = 0.0
        self._shown = False
        self._stale_s = 5 * Timing.from_environment().beat_s

    def tell(self, record: Mapping[str, Any], mirror: Mirror | None, now: float) -> None:
        """Tell what changed since the last call."""
        what, countdown = self._what(record, mirror, now)
        if what == self._told and not (countdown and self._terminal):
            return
        if what:
            self._was_lost = self._was_lost or number(record, "last_heard") or now
            self._show(f"dflashctl: {what}{countdown if self._terminal else ''}")
        elif self._told:
            lost, self._was_lost = self._was_lost, 0.0
            self.clear()
            if record.get("state") == "connected":
                self.note(f"connected again after {age_text(now - lost)}")
        self._told = what

    def _what(self, record: Mapping[str, Any], mirror: Mirror | None, now: float) -> tuple[str, str]:
        """What is wrong (empty: nothing), and how long the wait still is."""
        if mirror is not None and mirror.error is not None and not mirror.holds_lock:
            return safe_line(": ".join(filter(None, (mirror.error.message, mirror.error.hint)))), ""
        state = text(record, "state")
        written = number(record, "t")
        ours = mirror is not None and mirror.holds_lock
        if state == "ended":
            asks = mirror is not None and mirror.is_asking and now - self._since > _PATIENCE_S
            return ("asking its place whether it was resumed" if asks else ""), ""
        if not ours and written is not None and abs(now - written) > self._stale_s:
            if mirror is not None and now - self._since > _PATIENCE_S:
                pid = record.get("pid")
                return f"process {pid} holds this run's mirror and does nothing; is it stopped?", ""
            return "", ""
        said = ": ".join(filter(None, (text(record, "error"), text(record, "hint"))))
        wait = number(record, "next_try")
        left = f"; next try in {wait - now:.0f} s" if wait is not None and wait > now else ""
        if state == "reconnecting":
            return f"no connection ({said}); trying again" if said else "no connection", left
        if state == "refused":
            return f"refused: {said}", left
        if state == "connecting" and now - (number(record, "since") or now) > _PATIENCE_S:
            return "connecting", ""
        return "", ""

    def tell_age(self, record: Mapping[str, Any], mirror: Mirror | None, now: float) -> None:
        """Tell how old the log is when it could not be brought up to date."""
        heard = number(record, "last_heard")
        if record.get("complete") is True and heard is not None and now - heard < self._stale_s:
            return
        error = mirror.error.message if mirror is not None and mirror.error is not None else ""
        error = error or text(record, "error")
        age = "nothing was heard of the run yet" if heard is None else f"as of {age_text(now - heard)} ago"
        self.note(f"{age}: {safe_line(error)}" if error else age)

    def tell_own(self, mirror: Mirror | None) -> None:
        """Tell what kept our own mirror from its folder: what is wrong there, `mirror.json` cannot say."""
        if mirror is not None and isinstance(mirror.error, LocalStateError):
            self.note(safe_line(mirror.error.message))

    def note(self, what: str) -> None:
        """One line that stays."""
        self.clear()
        self._notes.write(f"{'' if self._at_line_start() else chr(10)}dflashctl: {what}\n")
        self._notes.flush()

    def clear(self) -> None:
        """Wipe the line that is being rewritten, if there is one."""
        if self._shown:
            self._notes.write("\r\033[K")
            self._notes.flush()
            self._shown = False

    def _show(self, line: str) -> None:
        if not self._terminal:
            self._notes.write(line + "\n")
        else:
            start = "\r\033[K" if self._shown or self._at_line_start() else "\n"
            self._notes.write(start + line[: shutil.get_terminal_size().columns - 1])
            self._shown = True
        self._notes.flush()
