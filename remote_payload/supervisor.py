"""The supervisor: starts the trainer, keeps `status.json` true, acts on requests, and judges the end.

One loop in the main thread, ten rounds a second: signals, `control/`, the age of `progress.json`, the
heartbeat. The only other thread samples the GPUs, so nothing that hangs there holds up the heartbeat. A
full disk stops records, not the supervision: what cannot be written is left out and tried again with the
next heartbeat. Standard library only.
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from remote_payload import crash, identity, memory_events, outcome, rundir
from remote_payload.control import take_requests
from remote_payload.gpu import GpuSampler
from remote_payload.rundir import Request, State
from remote_payload.timing import time_scale
from remote_payload.trainer_process import TrainerProcess, kill_strays, trainer_environment

PAYLOAD = Path(__file__).resolve().parent


class SupervisorError(Exception):
    """The run directory cannot be supervised; the text says why in one sentence."""


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """The supervisor's constants, in seconds."""

    tick: float = 0.1
    beat: float = 2.0
    stall: float = 60.0
    """Progress older than this: stalled."""
    launch_stall: float = 180.0
    """The same before the first progress: importing torch from a cold network disk can take minutes."""
    grace: float = 60.0
    """From SIGTERM to SIGKILL, for a checkpoint."""

    @classmethod
    def scaled(cls, scale: float) -> Timing:
        """Every constant multiplied by `scale`; a tick is 10 ms at the least."""
        scaled = cls(**{name: value * scale for name, value in dataclasses.asdict(cls()).items()})
        return dataclasses.replace(scaled, tick=max(scaled.tick, 0.01))


def supervise(
    run_dir: Path,
    *,
    command: Sequence[str] | None = None,
    timing: Timing | None = None,
    sample_gpus: bool = True,
) -> int:
    """Run the trainer of `run_dir` to its end and return the exit code that `status.json` names.

    `command` replaces the trainer's command line. Raises SupervisorError when there is no run to
    supervise, or when somebody supervises it already.
    """
    return Supervisor(run_dir, command, timing or Timing.scaled(time_scale()), sample_gpus).run()


class Supervisor:
    """One attempt at one run, from start to end."""

    def __init__(
        self, run_dir: Path, command: Sequence[str] | None, timing: Timing, sample_gpus: bool
    ) -> None:
        self._dir = run_dir
        self._lock = _lock(run_dir)
        run = rundir.read_whole(run_dir / rundir.RUN)
        if run is None:
            raise SupervisorError(f"{run_dir / rundir.RUN}: missing, or not a record; `start` writes it")
        before = rundir.read_whole(run_dir / rundir.STATUS) or {}
        self._attempt = before["attempt"] + 1 if isinstance(before.get("attempt"), int) else 1
        self._run = run
        self._command = list(command) if command else self._trainer_command()
        self._timing = timing
        self._sample_gpus = sample_gpus
        self._records = rundir.RecordWriter(run_dir / rundir.SUPERVISOR_LOG, attempt=self._attempt)
        self._trainer: TrainerProcess | None = None
        self._me = identity.identity(os.getpid())

        self._state = State.LAUNCHING
        self._since = time.time()
        self._reason: str | None = None
        self._exit_code: int | None = None
        self._signal: str | None = None
        self._next_beat = 0.0

        self._progress_seen: tuple[int, int] | None = None
        self._progress_at = time.monotonic()
        self._last_progress: float | None = None
        self._received: list[int] = []
        self._kill_at: float | None = None
        self._killed = False
        self._waiting: set[Request] = set()

    def run(self) -> int:
        """Start the trainer, watch it, and write down how it ended; returns its exit code."""
        (self._dir / rundir.CONTROL).mkdir(mode=0o700, exist_ok=True)
        (self._dir / rundir.CRASH).mkdir(mode=0o700, exist_ok=True)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._note("start", argv=self._command, pid=os.getpid())
        memory = memory_events.read()
        try:
            self._trainer = TrainerProcess(
                self._command,
                log=self._dir / rundir.TRAIN_LOG,
                cwd=Path(self._run.get("workspace") or self._dir),
                env=trainer_environment(self._run.get("env")),
            )
        except OSError as error:
            self._end(_not_started(error))
            return self._exit_code or 0
        self._note("trainer_started", pid=self._trainer.pid)
        self._write_status()
        gpus = self._start_gpus()
        try:
            self._watch(self._trainer)
            returncode = self._trainer.reap()
        except BaseException as error:
            self._fail(self._trainer, error)
            raise
        finally:
            if gpus:
                gpus.stop()
            kill_strays(spare=gpus.pids() if gpus else ())
        self._conclude(returncode, memory)
        return self._exit_code or 0

    # The loop

    def _watch(self, trainer: TrainerProcess) -> None:
        while not trainer.ended():
            self._act_on_signals(trainer)
            self._act_on_requests(trainer)
            self._watch_progress()
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._kill_at = None
                self._killed = True
                self._note("signal", name="SIGKILL", why="it did not end in time")
                trainer.kill_group()
            if time.monotonic() >= self._next_beat:
                self._write_status()
            time.sleep(self._timing.tick)
        self._watch_progress()

    def _act_on_signals(self, trainer: TrainerProcess) -> None:
        while self._received:
            name = outcome.signal_name(self._received.pop(0))
            self._stop(trainer, f"the supervisor received {name}", self._timing.grace)

    def _act_on_requests(self, trainer: TrainerProcess) -> None:
        for name, content in take_requests(self._dir / rundir.CONTROL):
            self._note("request", name=name, by=content.get("by"))
            if name == Request.STOP:
                self._stop(trainer, "asked to stop", _grace(content, self._timing.grace))
            elif name in (Request.STACKS, Request.CHECKPOINT):
                self._waiting.add(Request(name))
        for request, number in ((Request.STACKS, signal.SIGUSR1), (Request.CHECKPOINT, signal.SIGUSR2)):
            # Before the trainer has its handlers, these signals would end it: let them wait.
            if request in self._waiting and identity.catches(trainer.pid, number):
                self._waiting.remove(request)
                if request is Request.STACKS:
                    self._head_stacks()
                self._note("signal", name=outcome.signal_name(number), why=f"asked for {request}")
                trainer.signal(number)

    def _stop(self, trainer: TrainerProcess, why: str, grace: float) -> None:
        self._kill_at = time.monotonic() + grace
        if self._state is State.STOPPING:
            return
        self._note("signal", name="SIGTERM", why=why)
        trainer.signal(signal.SIGTERM)
        self._enter(State.STOPPING, why)

    def _watch_progress(self) -> None:
        path = self._dir / rundir.PROGRESS
        with suppress(OSError):
            status = path.stat()
            seen = (status.st_mtime_ns, status.st_ino)
            if seen != self._progress_seen:
                self._progress_seen = seen
                record = rundir.read_whole(path)
                if record is not None and record.get("attempt", self._attempt) == self._attempt:
                    self._progress_at = time.monotonic()
                    self._last_progress = record.get("t")
                    if self._state in (State.LAUNCHING, State.STALLED):
                        self._enter(State.RUNNING, None)
        new = self._last_progress is None
        patience = self._timing.launch_stall if new else self._timing.stall
        if self._state in (State.LAUNCHING, State.RUNNING):
            age = time.monotonic() - self._progress_at
            if age > patience:
                what = "no first progress" if new else "no progress"
                self._enter(State.STALLED, f"{what} for {patience:.0f} s, while the trainer lives")

    # What is written

    def _enter(self, state: State, reason: str | None) -> None:
        self._state, self._reason, self._since = state, reason, time.time()
        self._write_status()

    def _write_status(self) -> None:
        self._next_beat = time.monotonic() + self._timing.beat
        record = rundir.stamp(
            "status",
            {
                "attempt": self._attempt,
                "state": self._state,
                "since": round(self._since, 3),
                "reason": self._reason,
                "boot_id": identity.boot_id(),
                "supervisor": self._me,
                "trainer": self._trainer.identity if self._trainer else None,
                "exit_code": self._exit_code,
                "signal": self._signal,
                "last_progress": self._last_progress,
            },
        )
        with suppress(OSError):
            rundir.write_whole(self._dir / rundir.STATUS, rundir.encode(record))

    def _note(self, kind: str, **fields: Any) -> None:
        with suppress(OSError):
            self._records.write(kind, **fields)

    def _head_stacks(self) -> None:
        with suppress(OSError), (self._dir / rundir.CRASH / crash.REQUEST).open("ab", buffering=0) as file:
            file.write(crash.heading("asked for"))

    # The end

    def _conclude(self, returncode: int, memory: memory_events.MemoryEvents) -> None:
        assert self._trainer is not None
        signalled = outcome.signal_name(-returncode) if returncode < 0 else None
        self._note(
            "trainer_exited",
            exit_code=128 - returncode if returncode < 0 else returncode,
            signal=signalled,
            runtime_s=round(time.monotonic() - self._trainer.started, 3),
        )
        why = None
        if signalled == "SIGKILL" and self._killed:
            why = "it did not end in time after it was asked to stop"
        elif signalled == "SIGKILL":
            why = memory_events.hint(memory, memory_events.read())
        elif signalled == "SIGTERM" and self._state is State.STOPPING:
            why = "it was asked to stop before it could write a checkpoint"
        word = rundir.read_whole(self._dir / rundir.EXIT)
        if word is not None and word.get("attempt", self._attempt) != self._attempt:
            word = None
        log = self._dir / rundir.TRAIN_LOG
        self._end(outcome.judge(returncode, word, why_killed=why, last_line=outcome.last_line(log)))

    def _fail(self, trainer: TrainerProcess, error: BaseException) -> None:
        """The supervisor itself failed: have the trainer end with a checkpoint, and say so."""
        deadline = time.monotonic() + self._timing.grace
        trainer.signal(signal.SIGTERM)
        while not trainer.ended() and time.monotonic() < deadline:
            time.sleep(self._timing.tick)
        with suppress(OSError):
            crash.write_thread(
                self._dir,
                thread="supervisor",
                role="supervisor",
                device=None,
                step=None,
                bucket=None,
                samples=(),
                error=error,
                first=True,
                memory=None,
                attempt=self._attempt,
            )
        reason = f"the supervisor itself failed: {crash.one_line(error)}"
        self._end(outcome.Outcome(State.FAILED, reason, rundir.TrainerExit.CRASHED, None))

    def _end(self, ended: outcome.Outcome) -> None:
        self._exit_code, self._signal = ended.exit_code, ended.signal
        self._note("end", state=ended.state, reason=ended.reason)
        self._enter(ended.state, ended.reason)

    # Preparations

    def _trainer_command(self) -> list[str]:
        python = self._run.get("python")
        if not isinstance(python, str) or not python:
            raise SupervisorError(
                f"{self._dir / rundir.RUN}: python is missing: expected an interpreter's path"
            )
        return [python, str(PAYLOAD), "train", str(self._dir), str(self._attempt)]

    def _start_gpus(self) -> GpuSampler | None:
        if not self._sample_gpus:
            return None
        try:
            samples = rundir.RecordWriter(self._dir / rundir.GPU, attempt=self._attempt)
        except OSError as error:
            self._note("gpu_problem", text=f"{rundir.GPU} cannot be written: {error.strerror}")
            return None
        sampler = GpuSampler(samples, on_problem=lambda text: self._note("gpu_problem", text=text))
        sampler.start()
        return sampler

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._received.append(number)


def _grace(content: dict[str, Any], default: float) -> float:
    grace: Any = content.get("grace_s")
    usable = isinstance(grace, int | float) and not isinstance(grace, bool) and grace >= 0
    return float(grace) if usable else default


def _not_started(error: OSError) -> outcome.Outcome:
    what = f"{error.strerror}: {error.filename}" if error.filename else str(error)
    reason = f"the trainer could not be started: {what}"
    return outcome.Outcome(State.FAILED, reason, rundir.TrainerExit.REFUSED, None)


def _lock(run_dir: Path) -> int:
    """Hold the run directory itself: one supervisor at a time. The descriptor lives as long as we do."""
    try:
        descriptor = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise SupervisorError(f"{run_dir}: no run directory ({error.strerror})") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise SupervisorError(f"{run_dir}: another supervisor watches this run") from error
    except OSError:  # some network file systems know no locks on folders
        pass
    return descriptor
