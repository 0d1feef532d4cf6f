"""The payload's way into a place: one content-addressed tar, sent once, valid only as a whole.

What is shipped is a list and not luck: the Python files of `remote_payload`, requirements.txt, and its jobs.
The tar has sorted names and no times or owners, so its sha256 depends on the contents alone and names
the folder `<workspace>/payloads/<digest>/`. receiver.py, sent along as an argument, verifies the digest,
unpacks beside, syncs and renames: a folder of that name is complete, whatever broke off.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import remote_payload
from controller import receiver
from controller.errors import ConnectionLostError, PayloadEnvironmentError, ShipError
from controller.narration import detail
from controller.place import Completed
from controller.text import last_line
from controller.timing import Timing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controller.place import Command, Place, Process

PACKAGE: Final = Path(remote_payload.__file__).parent
ANSWER_S: Final = 60.0
"""How long the place may be silent: an interpreter start, or writing the payload to its disk."""
_CHUNK: Final = 256 * 1024

Sent = Callable[[int, int], None]
"""Told bytes sent, and bytes in all."""


@dataclasses.dataclass(frozen=True, slots=True)
class Payload:
    """A packed payload."""

    digest: str
    """sha256 of `tar`, hex."""
    tar: bytes
    files: tuple[tuple[str, int], ...]
    """Name in the tar and size in bytes of every file, sorted."""

    def directory(self, workspace: str) -> str:
        """Where it lies in a place with that workspace."""
        return f"{workspace}/payloads/{self.digest}"


@dataclasses.dataclass(frozen=True, slots=True)
class Shipped:
    """A payload in a place, and what its command said."""

    directory: str
    """Of the payload, in the place."""
    sent: bool
    """False: it was there already."""
    new_workspace: bool
    """True: the workspace's folder did not exist and was made."""
    status: int
    """Exit status of the payload's command."""
    output: bytes
    stderr: bytes


class Arrived:
    """A payload in a place, and its command that runs; whoever has it closes it."""

    def __init__(self, directory: str, process: Command, first: dict[str, Any], lines: _Lines) -> None:
        self.directory = directory
        """Of the payload, in the place."""
        self.sent = not first["have"]
        self.new_workspace = bool(first["new_workspace"])
        self.process = process
        self._lines = lines

    def record(self, timeout: float) -> dict[str, Any] | None:
        """The next line of JSON that the command prints; None at its end.

        Raises ConnectionLostError after `timeout` seconds of silence, ShipError for another line.
        """
        return self._lines.next(timeout)

    def rest(self) -> tuple[bytes, int]:
        """Its output to the end, and its exit status. Raises ConnectionLostError."""
        return self._lines.rest()


def pack(package: Path = PACKAGE) -> Payload:
    """Pack the payload package. Raises ShipError when a file of it cannot be read."""
    buffer = io.BytesIO()
    files = []
    try:
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for path in _shipped_files(package):
                content = path.read_bytes()
                member = tarfile.TarInfo(f"remote_payload/{path.relative_to(package).as_posix()}")
                member.size, member.mode = len(content), 0o644
                tar.addfile(member, io.BytesIO(content))
                files.append((member.name, len(content)))
    except OSError as error:
        raise ShipError(f"{error.filename}: cannot be packed ({error.strerror})") from error
    data = buffer.getvalue()
    return Payload(hashlib.sha256(data).hexdigest(), data, tuple(files))


def _shipped_files(package: Path) -> list[Path]:
    chosen = []
    for path in package.rglob("*"):
        parts = path.relative_to(package).parts
        if any(part.startswith(".") or part == "__pycache__" for part in parts):
            continue
        if (path.suffix == ".py" or parts[0] in ("jobs", "requirements.txt")) and path.is_file():
            chosen.append(path)
    return sorted(chosen, key=lambda path: path.relative_to(package).as_posix())


def ship(
    place: Place,
    payload: Payload,
    command: Sequence[str],
    *,
    progress: Sent | None = None,
) -> Shipped:
    """Bring `payload` into `place` if it is not there, and run its `command` to the end.

    `progress` is told bytes sent and bytes in all. Raises what `start` raises.
    """
    arrived = start(place, payload, command, progress=progress)
    try:
        arrived.process.close_stdin()
        output, status = arrived.rest()
        stderr = arrived.process.stderr
        return Shipped(arrived.directory, arrived.sent, arrived.new_workspace, status, output, stderr)
    finally:
        arrived.process.close()


def start(
    place: Place,
    payload: Payload,
    command: Sequence[str],
    *,
    python: str = "",
    progress: Sent | None = None,
) -> Arrived:
    """Bring `payload` into `place` if it is not there, and start its `command`, in one remote process.

    `python`: another interpreter than the venv's. Raises ShipError, PayloadEnvironmentError when the
    interpreter or the workspace cannot be used, and what `Place.start` raises.
    """
    text = Path(receiver.__file__).read_text(encoding="utf-8")
    head = [python or place.python, "-I", "-c", text, place.workspace, payload.digest, str(len(payload.tar))]
    process = place.start(Timing.from_environment().command([*head, *command]))
    lines = _Lines(process)
    try:
        first = lines.next(ANSWER_S)
        if first is None:
            raise _no_interpreter(place, process, python)
        if error := first.get("error"):
            raise _refused(place, str(error), first, python)
        if not first["have"]:
            _send(process, payload.tar, progress)
        second = lines.next(ANSWER_S) or {"error": "digest", "text": "the receiver ended early"}
        if error := second.get("error"):
            raise _refused(place, str(error), second, python)
        return Arrived(payload.directory(place.workspace), process, first, lines)
    except BaseException:
        process.close()
        raise


class Session:
    """The payload's commands asked one after the other in one remote process; a context manager."""

    def __init__(self, place: Place, payload: Payload, arrived: Arrived) -> None:
        self.place = place
        self.payload = payload
        self.directory = arrived.directory
        """Of the payload, in the place."""
        self.sent = arrived.sent
        self.new_workspace = arrived.new_workspace
        self._arrived = arrived

    def ask(self, command: Sequence[str], stdin: bytes = b"", *, timeout: float = ANSWER_S) -> Completed:
        """Run one command of the payload. Raises ConnectionLostError, also when it takes too long."""
        words = (self.place.python, f"{self.directory}/remote_payload", *command)
        detail(self.place.description.command_line(*words))
        self._arrived.process.send(_order(command, stdin).encode() + b"\n")
        return self.answer(timeout)

    def answer(self, timeout: float = ANSWER_S) -> Completed:
        """The answer to the command that the session began with. Raises ConnectionLostError."""
        answer = self._arrived.record(timeout)
        if answer is None:
            said = last_line(self._arrived.process.stderr)
            raise ConnectionLostError(f"{self.place.name}: the payload ended without an answer: {said}")
        return Completed(answer["status"], answer["stdout"].encode(), answer["stderr"].encode())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._arrived.process.close()


def converse(
    place: Place,
    payload: Payload,
    first: Sequence[str] = (),
    *,
    progress: Sent | None = None,
) -> Session:
    """Bring `payload` into `place` if it is not there, and talk to it. Raises what `start` raises.

    `first`: a command that it begins with, which saves a round trip; `answer` has what came of it. It travels
    among arguments, so nothing secret may be in it.
    """
    words = [_order(first, b"")] if first else []
    return Session(place, payload, start(place, payload, ["session", *words], progress=progress))


def _order(command: Sequence[str], stdin: bytes) -> str:
    return json.dumps({"argv": list(command), "stdin": stdin.decode()})


def _send(process: Process, tar: bytes, progress: Sent | None) -> None:
    view = memoryview(tar)
    for start in range(0, len(view), _CHUNK):
        process.send(view[start : start + _CHUNK])
        if progress is not None:
            progress(min(start + _CHUNK, len(view)), len(view))


class _Lines:
    """The receiver's lines of JSON, and then the raw output of the payload's command."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._buffer = b""

    def next(self, timeout: float) -> dict[str, Any] | None:
        """The next line, or None at the end of the output. Raises ConnectionLostError, ShipError."""
        while b"\n" not in self._buffer:
            data = self._some(timeout)
            if data == b"":
                return None
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise ShipError(f"the payload said {line[:80]!r}, which is no line of JSON")
        return record

    def rest(self) -> tuple[bytes, int]:
        """Everything to the end, and the exit status. Raises ConnectionLostError."""
        while data := self._some(ANSWER_S):
            self._buffer += data
        deadline = time.monotonic() + ANSWER_S
        status = self._process.wait(max(0.0, deadline - time.monotonic()))
        if status is None:
            raise ConnectionLostError("the payload's command closed its output and did not end")
        return self._buffer, status

    def _some(self, timeout: float) -> bytes:
        data = self._process.receive(timeout)
        if data is None:
            raise ConnectionLostError(f"the place said nothing for {timeout:.0f} s")
        return data


def _refused(place: Place, error: str, record: dict[str, Any], python: str) -> Exception:
    text = record.get("text", "")
    if error == "python":
        oldest = ".".join(map(str, receiver.OLDEST))
        return PayloadEnvironmentError(
            f"{place.name}: {python or place.python} is Python {text}; the payload needs {oldest} or newer",
            f"Name a newer one as `base_python` in hosts.toml, then: dflashctl setup --host {place.name}",
        )
    if error == "workspace":
        return PayloadEnvironmentError(
            f"{place.name}: the workspace {place.workspace} cannot be used: {text}",
            "Mount it there, make room in it or make it writable; or name another `workspace` in hosts.toml.",
        )
    return ShipError(f"{place.name}: the payload did not arrive whole: {text}", "Try again.")


def _no_interpreter(place: Place, process: Process, python: str) -> Exception:
    """The error for a receiver that said nothing: mostly there is no such interpreter."""
    status = process.wait(ANSWER_S)
    if status in (126, 127) and python:
        return PayloadEnvironmentError(
            f"{place.name}: there is no {python} to make the venv with",
            f"Install it there: {place.description.command_line('apt-get', 'install', 'python3-venv')}"
            " ; or name another as `base_python` in hosts.toml.",
        )
    if status in (126, 127):
        venv = place.python.removesuffix("/bin/python")
        there = place.run(["test", "-d", venv], timeout=ANSWER_S).status == 0
        what = (
            f"{place.python} is absent or cannot run, although {venv} is there"
            if there
            else f"there is no venv at {venv}"
        )
        return PayloadEnvironmentError(
            f"{place.name}: {what}",
            f"Make it: dflashctl setup --host {place.name} ; or name the right one as `venv` in hosts.toml.",
        )
    python = python or place.python
    return PayloadEnvironmentError(
        f"{place.name}: {python} ended with status {status}: {last_line(process.stderr)}",
        f"Try: {place.description.command_line(python, '--version')}",
    )
