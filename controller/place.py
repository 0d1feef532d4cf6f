"""Where a payload runs: one interface for this machine, a machine behind ssh, and an LXC container.

Everything above (ship, launch, mirror) sees argv in, bytes in, bytes out, an exit status. Quoting, pct,
login noise and broken sockets are solved below this line, once. A place connects when it is first
used; `close()` may be followed by another use, which connects anew.

Every command is started in the same way, in all three kinds: as a script for the other side's `sh` that
first prints a nonce on both streams, then runs argv. So what a login shell, perl's locale warnings or pct
say before is told from the command's own output, a command that never began is told from one that
failed (pct's exit statuses are the same as a command's), and start() returns only once argv has begun.
`sh` stays the parent of argv: it turns death by signal n into 128 + n, where ssh would say nothing and
older lxc would say 0.
"""

from __future__ import annotations

import dataclasses
import re
import secrets
import shlex
import sys
import threading
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final, Protocol, Self

from controller.errors import ConnectionLostError, UnreachableError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from controller.inventory import Host

STDERR_KEPT: Final = 64 * 1024
"""Bytes of a command's stderr that are kept, the last ones."""

NOISE_KEPT: Final = 64 * 1024
"""Bytes of what a login prints before a command begins that are kept, the last ones."""

BEGIN_GRACE_S: Final = 10.0
"""Seconds beyond the connect timeout that a command may take to begin (pct starts perl)."""

SEND_S: Final = 60.0
"""How long a command may take nothing of what is sent to it, unless somebody knows better."""

SIGNAL_S: Final = 20.0
"""Longest time to deliver a signal."""

MOST_BYTES: Final = 120 << 10
"""Longest script: Linux takes 128 KiB for one argument, and this is one."""

_PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789 @_+=:,./-")


@dataclasses.dataclass(frozen=True, slots=True)
class Completed:
    """How a command ended: its exit status (128 + n for signal n), and all that it printed."""

    status: int
    stdout: bytes
    stderr: bytes


class Process(Protocol):
    """One running command in a place. Not to be shared between threads, but for `send`."""

    def send(self, data: bytes | memoryview, *, limit_s: float = SEND_S) -> None:
        """Write all of `data` to its stdin.

        Raises ConnectionLostError, also when stdin is closed, or when it took nothing for `limit_s` seconds.
        """

    def close_stdin(self) -> None:
        """End its stdin; twice is once."""

    def receive(self, timeout: float) -> bytes | None:
        """Some bytes of its stdout; b"" at the end; None when nothing came within `timeout` seconds.

        Takes stderr in as well, so that neither pipe ever fills. Raises ConnectionLostError.
        """

    def receive_streams(self, timeout: float) -> tuple[bytes, bytes] | None:
        """Some bytes of its stdout and of its stderr; (b"", b"") at the end of both; None when nothing came.

        For who shows both as they come, instead of `receive`. Raises ConnectionLostError.
        """

    @property
    def stderr(self) -> bytes:
        """What it wrote to stderr so far, the last 64 KiB of it."""

    def wait(self, timeout: float) -> int | None:
        """Its exit status, None when it still runs after `timeout` seconds.

        Reads (and drops) output that is still to come. Raises ConnectionLostError.
        """

    def close(self) -> None:
        """Let go of it, whether it has ended or not; never raises."""


class Command(Process, Protocol):
    """A process that a place started."""

    pid: int
    """Of the `sh` above it, as the place counts."""


_SIGNAL_BELOW: Final = """\
below() {
    for stat in /proc/[0-9]*/stat; do
        { read -r line <"$stat"; } 2>/dev/null || continue
        rest=${line##*) }
        rest=${rest#* }
        if [ "${rest%% *}" = "$1" ]; then
            child=${stat#/proc/}
            echo "${child%/stat}"
            below "${child%/stat}"
        fi
    done
}
found=$(below "$1")
[ -n "$found" ] || exit 1
kill "-$2" $found 2>/dev/null
exit 0
"""
"""Signals everything below a pid by its parents in /proc, since a process group has no number inside a
container that it was entered from outside, and not every container has setsid."""


class Place(ABC):
    """Somewhere commands run. A context manager; making one contacts nobody."""

    name: str
    """The place's name in hosts.toml."""
    host: str
    """Its address, `local` for this machine; part of file names, so without slashes."""
    workspace: str
    """Absolute folder in the place for payloads and runs."""
    python: str
    """Absolute path of the payload's interpreter in the place."""

    def __init__(self, description: Host) -> None:
        self.description = description
        self.name = description.name
        self.host = description.address
        self.workspace = description.workspace
        self.python = description.python

    @abstractmethod
    def start(self, argv: Sequence[str]) -> Command:
        """Start `argv`, unharmed by any shell between here and there, and wait until it has begun.

        Raises the leaf of `errors` that says what is in the way.
        """

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float) -> Completed:
        """Start `argv`, send `stdin`, take all output, wait at most `timeout` seconds.

        Raises what `start` raises, and ConnectionLostError when time is up.
        """
        deadline = time.monotonic() + timeout
        process = self.start(argv)
        sender = threading.Thread(target=_send_all, args=(process, stdin), daemon=True)
        sender.start()
        output = []
        status: int | None = None
        try:
            while (data := process.receive(max(0.0, deadline - time.monotonic()))) != b"":
                if data is None:
                    break
                output.append(data)
            else:
                status = process.wait(max(0.0, deadline - time.monotonic()))
            if status is None:
                raise ConnectionLostError(
                    f"{self.host}: {shlex.join(argv)[:80]} took more than {timeout:.0f} s"
                )
        finally:
            process.close()
        sender.join(1.0)
        return Completed(status, b"".join(output), process.stderr)

    def connect_soon(self) -> None:
        """Begin to connect, while whoever will start a command still prepares it. Never raises."""
        return  # nothing to be connected

    def signal(self, command: Command, name: str) -> bool:
        """Send the signal `name` (INT, TERM, KILL; 0: none) to all that `command` has started and that lives.

        Says whether there was any. A command behind ssh has no terminal that would do it. Raises what
        `run` raises.
        """
        done = self.run(["sh", "-c", _SIGNAL_BELOW, "sh", str(command.pid), name], timeout=SIGNAL_S)
        return done.status == 0

    @abstractmethod
    def close(self) -> None:
        """Let go of the connection; never raises."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def open_place(description: Host, *, accept_new_host_key: bool = False) -> Place:
    """The place that `description` names, not yet connected."""
    if description.kind == "local":
        from controller.local import Local

        return Local(description)
    # paramiko takes a while to import, half of it for invoke (asyncio, yaml, unittest.mock), which it needs
    # for the `Match exec` of its own parser alone; ssh -G evaluates ours.
    sys.modules.setdefault("invoke", None)  # type: ignore[arg-type]
    from controller.remote import Proxmox, Ssh

    kind = Proxmox if description.kind == "proxmox" else Ssh
    return kind(description, accept_new_host_key=accept_new_host_key)


class NotBegunError(Exception):
    """The command never began; what came out instead, for whoever knows the layers between."""

    def __init__(self, status: int | None, stdout: bytes, stderr: bytes) -> None:
        super().__init__(status)
        self.status = status
        self.text = (stderr + b"\n" + stdout).decode(errors="replace").strip()


class BegunProcess:
    """A process whose streams are shown from the nonce on; what came before it is dropped."""

    def __init__(self, inner: Process, nonce: str, timeout: float, peer: str) -> None:
        """Wait for the nonce. Raises NotBegunError, UnreachableError after `timeout` seconds."""
        self._inner = inner
        self._mark = nonce.encode()
        try:
            self.pid, self._ahead = self._begun(timeout, peer)
        except BaseException:
            inner.close()
            raise
        self._early_stderr: bytes | None = inner.stderr  # None: its mark has passed

    def _begun(self, timeout: float, peer: str) -> tuple[int, bytes]:
        """The pid that stands beside the nonce, and what came behind them."""
        deadline = time.monotonic() + timeout
        noise = b""
        while (match := re.search(rb"%s (\d+)\n" % self._mark, noise)) is None:
            noise = noise[-NOISE_KEPT:]
            left = deadline - time.monotonic()
            data = self._inner.receive(max(0.0, left))
            if data == b"":
                raise NotBegunError(self._inner.wait(max(1.0, left)), noise, self._inner.stderr)
            if data is None or left <= 0:  # also when a login prints for ever
                raise UnreachableError(
                    f"{peer}: a command did not begin within {timeout:.0f} s",
                    "The host or the container may be frozen or overloaded.",
                )
            noise += data
        return int(match[1]), noise[match.end() :]

    def send(self, data: bytes | memoryview, *, limit_s: float = SEND_S) -> None:
        """See `Process`."""
        self._inner.send(data, limit_s=limit_s)

    def close_stdin(self) -> None:
        """See `Process`."""
        self._inner.close_stdin()

    def receive(self, timeout: float) -> bytes | None:
        """See `Process`."""
        if self._ahead:
            ahead, self._ahead = self._ahead, b""
            return ahead
        return self._inner.receive(timeout)

    def receive_streams(self, timeout: float) -> tuple[bytes, bytes] | None:
        """See `Process`."""
        deadline = time.monotonic() + timeout
        while True:
            out, self._ahead = self._ahead, b""
            err = self._after_mark(b"")
            if not out and not err:
                got = self._inner.receive_streams(max(0.0, deadline - time.monotonic()))
                if got is None or got == (b"", b""):
                    return got
                out, err = got[0], self._after_mark(got[1])
            if out or err:
                return out, err

    def _after_mark(self, err: bytes) -> bytes:
        """What of stderr is the command's own: `echo` of the nonce may come after stdout's."""
        if self._early_stderr is None:
            return err
        seen = self._early_stderr + err
        _, mark, own = seen.partition(self._mark + b"\n")
        self._early_stderr = None if mark else seen
        return own

    @property
    def stderr(self) -> bytes:
        """Its stderr from the nonce on; all that is kept when the nonce was pushed out."""
        return self._inner.stderr.rpartition(self._mark + b"\n")[2]

    def wait(self, timeout: float) -> int | None:
        """See `Process`."""
        return self._inner.wait(timeout)

    def close(self) -> None:
        """See `Process`."""
        self._inner.close()


def new_nonce() -> str:
    """A word that no login noise contains."""
    return f"begin-{secrets.token_hex(12)}"


def script(argv: Sequence[str], nonce: str, environment: Sequence[str]) -> str:
    """The text for the other side's `sh -c`: print the nonce (and a pid), run `argv`, keep its status.

    `environment` are arguments of `env`. The text is ASCII whatever argv holds, because pct takes
    nothing else: argv goes quoted for the shell, then as octal escapes of `printf %b`. Raises
    ValueError for a NUL byte, which no argument can hold, and UsageError for too much.
    """
    quoted = shlex.join([*environment, *argv])
    if "\0" in quoted:
        raise ValueError("an argument holds a NUL byte")
    raw = quoted.encode("utf-8", errors="surrogateescape")
    escaped = "".join(chr(byte) if byte in _PLAIN else f"\\0{byte:03o}" for byte in raw)
    if len(escaped) > MOST_BYTES:
        raise UsageError(
            f"the arguments are {len(escaped) >> 10} KiB as they travel; {MOST_BYTES >> 10} KiB fit",
            "Send long text by stdin or in a file.",
        )
    # The shell's own word on a signal ("Terminated") is not the command's: it goes nowhere.
    run = f"exec 3>&2 2>/dev/null; (eval \"exec env $(printf %b '{escaped}')\") 2>&3 3>&-"
    return f"echo {nonce} >&2; echo {nonce} $$; {run}; exit $?"


def _send_all(process: Process, stdin: bytes) -> None:
    try:
        if stdin:
            process.send(stdin)
        process.close_stdin()
    except ConnectionLostError:
        pass  # a command need not read all of its stdin; a lost connection shows in receive()
