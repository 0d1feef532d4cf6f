"""One hop to a host: a socket of our own, the host key verified, logged in.

The TCP socket is ours, for TCP_NODELAY (opening a channel took 26 ms without it, 2 ms with it) and a timeout
on unacknowledged data. A hop may go through a channel of the hop before (ProxyJump) or through a
ProxyCommand, whose stdin and stdout are one end of a socket pair, so that its end is seen as a socket's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import signal
import socket
import subprocess
import tempfile
from typing import IO

import paramiko

from controller.errors import DflashctlError, UnreachableError
from controller.known_hosts import KnownHosts
from controller.ssh_config import SshSettings, look_up
from controller.ssh_login import log_in
from controller.text import last_line

logging.getLogger("paramiko").addHandler(logging.NullHandler())


@dataclasses.dataclass(slots=True)
class Hop:
    """A connected and authenticated host on the way."""

    settings: SshSettings
    transport: paramiko.Transport
    proxy: subprocess.Popen[bytes] | None

    def close(self) -> None:
        """Close the connection, and end its ProxyCommand."""
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self.transport.close()
        if self.proxy is not None:
            _end(self.proxy)


def jump_host(text: str) -> SshSettings:
    """The settings of one part of a ProxyJump: `[user@]host[:port]`, or the same as an ssh:// address."""
    user, _, rest = text.removeprefix("ssh://").rpartition("@")
    host, port = rest, ""
    if rest.startswith("["):
        host, _, port = rest[1:].partition("]")
        port = port.removeprefix(":")
    elif rest.count(":") == 1:
        host, _, port = rest.partition(":")
    return look_up(host, user=user, port=int(port) if port.isdecimal() else None)


def connect(
    settings: SshSettings, before: paramiko.Transport | None, timeout: float, accept_new: bool
) -> Hop:
    """Connect, verify the host key, log in. Raises the leaf that fits."""
    proxy: subprocess.Popen[bytes] | None = None
    said: IO[bytes] | None = None
    peer: socket.socket | paramiko.Channel | None = None
    transport: paramiko.Transport | None = None
    known = KnownHosts(settings, accept_new=accept_new)
    try:
        if before is not None:
            where = (settings.hostname, settings.port)
            peer = before.open_channel("direct-tcpip", where, ("127.0.0.1", 0), timeout=timeout)
        elif settings.proxy_command:
            said = tempfile.TemporaryFile()  # noqa: SIM115 - closed below
            peer, proxy = _through_command(settings.proxy_command, said)
        else:
            peer = _socket(settings, timeout)
        transport = paramiko.ServiceRequestingTransport(peer)
        transport.banner_timeout = transport.handshake_timeout = timeout
        transport.auth_timeout = max(timeout, 60.0)
        _prefer(transport, known.key_types)
        transport.start_client(timeout=2 * timeout)  # its own limits, on each step, come first
        if not transport.initial_kex_done:
            raise TimeoutError
        known.verify(transport.get_remote_server_key())
        log_in(transport, settings)
        transport.set_keepalive(15)
        return Hop(settings, transport, proxy)
    except BaseException as error:
        for closable in (transport, peer):
            with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
                if closable is not None:
                    closable.close()
        if proxy is not None:
            _end(proxy)
        if isinstance(error, DflashctlError) or not isinstance(error, Exception):
            raise
        raise _explained(error, settings, before is not None, _last_line(said)) from error
    finally:
        if said is not None:
            said.close()


def _socket(settings: SshSettings, timeout: float) -> socket.socket:
    """A connected TCP socket; each address of the name gets its try."""
    trouble: OSError | None = None
    found = socket.getaddrinfo(settings.hostname, settings.port, settings.address_family, socket.SOCK_STREAM)
    for family, kind, protocol, _, address in found:
        peer = socket.socket(family, kind, protocol)
        try:
            peer.settimeout(timeout)
            if settings.bind_address:
                peer.bind((settings.bind_address, 0))
            peer.connect(address)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)
            return peer
        except OSError as error:
            peer.close()
            trouble = error
    assert trouble is not None
    raise trouble


def _through_command(command: str, said: IO[bytes]) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """A socket whose other end is the ProxyCommand's stdin and stdout; its stderr goes to `said`."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            ["/bin/sh", "-c", f"exec {command}"],
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=said,
            start_new_session=True,
        )
    return ours, process


def _end(process: subprocess.Popen[bytes]) -> None:
    """A ProxyCommand sees the end of its stdin; one that does not mind it is ended."""
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        if number is not None:
            process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
            return


def _prefer(transport: paramiko.Transport, types: list[str]) -> None:
    """Ask for a host key of a kind that is known, so that no other one looks unknown; and for AES-GCM, one
    pass in C where paramiko's own first choice needs two and a MAC: 220 MiB/s instead of 145.
    """
    options = transport.get_security_options()
    wanted = [
        name for kind in types for name in (["rsa-sha2-512", "rsa-sha2-256"] if kind == "ssh-rsa" else [kind])
    ]
    able = list(options.key_types)
    first = [name for name in wanted if name in able]
    options.key_types = [*first, *(name for name in able if name not in first)]
    options.ciphers = sorted(options.ciphers, key=lambda name: "gcm" not in name)


def _last_line(said: IO[bytes] | None) -> str:
    if said is None:
        return ""
    said.seek(0)
    return last_line(said.read(), "")


def _explained(error: Exception, settings: SshSettings, jumped: bool, proxy_said: str) -> DflashctlError:
    """The leaf of our tree for what paramiko or the socket raised before the login."""
    peer = settings.peer
    if settings.proxy_command:
        return UnreachableError(
            f"{peer}: its ProxyCommand gave no SSH server ({proxy_said or error or 'it hung up'})",
            f"It is: {settings.proxy_command.split()[0]} ...; try: ssh {settings.login} true",
        )
    if jumped and isinstance(error, paramiko.ChannelException):
        return UnreachableError(
            f"{peer}: the jump host cannot reach it ({error.text})",
            f"Try: ssh {settings.login} true",
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
        return UnreachableError(
            f"{peer}: cannot be reached ({error.strerror})", "Has this machine a network, and is the VPN up?"
        )
    return UnreachableError(
        f"{peer}: something answers, but not as an SSH server ({error or 'it hung up'})",
        "Is that its port?",
    )
