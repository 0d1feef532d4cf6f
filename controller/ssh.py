"""One SSH connection: set-up by fabric and paramiko, channels by our own loop.

fabric gives what ~/.ssh/config says (HostName, Port, User, IdentityFile, ProxyJump, ProxyCommand); host
keys are verified by known_hosts.py. The TCP socket is ours, for TCP_NODELAY (opening a channel took
26 ms without it, 2 ms with it) and a timeout on unacknowledged data. Channels never have a pty, and both
their streams are drained together: reading one after the other deadlocks past the 2 MiB window.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import time
from pathlib import Path
from typing import Any

import fabric
import paramiko

from controller.errors import (
    AuthenticationError,
    ConnectionLostError,
    DflashctlError,
    HostKeyError,
    UnreachableError,
)
from controller.known_hosts import KnownHosts
from controller.place import STDERR_KEPT

_SLICE = 32_704
"""Bytes in one send: what fits into one SSH packet; 139 MiB/s against 27 with one big sendall."""
_SEND_TIMEOUT_S = 60.0

logging.getLogger("paramiko").addHandler(logging.NullHandler())


class SshProcess:
    """A command in a channel of an SSH connection (`place.Process`)."""

    def __init__(self, channel: paramiko.Channel, peer: str) -> None:
        self._channel = channel
        self._peer = peer
        self._stderr = bytearray()
        channel.settimeout(_SEND_TIMEOUT_S)
        self._poll = select.poll()
        self._poll.register(channel.fileno(), select.POLLIN)

    def send(self, data: bytes | memoryview) -> None:
        """All of `data` to its stdin; gives up when nothing could be sent for a minute."""
        view = memoryview(data)
        try:
            for start in range(0, len(view), _SLICE):
                self._channel.sendall(view[start : start + _SLICE])
        except OSError as error:
            raise self._lost(f"cannot send to it ({error or 'timed out'})") from error

    def close_stdin(self) -> None:
        """The end of its stdin."""
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self._channel.shutdown_write()

    def receive(self, timeout: float) -> bytes | None:
        """Some of its stdout, b"" at the end; a channel that ends without an EOF is a lost one."""
        deadline = time.monotonic() + timeout
        channel = self._channel
        while True:
            # Read before the buffers: what arrived before the end is in them by then.
            ended = channel.eof_received or channel.closed
            if channel.recv_stderr_ready():
                self._stderr += channel.recv_stderr(STDERR_KEPT)
                del self._stderr[:-STDERR_KEPT]
                continue
            if channel.recv_ready():
                return bytes(channel.recv(1 << 20))
            if ended:
                if channel.eof_received:
                    return b""
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
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self._channel.close()

    def _lost(self, why: str) -> ConnectionLostError:
        return ConnectionLostError(f"{self._peer}: {why}")


class SshConnection:
    """A connection to one host, made when first used and again after a break."""

    def __init__(
        self, address: str, *, user: str, port: int | None, timeout: float, accept_new: bool
    ) -> None:
        self._address = address
        self._user = user
        self._port = port
        self._timeout = timeout
        self._accept_new = accept_new
        self._fabric: fabric.Connection | None = None

    def start(self, command: str) -> SshProcess:
        """Run `command` in the login shell of the other side. Raises the leaf that fits."""
        transport = self._transport()
        try:
            channel = transport.open_session(timeout=self._timeout)
            channel.exec_command(command)
        except paramiko.ChannelException as error:  # one too many; the others of this connection live
            raise ConnectionLostError(
                f"{self._address}: the server allows no further session ({error.text})"
            ) from error
        except (paramiko.SSHException, EOFError, OSError) as error:
            self.close()
            raise ConnectionLostError(f"{self._address}: no channel could be opened ({error})") from error
        return SshProcess(channel, self._address)

    def close(self) -> None:
        """Close the connection and those of the hosts it jumps through."""
        connection, self._fabric = self._fabric, None
        while isinstance(connection, fabric.Connection):
            with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
                connection.client.close()
            connection = connection.gateway

    def _transport(self) -> paramiko.Transport:
        if self._fabric is not None and self._fabric.is_connected:
            return self._fabric.transport
        self.close()
        try:
            connection = fabric.Connection(
                self._address,
                user=self._user or None,
                port=self._port,
                connect_timeout=self._timeout,
            )
        except (paramiko.SSHException, ValueError, OSError) as error:
            raise UnreachableError(
                f"{self._address}: ~/.ssh/config cannot be used ({error})", "Does ssh take it?"
            ) from error
        self._fabric = connection
        try:
            self._open(connection)
        except DflashctlError:
            self.close()
            raise
        connection.transport.set_keepalive(15)
        return connection.transport

    def _open(self, connection: Any) -> None:
        """Connect `connection`, its jump hosts first. Raises the leaf that fits."""
        if isinstance(connection.gateway, fabric.Connection):
            self._open(connection.gateway)
        host, port = connection.host, int(connection.port)
        peer = host if port == 22 else f"{host} port {port}"
        login = f"{connection.user}@{connection.original_host}"
        known = KnownHosts(
            connection.ssh_config,
            accept_new=self._accept_new,
            login=login if port == 22 else f"-p {port} {login}",
        )
        known.install(connection.client)
        options = connection.connect_kwargs
        # A missing IdentityFile is skipped by ssh; paramiko would raise FileNotFoundError.
        names = [Path(name).expanduser() for name in options.get("key_filename") or []]
        options["key_filename"] = [str(name) for name in names if name.is_file()]
        if str(connection.ssh_config.get("identitiesonly", "no")).lower() == "yes":
            options["look_for_keys"] = False
        options.setdefault("banner_timeout", self._timeout)
        options.setdefault("auth_timeout", max(self._timeout, 30.0))
        try:
            if connection.gateway is None:
                options["sock"] = self._socket(host, port)
            connection.open()
        except paramiko.BadHostKeyException as error:
            name = host if port == 22 else f"[{host}]:{port}"
            raise known.changed(name, error.key) from error
        except HostKeyError:
            raise
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise _explained(error, peer, login, connection.client) from error

    def _socket(self, host: str, port: int) -> socket.socket:
        peer = socket.create_connection((host, port), timeout=self._timeout)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)
        return peer


def _explained(error: Exception, peer: str, login: str, client: paramiko.SSHClient) -> DflashctlError:
    """The leaf of our tree for what fabric, paramiko or the socket raised."""
    transport = client.get_transport()
    greeted = transport is not None and transport.initial_kex_done
    if isinstance(error, paramiko.PasswordRequiredException):
        return AuthenticationError(
            f"{login}: the key is locked by a passphrase", "Unlock it first with: ssh-add"
        )
    if isinstance(error, paramiko.AuthenticationException) or greeted:
        return AuthenticationError(
            f"{login}: the server accepts none of our keys ({error})",
            f"Try: ssh {login} true . If it asks for a password, install a key: ssh-copy-id {login}",
        )
    if isinstance(error, socket.gaierror):
        return UnreachableError(
            f"{peer}: no such host name is known", "Check the address in hosts.toml, or the DNS."
        )
    if isinstance(error, ConnectionRefusedError):
        return UnreachableError(
            f"{peer}: refuses the connection", "Does sshd run there, and is that its port?"
        )
    if isinstance(error, TimeoutError):
        return UnreachableError(
            f"{peer}: no answer within the connect timeout", "Is it switched on, and the VPN up?"
        )
    if isinstance(error, OSError) and error.strerror:
        return UnreachableError(f"{peer}: cannot be reached ({error.strerror})")
    return UnreachableError(
        f"{peer}: something answers, but not as an SSH server ({error or 'it hung up'})",
        "Is that its port?",
    )
