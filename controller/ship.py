"""The payload's way into a place: one content-addressed tar, sent once, valid only as a whole.

What is shipped is a list and not luck: the Python files of `remote_payload` and what lies in its `jobs`.
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
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import remote_payload
from controller import receiver
from controller.errors import ConnectionLostError, PayloadEnvironmentError, ShipError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from controller.place import Place, Process

PACKAGE: Final = Path(remote_payload.__file__).parent
ANSWER_S: Final = 60.0
"""How long the place may be silent: an interpreter start, or writing the payload to its disk."""
_CHUNK: Final = 256 * 1024


@dataclasses.dataclass(frozen=True, slots=True)
class Payload:
    """A packed payload."""

    digest: str
    """sha256 of `tar`, hex."""
    tar: bytes
    files: tuple[tuple[str, int], ...]
    """Name in the tar and size in bytes of every file, sorted."""


@dataclasses.dataclass(frozen=True, slots=True)
class Shipped:
    """A payload in a place, and what its command said."""

    directory: str
    """`<workspace>/payloads/<digest>`"""
    sent: bool
    """False: it was there already."""
    new_workspace: bool
    """True: the workspace's folder did not exist and was made."""
    status: int
    """Exit status of the payload's command."""
    output: bytes
    stderr: bytes


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
        if (path.suffix == ".py" or parts[0] == "jobs") and path.is_file():
            chosen.append(path)
    return sorted(chosen, key=lambda path: path.relative_to(package).as_posix())


def ship(
    place: Place,
    payload: Payload,
    command: Sequence[str],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Shipped:
    """Bring `payload` into `place` if it is not there, and run its `command`, in one remote process.

    `progress` is told bytes sent and bytes in all. Raises ShipError, PayloadEnvironmentError when the
    interpreter or the workspace cannot be used, and what `Place.start` raises.
    """
    text = Path(receiver.__file__).read_text(encoding="utf-8")
    head = [place.python, "-I", "-c", text, place.workspace, payload.digest, str(len(payload.tar))]
    process = place.start([*head, *command])
    lines = _Lines(process)
    try:
        first = lines.next()
        if first is None:
            raise _no_interpreter(place, process)
        if error := first.get("error"):
            raise _refused(place, str(error), first)
        sent = not first["have"]
        if sent:
            _send(process, payload.tar, progress)
        process.close_stdin()
        second = lines.next() or {"error": "digest", "text": "the receiver ended early"}
        if error := second.get("error"):
            raise _refused(place, str(error), second)
        output, status = lines.rest()
        directory = f"{place.workspace}/payloads/{payload.digest}"
        made = bool(first["new_workspace"])
        return Shipped(directory, sent, made, status, output, process.stderr)
    finally:
        process.close()


def _send(process: Process, tar: bytes, progress: Callable[[int, int], None] | None) -> None:
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

    def next(self) -> dict[str, Any] | None:
        """The next line, or None at the end of the output. Raises ConnectionLostError."""
        while b"\n" not in self._buffer:
            data = self._some()
            if data == b"":
                return None
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise ShipError(f"the receiver said {line[:80]!r}, which is no line of JSON")
        return record

    def rest(self) -> tuple[bytes, int]:
        """Everything to the end, and the exit status. Raises ConnectionLostError."""
        while data := self._some():
            self._buffer += data
        deadline = time.monotonic() + ANSWER_S
        status = self._process.wait(max(0.0, deadline - time.monotonic()))
        if status is None:
            raise ConnectionLostError("the payload's command closed its output and did not end")
        return self._buffer, status

    def _some(self) -> bytes:
        data = self._process.receive(ANSWER_S)
        if data is None:
            raise ConnectionLostError(f"the place said nothing for {ANSWER_S:.0f} s")
        return data


def _refused(place: Place, error: str, record: dict[str, Any]) -> Exception:
    text = record.get("text", "")
    if error == "python":
        oldest = ".".join(map(str, receiver.OLDEST))
        return PayloadEnvironmentError(
            f"{place.name}: {place.python} is Python {text}; the payload needs {oldest} or newer",
            "Make a venv with a newer Python there, and name it as `venv` in hosts.toml.",
        )
    if error == "workspace":
        return PayloadEnvironmentError(
            f"{place.name}: the workspace {place.workspace} cannot be used: {text}",
            "Mount or make it writable there, or name another `workspace` in hosts.toml.",
        )
    return ShipError(f"{place.name}: the payload did not arrive whole: {text}", "Try again.")


def _no_interpreter(place: Place, process: Process) -> Exception:
    """The error for a receiver that said nothing: mostly there is no such interpreter."""
    status = process.wait(ANSWER_S)
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
            f"Make it: {place.description.command_line('python3', '-m', 'venv', '--clear', venv)}"
            " ; or name the right one as `venv` in hosts.toml.",
        )
    said = process.stderr.decode(errors="replace").strip().splitlines()
    return PayloadEnvironmentError(
        f"{place.name}: {place.python} ended with status {status}: {said[-1] if said else 'no word'}",
        f"Try: {place.description.command_line(place.python, '--version')}",
    )
