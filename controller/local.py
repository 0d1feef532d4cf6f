"""This machine as a place: the same way as a remote one, with pipes instead of an SSH channel."""

from __future__ import annotations

import contextlib
import os
import pwd
import select
import signal
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Final

from controller.errors import ConnectionLostError, LocalStateError
from controller.place import (
    BEGIN_GRACE_S,
    SEND_S,
    STDERR_KEPT,
    BegunProcess,
    Command,
    NotBegunError,
    Place,
    new_nonce,
    script,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

_PIPE_BYTES: Final = 1 << 20
_CLOSE_GRACE_S: Final = 2.0


class Local(Place):
    """Commands of this machine, in sessions of their own and with a bare environment."""

    def start(self, argv: Sequence[str]) -> Command:
        """See `Place`; nothing of the caller's environment but PATH, HOME and USER gets in."""
        nonce = new_nonce()
        process = LocalProcess(["/bin/sh", "-c", script(argv, nonce, ["LC_ALL=C.UTF-8"])])
        try:
            return BegunProcess(process, nonce, BEGIN_GRACE_S, self.name)
        except NotBegunError as error:
            raise LocalStateError(f"this machine's /bin/sh did not start: {error.text}") from error

    def close(self) -> None:
        """Nothing is held between commands."""


class LocalProcess:
    """A child process with three pipes (`place.Process`)."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._popen = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            cwd="/",
            env=_environment(),
            start_new_session=True,  # the terminal's Ctrl-C is for the views alone
        )
        popen = self._popen
        assert popen.stdin is not None and popen.stdout is not None and popen.stderr is not None
        self._stdin = popen.stdin
        self._stdin_lock = threading.Lock()  # its number may be another file's once it is closed
        self._in, self._out, self._error = (s.fileno() for s in (popen.stdin, popen.stdout, popen.stderr))
        os.set_blocking(self._in, False)
        self._open = {self._out, self._error}
        self._stderr = bytearray()

    def send(self, data: bytes | memoryview, *, limit_s: float = SEND_S) -> None:
        """All of `data` to its stdin, as fast as it reads."""
        view = memoryview(data)
        taken = time.monotonic()
        room = select.poll()
        room.register(self._in, select.POLLOUT)
        while view:
            with self._stdin_lock:
                if self._stdin.closed:
                    raise ConnectionLostError("the command's stdin is closed")
                try:
                    view = view[os.write(self._in, view[:_PIPE_BYTES]) :]
                    taken = time.monotonic()
                    continue
                except BlockingIOError:
                    pass
                except OSError as error:
                    raise ConnectionLostError("the command has closed its stdin") from error
            if time.monotonic() - taken >= limit_s:
                raise ConnectionLostError(f"the command took nothing for {limit_s:g} s")
            room.poll(min(500.0, 1000 * limit_s))

    def close_stdin(self) -> None:
        """The end of its stdin."""
        with self._stdin_lock:
            self._stdin.close()

    def receive(self, timeout: float) -> bytes | None:
        """Some of its stdout, b"" at the end."""
        deadline = time.monotonic() + timeout
        while self._out in self._open:
            got = self._read(max(0.0, deadline - time.monotonic()))
            if got is None:
                return None
            if got[0]:
                return got[0]
        self._drain_stderr()
        return b""

    def receive_streams(self, timeout: float) -> tuple[bytes, bytes] | None:
        """Some of its stdout and stderr, (b"", b"") once both are closed or it has ended."""
        deadline = time.monotonic() + timeout
        while self._open:
            ended = self._popen.poll() is not None  # what a child of it may still write is nobody's
            got = self._read(0.0 if ended else min(0.1, max(0.0, deadline - time.monotonic())))
            if got is not None and got != (b"", b""):
                return got
            if got is None and ended:
                break
            if got is None and time.monotonic() >= deadline:
                return None
        return b"", b""

    def _read(self, timeout: float) -> tuple[bytes, bytes] | None:
        """What one read of each readable pipe gives; None when none was readable."""
        poll = select.poll()
        for descriptor in self._open:
            poll.register(descriptor, select.POLLIN)
        ready = poll.poll(timeout * 1000)
        if not ready:
            return None
        out = err = b""
        for descriptor, _ in ready:
            data = os.read(descriptor, _PIPE_BYTES)
            if not data:
                self._open.discard(descriptor)
            elif descriptor == self._out:
                out = data
            else:
                err = data
                self._stderr += data
                del self._stderr[:-STDERR_KEPT]
        return out, err

    @property
    def stderr(self) -> bytes:
        """The last 64 KiB of its stderr."""
        return bytes(self._stderr)

    def wait(self, timeout: float) -> int | None:
        """Its exit status, 128 + n for signal n, or None."""
        deadline = time.monotonic() + timeout
        while (data := self.receive(max(0.0, deadline - time.monotonic()))) != b"":
            if data is None:
                return None
        while (status := self._popen.poll()) is None:
            if time.monotonic() >= deadline:
                return None
            self._drain_stderr()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(min(0.05, max(0.0, deadline - time.monotonic())))
        self._drain_stderr()
        return status if status >= 0 else 128 - status

    def close(self) -> None:
        """Close the pipes, which ends what minds them, and then end the command's session."""
        self.close_stdin()
        for stream in (self._popen.stdout, self._popen.stderr):
            if stream is not None:
                stream.close()
        self._open.clear()
        for numbers in ((signal.SIGTERM, signal.SIGCONT), (signal.SIGKILL,)):  # a stopped one takes no TERM
            if self._popen.poll() is not None:
                break
            with contextlib.suppress(ProcessLookupError):
                for number in numbers:
                    os.killpg(self._popen.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(_CLOSE_GRACE_S)

    def _drain_stderr(self) -> None:
        """Take what already lies in stderr's pipe, without waiting for its end; stdout has ended."""
        while self._open and self._read(0.0) is not None:
            pass


def _environment() -> dict[str, str]:
    try:
        me = pwd.getpwuid(os.getuid())
        name, home = me.pw_name, me.pw_dir
    except KeyError:  # a uid without a name, as some container engines give
        name, home = str(os.getuid()), "/"
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": os.environ.get("HOME", home),
        "USER": name,
        "LANG": "C.UTF-8",
    }
