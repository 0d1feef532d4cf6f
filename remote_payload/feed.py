"""The feed: everything in a run directory, as frames on stdout, for one watching laptop.

docs/rundir.md has the frames. Two threads. The main one looks ten times a second and writes, blocking as
long as the reader is slow. The other one listens to stdin and ends the process, whatever the main thread
is stuck in, when the reader has gone or has been silent: a connection that was cut silently must leave
nothing behind. A beat that says that the supervisor has gone is true of the files too: who lives is looked
up first, then all bytes there are at that moment are sent, then the beat. Standard library only.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from remote_payload import identity, rundir
from remote_payload.growing_file import GrowingFile, Have
from remote_payload.run_folder import RunFolder
from remote_payload.timing import time_scale

_NONCE = re.compile(r"[A-Za-z0-9._-]{1,128}")
_MOST_LINE = 4 << 20
_MOST_CRASH_FILES = 200  # each stays open; more of them tell nobody more


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """The feed's constants, in seconds."""

    tick: float = 0.1
    beat: float = 2.0
    silence: float = 60.0
    """A reader that says nothing for so long has gone."""

    @classmethod
    def scaled(cls, scale: float) -> Timing:
        """Every constant multiplied by `scale`; a tick is 10 ms at the least."""
        scaled = cls(**{name: value * scale for name, value in dataclasses.asdict(cls()).items()})
        return dataclasses.replace(scaled, tick=max(scaled.tick, 0.01))


class FeedError(Exception):
    """What the reader is told in an `error` frame, before the feed ends."""


def feed(run_dir: Path, nonce: str) -> int:
    """Feed the reader behind stdin and stdout until it goes; returns the exit code.

    0: the reader went. 1: an `error` frame said why. 64: the nonce is none.
    """
    if not _NONCE.fullmatch(nonce):
        print("remote_payload: feed: NONCE must be 1 to 128 of A-Z a-z 0-9 . _ -", file=sys.stderr)
        return 64
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    output = _Output()
    try:
        output.write(nonce.encode() + b"\n")
        try:
            _Feed(run_dir, output, Timing.scaled(time_scale())).run()
        except (FeedError, ValueError) as error:
            output.frame("error", text=str(error))
            return 1
    except ConnectionError:
        # Nobody reads any more; Python's own flush at exit must not complain about it either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 0


class _Feed:
    def __init__(self, run_dir: Path, output: _Output, timing: Timing) -> None:
        self._output = output
        self._timing = timing
        self._name = run_dir.absolute().name
        try:
            self._folder = RunFolder(run_dir)
        except OSError as error:
            raise FeedError(f"{run_dir}: no run directory ({error.strerror})") from error
        self._have: dict[str, Have] = {}
        self._log_tail: int | None = None
        self._files: dict[str, GrowingFile] = {}
        self._sent_small: dict[str, tuple[tuple[int, ...], bytes]] = {}
        self._sequence = 0
        self._left_out: dict[str, str] = {}
        self._present: list[str] = []
        self._next_beat = 0.0

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
        listener = _Listener(self._timing.silence)
        self._have, self._log_tail = parse_request(listener.first())
        while True:
            for later in listener.later():
                self._rewind(parse_request(later)[0])
            if self._folder.gone():
                raise FeedError("the run directory was removed")
            presence = self._presence()
            self._send_small_files(look_closer=self._beat_is_due())
            self._send_growing_files(presence)
            if self._beat_is_due():
                self._beat(presence)
            time.sleep(self._timing.tick)

    def _send_growing_files(self, presence: Mapping[str, str]) -> None:
        """Send what all appended files hold at this moment, a chunk of each in turn."""
        until = {}
        for file in self._growing_files():
            size = file.look()
            if size is not None:
                until[file.name] = size
        self._present = list(until)
        while until:
            for name in list(until):
                chunk = self._files[name].chunk(until[name], rundir.MAX_FRAME_BYTES)
                if chunk is None:
                    del until[name]
                    continue
                fields = {"file": name, "generation": chunk.generation, "offset": chunk.offset}
                self._output.frame("append", chunk.data, **fields)
            # A long way to catch up must not silence the beats; but the one that tells of the
            # supervisor's end has to wait, because it says that all there was has been sent.
            if presence["supervisor"] == "alive" and self._beat_is_due():
                self._send_small_files(look_closer=True)
                self._beat(presence)

    def _growing_files(self) -> list[GrowingFile]:
        crash = self._folder.crash_names()
        # faulthandler needs its files open, and so there, from the start: empty ones tell nothing.
        crash = [name for name in crash if name in self._files or self._holds_something(name)]
        self._left_out.pop(rundir.CRASH, None)
        if len(crash) > _MOST_CRASH_FILES:
            self._left_out[rundir.CRASH] = f"{len(crash) - _MOST_CRASH_FILES} files, the last by name"
        names = [*rundir.APPENDED, *crash[:_MOST_CRASH_FILES]]
        for name in names:
            if name not in self._files:
                tail = self._log_tail if name == rundir.TRAIN_LOG else None
                self._files[name] = GrowingFile(self._folder, name, self._have.get(name), tail)
        return [self._files[name] for name in names]

    def _holds_something(self, name: str) -> bool:
        status = self._folder.status(name)
        return status is not None and status.st_size > 0

    def _send_small_files(self, *, look_closer: bool) -> None:
        """Send the small files that changed; by their status, or (`look_closer`) by their bytes."""
        for name in rundir.REPLACED:
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

    def _presence(self) -> dict[str, str]:
        """Whether supervisor and trainer live, as `status.json` identifies them."""
        status: dict[str, Any] = {}
        descriptor = self._folder.open(rundir.STATUS)
        if descriptor is not None:
            with os.fdopen(descriptor, "rb") as file:
                status = rundir.decode(file.read(rundir.MAX_FRAME_BYTES)) or {}
        boot = status.get("boot_id")
        return {
            who: identity.state_of(status.get(who) if isinstance(status.get(who), dict) else None, boot)
            for who in ("supervisor", "trainer")
        }

    def _beat_is_due(self) -> bool:
        return time.monotonic() >= self._next_beat

    def _beat(self, presence: Mapping[str, str]) -> None:
        self._next_beat = time.monotonic() + self._timing.beat
        sizes = {
            name: {"generation": self._files[name].generation, "size": self._files[name].sent}
            for name in self._present
        }
        self._output.frame(
            "beat",
            t=round(time.time(), 3),
            mono=round(time.monotonic(), 3),
            boot_id=identity.boot_id(),
            **presence,
            files=sizes,
            **({"left_out": self._left_out} if self._left_out else {}),
        )

    def _rewind(self, have: Mapping[str, Have]) -> None:
        for name, had in have.items():
            if name in self._files:
                self._files[name].rewind(had)


def parse_request(line: bytes) -> tuple[dict[str, Have], int | None]:
    """The `have` and the `log_tail` in a line from the reader; raises FeedError that says what is wrong."""
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise FeedError(f"the request is not JSON: {error}") from error
    if not isinstance(request, dict):
        raise FeedError("the request is not a JSON object")
    have, tail = request.get("have") or {}, request.get("log_tail")
    if not isinstance(have, dict):
        raise FeedError(f"have = {have!r}: expected an object")
    if tail is not None and (not isinstance(tail, int) or isinstance(tail, bool) or tail < 0):
        raise FeedError(f"log_tail = {tail!r}: expected a number of bytes or null")
    try:
        return {name: Have.from_mapping(name, value) for name, value in have.items()}, tail
    except ValueError as error:
        raise FeedError(str(error)) from error


class _Output:
    """Frames on stdout, past Python's own buffer."""

    def __init__(self) -> None:
        self._writable = select.poll()
        self._writable.register(1, select.POLLOUT)

    def frame(self, kind: str, data: bytes | None = None, /, **fields: Any) -> None:
        """Write one frame: a line of JSON, and `data` behind it where there is any."""
        size = {} if data is None else {"size": len(data)}
        line = json.dumps({"frame": kind, **fields, **size}, separators=(",", ":")).encode() + b"\n"
        self.write(line, data or b"")

    def write(self, *parts: bytes) -> None:
        """Write all bytes, however long the reader takes. Raises BrokenPipeError when it has gone."""
        views = [memoryview(part) for part in parts if part]
        while views:
            try:
                written = os.writev(1, views)
            except BlockingIOError:  # whoever started us had set the pipe so
                self._writable.poll()
                continue
            while views and written >= len(views[0]):
                written -= len(views.pop(0))
            if views:
                views[0] = views[0][written:]


class _Listener:
    """Lines from the reader, in a thread that ends the process when the reader is gone or silent."""

    def __init__(self, silence: float) -> None:
        self._silence = silence
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="listener", daemon=True).start()

    def first(self) -> bytes:
        """Wait for the first line; the listener ends the process if none comes."""
        return self._lines.get()

    def later(self) -> Iterator[bytes]:
        """Further lines so far that ask for something; plain pings are left out."""
        while True:
            try:
                line = self._lines.get_nowait()
            except queue.Empty:
                return
            if line.strip() not in (b"", b"{}"):
                yield line

    def _listen(self) -> None:
        buffer = b""
        poll = select.poll()
        poll.register(0, select.POLLIN)
        try:
            while poll.poll(self._silence * 1000):
                data = os.read(0, 65536)
                if not data:
                    break
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines:
                    self._lines.put(line)
                if len(buffer) > _MOST_LINE:
                    break
        finally:
            # The main thread may be stuck in a write to a pipe that nobody empties; nothing of it
            # needs to be finished.
            os._exit(0)
