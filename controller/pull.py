"""`pull`: files of a run directory to this machine, verified, and continued where a transfer broke off.

A file is written beside its place, under a name with a dot in front, and renamed once its sha256 is the
remote's; a checkpoint or an export is a folder, and appears whole or not at all. What a broken transfer
left is kept and continued, by the next try of the same call or by the next call; never by two at once: a
pull locks the folder that it writes into, and a second one is refused. Memory does not grow with the files:
bytes go from the connection to the disk and through the hash.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from controller.errors import ConnectionLostError, LocalStateError, PullError
from controller.figures import amount
from controller.freed_memory import keep_freed_memory
from controller.narration import Say
from controller.place import Place, open_place
from controller.pull_stream import PullStream, UnfitPayloadError
from controller.run_place import RunPlace, payload_argv
from controller.ship import pack, ship
from controller.sink import Sink
from controller.timing import Timing

Progress = Callable[[str, int, int], None]
"""Told the file, bytes of all files that are here, and bytes of all files."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._+@=-]{0,200}(/[A-Za-z0-9][A-Za-z0-9 ._+@=-]{0,200}){0,6}")
_WHOLE = re.compile(r"(checkpoints/step-\d+|exports/[^/]+)/.+")
_TRIES: Final = 5
"""Connections in a row that may bring not a single byte."""
_CHUNK: Final = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Pulled:
    """A file that is here; the field names are the keys of `pull --json`."""

    file: str
    size: int
    sha256: str
    path: str
    new: bool
    """False: it was here already, byte for byte."""


@dataclasses.dataclass(slots=True)
class _Target:
    """Where one remote file goes."""

    name: str
    size: int
    final: Path
    work: Path
    unit: tuple[Path, Path] | None
    """The folder that appears whole, and what it is called until then."""
    digest: Any = None
    """Of what lies in `source`, or None."""
    have: int = 0
    source: Path | None = None
    """The file whose beginning we have: `work`, or an older `final`."""
    unchanged: bool = False
    """`final` is it already."""


def pull(
    directory: Path,
    what: Sequence[str],
    to: Path,
    *,
    say: Say,
    progress: Progress | None = None,
) -> list[Pulled]:
    """Bring `what` of the run mirrored in `directory` into the folder `to`.

    Raises PullError, and ConnectionLostError when no connection brings a byte any more.
    """
    run_place = RunPlace.read(directory)

    def pulled(payload_dir: str) -> list[Pulled]:
        def stream(place: Place) -> PullStream:
            return _stream(place, payload_dir, run_place.run_dir, {"what": list(what)})

        return Pull(stream, lambda: open_place(run_place.host), to, say=say, progress=progress).run()

    try:
        return pulled(run_place.payload_dir)
    except UnfitPayloadError:
        return pulled(_shipped(run_place, say))


def listing(directory: Path, *, say: Say) -> list[tuple[str, int]]:
    """Names and sizes of all that could be pulled of a run. Raises PullError."""
    run_place = RunPlace.read(directory)

    def listed(payload_dir: str) -> list[tuple[str, int]]:
        with open_place(run_place.host) as place:
            stream = _stream(place, payload_dir, run_place.run_dir, {"what": ["all"], "list": True})
            try:
                return stream.files()
            finally:
                stream.close()

    try:
        return listed(run_place.payload_dir)
    except UnfitPayloadError:
        return listed(_shipped(run_place, say))


def _stream(place: Place, payload_dir: str, run_dir: str, request: Mapping[str, Any]) -> PullStream:
    argv = payload_argv(place, payload_dir, ["send", run_dir])
    return PullStream(place.start(argv), request, Timing.from_environment())


def _shipped(run_place: RunPlace, say: Say) -> str:
    """Ship our own payload, since the run's is older and cannot send, or is gone; returns its folder."""
    with open_place(run_place.host) as place:
        shipped = ship(place, pack(), ["runs", place.workspace])
    say(f"{run_place.run_id}: its payload is older and cannot send, or was removed; ours was shipped")
    return shipped.directory


class Pull:
    """One pull into the folder `to`."""

    def __init__(
        self,
        stream: Callable[[Place], PullStream],
        open_place: Callable[[], Place],
        to: Path,
        *,
        say: Say,
        progress: Progress | None = None,
        timing: Timing | None = None,
    ) -> None:
        """`stream` starts the sender in a place that `open_place` gave."""
        self._stream = stream
        self._open_place = open_place
        self._to = to
        self._say = say
        self._progress = progress
        self._timing = timing or Timing.from_environment()
        self._received = 0
        self._pulled: dict[str, Pulled] = {}
        self._wrong: set[str] = set()
        self._lock = -1

    def run(self) -> list[Pulled]:
        """Pull everything. Raises PullError, LocalStateError, also when another pull writes into the folder,
        and ConnectionLostError when no connection brings a byte.
        """
        try:
            return self._run()
        finally:
            if self._lock >= 0:
                os.close(self._lock)
                self._lock = -1

    def _run(self) -> list[Pulled]:
        keep_freed_memory()
        tries = 0
        while True:
            before = self._received
            try:
                self._once()
                return sorted(self._pulled.values(), key=lambda pulled: pulled.file)
            except ConnectionLostError as error:
                tries = 1 if self._received > before else tries + 1
                if tries >= _TRIES:
                    error.hint = "What arrived is kept: the same command goes on from there."
                    raise
                wait = self._timing.backoff[min(tries, len(self._timing.backoff)) - 1]
                self._say(f"{error.message}; going on in {wait:.0f} s")
                time.sleep(wait)

    def _once(self) -> None:
        with self._open_place() as place:
            stream = self._stream(place)
            try:
                targets = [self._target(name, size) for name, size in stream.files()]
                self._examine(targets)
                stream.have(
                    {t.name: {"size": t.have, "sha256": t.digest.hexdigest()} for t in targets if t.have}
                )
                total, here = sum(target.size for target in targets), 0
                for target in targets:
                    self._pulled[target.name] = self._receive(stream, target, here, total)
                    here += target.size
                stream.finish()
            finally:
                stream.close()
        self._place(targets)

    def _target(self, name: str, size: int) -> _Target:
        if not _NAME.fullmatch(name):
            raise PullError(f"the place offers a file of the name {name!r}, which is refused")
        final = self._to / name
        match = _WHOLE.fullmatch(name)
        if match is None:
            return _Target(name, size, final, final.with_name(f".{final.name}.part"), None)
        folder = self._to / match[1]
        part = folder.with_name(f".{folder.name}.part")
        return _Target(name, size, final, part / final.relative_to(folder), (folder, part))

    def _examine(self, targets: Sequence[_Target]) -> None:
        try:
            self._check_room(targets)
            self._hold_folder()
            for target in targets:
                self._look(target)
        except OSError as error:
            raise LocalStateError(
                f"{error.filename or self._to}: cannot be used ({error.strerror})",
                "Name another folder with --to.",
            ) from error

    def _check_room(self, targets: Sequence[_Target]) -> None:
        needed = sum(t.size for t in targets) - sum(_size(t.work) or _size(t.final) for t in targets)
        existing = next(path for path in (self._to, *self._to.absolute().parents) if path.exists())
        free = shutil.disk_usage(existing).free
        if needed > free:
            raise PullError(
                f"{self._to}: {amount(needed)} are to come, and {amount(free)} are free",
                "Name another folder with --to.",
            )

    def _hold_folder(self) -> None:
        if self._lock >= 0:
            return
        self._to.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self._to, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # some network file systems lock no folder: nobody is kept out
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise LocalStateError(
                    f"{self._to}: another pull is writing there",
                    "Wait for its end, or name another folder with --to.",
                ) from None

    def _look(self, target: _Target) -> None:
        """What of the file is here already: of a transfer that broke off, or of an earlier pull."""
        for source in (target.work, target.final):
            size = _size(source)
            if 0 < size <= target.size:
                target.digest, target.have, target.source = _digest(source, size), size, source
                return

    def _receive(self, stream: PullStream, target: _Target, here: int, total: int) -> Pulled:
        offset = stream.begin(target.name)
        if offset not in (0, target.have):
            raise PullError(f"{target.name}: the place goes on at {offset}, not at {target.have}")
        digest = target.digest if offset else hashlib.sha256()
        target.unchanged = offset == target.size > 0 and target.source == target.final
        if target.unchanged:
            for _ in stream.data():
                raise PullError(f"{target.name}: the place sent more than it announced")
            return Pulled(target.name, target.size, stream.sha256, str(target.final), False)
        try:
            target.work.parent.mkdir(parents=True, exist_ok=True)
            if offset and target.source == target.final:
                _continue_copy(target.final, target.work)
            with target.work.open("r+b" if offset else "wb", buffering=0) as file:
                file.seek(offset)
                position = offset
                with Sink(file, digest) as sink:
                    for data in stream.data():
                        sink.put(data)
                        position += len(data)
                        self._received += len(data)
                        if self._progress is not None:
                            self._progress(target.name, here + position, total)
                os.fsync(file.fileno())
        except OSError as error:
            raise LocalStateError(
                f"{error.filename or target.work}: cannot be written ({error.strerror})"
            ) from error
        if position != target.size or digest.hexdigest() != stream.sha256:
            target.work.unlink(missing_ok=True)
            text = f"{target.name}: what arrived is not what was sent, and was thrown away"
            if target.name in self._wrong:
                raise PullError(f"{text}; for the second time", "Is this machine's disk or memory at fault?")
            self._wrong.add(target.name)
            raise ConnectionLostError(text)
        return Pulled(target.name, target.size, stream.sha256, str(target.final), True)

    def _place(self, targets: Sequence[_Target]) -> None:
        """Rename what is complete to its place."""
        changed = [target for target in targets if not target.unchanged]
        try:
            for target in changed:
                if target.unit is None:
                    target.work.replace(target.final)
            for unit in dict.fromkeys(target.unit for target in changed if target.unit is not None):
                _place_folder(*unit, [target for target in targets if target.unit == unit])
        except OSError as error:
            raise LocalStateError(f"{error.filename}: cannot be renamed ({error.strerror})") from error


def _place_folder(folder: Path, part: Path, targets: Sequence[_Target]) -> None:
    """Make `part` have the files of `targets` and no others, and put it in the place of `folder`."""
    for target in targets:
        if target.unchanged:
            target.work.parent.mkdir(parents=True, exist_ok=True)
            _continue_copy(target.final, target.work)
    wanted = {target.work for target in targets}
    for path in sorted(part.rglob("*")):
        if path.is_file() and path not in wanted:
            path.unlink()
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    part.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0


def _digest(path: Path, size: int) -> Any:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while size > 0 and (data := file.read(min(_CHUNK, size))):
            digest.update(data)
            size -= len(data)
    return digest


def _continue_copy(final: Path, work: Path) -> None:
    """A copy of the earlier file to go on with; the file itself stays whole until the new one is."""
    work.unlink(missing_ok=True)
    shutil.copyfile(final, work)
