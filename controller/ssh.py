"""Connections to hosts by SSH: one a host and process, its channels run the commands.

What ~/.ssh/config says comes from ssh_config.py, ssh_hop.py connects and logs in, ssh_process.py runs a
channel. A process has one connection to a host, however many places and views it has there (`shared`): a
view that lets go closes its channels, the last one the connection. Between processes nothing is shared: of
the views of a run one holds the mirror's lock and so the connection, the others read the mirror.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Final

import paramiko

from controller.errors import (
    AuthenticationError,
    ConnectionLostError,
    DflashctlError,
    UnreachableError,
)
from controller.ssh_config import SshSettings, look_up
from controller.ssh_hop import Hop, connect, jump_host
from controller.ssh_process import SshProcess

DEFAULT_TIMEOUT_S: Final = 10.0
"""For each step of connecting, where neither hosts.toml nor ssh_config has one."""
_MOST_HOPS: Final = 8


class SshConnection:
    """A connection to one host, made when first used and again after a break. For several threads."""

    def __init__(
        self, address: str, *, user: str, port: int | None, timeout: float | None, accept_new: bool
    ) -> None:
        """`timeout`: seconds for each step of connecting; None: ConnectTimeout of ssh_config, or 10."""
        self._address = address
        self._user = user
        self._port = port
        self._timeout = timeout
        self._accept_new = accept_new
        self._lock = threading.Lock()
        self._path: list[Hop] = []
        self._failed: DflashctlError | None = None
        self.users = 0

    def connect_soon(self) -> None:
        """Begin to connect in a thread of its own; what fails there, the next `start` raises."""
        threading.Thread(target=self._connect_early, name="connecting early", daemon=True).start()

    def _connect_early(self) -> None:
        with self._lock:
            try:
                self._connected()
            except AuthenticationError:
                pass  # in the main thread a passphrase may be asked for
            except DflashctlError as error:
                self._failed = error

    def start(self, command: str) -> SshProcess:
        """Run `command` in the login shell of the other side. Raises the leaf that fits."""
        with self._lock:
            failed, self._failed = self._failed, None
            if failed is not None:
                raise failed
            hop = self._connected()
        timeout = self._timeout or hop.settings.connect_timeout or DEFAULT_TIMEOUT_S
        try:
            channel = hop.transport.open_session(timeout=timeout)
            channel.exec_command(command)
        except paramiko.ChannelException as error:  # one too many; the others of this connection live
            raise ConnectionLostError(
                f"{self._address}: the server allows no further session ({error.text})"
            ) from error
        except (paramiko.SSHException, EOFError, OSError) as error:
            with self._lock:
                if self._path and self._path[-1] is hop:  # another thread may have connected anew
                    self.close()
            raise ConnectionLostError(f"{self._address}: no channel could be opened ({error})") from error
        return SshProcess(channel, self._address)

    def close(self) -> None:
        """Close the connection and those of the hosts it jumps through."""
        path, self._path = self._path, []
        for hop in reversed(path):
            hop.close()

    def _connected(self) -> Hop:
        if self._path and all(hop.transport.is_active() for hop in self._path):
            return self._path[-1]
        self.close()
        settings = look_up(self._address, user=self._user, port=self._port)
        try:
            self._travel(settings, 0)
        except BaseException:
            self.close()
            raise
        return self._path[-1]

    def _travel(self, settings: SshSettings, depth: int) -> None:
        """Connect to the host of `settings`, its jump hosts first, each a hop of `_path`."""
        if depth > _MOST_HOPS:
            raise UnreachableError(
                f"{self._address}: its ProxyJump leads through more than {_MOST_HOPS} hosts, or in a circle",
                f"See: ssh -G {self._address}",
            )
        before = None
        if settings.proxy_jump:
            *earlier, last = settings.proxy_jump.split(",")
            gateway = jump_host(last.strip())
            if earlier:
                gateway = dataclasses.replace(gateway, proxy_jump=",".join(earlier), proxy_command="")
            self._travel(gateway, depth + 1)
            before = self._path[-1].transport
        timeout = self._timeout or settings.connect_timeout or DEFAULT_TIMEOUT_S
        self._path.append(connect(settings, before, timeout, self._accept_new))


_shared: dict[tuple[object, ...], SshConnection] = {}
_shared_lock = threading.Lock()


def shared(
    address: str, *, user: str, port: int | None, timeout: float | None, accept_new: bool
) -> SshConnection:
    """This process's connection to a host; give it back by `release`. Contacts nobody."""
    key = (address, user, port, timeout, accept_new)
    with _shared_lock:
        connection = _shared.get(key)
        if connection is None:
            connection = _shared[key] = SshConnection(
                address, user=user, port=port, timeout=timeout, accept_new=accept_new
            )
        connection.users += 1
        return connection


def release(connection: SshConnection) -> None:
    """Let go of a shared connection; the last one closes it."""
    with _shared_lock:
        connection.users -= 1
        last = connection.users == 0
        if last:
            for key in [key for key, known in _shared.items() if known is connection]:
                del _shared[key]
    if last:
        connection.close()
