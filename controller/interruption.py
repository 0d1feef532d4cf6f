"""What ends a command from outside: Ctrl-C, and a reader of its stdout that goes.

Python raises KeyboardInterrupt wherever it happens to be. Before `main` and after it nobody catches it. In an
import it may come out as another error (a class that is being made wraps it), or be lost (in a callback). So
while Ctrl-C is `held` it waits until the command has begun (`allowed`) and no module is being imported. A
second one waits for nothing. Imports next to nothing itself: until it is here, a Ctrl-C is a traceback.
"""

from __future__ import annotations

import _thread
import os
import signal
import time
from types import FrameType, TracebackType

SAID = "interrupted; a run that was started goes on"
_AGAIN_S = 0.02
"""How often a Ctrl-C that waits looks whether it may come."""
_IMPORTER = "<frozen importlib._bootstrap>"


class Interrupts:
    """Ctrl-C of this process, which is `held` in this context; one object, since signals are the process's.

    Where it is ignored or handled by somebody else already, or in another thread than the main one, it stays
    as it is.
    """

    def __init__(self) -> None:
        self.allowed = Allowed(self)
        self._held = False
        self._waits = False
        self._again = False
        self._coming = _thread.allocate_lock()

    def __enter__(self) -> Interrupts:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            try:
                signal.signal(signal.SIGINT, self._came)
                self._held = True
            except ValueError:  # not the main thread
                pass
        return self

    def __exit__(self, *_: object) -> None:
        with self._coming:  # none comes after this, when nobody would catch it
            self._waits = False
        if self._held:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    @property
    def waits(self) -> bool:
        """Whether one came that could not be raised yet."""
        return self._waits

    def _came(self, number: int, frame: FrameType | None) -> None:
        again, self._again = self._again, False
        if self.allowed.now and not _imports(frame):
            self._waits = False
            raise KeyboardInterrupt
        if self._waits and not again:
            from controller.errors import InterruptedByUser

            os.write(2, f"\n{SAID}\n".encode())
            os._exit(InterruptedByUser.exit_code)
        if not self._waits:
            self._waits = True
            _thread.start_new_thread(self._come_again, ())  # `threading` itself may be half imported

    def _come_again(self) -> None:
        while True:
            time.sleep(_AGAIN_S)
            with self._coming:
                if not self._waits:
                    return
                self._again = True
                os.kill(os.getpid(), signal.SIGINT)


class Allowed:
    """Context in which KeyboardInterrupt is caught, and leaves all in order; at its end none waits."""

    def __init__(self, interrupts: Interrupts) -> None:
        self._interrupts = interrupts
        self.now = False

    def __enter__(self) -> None:
        self.now = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.now = False
        if kind is None and self._interrupts.waits:
            raise KeyboardInterrupt


class ReaderGoneError(Exception):
    """Whoever read our stdout has closed it."""


class OurEndings:
    """Context whose endings from outside are errors of ours, before typer makes exit codes of them."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, KeyboardInterrupt):
            from controller.errors import InterruptedByUser

            raise InterruptedByUser(SAID) from None
        if isinstance(error, BrokenPipeError):
            raise ReaderGoneError from None


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
