"""Where a payload runs: one interface for this machine, a machine behind ssh, and an LXC container.

Everything above (ship, launch, mirror) sees argv in, bytes in, bytes out, an exit status. Quoting, pct,
login noise and broken sockets are solved below this line, once. A place connects when it is first
used; `close()` may be followed by another use, which connects anew.
"""

from __future__ import annotations

import dataclasses
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controller.inventory import Host


@dataclasses.dataclass(frozen=True, slots=True)
class Completed:
    """How a command ended: its exit status (128 + n for signal n), and all that it printed."""

    status: int
    stdout: bytes
    stderr: bytes


class Process(Protocol):
    """One running command in a place. Not to be shared between threads, but for `send`."""

    def send(self, data: bytes | memoryview) -> None:
        """Write all of `data` to its stdin. Raises ConnectionLostError, also when stdin is closed."""

    def close_stdin(self) -> None:
        """End its stdin; twice is once."""

    def receive(self, timeout: float) -> bytes | None:
        """Some bytes of its stdout; b"" at the end; None when nothing came within `timeout` seconds.

        Takes stderr in as well, so that neither pipe ever fills. Raises ConnectionLostError.
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


class Place(Protocol):
    """Somewhere commands run. A context manager; making one contacts nobody."""

    name: str
    """The place's name in hosts.toml."""
    host: str
    """Its address, `local` for this machine; part of file names, so without slashes."""
    workspace: str
    """Absolute folder in the place for payloads and runs."""
    python: str
    """Absolute path of the payload's interpreter in the place."""

    def start(self, argv: Sequence[str]) -> Process:
        """Start `argv`, unharmed by any shell between here and there.

        Raises the leaf of `errors` that says what is in the way.
        """

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float) -> Completed:
        """Start `argv`, send `stdin`, take all output, wait at most `timeout` seconds.

        Raises what `start` raises, and ConnectionLostError when time is up.
        """

    def close(self) -> None:
        """Let go of the connection; never raises."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def open_place(host: Host) -> Place:
    """The place that `host` describes, not yet connected."""
    raise NotImplementedError
