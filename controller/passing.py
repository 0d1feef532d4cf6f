"""A command in a place with our own stdin, stdout and stderr: every byte passed on, its code returned.

Ctrl-C goes to what runs there: INT at the first, TERM at the second, KILL at the third; so do TERM and HUP
to us, which end it for good. What it left behind with our pipes in its hands is not waited for then. While a
connection is still being made nothing runs there: then the second Ctrl-C, or two seconds after the first, are
the end. Nothing here has a terminal, so nothing changes a byte.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import BinaryIO, Final

from controller.errors import ConnectionLostError, PayloadEnvironmentError
from controller.place import Command, Place

_POLL_S: Final = 0.1
_BEGIN_S: Final = 2.0
"""From a Ctrl-C to the end of an attempt to connect: what has begun there by then is told."""
_END_S: Final = 5.0
"""From the TERM that ends it because we were told to end, to the KILL."""
_LOOK_S: Final = 1.0
"""From a signal to the first look whether anything is left; each further one waits twice as long."""
_ESCALATION: Final = ("INT", "TERM", "KILL")

ENTER: Final = (
    'mkdir -p -- "$1" && cd -- "$1" || {'
    ' echo "error: the workspace $1 cannot be entered; hosts.toml names it" >&2;'
    f" exit {PayloadEnvironmentError.exit_code}; }};"
    ' PATH="$2:$PATH"; export PATH; shift 2; exec "$@"'
)
"""For `sh -c`: run the rest in folder $1, with the programs of folder $2 found first. Never elsewhere: what
`tar x` or `rm` do in a workspace must not happen in /."""

RUN_PROGRAM: Final = """\
import json, linecache, os, sys
def _exactly(size):
    data = b""
    while len(data) < size:
        more = os.read(0, min(65536, size - len(data)))
        if not more:
            sys.exit("the program did not arrive whole")
        data += more
    return data
_head = b""
while not _head.endswith(b"\\n"):
    _head += _exactly(1)
_head = json.loads(_head)
_text = _exactly(_head["size"])
os.environ.update(_head["env"])
sys.argv = _head["argv"]
sys.path.insert(0, "")
linecache.cache[sys.argv[0]] = (
    len(_text), None, _text.decode("utf-8", "replace").splitlines(True), sys.argv[0]
)
exec(compile(_text, sys.argv[0], "exec"), {"__name__": "__main__", "__file__": sys.argv[0]})
"""
"""A program for `python -c` that takes another from its stdin: a line of JSON, the text, and then the
other one's own stdin. So neither text nor variables stand in anybody's arguments."""


def run_command(place: Place, argv: Sequence[str]) -> int:
    """Run `argv` in the place's workspace with the venv's programs first; returns its exit code."""
    folder = place.python.rpartition("/")[0]
    return pass_through(place, ["sh", "-c", ENTER, "sh", place.workspace, folder, *argv])


def run_python(place: Place, name: str, program: bytes, arguments: Sequence[str], *, stdin: bool) -> int:
    """Run a Python program in the place's venv, with the place's variables; returns its exit code.

    `name` is what tracebacks call it; `stdin`: whether it gets ours, or none.
    """
    import json

    head = {"size": len(program), "env": place.description.env, "argv": [name, *arguments]}
    first = json.dumps(head).encode() + b"\n" + program
    folder = place.python.rpartition("/")[0]
    argv = ["sh", "-c", ENTER, "sh", place.workspace, folder, place.python, "-c", RUN_PROGRAM]
    return pass_through(place, argv, first=first, stdin=stdin)


def pass_through(place: Place, argv: Sequence[str], *, first: bytes = b"", stdin: bool = True) -> int:
    """Run `argv`, pass all three streams on, and return its exit code. Raises what `Place.start` raises,
    ConnectionLostError, and BrokenPipeError when nobody reads our stdout any more.
    """
    out, err = sys.stdout.buffer, sys.stderr.buffer
    with _Signals() as signals:
        command = place.start(argv)
        signals.begun = True
        feeder = threading.Thread(target=_feed, args=(command, first, stdin), daemon=True)
        feeder.start()
        try:
            while (got := command.receive_streams(_POLL_S)) != (b"", b""):
                if (ended_by := signals.deliver(place, command)) and got is None:
                    return ended_by
                if got is not None:
                    _write(out, got[0])
                    _write(err, got[1])
            while (status := command.wait(_POLL_S)) is None:
                if ended_by := signals.deliver(place, command):
                    return ended_by
            return status
        except BrokenPipeError:
            with contextlib.suppress(ConnectionLostError):
                place.signal(command, "TERM")
            raise
        finally:
            command.close()


def _write(stream: BinaryIO, data: bytes) -> None:
    if data:
        stream.write(data)
        stream.flush()


def _feed(command: Command, first: bytes, stdin: bool) -> None:
    with contextlib.suppress(ConnectionLostError):  # a command need not read it; a break shows elsewhere
        if first:
            command.send(first, limit_s=math.inf)
        while stdin:
            try:
                data = os.read(0, 65536)
            except OSError:  # there is no stdin
                break
            if not data:
                break
            command.send(data, limit_s=math.inf)  # it may read when it likes
        command.close_stdin()


class _Signals:
    """Meanwhile Ctrl-C, TERM and HUP are counted and delivered, and do not break a call off."""

    def __init__(self) -> None:
        self.begun = False
        """Whether there is something to deliver them to."""
        self._interrupts = 0
        self._delivered = 0
        self._ending: float | None = None
        self._before: dict[int, object] = {}
        self._look_at: float | None = None
        self._patience = _LOOK_S

    def __enter__(self) -> _Signals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self._interrupts += 1
            if not self.begun and self._interrupts > 1:
                raise KeyboardInterrupt
            if not self.begun:
                threading.Thread(target=self._give_up, daemon=True).start()
        elif self._ending is None:
            self._interrupts = max(self._interrupts, 2)
            self._ending = time.monotonic() + _END_S

    def _give_up(self) -> None:
        time.sleep(_BEGIN_S)
        if not self.begun:
            os.kill(os.getpid(), signal.SIGINT)

    def deliver(self, place: Place, command: Command) -> int | None:
        """Send what was asked for since, and look later whether it has ended all; its code if so.

        What ends us ends the command by KILL after a while.
        """
        now = time.monotonic()
        if self._ending is not None and now > self._ending:
            self._interrupts, self._ending = 3, None
        due = min(self._interrupts, len(_ESCALATION))
        if self._delivered < due:
            self._delivered = due
            place.signal(command, _ESCALATION[due - 1])
            self._look_at, self._patience = now + _LOOK_S, _LOOK_S
        elif self._look_at is not None and now > self._look_at:
            if not place.signal(command, "0"):
                return 128 + int(signal.Signals[f"SIG{_ESCALATION[self._delivered - 1]}"])
            self._patience *= 2
            self._look_at = now + self._patience
        return None
