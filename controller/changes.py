"""`watch`: what happens to a run as lines, for a terminal that is none: a change of state, or an event.

One line (or one JSON object, docs/json.md) each, until the run has ended. Steps are not lines: they come
too often, and the newest one stands in every line.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from controller import figures
from controller.errors import ProtocolError, RunLostError
from controller.run_events import Event, Level
from controller.run_reader import RunReader
from controller.suspension import Suspension
from controller.text import safe_line
from controller.watching import catch_up

if TYPE_CHECKING:
    from controller.mirror import Mirror
    from controller.run_state import RunState


def print_changes(directory: Path, mirror: Mirror, *, as_json: bool, out: TextIO) -> int:
    """Print to `out` until the run has ended and all of it is here; returns the run's exit code.

    Raises the mirror's error, or ProtocolError, when it gave up before the run ended.
    """
    reader = RunReader(directory)
    told: tuple[str, int] | None = None
    catch_up(directory, mirror)  # the first line is of the run, not of the way to it
    known: set[Event] = set()
    with Suspension(mirror) as suspension:
        while True:
            suspension.check()
            seen, running = mirror.news_count, mirror.running
            state = reader.catch_up(time.time())
            if told is not None:
                for event in state.events:
                    if event not in known and event.level > Level.INFO:
                        _tell(state, event, as_json, out)
            known = set(state.events)
            if told != (state.state, state.attempt):
                told = (state.state, state.attempt)
                _tell(state, None, as_json, out)
            if state.ended and (state.connection == "ended" or not running):
                return RunLostError.exit_code if state.exit_code is None else state.exit_code
            if not running:
                raise mirror.error or ProtocolError("the mirror ended before the run did")
            mirror.wait_for_news(seen, 0.5)


def _tell(state: RunState, event: Event | None, as_json: bool, out: TextIO) -> None:
    out.write((json.dumps(change_record(state, event)) if as_json else change_line(state, event)) + "\n")
    out.flush()


def change_record(state: RunState, event: Event | None) -> dict[str, Any]:
    """One object of `watch --json`."""
    p = state.progress
    return {
        "t": round(state.now, 3),
        "run": state.run_id,
        "state": state.state,
        "detail": state.health.detail,
        "attempt": state.attempt,
        "step": p.step if p else None,
        "steps": p.steps if p else None,
        "loss": p.loss if p else None,
        "tau": p.tau if p else None,
        "exit_code": state.exit_code,
        "event": None if event is None else {"t": event.t, "kind": event.kind, "line": event.line},
    }


def change_line(state: RunState, event: Event | None) -> str:
    """One line of `watch`."""
    clock = figures.clock(state.here(event.t) if event is not None and event.t is not None else state.now)
    p = state.progress
    where = f" step {p.step}" + (f"/{p.steps}" if p.steps else "") if p and p.step is not None else ""
    what = event.line if event is not None else state.health.detail
    if event is None and state.diagnosis is not None:
        what = f"{safe_line(what).rstrip('.')}. What to do: {state.diagnosis.do}"
    number = f" (attempt {state.attempt})" if state.attempt > 1 else ""
    word = state.health.headline if event is None else "·"
    return safe_line(f"{clock} {state.run_id} {word}{number}{where}" + (f": {what}" if what else ""))
