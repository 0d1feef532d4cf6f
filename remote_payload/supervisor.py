"""The supervisor: one attempt after another at one run, until an end stands.

Mostly there is one attempt (`attempt.py` watches it). With `restart = "on-crash"` another one follows a
crash, after a wait (`restart_policy.py` has the rules). The run's lock, its signals and its status live as
long as the supervisor, so between two attempts a run is neither dead nor silent. Standard library only.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from pathlib import Path
from types import FrameType

from remote_payload import crash, lock, outcome, rundir
from remote_payload.attempt import Attempt, Inbox, Timing
from remote_payload.control import take_requests
from remote_payload.outcome import Outcome
from remote_payload.restart_policy import Decision, Ended, RestartPolicy, Restarts
from remote_payload.run_status import RunStatus
from remote_payload.rundir import Request, State
from remote_payload.timing import time_scale

PAYLOAD = Path(__file__).resolve().parent


class SupervisorError(Exception):
    """The run directory cannot be supervised; the text says why in one sentence."""


def supervise(run_dir: Path) -> int:
    """Run the trainer of `run_dir` to its end and return the exit code that `status.json` names.

    Raises SupervisorError when there is no run to supervise, or when somebody supervises it already.
    """
    return Supervisor(run_dir).run()


class Supervisor:
    """All attempts at one run until an end stands."""

    def __init__(self, run_dir: Path) -> None:
        self._dir = run_dir
        self._lock = _lock(run_dir)
        run = rundir.read_whole(run_dir / rundir.RUN)
        if run is None:
            raise SupervisorError(f"{run_dir / rundir.RUN}: missing, or not a record; `start` writes it")
        self._run = run
        if not (isinstance(run.get("python"), str) and run["python"]):
            raise SupervisorError(
                f"{run_dir / rundir.RUN}: python is missing: expected an interpreter's path"
            )
        self._timing = Timing.scaled(time_scale())
        self._inbox = Inbox()
        self._status = RunStatus(run_dir, last_attempt(run_dir) + 1, self._timing.beat)
        self._restarts = Restarts(RestartPolicy.read(run_dir / rundir.JOB, time_scale()))

    def run(self) -> int:
        """Watch attempt after attempt, and write down how the last one ended; returns its exit code."""
        (self._dir / rundir.CONTROL).mkdir(mode=0o700, exist_ok=True)
        (self._dir / rundir.CRASH).mkdir(mode=0o700, exist_ok=True)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        for name, content in take_requests(self._dir / rundir.CONTROL):  # of the attempt before, as it ended
            self._status.note("request", name=name, by=content.get("by"), late=True)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        # Whoever started us may have had it ignored, and then the kernel reaps trainers unseen.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            return self._end(self._attempts())
        except BaseException as error:
            reason = f"the supervisor itself failed: {crash.one_line(error)}"
            self._end(Outcome(State.FAILED, reason, rundir.TrainerExit.CRASHED, None))
            raise

    def _attempts(self) -> Outcome:
        while True:
            command = [self._run["python"], str(PAYLOAD), "train", str(self._dir), str(self._status.attempt)]
            self._status.note("start", argv=command, pid=os.getpid(), payload=self._run.get("payload"))
            attempt = Attempt(
                self._dir,
                self._run,
                command,
                status=self._status,
                inbox=self._inbox,
                timing=self._timing,
            )
            ended = attempt.run()
            decision = self._restarts.after(ended)
            if decision.wait_s is None:
                return _with(ended.outcome, decision.why_not)
            who = self._wait(ended, decision)
            if who is not None:
                return _with(ended.outcome, f"{who} before the next attempt began")
            self._status.begin_next_attempt()

    def _wait(self, ended: Ended, decision: Decision) -> str | None:
        """Wait for the next attempt; returns why there will be none, or None when it is time."""
        assert decision.wait_s is not None
        how = ended.outcome
        count, limit = self._restarts.count, self._restarts.policy.limit
        self._status.note(
            "restart",
            state=how.state,
            reason=how.reason,
            exit_code=how.exit_code,
            signal=how.signal,
            wait_s=round(decision.wait_s, 3),
            count=count,
            limit=limit,
        )
        until = time.monotonic() + decision.wait_s
        self._status.restart = {
            "next": round(time.time() + decision.wait_s, 3),
            "count": count,
            "limit": limit,
        }
        self._status.trainer = None
        reason = f"attempt {self._status.attempt} {how.state} at step {ended.step}: {how.reason}"
        self._status.enter(State.RESTARTING, reason)
        while time.monotonic() < until:
            if self._inbox.signals:
                return f"the supervisor received {outcome.signal_name(self._inbox.signals.pop(0))}"
            for name, content in take_requests(self._dir / rundir.CONTROL):
                self._status.note("request", name=name, by=content.get("by"))
                if name == Request.STOP:
                    return "asked to stop"
                if name in (Request.STACKS, Request.CHECKPOINT):
                    self._inbox.waiting.add(Request(name))
            self._status.beat()
            time.sleep(self._timing.tick)
        return None

    def _end(self, ended: Outcome) -> int:
        self._status.exit_code, self._status.signal = ended.exit_code, ended.signal
        self._status.restart = None
        self._status.note(
            "end", state=ended.state, reason=ended.reason, exit_code=ended.exit_code, signal=ended.signal
        )
        self._status.enter(ended.state, ended.reason)
        return ended.exit_code

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._inbox.signals.append(number)


def last_attempt(run_dir: Path) -> int:
    """The number of the newest attempt at the run, by its status.json; 0: there was none."""
    attempt = (rundir.read_whole(run_dir / rundir.STATUS) or {}).get("attempt")
    return attempt if isinstance(attempt, int) and attempt > 0 else 0


def _with(ended: Outcome, addition: str) -> Outcome:
    reason = "; ".join(filter(None, (ended.reason, addition)))
    return dataclasses.replace(ended, reason=reason or None)


def _lock(run_dir: Path) -> int:
    """Hold the run directory itself: one supervisor at a time. The descriptor lives as long as we do."""
    try:
        descriptor = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise SupervisorError(f"{run_dir}: no run directory ({error.strerror})") from error
    try:
        lock.hold(descriptor)
    except BlockingIOError as error:
        os.close(descriptor)
        raise SupervisorError(f"{run_dir}: another supervisor watches this run") from error
    return descriptor
