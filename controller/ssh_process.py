"""A command in a channel of an SSH connection: no pty, both streams drained together.

Reading one stream after the other deadlocks past the 2 MiB window, and so does the exit status before the
output; paramiko's own file objects are not used.
"""

from __future__ import annotations

import contextlib
import select
import time

import paramiko

from controller.errors import ConnectionLostError
from controller.place import SEND_S, STDERR_KEPT

_SLICE = 32_704
"""Bytes in one send: what fits into one SSH packet; 139 MiB/s against 27 with one big sendall."""
_LOOK_S = 1.0
"""Longest wait for room in which nobody looks whether the limit is over."""
_BROKEN = (OSError, EOFError, paramiko.SSHException)
"""What paramiko raises when it sends on a connection that just broke; reading sends too: window sizes."""


class SshProcess:
    """A command in a channel of an SSH connection (`place.Process`)."""

    def __init__(self, channel: paramiko.Channel, peer: str) -> None:
        self._channel = channel
        self._peer = peer
        self._stderr = bytearray()
        channel.settimeout(_LOOK_S)
        self._poll = select.poll()
        self._poll.register(channel.fileno(), select.POLLIN)

    def send(self, data: bytes | memoryview, *, limit_s: float = SEND_S) -> None:
        """All of `data` to its stdin, as fast as the other side makes room for it."""
        view = memoryview(data)
        taken = time.monotonic()
        while view:
            try:
                count = self._channel.send(view[:_SLICE])
            except TimeoutError as error:
                if time.monotonic() - taken >= limit_s:
                    raise self._lost("cannot send to it (timed out)") from error
                continue
            except _BROKEN as error:
                raise self._lost(f"cannot send to it ({str(error) or 'the connection broke'})") from error
            if not count:
                raise self._lost("cannot send to it (its stdin is closed)")
            view = view[count:]
            taken = time.monotonic()

    def close_stdin(self) -> None:
        """The end of its stdin."""
        with contextlib.suppress(*_BROKEN):
            self._channel.shutdown_write()

    def receive(self, timeout: float) -> bytes | None:
        """Some of its stdout, b"" at the end; a channel that ends without an EOF is a lost one."""
        deadline = time.monotonic() + timeout
        while (got := self.receive_streams(max(0.0, deadline - time.monotonic()))) is not None:
            out, err = got
            if out or not err:
                return out
        return None

    def receive_streams(self, timeout: float) -> tuple[bytes, bytes] | None:
        """Some of its stdout and stderr, (b"", b"") at the end of both."""
        deadline = time.monotonic() + timeout
        channel = self._channel
        while True:
            # Read before the buffers: what arrived before the end is in them by then.
            ended = channel.eof_received or channel.closed
            try:
                err = bytes(channel.recv_stderr(STDERR_KEPT)) if channel.recv_stderr_ready() else b""
                out = bytes(channel.recv(1 << 20)) if channel.recv_ready() else b""
            except _BROKEN as error:
                raise self._lost("the connection broke") from error
            self._stderr += err
            del self._stderr[:-STDERR_KEPT]
            if out or err:
                return out, err
            if ended:
                if channel.eof_received:
                    return b"", b""
                raise self._lost("the connection broke")
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self._poll.poll(left * 1000)

    @property
    def stderr(self) -> bytes:
        """The last 64 KiB of its stderr."""
        return bytes(self._stderr)

    def wait(self, timeout: float) -> int | None:
        """Its exit status, or None; -1, which is paramiko's for a lost channel, is raised."""
        deadline = time.monotonic() + timeout
        while (data := self.receive(max(0.0, deadline - time.monotonic()))) != b"":
            if data is None:
                return None
        while not self._channel.status_event.wait(0.05):  # stderr may outlive stdout: drain it
            if time.monotonic() >= deadline:
                return None
            self.receive(0)
        status = int(self._channel.exit_status)
        if status == -1:
            raise self._lost("the connection broke before the command's end was told")
        return status

    def close(self) -> None:
        """Close the channel; a command that minds its stdin or stdout ends by it."""
        with contextlib.suppress(*_BROKEN):
            self._channel.close()

    def _lost(self, why: str) -> ConnectionLostError:
        return ConnectionLostError(f"{self._peer}: {why}")
