"""Ctrl-Z: a view that sleeps gives the mirror's lock away, or every other view would wait for it.

A stopped process keeps its file locks. So a view that writes the mirror lets go of it before it stops, and
begins again when it is continued.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from controller.mirror import Mirror


class Suspension:
    """Context in which Ctrl-Z is obeyed at `check()` alone, with `mirror` stopped meanwhile."""

    def __init__(self, mirror: Mirror | None) -> None:
        self._mirror = mirror
        self._asked = False
        self._installed = False

    def __enter__(self) -> Self:
        ignored = signal.getsignal(signal.SIGTSTP) is not signal.SIG_DFL
        if self._mirror is not None and threading.current_thread() is threading.main_thread() and not ignored:
            signal.signal(signal.SIGTSTP, self._ask)
            self._installed = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._installed:
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True

    def check(self) -> None:
        """Sleep now if it was asked for, until the process is continued."""
        if not self._asked or self._mirror is None:
            return
        again = self._mirror.running
        self._mirror.stop()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)  # returns when the process is continued
        self._asked = False
        signal.signal(signal.SIGTSTP, self._ask)
        if again:
            self._mirror.start()
