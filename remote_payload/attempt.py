"""One attempt at a run: start the trainer, watch it, act on requests, and judge how it ended.

One loop in the main thread, ten rounds a second: signals, `control/`, the age of `progress.json`, the
heartbeat. The only other thread samples the GPUs, so nothing that hangs there holds up the heartbeat.
A stop asks three times: SIGTERM to the trainer (checkpoint and end), after the grace SIGTERM to its whole
process group, and soon after that SIGKILL. Standard library only.
"""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from remote_payload import crash, identity, memory_events, outcome, rundir
from remote_payload.control import take_requests
from remote_payload.gpu import GpuSampler
from remote_payload.outcome import Outcome
from remote_payload.restart_policy import Ended
from remote_payload.run_status import RunStatus
from remote_payload.rundir import Request, State
from remote_payload.trainer_process import TrainerProcess, kill_strays, trainer_environment

_BEFORE_TRAINING = ("loading", "warming_up")
"""Phases of progress.json."""
_LONGEST_GRACE_S = 86_400.0


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
    """From the request to stop to SIGTERM for the whole group: time for a checkpoint."""
    last_call: float = 5.0
    """From there to SIGKILL."""

    @classmethod
    def scaled(cls, scale: float) -> Timing:
        """Every constant multiplied by `scale`; a tick is 10 ms at the least."""
        scaled = cls(**{name: value * scale for name, value in dataclasses.asdict(cls()).items()})
        return dataclasses.replace(scaled, tick=max(scaled.tick, 0.01))


@dataclasses.dataclass(slots=True)
class Inbox:
    """What was asked of the supervisor and is not done yet; it outlives an attempt."""

    signals: list[int] = dataclasses.field(default_factory=list)
    """Numbers of signals that the supervisor received."""
    waiting: set[Request] = dataclasses.field(default_factory=set)
    """Requests that wait for a trainer that can take them."""


class Attempt:
    """The attempt `status.attempt` at the run in `run_dir`, whose run.json is `run`; `run()` it once."""

    def __init__(
        self,
        run_dir: Path,
        run: Mapping[str, Any],
        command: Sequence[str],
        *,
        status: RunStatus,
        inbox: Inbox,
        timing: Timing,
    ) -> None:
        self._dir = run_dir
        self._run = run
        self._command = command
        self._status = status
        self._inbox = inbox
        self._timing = timing
        self._progress_seen: tuple[int, int] | None = None
        self._progress_at = time.monotonic()
        self._first_progress: float | None = None
        self._step = 0
        self._trains = True
        """Not while the newest progress is of loading or warming up, whose step is where it goes on from."""
        self._asked_to_stop = False
        self._term_at: float | None = None
        self._kill_at: float | None = None
        self._gone_by: float | None = None
        self._killed = False

    def run(self) -> Ended:
        """Start the trainer and watch it to its end."""
        memory = memory_events.read()
        try:
            trainer = TrainerProcess(
                self._command,
                log=self._dir / rundir.TRAIN_LOG,
                cwd=Path(self._run.get("workspace") or self._dir),
                env=trainer_environment(self._run.get("env")),
            )
        except OSError as error:
            return self._ended(_not_started(error))
        self._status.trainer = trainer.identity
        self._status.note("trainer_started", pid=trainer.pid)
        self._status.write()
        gpus = self._start_gpus()
        try:
            self._watch(trainer)
            returncode = trainer.reap()
        except BaseException as error:
            self._fail(trainer, error)
            raise
        finally:
            if gpus:
                gpus.stop()
            kill_strays(spare=gpus.pids() if gpus else ())
        return self._ended(self._judge(trainer, returncode, memory))

    # The loop

    def _watch(self, trainer: TrainerProcess) -> None:
        while not trainer.ended():
            self._act_on_signals(trainer)
            self._act_on_requests(trainer)
            self._watch_progress()
            self._press(trainer)
            self._status.beat()
            time.sleep(self._timing.tick)
        self._watch_progress()

    def _act_on_signals(self, trainer: TrainerProcess) -> None:
        while self._inbox.signals:
            name = outcome.signal_name(self._inbox.signals.pop(0))
            self._stop(trainer, f"the supervisor received {name}", self._timing.grace)

    def _act_on_requests(self, trainer: TrainerProcess) -> None:
        waiting = self._inbox.waiting
        for name, content in take_requests(self._dir / rundir.CONTROL):
            self._status.note("request", name=name, by=content.get("by"))
            if name == Request.STOP:
                self._stop(trainer, "asked to stop", _grace(content, self._timing.grace))
            elif name in (Request.STACKS, Request.CHECKPOINT):
                waiting.add(Request(name))
        for request, number in ((Request.STACKS, signal.SIGUSR1), (Request.CHECKPOINT, signal.SIGUSR2)):
            # Before the trainer has its handlers, these signals would end it: let them wait.
            if request in waiting and identity.catches(trainer.pid, number):
                waiting.remove(request)
                if request is Request.STACKS:
                    self._head_stacks()
                self._status.note("signal", name=outcome.signal_name(number), why=f"asked for {request}")
                trainer.signal(number)

    def _stop(self, trainer: TrainerProcess, why: str, grace: float) -> None:
        self._term_at = time.monotonic() + grace
        self._asked_to_stop = True
        if self._status.state is State.STOPPING:
            return
        self._status.note("signal", name="SIGTERM", why=why)
        trainer.signal(signal.SIGTERM)
        self._status.enter(State.STOPPING, why)

    def _press(self, trainer: TrainerProcess) -> None:
        """The second and the third time that a trainer is asked to stop, and what is said when it cannot."""
        now = time.monotonic()
        if self._term_at is not None and now >= self._term_at:
            self._term_at, self._kill_at = None, now + self._timing.last_call
            self._status.note("signal", name="SIGTERM", why="to its whole group: it did not end in time")
            trainer.signal_group(signal.SIGTERM)
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            self._killed = True
            self._gone_by = now + self._timing.last_call
            self._status.note("signal", name="SIGKILL", why="it did not end in time")
            trainer.signal_group(signal.SIGKILL)
        if self._gone_by is not None and now >= self._gone_by:
            self._gone_by = None
            why = "killed, but it does not end: the kernel waits for a device or a disk on its behalf"
            self._status.enter(State.STOPPING, why)

    def _watch_progress(self) -> None:
        path = self._dir / rundir.PROGRESS
        with suppress(OSError):
            status = path.stat()
            seen = (status.st_mtime_ns, status.st_ino)
            if seen != self._progress_seen:
                self._progress_seen = seen
                self._take_progress(rundir.read_whole(path))
        new = self._status.last_progress is None
        patience = self._timing.launch_stall if new else self._timing.stall
        if self._status.state in (State.LAUNCHING, State.RUNNING):
            age = time.monotonic() - self._progress_at
            if age > patience:
                what = "no first progress" if new else "no progress"
                self._status.enter(State.STALLED, f"{what} for {patience:.0f} s, while the trainer lives")

    def _take_progress(self, record: dict[str, Any] | None) -> None:
        if record is None or record.get("attempt", self._status.attempt) != self._status.attempt:
            return
        self._progress_at = time.monotonic()
        if self._first_progress is None:
            self._first_progress = self._progress_at
        step = record.get("step")
        self._step = step if isinstance(step, int) else self._step
        self._trains = record.get("phase") not in _BEFORE_TRAINING
        self._status.last_progress = record.get("t")
        if self._status.state in (State.LAUNCHING, State.STALLED):
            self._status.enter(State.RUNNING, None)

    def _head_stacks(self) -> None:
        with suppress(OSError), (self._dir / rundir.CRASH / crash.REQUEST).open("ab", buffering=0) as file:
            file.write(crash.heading("asked for"))

    # The end

    def _ended(self, ended: Outcome) -> Ended:
        trained = 0.0 if self._first_progress is None else time.monotonic() - self._first_progress
        return Ended(ended, self._step if self._trains else 0, trained, self._asked_to_stop)

    def _judge(self, trainer: TrainerProcess, returncode: int, memory: memory_events.MemoryEvents) -> Outcome:
        word = rundir.read_whole(self._dir / rundir.EXIT)
        if word is not None and word.get("attempt", self._status.attempt) != self._status.attempt:
            word = None
        if word is not None and isinstance(word.get("step"), int):
            self._step = word["step"]  # exact, where progress may be a second old
        signalled = outcome.signal_name(-returncode) if returncode < 0 else None
        self._status.note(
            "trainer_exited",
            exit_code=128 - returncode if returncode < 0 else returncode,
            signal=signalled,
            runtime_s=round(time.monotonic() - trainer.started, 3),
            step=self._step,
        )
        why = None
        if signalled == "SIGKILL" and self._killed:
            why = "it did not end in time after it was asked to stop"
        elif signalled == "SIGKILL":
            why = memory_events.hint(memory, memory_events.read())
        elif signalled == "SIGTERM" and self._asked_to_stop:
            why = "it was asked to stop before it could write a checkpoint"
        log = self._dir / rundir.TRAIN_LOG
        ended = outcome.judge(returncode, word, why_killed=why, last_line=outcome.last_line(log))
        if ended.state is State.FAILED and (beside := memory_events.beside(memory, memory_events.read())):
            return dataclasses.replace(ended, reason=f"{ended.reason}; {beside}")
        return ended

    def _fail(self, trainer: TrainerProcess, error: BaseException) -> None:
        """The supervisor itself failed: have the trainer end with a checkpoint, and keep the traceback."""
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
                attempt=self._status.attempt,
            )

    def _start_gpus(self) -> GpuSampler | None:
        try:
            samples = rundir.RecordWriter(self._dir / rundir.GPU, attempt=self._status.attempt)
        except OSError as error:
            self._status.note("gpu_problem", text=f"{rundir.GPU} cannot be written: {error.strerror}")
            return None
        sampler = GpuSampler(samples, on_problem=lambda text: self._status.note("gpu_problem", text=text))
        sampler.start()
        return sampler


def _grace(content: dict[str, Any], default: float) -> float:
    grace: Any = content.get("grace_s")
    usable = isinstance(grace, int | float) and not isinstance(grace, bool) and grace >= 0
    return float(min(grace, _LONGEST_GRACE_S)) if usable else default


def _not_started(error: OSError) -> Outcome:
    """Refused where something is not there; memory or processes that a machine lacks it may have soon."""
    what = f"{error.strerror}: {error.filename}" if error.filename else str(error)
    reason = f"the trainer could not be started: {what}"
    missing = isinstance(error, FileNotFoundError | NotADirectoryError | PermissionError)
    code = rundir.TrainerExit.REFUSED if missing else rundir.TrainerExit.CRASHED
    return Outcome(State.FAILED, reason, code, None)
