"""Asking a run for something and waiting until it is done: `stop`, `checkpoint`, `stacks`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final

from controller.errors import CheckpointError, NotInTimeError, RunLostError
from controller.narration import Say
from controller.run_control import ask, memory_left
from controller.run_control import stop as ask_to_stop
from controller.run_events import Event
from controller.run_place import RunPlace
from controller.run_reader import RunReader
from controller.run_records import table, whole
from controller.run_state import RunState
from controller.text import safe_line
from controller.timing import Timing
from controller.watching import catch_up, last_state, mirrored, wait_for
from remote_payload import rundir
from remote_payload.rundir import CHECKPOINTS, Request

_BEYOND_GRACE_S: Final = 60.0
"""The supervisor's last call, its own end, and a connection that is made anew."""
_FAILED: Final = "checkpoint_failed"
_WHOLE_S: Final = 1.0
"""A dump of stacks says nowhere that it ends, and is written in a few milliseconds."""
_RELEASE_S: Final = 10.0
"""How long a driver may take to give the memory of a dead process back."""


def stop(directory: Path, *, grace_s: float, say: Say) -> dict[str, Any]:
    """Have the run checkpoint and end, wait for it, and look at its GPUs; the keys of `stop --json`.

    Raises RunLostError when nobody is there to act on it and the run had not ended, NotInTimeError.
    """
    run_place = RunPlace.read(directory)
    refusal: RunLostError | None = None
    try:
        ask_to_stop(run_place, grace_s=grace_s)
    except RunLostError as error:
        refusal = error
    if refusal is not None:
        state = last_state(directory)
        if not state.ended:
            raise refusal
        say(f"{run_place.run_id}: {state.health.headline}")
        return _stopped(run_place, state, [])
    say(f"{run_place.run_id}: asked to stop; waiting for its end (Ctrl-C leaves it to itself)")
    with mirrored(directory) as mirror:
        limit = grace_s + _BEYOND_GRACE_S
        state = wait_for(directory, mirror, lambda state: False, limit_s=limit, what="its end")
    say(f"{run_place.run_id}: {state.health.headline}")
    held = _held(run_place, state)
    for line in held:
        say(f"warning: {run_place.run_id}: {line}")
    return _stopped(run_place, state, held)


def _held(run_place: RunPlace, state: RunState) -> list[str]:
    uuids = {device.uuid for device in state.progress.devices if device.uuid} if state.progress else set()
    deadline = time.monotonic() + _RELEASE_S * Timing.from_environment().scale
    while (held := memory_left(run_place, uuids)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return held


def _stopped(run_place: RunPlace, state: RunState, held: list[str]) -> dict[str, Any]:
    return {
        "run": run_place.run_id,
        "state": state.state,
        "exit_code": state.exit_code,
        "step": state.progress.step if state.progress else None,
        "detail": state.health.detail,
        "held": held,
    }


def checkpoint(directory: Path, *, limit_s: float, say: Say) -> dict[str, Any]:
    """Have the run write a checkpoint now and wait for it; the keys of `checkpoint --json`.

    Raises RunLostError when nobody is there to write one, or the run ends before; NotInTimeError.
    """
    run_place = RunPlace.read(directory)
    with mirrored(directory) as mirror:
        catch_up(directory, mirror)
        before = _newest(RunReader(directory).catch_up(time.time()))
        ask(run_place, Request.CHECKPOINT)
        say(f"{run_place.run_id}: asked for a checkpoint; waiting at most {limit_s:.0f} s")
        state = wait_for(
            directory,
            mirror,
            lambda state: _written(state, before) is not None,
            limit_s=limit_s,
            what="a checkpoint",
        )
    answer = _written(state, before)
    if answer is None:
        raise RunLostError(f"{run_place.run_id}: ended before it wrote one ({state.health.headline})")
    if answer.kind == _FAILED:
        raise CheckpointError(f"{run_place.run_id}: {safe_line(answer.line)}", "The run goes on.")
    path = f"{run_place.run_dir}/{CHECKPOINTS}/step-{answer.step}"
    return {"run": run_place.run_id, "step": answer.step, "path": path, "place": run_place.host.name}


def _written(state: RunState, before: float) -> Event | None:
    """What came of the first request for a checkpoint after `before`: it was written, or could not be."""
    asked = _noted(state, "request", Request.CHECKPOINT, before)
    if asked is None:
        return None
    for event in state.history.events:
        if event.kind in ("checkpoint", _FAILED) and event.t is not None and event.t >= asked:
            return event
    return None


def stacks(directory: Path, *, limit_s: float, say: Say) -> dict[str, Any]:
    """Have the trainer show where each of its threads is, and wait for that; the keys of `stacks --json`.

    Raises RunLostError when nobody is there to ask it, or the run ends before; NotInTimeError.
    """
    run_place = RunPlace.read(directory)
    with mirrored(directory) as mirror:
        catch_up(directory, mirror)
        before = _newest(RunReader(directory).catch_up(time.time()))
        answer = _Answer(directory)
        ask(run_place, Request.STACKS)
        say(f"{run_place.run_id}: asked where its threads are; waiting at most {limit_s:.0f} s")
        try:
            state = wait_for(
                directory, mirror, lambda state: answer.is_whole(), limit_s=limit_s, what="the stacks"
            )
        except NotInTimeError as error:
            error.hint = _why_no_stacks(directory, before, run_place)
            raise
    if not answer.is_whole():
        raise RunLostError(f"{run_place.run_id}: ended before it showed them ({state.health.headline})")
    path = f"{run_place.run_dir}/{rundir.STACKS}"
    return {"run": run_place.run_id, "stacks": answer.text, "path": path, "place": run_place.host.name}


class _Answer:
    """What comes from now on to the stacks that were asked for, in the mirror folder `directory`."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / rundir.STACKS
        self._begin = len(self._read())
        self._grown = 0.0
        self.text = ""

    def _read(self) -> bytes:
        try:
            return self._path.read_bytes()
        except OSError:
            return b""

    def is_whole(self) -> bool:
        """Whether the stacks are here, and nothing has followed for a moment."""
        text = self._read()[self._begin :].decode("utf-8", "replace")
        if text != self.text:
            self.text, self._grown = text, time.monotonic()
        return "most recent call first" in text and time.monotonic() - self._grown >= _WHOLE_S


def _why_no_stacks(directory: Path, before: float, run_place: RunPlace) -> str:
    state = RunReader(directory).catch_up(time.time())
    if _noted(state, "request", Request.STACKS, before) is None:
        return "The run's supervisor has not taken the request: it does nothing, or the connection is slow."
    if _noted(state, "signal", Request.STACKS, before) is None:
        return "The trainer is still starting and cannot answer yet; it will, into crash/, as soon as it can."
    status = rundir.read_whole(directory / rundir.STATUS) or {}
    pid = whole(table(status, "trainer"), "pid")
    return (
        "It was stopped, or its main thread waits in the kernel, for a driver or a disk. How each thread"
        f" waits: dflashctl exec --host {run_place.host.name} -- ps -L -o tid,stat,wchan:32,comm -p {pid}"
    )


def _newest(state: RunState) -> float:
    """The time of the newest event, in the container's Unix seconds; 0: there is none."""
    return max((event.t or 0.0 for event in state.events), default=0.0)


def _noted(state: RunState, kind: str, request: Request, before: float) -> float | None:
    """When the supervisor first noted a `kind` that concerns `request` after `before`."""
    for event in state.supervisor_events:
        if event.kind == kind and event.t is not None and event.t > before and request in event.line:
            return event.t
    return None
