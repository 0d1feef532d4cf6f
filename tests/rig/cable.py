"""A cable to the rig's sshd that can be cut: packets are dropped, and neither end is told.

A process makes a network namespace of its own, joined to this one by a veth pair, and passes on what is
sent to its address there to sshd's port on loopback. To cut is to give both ends a wrong neighbour's
address: frames arrive and are dropped, as behind a pulled cable, no reset and no error. The namespace ends
with the process, and the process with this one.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from tests.rig.rig import Rig

CLONE_NEWNET = 0x40000000
WRONG = "02:00:5e:00:53:01"


class Cable:
    """Context: `address` and `port` reach 127.0.0.1 `target`. `cut()` and `mend()` at any time."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = 2222
        number = os.getpid() % 16000  # a /30 of 198.18.0.0/16, which is for tests of networks
        net = f"198.18.{number // 64}.{number % 64 * 4 + 1}".rsplit(".", 1)
        self.here, self.address = f"{net[0]}.{net[1]}", f"{net[0]}.{int(net[1]) + 1}"
        self.device = f"dfl{os.getpid()}"

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            [sys.executable, "-S", __file__, self.address, str(self.port), str(self.target), self.here],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._hear("unshared")
        pid = str(self.process.pid)
        ip("link", "add", self.device, "type", "veth", "peer", "name", "cable", "netns", pid)
        ip("addr", "add", f"{self.here}/30", "dev", self.device)
        ip("link", "set", self.device, "up")
        self._say("joined", "listening")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()
        subprocess.run(["ip", "link", "del", self.device], capture_output=True)  # gone with its peer

    def introduce(self, rig: Rig) -> None:
        """Let the rig's laptop log in through the cable as Host `cable`; `rig.reset()` undoes it."""
        with rig.ssh_config.open("a") as file:
            file.write(f"\nHost cable\n  HostName {self.address}\n  Port {self.port}\n  User {rig.user}\n")
            file.write(f"  IdentityFile {rig.identity}\n  IdentitiesOnly yes\n  IdentityAgent none\n")
            file.write(f"  UserKnownHostsFile {rig.known_hosts}\n")
        key = rig.known_hosts.read_text().split(" ", 1)[1]
        with rig.known_hosts.open("a") as file:
            file.write(f"[{self.address}]:{self.port} {key}")

    def cut(self) -> None:
        """From now on every packet is lost, in both directions."""
        ip("neigh", "replace", self.address, "lladdr", WRONG, "dev", self.device, "nud", "permanent")
        self._say("cut", "done")

    def mend(self) -> None:
        """Packets arrive again."""
        subprocess.run(["ip", "neigh", "del", self.address, "dev", self.device], capture_output=True)
        self._say("mend", "done")

    def _say(self, word: str, answer: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n".encode())
        self.process.stdin.flush()
        self._hear(answer)

    def _hear(self, word: str) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line == f"{word}\n".encode(), line


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True)


def main(address: str, port: str, target: str, peer: str) -> None:
    """The process: in its namespace but for the connections to loopback."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    here = os.open("/proc/self/ns/net", os.O_RDONLY)
    assert libc.unshare(CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
    there = os.open("/proc/self/ns/net", os.O_RDONLY)
    say("unshared")
    assert sys.stdin.readline() == "joined\n"
    ip("addr", "add", f"{address}/30", "dev", "cable")
    ip("link", "set", "cable", "up")
    listener = socket.create_server((address, int(port)))
    libc.setns(here, CLONE_NEWNET)
    threading.Thread(target=accept, args=(listener, int(target)), daemon=True).start()
    say("listening")
    for line in sys.stdin:
        libc.setns(there, CLONE_NEWNET)  # of this thread alone
        if line == "cut\n":
            ip("neigh", "replace", peer, "lladdr", WRONG, "dev", "cable", "nud", "permanent")
        else:
            subprocess.run(["ip", "neigh", "del", peer, "dev", "cable"], capture_output=True)
        libc.setns(here, CLONE_NEWNET)
        say("done")


def say(word: str) -> None:
    print(word, flush=True)


def accept(listener: socket.socket, target: int) -> None:
    while True:
        client, _ = listener.accept()
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            server = socket.create_connection(("127.0.0.1", target), timeout=5)
        except OSError:
            client.close()
            continue
        server.settimeout(None)
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for pair in ((client, server), (server, client)):
            threading.Thread(target=pass_on, args=pair, daemon=True).start()


def pass_on(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 18):
            target.sendall(data)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    main(*sys.argv[1:])
