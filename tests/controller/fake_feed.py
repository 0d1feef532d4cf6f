"""An honest feed in this process, over a connection that breaks as a test wants it."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from controller import paths
from controller.errors import ConnectionLostError
from controller.place import Completed
from controller.timing import Timing
from remote_payload import rundir

TIMING = Timing(
    beat_s=0.02,
    silence_s=60.0,
    ping_s=0.02,
    hello_s=60.0,
    backoff=(0.005, 0.01),
    jitter=0.0,
    fill_s=60.0,
    refused_s=0.05,
    lock_s=0.01,
    poll_s=0.005,
    scale=0.01,
)
"""What happens over and over happens at once; but no stall of a busy machine is taken for a broken feed."""
RUN_ID = "run-1"


def line(record: dict[str, Any]) -> bytes:
    return json.dumps(record).encode() + b"\n"


class HandClock:
    """A clock that a test sets by hand; it knows whether it was read since."""

    def __init__(self) -> None:
        self._now, self._reads = 0.0, 0

    def __call__(self) -> float:
        self._reads += 1
        return self._now

    def show(self, now: float) -> None:
        self._now, self._reads = now, 0

    def was_read(self) -> bool:
        """Often enough that what follows from a reading has happened."""
        return self._reads > 3


class Remote:
    """A run directory somewhere else, in memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.files: dict[str, bytearray] = {name: bytearray() for name in rundir.APPENDED}
        self.generations: dict[str, int] = dict.fromkeys(rundir.APPENDED, 1)
        self.small: dict[str, bytes] = {}
        self.supervisor = self.trainer = "alive"
        self.run_id = RUN_ID
        self.haves: list[dict[str, Any]] = []
        self.fills: list[dict[str, Any]] = []
        self.pings = 0
        self.fills_holes = True
        self.status("running")

    def status(self, state: str, **fields: Any) -> None:
        self.small["status.json"] = line({"kind": "status", "state": state, "t": time.time(), **fields})

    def finish(self, code: int = 0) -> None:
        self.status("finished" if code in (0, 3) else "failed", exit_code=code)
        self.supervisor = self.trainer = "gone"

    def replace_file(self, name: str, content: bytes) -> None:
        with self._lock:
            self.files[name] = bytearray(content)
            self.generations[name] += 1

    def beat(self) -> bytes:
        return line(
            {
                "frame": "beat", "t": time.time() + 100.0, "boot_id": "b",
                "supervisor": self.supervisor, "trainer": self.trainer,
                "files": {
                    name: {"generation": self.generations.get(name, 1), "size": len(content)}
                    for name, content in list(self.files.items())
                },
            }
        )  # fmt: skip

    def frames(self, told: dict[str, Any], *, frame_bytes: int = 1000) -> Iterator[bytes]:
        """What a feed sends to a reader that has `told`; for ever."""
        yield line(
            {"frame": "hello", "protocol": 1, "schema": 1, "run": self.run_id, "boot_id": "b", "t": 1.0}
        )
        sent: dict[str, tuple[int, int]] = {}
        for name in list(self.files):
            have = told["have"].get(name)
            start = 0
            with self._lock:
                content = self.files[name]
                self.generations.setdefault(name, 1)
                if have is not None:
                    head = bytes(content[: have["head"]])
                    same = hashlib.sha256(head).hexdigest() == have["head_sha256"]
                    tail = bytes(content[max(0, have["size"] - have["tail"]) : have["size"]])
                    same = same and hashlib.sha256(tail).hexdigest() == have["tail_sha256"]
                    same = same and len(content) >= have["size"]
                    self.generations[name] = have["generation"] + (0 if same else 1)
                    start = have["size"] if same else 0
            if name == rundir.TRAIN_LOG and told["log_tail"] is not None and not (have and have["size"]):
                start = max(0, len(content) - told["log_tail"])
            sent[name] = (self.generations[name], start)
        small: dict[str, bytes] = {}
        filled = len(self.fills)
        sequence, next_beat = 0, 0.0
        while True:
            who = (self.supervisor, self.trainer)
            for name, content in list(self.small.items()):
                if small.get(name) != content:
                    small[name] = content
                    sequence += 1
                    header = {"frame": "replace", "file": name, "sequence": sequence, "size": len(content)}
                    yield line(header) + content
            for name in list(self.files):
                while frame := self._append(name, sent, frame_bytes):
                    yield frame
            for fill in self.fills[filled:] if self.fills_holes else ():
                filled += 1
                for name, asked in fill.items():
                    pieces = [
                        (start, min(start + (1 << 20), stop))
                        for first, stop in asked["ranges"]
                        for start in range(first, stop, 1 << 20)
                    ]
                    for start, stop in pieces:
                        data = bytes(self.files[name][start:stop])
                        header = {"frame": "append", "file": name, "generation": asked["generation"]}
                        yield line(header | {"offset": start, "size": len(data)}) + data
            now = time.monotonic()
            if who == (self.supervisor, self.trainer) and now >= next_beat:
                next_beat = now + TIMING.beat_s
                yield self.beat()
            yield b""

    def _append(self, name: str, sent: dict[str, tuple[int, int]], frame_bytes: int) -> bytes:
        with self._lock:
            content, now = self.files[name], self.generations.setdefault(name, 1)
            generation, offset = sent.get(name, (now, 0))
            if generation != now:
                offset = 0
            elif offset >= len(content):
                return b""
            data = bytes(content[offset : offset + frame_bytes])
            sent[name] = (now, offset + len(data))
        header = {"frame": "append", "file": name, "generation": now, "offset": offset}
        return line(header | {"size": len(data)}) + data


class FakeProcess:
    """One feed. `fate` is asked before every chunk: None goes on, otherwise how it breaks."""

    def __init__(self, remote: Remote, nonce: str, fate: Callable[[], str | None], chunk: int) -> None:
        self.remote, self.fate, self.chunk = remote, fate, chunk
        self.closed = False
        self.stderr = b""
        self.status: int | None = 0
        self._nonce = nonce
        self._told = b""
        self._stream: Iterator[bytes] | None = None
        self._buffer = b"login noise\n" + nonce.encode() + b"\n"
        self._broken: str | None = None

    def send(self, data: bytes | memoryview) -> None:
        if self._broken == "lost":
            raise ConnectionLostError("connection reset")
        self._told += bytes(data)
        if self._stream is None and b"\n" in self._told:
            told = json.loads(self._told.split(b"\n")[0])
            self.remote.haves.append(told)
            self._stream = self.remote.frames(told)
        elif data == b"{}\n":
            self.remote.pings += 1
        elif fill := json.loads(bytes(data)).get("fill"):
            self.remote.fills.append(fill)

    def close_stdin(self) -> None:
        pass

    def receive(self, timeout: float) -> bytes | None:
        assert not self.closed
        self._broken = self._broken or self.fate()
        if self._broken == "lost":
            raise ConnectionLostError("connection reset")
        if self._broken == "ended":
            return b""
        if self._broken == "silent":
            time.sleep(timeout)
            return None
        while self._stream is not None and len(self._buffer) < self.chunk:
            more = next(self._stream)
            if not more:
                break
            self._buffer += more
        if not self._buffer:
            time.sleep(min(timeout, 0.002))
            return None
        data, self._buffer = self._buffer[: self.chunk], self._buffer[self.chunk :]
        return data

    def wait(self, timeout: float) -> int | None:
        return self.status

    def close(self) -> None:
        self.closed = True


class FakePlace:
    name = "fake"
    host = "fake"
    workspace = "/w"
    python = "/w/python"

    def __init__(self, start: Callable[[Sequence[str]], FakeProcess]) -> None:
        self._start = start

    def start(self, argv: Sequence[str]) -> FakeProcess:
        return self._start(argv)

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float) -> Completed:
        raise NotImplementedError

    def close(self) -> None:
        pass

    def __enter__(self) -> FakePlace:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Line:
    """A way to a remote; counts its connections and breaks them as `fate(n)` says."""

    def __init__(self, remote: Remote, chunk: int = 4096) -> None:
        self.remote = remote
        self.chunk = chunk
        self.processes: list[FakeProcess] = []
        self.argvs: list[Sequence[str]] = []
        self.error: Exception | None = None
        self.attempts = 0
        self.hang = threading.Event()
        self.hang.set()
        self.fate: Callable[[int], Callable[[], str | None]] = lambda _: lambda: None

    def open(self) -> FakePlace:
        return FakePlace(self._start)

    def _start(self, argv: Sequence[str]) -> FakeProcess:
        self.attempts += 1
        self.argvs.append(argv)
        assert self.hang.wait(100)
        if self.error is not None:
            raise self.error
        process = FakeProcess(self.remote, argv[-1], self.fate(len(self.processes)), self.chunk)
        self.processes.append(process)
        return process


def mirror_folder(directory: Path) -> Path:
    """A folder as a launch leaves it."""
    directory.mkdir(parents=True, exist_ok=True)
    place = {
        "run_id": RUN_ID, "python": "/w/python", "payload_dir": "/w/payloads/d", "run_dir": "/w/runs/run-1",
        "created": 1.0, "job_name": "tiny",
    }  # fmt: skip
    (directory / paths.PLACE).write_bytes(line(place))
    return directory
