"""What ends a command from outside: Ctrl-C, and a reader of its stdout that goes.

Python raises KeyboardInterrupt wherever it happens to be. Before `main` and after it nobody catches it. In an
import it may come out as another error (a class that is being made wraps it), or be lost (in a callback). So
while Ctrl-C is `held` it waits until the command has begun (`allowed`) and no module is being imported. A
second one waits for nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Final

from controller.errors import InterruptedByUser

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

SAID: Final = "interrupted; a run that was started goes on"
_AGAIN_S: Final = 0.02
"""How often a Ctrl-C that waits looks whether it may come."""
_IMPORTER: Final = "<frozen importlib._bootstrap>"


class ReaderGoneError(Exception):
    """Whoever read our stdout has closed it."""


@contextlib.contextmanager
def our_endings() -> Iterator[None]:
    """Errors of ours for what typer would turn into exit codes of its own."""
    try:
        yield
    except KeyboardInterrupt:
        raise InterruptedByUser(SAID) from None
    except BrokenPipeError:
        raise ReaderGoneError from None


class Interrupts:
    """Ctrl-C of this process; one object, since signals are the process's."""

    def __init__(self) -> None:
        self._allowed = False
        self._waits = False
        self._again = False

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Meanwhile Ctrl-C comes where it is `allowed`. Where it is ignored or handled, it stays so."""
        ours = threading.current_thread() is threading.main_thread()
        if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return
        signal.signal(signal.SIGINT, self._came)
        try:
            yield
        finally:
            self._waits = False
            signal.signal(signal.SIGINT, signal.default_int_handler)

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Where KeyboardInterrupt is caught, and all is left in order; at its end none waits any longer."""
        self._allowed = True
        try:
            yield
            if self._waits:
                raise KeyboardInterrupt
        finally:
            self._allowed = False

    def _came(self, number: int, frame: FrameType | None) -> None:
        again, self._again = self._again, False
        if self._allowed and not _imports(frame):
            self._waits = False
            raise KeyboardInterrupt
        if self._waits and not again:
            os.write(2, f"\n{SAID}\n".encode())
            os._exit(InterruptedByUser.exit_code)
        if not self._waits:
            self._waits = True
            threading.Thread(target=self._come_again, name="interrupt", daemon=True).start()

    def _come_again(self) -> None:
        while True:
            time.sleep(_AGAIN_S)
            if not self._waits:
                return
            self._again = True
            os.kill(os.getpid(), signal.SIGINT)


def ignore_from_now_on() -> None:
    """Of a command that is done only the interpreter's end is left, and nothing to interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _imports(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTER:
            return True
        frame = frame.f_back
    return False
