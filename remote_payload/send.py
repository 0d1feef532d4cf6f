"""Sends files of a run directory, whole and verified: the other end of `dflashctl pull`.

docs/rundir.md has the frames. The reader names what it wants, is told the files with their sizes, says what
it has of each (size and sha256 of its beginning), and gets the rest. A beginning that is not ours is sent
anew. Every file is opened before its size is told, so a checkpoint that is removed meanwhile still arrives.
Nothing behind a link is sent. Standard library only.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from remote_payload import rundir
from remote_payload.feed_streams import Listener, Output
from remote_payload.timing import time_scale

EXPORTS: Final = "exports"
WHAT: Final = (
    "log, events, crash, checkpoints, checkpoints/step-N, checkpoints/best, checkpoints/last, exports,"
    " exports/NAME or all"
)
_SILENCE_S: Final = 60.0
_BEAT_S: Final = 2.0
_CHUNK: Final = 1 << 20
_MOST_FILES: Final = 20_000
_MOST_OPEN: Final = 500
_DEEPEST: Final = 6
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._+@=-]{0,200}")


class SendError(Exception):
    """What the reader is told in an `error` frame; one sentence."""


class _Source:
    """One file to send: opened at once while few are, or when its turn comes."""

    def __init__(self, run_dir: Path, name: str, descriptor: int, keep_open: bool) -> None:
        self._path = run_dir / name
        self.name = name
        self.size = os.fstat(descriptor).st_size
        self._descriptor: int | None = descriptor
        if not keep_open:
            os.close(descriptor)
            self._descriptor = None

    def open(self) -> int:
        """A descriptor of it. Raises SendError when it is gone."""
        if self._descriptor is None:
            try:
                self._descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError as error:
                raise SendError(f"{self.name}: cannot be read any more ({error.strerror})") from error
        return self._descriptor

    def close(self) -> None:
        """Let go of it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def send(run_dir: Path) -> int:
    """Serve one reader behind stdin and stdout; returns the exit code, 1 after an `error` frame."""
    output = Output()
    try:
        listener = Listener(_SILENCE_S * time_scale())
        request = rundir.decode(listener.first()) or {}
        try:
            what = request.get("what")
            if not isinstance(what, list) or not all(isinstance(word, str) for word in what):
                raise SendError("the request has no list `what`")
            sources = [*_sources(run_dir, what)]
            output.frame("files", files=[{"file": s.name, "size": s.size} for s in sources])
            if request.get("list") is not True:
                have = rundir.decode(listener.first()) or {}
                for source in sources:
                    _send_one(output, source, have.get(source.name))
            output.frame("done")
        except (SendError, OSError) as error:
            output.frame("error", text=str(error))
            return 1
    except ConnectionError:
        # Nobody reads any more; Python's own flush at exit must not complain about it either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 0


def _send_one(output: Output, source: _Source, have: object) -> None:
    """Send what the reader lacks of one file, then the sha256 of all its `size` bytes."""
    descriptor = source.open()
    try:
        digest, start = _common(output, source, descriptor, have)
        output.frame("begin", file=source.name, offset=start)
        position = start
        while position < source.size:
            data = os.pread(descriptor, min(_CHUNK, source.size - position), position)
            if not data:
                raise SendError(f"{source.name}: became shorter while it was sent")
            digest.update(data)
            output.frame("data", data)
            position += len(data)
        output.frame("end", file=source.name, sha256=digest.hexdigest())
    finally:
        source.close()


def _common(output: Output, source: _Source, descriptor: int, have: object) -> tuple[Any, int]:
    """The sha256 so far and where to go on: behind what the reader has, if that is our beginning."""
    fresh = hashlib.sha256()
    if not isinstance(have, Mapping):
        return fresh, 0
    size, wanted = have.get("size"), have.get("sha256")
    if not isinstance(size, int) or isinstance(size, bool) or not 0 < size <= source.size:
        return fresh, 0
    digest, position, beat = hashlib.sha256(), 0, time.monotonic()
    while position < size:
        data = os.pread(descriptor, min(_CHUNK, size - position), position)
        if not data:
            return fresh, 0
        digest.update(data)
        position += len(data)
        if time.monotonic() - beat > _BEAT_S:
            output.frame("beat")
            beat = time.monotonic()
    return (digest, size) if digest.hexdigest() == wanted else (fresh, 0)


def _sources(run_dir: Path, what: Sequence[str]) -> Iterator[_Source]:
    """The files that `what` names, each once. Raises SendError for what is not there."""
    seen: set[str] = set()
    try:
        root = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise SendError(f"{run_dir}: no run directory ({error.strerror})") from error
    try:
        for word in what:
            found = False
            for name, descriptor in _files(root, _resolve(run_dir, word)):
                found = True
                if name in seen or len(seen) >= _MOST_FILES:
                    os.close(descriptor)
                    continue
                seen.add(name)
                yield _Source(run_dir, name, descriptor, keep_open=len(seen) <= _MOST_OPEN)
            if not found and word in ("log", "events"):
                raise SendError(f"{word}: this run has none yet")
            if not found and "/" in word:
                raise SendError(f"{word}: there is nothing of that name in {run_dir}")
    finally:
        os.close(root)


def _resolve(run_dir: Path, word: str) -> str:
    """The file or folder in the run directory that `word` means; "" for all of it."""
    short = {"log": rundir.TRAIN_LOG, "events": rundir.EVENTS, "all": ""}
    if word in (*short, rundir.CRASH, rundir.CHECKPOINTS, EXPORTS):
        return short.get(word, word)
    folder, slash, name = word.partition("/")
    if folder == rundir.CHECKPOINTS and name in ("best", "last"):
        return f"{rundir.CHECKPOINTS}/step-{_pointed(run_dir, name)}"
    known = folder == EXPORTS or (folder == rundir.CHECKPOINTS and rundir.step_of(name) is not None)
    if not slash or not known or not _PART.fullmatch(name):
        raise SendError(f"{word!r} is nothing that can be pulled: expected {WHAT}")
    return word


def _pointed(run_dir: Path, name: str) -> int:
    """The step of the `best` or the `last` checkpoint: by the index, and the newest folder without one."""
    steps = rundir.checkpoint_steps(run_dir)
    if not steps:
        raise SendError(f"checkpoints/{name}: this run has no checkpoint yet")
    if name == "last":
        return steps[-1]
    best = (rundir.read_whole(run_dir / rundir.CHECKPOINTS / "index.json") or {}).get("best")
    step = best.get("step") if isinstance(best, dict) else None
    if not isinstance(step, int):
        raise SendError("checkpoints/best: no checkpoint of this run was evaluated yet; try checkpoints/last")
    return step


def _files(root: int, name: str) -> Iterator[tuple[str, int]]:
    """Names and descriptors of the plain files at or below `name`; what is being written is left out."""
    folder, _, entry = name.rpartition("/")
    if not folder:
        yield from _walk(root, entry or ".", name, 0)
        return
    try:
        parent = os.open(folder, _FLAGS | os.O_DIRECTORY, dir_fd=root)
    except OSError:
        return
    try:
        yield from _walk(parent, entry, name, 1)
    finally:
        os.close(parent)


def _walk(parent: int, entry: str, name: str, depth: int) -> Iterator[tuple[str, int]]:
    try:
        # A pipe or a device must not be opened for reading at all, not even without waiting.
        kind = stat.S_IFMT(os.stat(entry, dir_fd=parent, follow_symlinks=False).st_mode)
        if kind not in (stat.S_IFREG, stat.S_IFDIR):
            return
        descriptor = os.open(entry, _FLAGS, dir_fd=parent)
    except OSError:
        return
    if kind == stat.S_IFREG:
        yield name, descriptor
        return
    try:
        below = sorted(os.listdir(descriptor)) if depth < _DEEPEST else []  # noqa: PTH208 (a descriptor)
        for part in below:
            if _PART.fullmatch(part) and (name or part != rundir.CONTROL):
                yield from _walk(descriptor, part, f"{name}/{part}" if name else part, depth + 1)
    finally:
        os.close(descriptor)
