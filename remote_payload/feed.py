"""The feed: everything in a run directory, as frames on stdout, for one watching laptop.

docs/rundir.md has the frames. Two threads. The main one sleeps until the kernel says that a file changed,
looks at that file, and writes, blocking as long as the reader is slow; before each beat it looks at all.
That look is also the proof that the kernel tells: when it finds bytes of which nothing was told, or where
inotify is refused, the main thread looks ten times a second from then on. The other thread listens to
stdin and ends the process, whatever the main thread is stuck in, when the reader has gone or has been
silent: a connection that was cut silently must leave nothing behind. A beat that says that the supervisor
has gone is true of the files too: who lives is looked up first, then all bytes there are at that moment are
sent, then the beat. Standard library only.
"""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from remote_payload import identity, rundir
from remote_payload.feed_request import FeedError, Request, parse_request
from remote_payload.feed_streams import Listener, Output
from remote_payload.growing_file import Chunk, GrowingFile, Have
from remote_payload.inotify import Watch
from remote_payload.log_file import LogFile
from remote_payload.run_folder import RunFolder
from remote_payload.timing import time_scale

_NONCE = re.compile(r"[A-Za-z0-9._-]{1,128}")
_MOST_CRASH_FILES = 200  # each stays open; more of them tell nobody more
_GATHER_S = 0.005
"""From one look to the next at the least: many small writes become one frame."""
_UNTOLD_LOOKS = 3
_TELLING_S = 0.05
"""How much later than the bytes themselves the kernel may tell of them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """The feed's constants, in seconds."""

    tick: float = 0.1
    """Between looks, where the kernel tells nothing."""
    beat: float = 2.0
    silence: float = 60.0
    """A reader that says nothing for so long has gone."""

    @classmethod
    def scaled(cls, scale: float) -> Timing:
        """Every constant multiplied by `scale`; a tick is 10 ms at the least."""
        scaled = cls(**{name: value * scale for name, value in dataclasses.asdict(cls()).items()})
        return dataclasses.replace(scaled, tick=max(scaled.tick, 0.01))


def feed(run_dir: Path, nonce: str) -> int:
    """Feed the reader behind stdin and stdout until it goes; returns the exit code.

    0: the reader went. 1: an `error` frame said why. 64: the nonce is none.
    """

    def make(output: Output) -> _Feed:
        try:
            return _Feed(RunFolder(run_dir), run_dir.absolute().name, output)
        except OSError as error:
            raise FeedError(f"{run_dir}: no run directory ({error.strerror})") from error

    return _serve(nonce, make)


def feed_log(path: Path, nonce: str) -> int:
    """As `feed`, of one log file that belongs to no run; `hello` names its path as `run`."""

    def make(output: Output) -> _Feed:
        try:
            return _Feed(LogFile(path), str(path), output)
        except OSError as error:
            raise FeedError(f"{path.parent}: no folder ({error.strerror})") from error

    return _serve(nonce, make)


def _serve(nonce: str, make: Callable[[Output], _Feed]) -> int:
    if not _NONCE.fullmatch(nonce):
        print("remote_payload: feed: NONCE must be 1 to 128 of A-Z a-z 0-9 . _ -", file=sys.stderr)
        return 64
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    output = Output()
    try:
        output.write(nonce.encode() + b"\n")
        try:
            make(output).run()
        except (FeedError, ValueError) as error:
            output.frame("error", text=str(error))
            return 1
    except ConnectionError:
        # Nobody reads any more; Python's own flush at exit must not complain about it either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 0


class _Feed:
    def __init__(self, folder: RunFolder | LogFile, name: str, output: Output) -> None:
        self._output = output
        self._timing = Timing.scaled(time_scale())
        self._name = name
        self._folder = folder
        self._have: dict[str, Have] = {}
        self._log_tail: int | None = None
        self._files: dict[str, GrowingFile] = {}
        self._sent_small: dict[str, tuple[tuple[int, ...], bytes]] = {}
        self._sequence = 0
        self._left_out: dict[str, str] = {}
        self._present: list[str] = []
        self._presence: dict[str, str] = {}
        self._next_beat = 0.0
        self._watch: Watch | None = None
        self._looked_at = 0.0
        self._untold = 0

    def run(self) -> None:
        """Send frames for ever; the listener ends the process, a broken pipe raises BrokenPipeError."""
        self._output.frame(
            "hello",
            protocol=rundir.PROTOCOL_VERSION,
            schema=rundir.SCHEMA_VERSION,
            run=self._name,
            boot_id=identity.boot_id(),
            t=round(time.time(), 3),
        )
        listener = Listener(self._timing.silence)
        request = parse_request(listener.first())
        self._have, self._log_tail = request.have, request.log_tail
        self._fill(request)
        self._keep_watch(listener.woken)
        changed = self._look_at_all(None)
        filling = False
        while True:
            for later in listener.later():
                self._fill(parse_request(later))
            if self._beat_is_due() or self._watch is None:
                changed = self._look_at_all(changed)
            elif changed:
                changed = self._look_at(changed)
            was_filling, filling = filling, self._send_older_bytes()
            if was_filling and not filling:
                self._next_beat = 0.0  # tell at once that all there is was sent
            changed = self._wait(changed, 0.0 if filling else self._timing.tick)

    # when to look

    def _keep_watch(self, wake: int) -> None:
        try:
            self._watch = Watch(wake)
            self._folder.watch(self._watch)
        except OSError:  # a limit of the kernel, or a file system without
            self._look_often()

    def _look_often(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _wait(self, changed: set[str], tick: float) -> set[str]:
        """Wait until there is something to look at, and return the names of the files that changed."""
        until_beat = max(0.0, self._next_beat - time.monotonic())
        if self._watch is None:
            time.sleep(min(tick, until_beat))
            return changed
        if not changed:
            told = self._watch.wait(until_beat if tick else 0.0)
            if told is None:
                self._next_beat = 0.0  # too much to be told: look at all
                return changed
            changed = told
        changed = {name for name in changed if name == rundir.CRASH or rundir.is_mirrored(name)}
        if changed and tick:
            time.sleep(max(0.0, self._looked_at + _GATHER_S - time.monotonic()))
        return changed

    def _look_at_all(self, told: set[str] | None) -> set[str]:
        """Send whatever is new, then a beat. Returns the names that are to be looked at again.

        `told`: the names of which the kernel told since the last look; None: there was none.
        """
        if self._folder.gone():
            raise FeedError("the run directory was removed")
        self._presence = self._who_lives()
        files = self._growing_files()
        if told is not None:
            grown = {file.name for file in files if file.grown and file.name in rundir.APPENDED}
            self._check_watch(grown, told)
        self._send_small_files(rundir.REPLACED, look_closer=self._beat_is_due())
        again = self._send_growing_files(files)
        if self._watch is not None:
            try:
                self._folder.watch(self._watch)
            except OSError:
                self._look_often()
        if self._beat_is_due():
            self._beat()
        return again

    def _check_watch(self, grown: set[str], told: set[str]) -> None:
        """Look often from now on if files have grown, time and again, of which the kernel does not tell."""
        if self._watch is None or not grown:
            return
        until = time.monotonic() + _TELLING_S
        while grown - told and (left := until - time.monotonic()) > 0:
            more = self._watch.wait(left)
            if more is None:
                return
            told |= more
        # Once is no proof: on a busy machine a writer may be held up between its bytes and the word of them.
        self._untold = self._untold + 1 if grown - told else 0
        if self._untold == _UNTOLD_LOOKS:
            self._look_often()

    def _look_at(self, changed: set[str]) -> set[str]:
        """Send what is new in these files; returns the names that are to be looked at again."""
        self._looked_at = time.monotonic()
        self._send_small_files([name for name in rundir.REPLACED if name in changed], look_closer=False)
        unknown = [name for name in changed if name not in self._files and rundir.is_mirrored(name)]
        if rundir.CRASH in changed or any(name not in rundir.REPLACED for name in unknown):
            files = self._growing_files()
        else:
            files = [self._files[name] for name in changed if name in self._files]
        return self._send_growing_files(files)

    # what to send

    def _send_growing_files(self, files: list[GrowingFile]) -> set[str]:
        """Send what these files hold at this moment, a chunk of each in turn."""
        until = {}
        for file in files:
            size = file.look()
            if size is not None:
                until[file.name] = size
        looked_at = {file.name for file in files}
        told_half = False
        self._present = [name for name in self._present if name not in looked_at] + list(until)
        while until:
            for name in list(until):
                file = self._files[name]
                chunk = file.chunk(until[name], rundir.MAX_FRAME_BYTES)
                if chunk is not None:
                    self._append(name, chunk)
                if chunk is None or file.sent >= until[name]:
                    del until[name]
            # A long way to catch up must not silence the beats; but the one that tells of the
            # supervisor's end has to wait, because it says that all there was has been sent.
            if self._presence["supervisor"] == "alive" and self._beat_is_due():
                self._send_small_files(rundir.REPLACED, look_closer=True)
                told_half = bool(until)
                self._beat(catching_up=told_half)
        if told_half:
            self._next_beat = 0.0
        return {file.name for file in files if file.renamed}

    def _append(self, name: str, chunk: Chunk) -> None:
        fields = {"file": name, "generation": chunk.generation, "offset": chunk.offset}
        self._output.frame("append", chunk.data, **fields)

    def _send_older_bytes(self) -> bool:
        """Send one chunk of what a reader asked for beside the new bytes; whether there was one."""
        for file in self._files.values():
            chunk = file.fill_chunk(rundir.MAX_FRAME_BYTES)
            if chunk is not None:
                self._append(file.name, chunk)
                return True
        return False

    def _fill(self, request: Request) -> None:
        for name, (generation, ranges) in request.fill.items():
            if name in self._files:
                self._files[name].fill(generation, ranges)

    def _growing_files(self) -> list[GrowingFile]:
        crash = self._folder.crash_names()
        # faulthandler needs its files open, and so there, from the start: empty ones tell nothing.
        crash = [name for name in crash if name in self._files or self._holds_something(name)]
        self._left_out.pop(rundir.CRASH, None)
        if len(crash) > _MOST_CRASH_FILES:
            crash = self._newest(crash)
        names = [*rundir.APPENDED, *crash]
        for name in names:
            if name not in self._files:
                tail = self._log_tail if name == rundir.TRAIN_LOG else None
                self._files[name] = GrowingFile(self._folder, name, self._have.get(name), tail)
        return [self._files[name] for name in names]

    def _newest(self, crash: list[str]) -> list[str]:
        """The names of the newest crash files, as many as may be open; those before them are let go."""
        by_age = sorted(crash, key=self._changed_ns)
        older, newest = by_age[:-_MOST_CRASH_FILES], by_age[-_MOST_CRASH_FILES:]
        self._left_out[rundir.CRASH] = f"{len(older)} files, the oldest"
        for name in older:
            if name in self._files:
                self._files[name].rest()
        self._present = [name for name in self._present if name not in older]
        return sorted(newest)

    def _changed_ns(self, name: str) -> int:
        status = self._folder.status(name)
        return 0 if status is None else status.st_mtime_ns

    def _holds_something(self, name: str) -> bool:
        status = self._folder.status(name)
        return status is not None and status.st_size > 0

    def _send_small_files(self, names: Iterable[str], *, look_closer: bool) -> None:
        """Send those of them that changed; by their status, or (`look_closer`) by their bytes."""
        for name in names:
            status = self._folder.status(name)
            if status is None:
                continue
            sign = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            before = self._sent_small.get(name)
            if before and before[0] == sign and not look_closer:
                continue
            descriptor = self._folder.open(name)
            if descriptor is None:
                continue
            with os.fdopen(descriptor, "rb") as file:
                content = file.read(rundir.MAX_FRAME_BYTES + 1)
            if len(content) > rundir.MAX_FRAME_BYTES:
                self._left_out[name] = f"larger than {rundir.MAX_FRAME_BYTES} bytes"
                continue
            self._left_out.pop(name, None)
            if not before or before[1] != content:
                self._sequence += 1
                self._output.frame("replace", content, file=name, sequence=self._sequence)
            self._sent_small[name] = (sign, content)

    def _who_lives(self) -> dict[str, str]:
        """Whether supervisor and trainer live, as `status.json` identifies them."""
        status: dict[str, Any] = {}
        descriptor = self._folder.open(rundir.STATUS)
        if descriptor is not None:
            with os.fdopen(descriptor, "rb") as file:
                status = rundir.decode(file.read(rundir.MAX_FRAME_BYTES)) or {}
        boot = status.get("boot_id")
        return {who: identity.state_of(status.get(who), boot) for who in ("supervisor", "trainer")}

    def _beat_is_due(self) -> bool:
        return time.monotonic() >= self._next_beat

    def _beat(self, *, catching_up: bool = False) -> None:
        self._next_beat = time.monotonic() + self._timing.beat
        files: dict[str, dict[str, Any]] = {}
        for name in self._present:
            file, status = self._files[name], self._folder.status(name)
            files[name] = {"generation": file.generation, "size": file.sent, "inode": file.inode}
            if status is not None:
                files[name]["written"] = round(status.st_mtime, 3)
        self._output.frame(
            "beat",
            t=round(time.time(), 3),
            mono=round(time.monotonic(), 3),
            boot_id=identity.boot_id(),
            **self._presence,
            files=files,
            source=self._folder.source,
            told_by="looking" if self._watch is None else "inotify",
            **({"left_out": self._left_out} if self._left_out else {}),
            **({"catching_up": True} if catching_up else {}),
        )
