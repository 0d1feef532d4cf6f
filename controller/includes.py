"""`--include`: files of this machine that a run gets beside its payload, as `include/NAME` in its directory.

A file keeps its name, a folder its own and what lies below it but hidden files and caches: no `.env`, no
`.git`. Files are known by their sha256, so one that is there already is not sent again. A job names one as
`include:NAME`; the launch writes the path that the run has.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from controller.errors import ShipError, UsageError
from controller.figures import amount
from controller.narration import Say
from controller.place import Command, Place
from controller.ship import Payload, Sent, start
from controller.text import safe_line
from remote_payload.job import Job

PREFIX: Final = "include:"
_CHUNK: Final = 256 * 1024
_ANSWER_S: Final = 120.0
PATHS: Final = ("target", "dataset", "held_out", "init_from")
"""Keys of a job that are paths."""


@dataclasses.dataclass(frozen=True, slots=True)
class Included:
    """One file: where it is here, what the run calls it, and its content."""

    path: Path
    name: str
    """Below `include/`, with slashes."""
    size: int
    sha256: str

    def to_json(self) -> dict[str, object]:
        """What the order to start says of it."""
        return {"name": self.name, "sha256": self.sha256, "size": self.size}


def collect(paths: Sequence[Path]) -> list[Included]:
    """The files that `paths` mean, read once for their sha256. Raises UsageError."""
    found: dict[str, Included] = {}
    for path in paths:
        try:
            files = _files(path)
        except OSError as error:
            raise UsageError(
                f"--include {path}: {error.filename} cannot be read ({error.strerror})"
            ) from error
        for file, name in files:
            if name in found:
                raise UsageError(f"--include {path}: {name} is included twice", "Rename one of them.")
            found[name] = _included(file, name)
    return list(found.values())


def _files(path: Path) -> list[tuple[Path, str]]:
    absolute = Path(os.path.normpath(path.absolute()))
    if not absolute.is_dir():
        return [(absolute, absolute.name)]
    chosen = []
    for file in sorted(absolute.rglob("*")):
        parts = file.relative_to(absolute).parts
        if file.is_file() and not any(part.startswith(".") or part == "__pycache__" for part in parts):
            chosen.append((file, "/".join((absolute.name, *parts))))
    return chosen


def _included(file: Path, name: str) -> Included:
    try:
        if not stat.S_ISREG(file.stat().st_mode):  # reading a pipe would wait, and it could not be read again
            raise UsageError(f"--include {file}: is no plain file")
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
            return Included(file, name, os.fstat(stream.fileno()).st_size, digest)
    except OSError as error:
        raise UsageError(f"--include {file}: cannot be read ({error.strerror})") from error


def located(job: Job, run_dir: str, files: Sequence[Included]) -> Job:
    """`job` with each `include:NAME` as the path it has in the run. Raises UsageError for an unknown name."""
    names = {file.name for file in files} | {file.name.partition("/")[0] for file in files}
    changes = {}
    for key in PATHS:
        value = getattr(job, key)
        if not value.startswith(PREFIX):
            continue
        name = value.removeprefix(PREFIX)
        if name not in names and not any(file.name.startswith(f"{name.rstrip('/')}/") for file in files):
            known = ", ".join(sorted(names)) or "nothing is: give --include PATH"
            raise UsageError(f"{key} = {value!r}: is not among the included files ({known})")
        changes[key] = f"{run_dir}/include/{name}"
    return dataclasses.replace(job, **changes) if changes else job  # type: ignore[arg-type]


def send(
    place: Place,
    payload: Payload,
    files: Sequence[Included],
    *,
    say: Say,
    progress: Sent | None = None,
) -> None:
    """Bring what `place` lacks of `files`; each is announced with its size.

    Raises ShipError when one does not arrive whole, ConnectionLostError.
    """
    arrived = start(place, payload, ["include", place.workspace])
    try:
        wanted = {file.sha256: file for file in files}
        order = {"files": [{"sha256": file.sha256, "size": file.size} for file in wanted.values()]}
        arrived.process.send(json.dumps(order).encode() + b"\n")
        answer = arrived.record(_ANSWER_S) or {}
        if (missing := answer.get("missing")) is None:
            raise ShipError(f"{place.name}: included files cannot be taken: {_said(answer)}")
        for file in files:
            what = f"including {file.name} ({amount(file.size)})"
            absent = file.sha256 in missing
            say(f"{place.name}: {what}" if absent else f"{place.name}: {file.name} is there already")
        _send(arrived.process, [wanted[digest] for digest in missing], progress)
        arrived.process.close_stdin()
        answer = arrived.record(_ANSWER_S) or {}
        if not answer.get("ok"):
            raise ShipError(f"{place.name}: an included file did not arrive whole: {_said(answer)}")
    finally:
        arrived.process.close()


def _send(process: Command, files: Sequence[Included], progress: Sent | None) -> None:
    sent, total = 0, sum(file.size for file in files)
    for file in files:
        for data in _content(file):
            process.send(data)
            sent += len(data)
            if progress is not None:
                progress(sent, total)


def _content(file: Included) -> Iterator[bytes]:
    """As many bytes as it had when it was looked at: one that grows meanwhile must not shift the next."""
    left = file.size
    try:
        with file.path.open("rb") as stream:
            while left:
                data = stream.read(min(_CHUNK, left))
                if not data:
                    raise ShipError(f"{file.path}: became shorter while it was sent")
                left -= len(data)
                yield data
    except OSError as error:
        raise ShipError(f"{file.path}: cannot be read any more ({error.strerror})") from error


def _said(answer: dict[str, Any]) -> str:
    return safe_line(str(answer.get("error", "no word")))
