"""The writing half of a mirror folder: the lock, the files, and what `mirror.json` says of them.

The promise is that every byte inside an extent equals the remote's, whatever dies when. It rests on three
orders of writing:

1. bytes reach the disk before the extents that claim them do (`save` syncs the files first; meanwhile
   `arrived` tells readers of older bytes that lie in a hole: a power cut may take them away again);
2. when a file begins anew (another generation), `mirror.json` gives its extents up before an empty file takes
   the place of the local one, so a reader who sees new bytes also sees the new generation, and one who has
   the old file open can read it to its end;
3. what lies behind the last extent when a folder is taken over was written by a process that died before it
   could claim it: it is cut off and asked for again.

From 2 and from appends that only ever continue the last extent follows the rule for readers: bytes from
the end of the last extent to the end of the file are good too, as long as the generation in `mirror.json`,
read after them, is still the same.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import threading
from pathlib import Path
from typing import Any, Final

from controller.errors import LocalStateError, ProtocolError
from controller.extents import Extents
from controller.frames import Append, Beat, Replace
from remote_payload import rundir

LOCK: Final = "mirror.lock"
MIRROR: Final = "mirror.json"
HEAD_BYTES: Final = 4096
TAIL_BYTES: Final = 256
"""How much of a file's beginning and end is compared to notice that it is another one."""
_WRITTEN_BEHIND: Final = 64 << 20
"""After so many bytes the disk is made to begin, so that little is left when `save` waits for it."""
MAX_FILES: Final = 1000
"""More appended files than this (all but four in `crash/`) are not a run's."""


class MirroredFile:
    """What is known of one appended file."""

    __slots__ = ("claimed", "descriptor", "dirty", "extents", "generation", "inode", "size")

    def __init__(self, generation: int, size: int, extents: Extents, inode: int | None = None) -> None:
        self.generation = generation
        self.inode = inode
        self.size = size
        self.extents = extents
        self.claimed = extents.to_json()
        """The extents of which all bytes are on the disk."""
        self.descriptor = -1
        self.dirty = False


class MirrorFiles:
    """One mirror folder, open for writing. Every method may raise LocalStateError."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.connection: dict[str, Any] = {}
        """The fields of `mirror.json` that do not concern files; written by the next `save`."""
        self.files: dict[str, MirroredFile] = {}
        self.filled = False
        """Whether older bytes arrived in a hole since `mirror.json` was last written."""
        self._lock = -1
        self._not_begun = 0
        self._behind: threading.Thread | None = None

    def lock(self) -> bool:
        """Try to become the folder's one writer."""
        assert self._lock < 0
        try:
            descriptor = os.open(self.directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._trouble("cannot open", LOCK, error) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        except OSError as error:
            os.close(descriptor)
            raise self._trouble("cannot lock", LOCK, error) from error
        self._lock = descriptor
        return True

    @property
    def locked(self) -> bool:
        """Whether this object is the folder's writer."""
        return self._lock >= 0

    def close(self) -> None:
        """Close the files and give the lock back."""
        for file in self.files.values():
            if file.descriptor >= 0:
                os.close(file.descriptor)
                file.descriptor = -1
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def load(self) -> dict[str, Any]:
        """Take over what the last writer left; returns its `mirror.json` (empty: there is none)."""
        assert self.locked
        left = rundir.read_whole(self.directory / MIRROR) or {}
        listed = left.get("files")
        for name, entry in listed.items() if isinstance(listed, dict) else ():
            generation = entry.get("generation") if isinstance(entry, dict) else None
            if name in rundir.REPLACED or not rundir.is_mirrored(name) or type(generation) is not int:
                continue
            inode = entry.get("inode")
            inode = inode if type(inode) is int and inode >= 0 else None
            file = MirroredFile(generation, 0, Extents.from_json(entry.get("extents")), inode)
            self.files[name] = file
            local = os.fstat(self._descriptor(name, file)).st_size
            file.extents.clip(local)
            file.size = file.extents.end
            if local > file.extents.end:
                self._cut(name, file, file.extents.end)
        return left

    def have(self) -> dict[str, dict[str, Any]]:
        """What the feed is told that we have; holes in train.log are another matter (`holes`)."""
        told: dict[str, dict[str, Any]] = {}
        for name, file in self.files.items():
            size = _wanted_from(name, file, whole_log=False)
            begin = file.extents.last[0] if size == file.extents.end else 0
            head = self._read(name, file, 0, min(HEAD_BYTES, size, file.extents.prefix))
            tail = self._read(name, file, max(begin, size - TAIL_BYTES), size)
            told[name] = {
                "generation": file.generation,
                "size": size,
                "head": len(head),
                "head_sha256": hashlib.sha256(head).hexdigest(),
                "tail": len(tail),
                "tail_sha256": hashlib.sha256(tail).hexdigest(),
                "inode": file.inode,
            }
        return told

    def _read(self, name: str, file: MirroredFile, start: int, stop: int) -> bytes:
        try:
            return os.pread(self._descriptor(name, file), stop - start, start)
        except OSError as error:
            raise self._trouble("cannot read", name, error) from error

    def holes(self, name: str, stop: int | None = None) -> tuple[int, list[tuple[int, int]]]:
        """The generation of the file `name`, and what is missing of it before its newest bytes and `stop`."""
        file = self.files.get(name)
        return (0, []) if file is None else (file.generation, file.extents.holes(stop))

    def append(self, frame: Append) -> None:
        """Write a piece of an appended file. Raises ProtocolError when bytes before it are missing."""
        file = self.files.get(frame.file)
        if file is None:
            if len(self.files) >= MAX_FILES:
                raise ProtocolError(f"the feed sent more than {MAX_FILES} files")
            file = self.files[frame.file] = MirroredFile(frame.generation, 0, Extents())
            self._cut(frame.file, file, 0)
        elif file.generation != frame.generation:
            file.generation, file.size, file.extents = frame.generation, 0, Extents()
            file.inode = None
            file.claimed = []
            self.save()
            self._begin_anew(frame.file, file)
        if file.extents and frame.offset > file.extents.end:
            raise ProtocolError(
                f"the feed left out bytes {file.extents.end} to {frame.offset} of {frame.file}"
            )
        if not frame.data:
            return
        begins = not file.extents
        descriptor = self._descriptor(frame.file, file)
        view, offset = memoryview(frame.data), frame.offset
        try:
            while view:
                written = os.pwrite(descriptor, view, offset)
                view, offset = view[written:], offset + written
        except (OSError, OverflowError) as error:
            raise self._trouble("cannot write", frame.file, error) from error
        self.filled = self.filled or offset < file.extents.end
        file.extents.add(frame.offset, offset)
        file.size = max(file.size, offset)
        file.dirty = True
        self._not_begun += len(frame.data)
        if self._not_begun >= _WRITTEN_BEHIND and not (self._behind and self._behind.is_alive()):
            self._not_begun = 0
            path = self.directory / frame.file
            self._behind = threading.Thread(target=_write_out, args=(path,), name="write-behind", daemon=True)
            self._behind.start()
        if begins:
            self.save()  # before this, no reader knows where the bytes begin

    def replace(self, frame: Replace) -> None:
        """Replace a small file."""
        try:
            rundir.write_whole(self.directory / frame.file, frame.data)
        except OSError as error:
            raise self._trouble("cannot write", frame.file, error) from error

    def note(self, beat: Beat) -> None:
        """Take over the sizes that a beat announces; files that are empty there are empty here."""
        for name, (generation, size) in beat.files.items():
            known = self.files.get(name)
            if known is None or known.generation != generation:
                self.append(Append(name, generation, 0, b""))
            file = self.files[name]
            file.size = max(size, file.extents.end)
            file.inode = beat.inodes.get(name)

    def complete(self, beat: Beat, *, whole_log: bool) -> bool:
        """Whether every byte that `beat` announces is here, and it announces all that there is."""
        if beat.record.get("catching_up"):
            return False
        for name, (generation, size) in beat.files.items():
            file = self.files.get(name)
            if file is None:
                if size:
                    return False
            elif file.generation != generation or _wanted_from(name, file, whole_log) < size:
                return False
        return True

    def save(self, *, sync: bool = True) -> None:
        """Sync what was written, then write `mirror.json`; without `sync` nothing new is claimed in it."""
        assert self.locked
        self.filled = False
        try:
            for file in self.files.values() if sync else ():
                if file.dirty:
                    getattr(os, "fdatasync", os.fsync)(file.descriptor)
                    file.dirty = False
                file.claimed = file.extents.to_json()
            record = rundir.stamp("mirror", self.connection) | {
                "pid": os.getpid(),
                "files": {
                    name: {
                        "generation": file.generation,
                        "size": file.size,
                        "inode": file.inode,
                        "extents": file.claimed,
                        **({"arrived": file.extents.to_json()} if not sync else {}),
                    }
                    for name, file in self.files.items()
                },
            }
            rundir.write_whole(self.directory / MIRROR, rundir.encode(record))
        except OSError as error:
            raise self._trouble("cannot write", MIRROR, error) from error

    def _descriptor(self, name: str, file: MirroredFile) -> int:
        if file.descriptor < 0:
            path = self.directory / name
            try:
                if name.startswith(f"{rundir.CRASH}/"):
                    path.parent.mkdir(mode=0o700, exist_ok=True)
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                file.descriptor = os.open(path, flags, 0o600)
            except OSError as error:
                raise self._trouble("cannot open", name, error) from error
        return file.descriptor

    def _begin_anew(self, name: str, file: MirroredFile) -> None:
        if file.descriptor >= 0:
            os.close(file.descriptor)
            file.descriptor = -1
        path = self.directory / name
        new = path.with_name(f".{path.name}.new")
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
            file.descriptor = os.open(new, flags, 0o600)
            new.replace(path)
        except OSError as error:
            raise self._trouble("cannot replace", name, error) from error

    def _cut(self, name: str, file: MirroredFile, size: int) -> None:
        try:
            os.ftruncate(self._descriptor(name, file), size)
        except OSError as error:
            raise self._trouble("cannot cut", name, error) from error

    def _trouble(self, what: str, name: str, error: Exception) -> LocalStateError:
        why = error.strerror if isinstance(error, OSError) else str(error)
        return LocalStateError(
            f"{what} {self.directory / name}: {why}",
            "the mirror goes on when the folder can be written again",
        )


def _wanted_from(name: str, file: MirroredFile, whole_log: bool) -> int:
    """From where on bytes are still wanted: all but the log's are, without a hole."""
    tail_is_enough = name == rundir.TRAIN_LOG and not whole_log
    return file.extents.end if tail_is_enough else file.extents.prefix


def _write_out(path: Path) -> None:
    """Write what the system holds of a file to the disk. What fails here is not hidden from `save`: the
    kernel tells an error once to each that has opened the file, and this opens it anew.
    """
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
