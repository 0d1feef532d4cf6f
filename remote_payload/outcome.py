"""How a trainer's end is judged: its own word (`exit.json`) first, then what the kernel says.

A process may write that all is done and still die while libraries close down, so a signal does not
overrule `exit.json`. Without its word, only the exit status is left, and the log's last line as a reason.
Pure functions; standard library only.
"""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from remote_payload.rundir import State, TrainerExit

_MOST_REASON = 500


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What `status.json` says of an ended trainer; `exit_code` is 128 + n for signal n."""

    state: State
    reason: str | None
    exit_code: int
    signal: str | None


def judge(
    returncode: int,
    word: Mapping[str, Any] | None,
    *,
    why_killed: str | None,
    last_line: str | None,
) -> Outcome:
    """Judge a trainer that ended with `returncode` (negative: by that signal) and the `word` of exit.json.

    `why_killed`: why the supervisor itself sent the signal, or what else is known about it.
    `last_line`: the last line of the log, the reason of last resort.
    """
    name = signal_name(-returncode) if returncode < 0 else None
    code = 128 - returncode if returncode < 0 else returncode
    outcome = word.get("outcome") if word else None
    if outcome in ("finished", "stopped"):
        state, reason = State.FINISHED, _stopped(word) if outcome == "stopped" else None
        if name:
            late = f"the trainer died by {name} while it was closing down"
            reason = f"{reason}; {late}" if reason else f"finished, but {late}"
        said = TrainerExit.STOPPED if outcome == "stopped" else TrainerExit.FINISHED
        return Outcome(state, reason, int(said), name)
    if outcome in ("crashed", "refused"):
        reason = _text(word, "error") or last_line or f"the trainer {outcome}"
        said = TrainerExit.REFUSED if outcome == "refused" else TrainerExit.CRASHED
        return Outcome(State.FAILED, _short(reason), code or int(said), name)
    if name:
        reason = f"killed by {name}" + (f": {why_killed}" if why_killed else "")
        return Outcome(State.KILLED, _short(reason), code, name)
    if code == TrainerExit.FINISHED:
        return Outcome(State.FINISHED, "the trainer ended well, but left no exit.json", code, None)
    if code == TrainerExit.STOPPED:
        return Outcome(State.FINISHED, "stopped on request", code, None)
    reason = last_line or f"the trainer ended with exit code {code}"
    return Outcome(State.FAILED, _short(reason), code, None)


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; a number without a name (real-time signals) as `signal 35`."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def last_line(log: Path) -> str | None:
    """The last line of `log` that is not empty, or None; reads no more than its last 8 KiB."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 8192))
            lines = file.read().replace(b"\r", b"\n").split(b"\n")
    except OSError:
        return None
    texts = (line.decode("utf-8", "replace").strip() for line in reversed(lines))
    return next((text for text in texts if text), None)


def _stopped(word: Mapping[str, Any] | None) -> str:
    step = word.get("step") if word else None
    return f"stopped on request at step {step}" if isinstance(step, int) else "stopped on request"


def _text(word: Mapping[str, Any] | None, key: str) -> str | None:
    value = word.get(key) if word else None
    return value if isinstance(value, str) and value else None


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MOST_REASON else line[: _MOST_REASON - 1] + "…"
