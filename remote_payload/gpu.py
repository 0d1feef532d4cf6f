"""GPU samples from one looping `nvidia-smi`, which may lie, hang, lose a GPU, or not exist.

One process prints a row a GPU every 5 s (`-l 5`); a thread reads it, with a limit on its silence. What
can go wrong was seen elsewhere, so each has an answer: an unknown field fails the whole query (drop that
field), one lost GPU can end the whole listing (ask each GPU by itself for a while), a driver in trouble
answers with a sentence, on stdout (a `gpu_problem` record, tried again after growing pauses), or never
(killed; while it cannot even be killed nothing else is started). Standard library only.
"""

from __future__ import annotations

import dataclasses
import os
import select
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from remote_payload import gpu_rows
from remote_payload.gpu_rows import Row
from remote_payload.timing import time_scale

COMMAND = "nvidia-smi"

_MOST_TEXT = 500


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """The sampler's constants, in seconds."""

    interval: float = 5.0
    quiet: float = 0.5
    """No further row for so long: the listing is complete (two rows came 9 ms apart)."""
    first_answer: float = 60.0
    """Without persistence mode and with many GPUs, the first row takes many seconds."""
    silence: float = 20.0
    """Nothing for so long after that: it hangs."""
    pauses: tuple[float, ...] = (5.0, 15.0, 60.0, 300.0)
    """Before the first, second, ... try after a failure."""
    one_by_one: float = 60.0
    """How long GPUs are asked one by one before the loop is tried again."""

    @classmethod
    def scaled(cls, scale: float) -> Timing:
        """Every constant multiplied by `scale`."""
        default = cls()
        return cls(
            interval=default.interval * scale,
            quiet=default.quiet * scale,
            first_answer=default.first_answer * scale,
            silence=default.silence * scale,
            pauses=tuple(pause * scale for pause in default.pauses),
            one_by_one=default.one_by_one * scale,
        )


class Records(Protocol):
    """Where samples go: a `RecordWriter`, or what takes records as it does."""

    def write(self, kind: str, **fields: Any) -> None:
        """Take one record of `kind`."""


class GpuSampler:
    """Writes `gpu_constants`, `gpu` and `gpu_none` records until `stop`; call `start` once."""

    def __init__(
        self,
        records: Records,
        *,
        on_problem: Callable[[str], None],
        timing: Timing | None = None,
        command: str = COMMAND,
    ) -> None:
        self._records = records
        self._on_problem = on_problem
        self._timing = timing or Timing.scaled(time_scale())
        self._command = command
        self._query = gpu_rows.Query()
        self._known: dict[str, str] = {}  # uuid (or index-N) -> index, of every GPU seen in this attempt
        self._described: set[str] = set()
        self._told: set[str] = set()
        self._troubled = False  # something was told since the last listing
        self._failures = 0
        self._stop = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="gpu", daemon=True)

    def start(self) -> None:
        """Begin sampling in a thread of its own."""
        self._thread.start()

    def stop(self, patience: float = 3.0) -> None:
        """End the thread and its nvidia-smi; a process that cannot be killed is left behind."""
        self._stop.set()
        if self._process:
            _kill(self._process)
        self._thread.join(patience)

    def pids(self) -> list[int]:
        """The pid of the nvidia-smi that runs now, if any."""
        process = self._process
        return [process.pid] if process else []

    # The thread

    def _run(self) -> None:
        if shutil.which(self._command) is None:
            self._write("gpu_none", reason=f"{self._command} is not installed here")
            return
        while not self._stop.is_set():
            try:
                answer = self._loop()
            except OSError as error:
                answer = f"{self._command} cannot be run: {error.strerror}"
            if self._stop.is_set() or self._query.drop(answer):
                continue
            if answer.startswith(gpu_rows.NO_DEVICES) and not self._known:
                self._write("gpu_none", reason=answer)
                return
            self._tell(answer)
            if gpu_rows.names_one_gpu(answer):
                try:
                    self._ask_one_by_one()
                except OSError as error:  # no memory for a process, for one; the loop is tried again
                    self._tell(f"{self._command} cannot be run: {error.strerror}")
                    self._stop.wait(self._timing.pauses[0])
            else:
                pauses = self._timing.pauses
                self._stop.wait(pauses[min(self._failures, len(pauses) - 1)])
                self._failures += 1

    def _loop(self) -> str:
        """Read one looping nvidia-smi to its end, and return what it said last or how it failed."""
        process = self._start("-l", str(max(1, round(self._timing.interval))))
        assert process.stdout is not None
        lines = _Lines(process.stdout.fileno())
        rows: list[Row] = []
        said: list[str] = []
        patience = self._timing.first_answer
        heard = time.monotonic()
        try:
            while not self._stop.is_set():
                left = heard + patience - time.monotonic()
                line = lines.next(self._timing.quiet if rows else max(0.0, left))
                if line is None and rows:
                    self._emit(rows)
                    rows = []
                elif line is None:
                    return f"{self._command} gave no answer for {patience:g} s"
                else:
                    heard, patience = time.monotonic(), self._timing.silence
                    row = self._query.row(line)
                    if row is not None:
                        if any(row.index == earlier.index for earlier in rows):
                            self._emit(rows)
                            rows = []
                        rows.append(row)
                    elif line:
                        said.append(line)
                        if gpu_rows.names_one_gpu(line):
                            return line
                        if process.poll() is None:
                            self._tell_if_it_goes_on(process, line)
        except EOFError:
            if rows:
                self._emit(rows)
        finally:
            self._finish(process)
        if said:
            return " ".join(said)[-_MOST_TEXT:]
        return f"{self._command} ended with exit status {process.returncode}"

    def _ask_one_by_one(self) -> None:
        until = time.monotonic() + self._timing.one_by_one
        hung: set[str] = set()
        while not self._stop.is_set() and time.monotonic() < until:
            began = time.monotonic()
            rows = []
            for which, index in self._targets():
                answer = None if which in hung else self._ask(which)
                if self._stop.is_set():
                    return
                if answer is None:
                    hung.add(which)
                    answer = f"{self._command} -i {which} gave no answer for {self._timing.silence:g} s"
                if answer.startswith(gpu_rows.NO_DEVICES) and which == index:
                    break  # counting up, this index is past the last GPU
                row = next(filter(None, map(self._query.row, answer.splitlines())), None)
                if row is None:
                    self._tell(answer)
                    row = dataclasses.replace(gpu_rows.unknown(index, answer), uuid=self._name(index))
                rows.append(row)
            if rows:
                self._emit(rows)
            self._stop.wait(max(0.0, began + self._timing.interval - time.monotonic()))

    def _targets(self) -> Sequence[tuple[str, str]]:
        """What to ask one by one: the known GPUs' (uuid, index), or else indices to count up."""
        known = [(u, i) for u, i in self._known.items() if not u.startswith("index-")]
        return known or [(str(index), str(index)) for index in range(gpu_rows.MOST_GPUS)]

    def _ask(self, which: str) -> str | None:
        """What nvidia-smi says of one GPU, or None when it hangs."""
        process = self._start("-i", which)
        assert process.stdout is not None
        lines, said = _Lines(process.stdout.fileno()), []
        deadline = time.monotonic() + self._timing.silence
        try:
            while (line := lines.next(max(0.0, deadline - time.monotonic()))) is not None:
                said.append(line)
        except EOFError:
            return "\n".join(said)[-_MOST_TEXT:].strip() or f"no answer about GPU {which}"
        finally:
            self._finish(process)
        return None

    # Processes

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(
            [
                self._command,
                f"--query-gpu={self._query.text()}",
                "--format=csv,noheader,nounits",
                *arguments,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | {"LC_ALL": "C"},
        )
        return self._process

    def _finish(self, process: subprocess.Popen[bytes]) -> None:
        """Kill and reap. A process in state D answers no signal: wait for it, start no second one."""
        _kill(process)
        if process.stdout:
            process.stdout.close()
        while True:
            try:
                process.wait(1.0)
                self._process = None
                return
            except subprocess.TimeoutExpired:
                if self._stop.is_set():
                    return
                self._tell(f"{self._command} hangs and cannot be killed; no samples until it ends")

    # Records

    def _emit(self, rows: list[Row]) -> None:
        named: dict[str, Row] = {}
        for row in rows:
            name = row.uuid or self._name(row.index)
            if row.uuid and not row.uuid.startswith("index-"):
                self._known.pop(f"index-{row.index}", None)  # what it was called while it was lost
            self._known[name] = row.index
            named[name] = row
        missing = [name for name in self._known if name not in named]
        for name in missing:
            reason = "nvidia-smi does not list it any more"
            named[name] = gpu_rows.unknown(self._known[name], reason)
            self._tell(f"GPU {self._known[name]} ({name}): {reason}")
        new = [name for name, row in named.items() if name not in self._described and row.values["name"]]
        if new:
            self._described.update(new)
            described = [row.constants(name) for name, row in named.items() if name in self._described]
            self._write("gpu_constants", gpus=described)
        self._write("gpu", gpus={name: row.sample() for name, row in named.items()})
        self._failures = 0
        if not self._troubled:
            self._told.clear()
        self._troubled = False

    def _name(self, index: str) -> str:
        return next((name for name, known in self._known.items() if known == index), f"index-{index}")

    def _tell(self, text: str) -> None:
        """Report a problem once, until a whole listing came without any."""
        self._troubled = True
        if text not in self._told:
            self._told.add(text)
            self._on_problem(text)

    def _tell_if_it_goes_on(self, process: subprocess.Popen[bytes], line: str) -> None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.1)  # most failures end it at once, and are reported whole then
            return
        self._tell(line)

    def _write(self, kind: str, **fields: Any) -> None:
        with suppress(OSError):  # a full disk: this sample is lost, the next may not be
            self._records.write(kind, **fields)


class _Lines:
    """Lines of a pipe, each within a time limit."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)
        self._buffer = b""

    def next(self, timeout: float) -> str | None:
        """The next line, or None when there was none within `timeout` seconds. Raises EOFError at the end."""
        deadline = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            if not self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return None
            data = os.read(self._descriptor, 65536)
            if not data:
                if not self._buffer:
                    raise EOFError
                data = b"\n"
            self._buffer = (self._buffer + data)[-65536:]
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode("utf-8", "replace").strip()


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
