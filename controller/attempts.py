"""The attempts at a run, as `supervisor.jsonl` tells of them: how each began, and how it ended.

Pure: `updated` takes the attempts so far and new records. Only the newest `KEPT` stay.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from controller.run_records import Record, number, table, text, whole

KEPT = 50


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt; times are Unix seconds of the container."""

    number: int
    begun_by: str = "launch"
    """`launch`, `resume` or `restart`."""
    by: str = ""
    """Who resumed: user@machine."""
    payload: str = ""
    """The payload's digest."""
    changes: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """What a resume changed of the job: `{key: [before, after]}`."""
    begun: float | None = None
    ended: float | None = None
    state: str = ""
    """`finished`, `failed` or `killed`; empty: it has written no end."""
    exit_code: int | None = None
    signal: str = ""
    reason: str = ""
    step: int | None = None
    """The newest step that its supervisor saw."""


def updated(attempts: tuple[Attempt, ...], records: Iterable[Record]) -> tuple[Attempt, ...]:
    """The attempts after these records of `supervisor.jsonl`, oldest first."""
    known = {attempt.number: attempt for attempt in attempts}
    for record in records:
        of = whole(record, "attempt")
        if of is None:
            continue
        before = known.get(of)
        after = _after(before or Attempt(number=of), record)
        if before is None and after.begun_by == "launch" and of - 1 in known:
            # Its supervisor's own doing, unless a `resume` record (which comes first) said otherwise.
            after = dataclasses.replace(after, begun_by="restart")
        known[of] = after
    return tuple(known[n] for n in sorted(known))[-KEPT:]


def _after(attempt: Attempt, record: Record) -> Attempt:
    kind, t = text(record, "kind"), number(record, "t")
    if kind == "resume":
        return dataclasses.replace(
            attempt,
            begun_by="resume",
            begun=t,
            by=text(record, "by"),
            payload=text(record, "payload"),
            changes=table(record, "changes"),
        )
    if kind == "start":
        return dataclasses.replace(attempt, begun=t, payload=text(record, "payload") or attempt.payload)
    if kind == "trainer_exited":
        return dataclasses.replace(
            attempt,
            ended=t,
            step=whole(record, "step"),
            exit_code=whole(record, "exit_code"),
            signal=text(record, "signal"),
        )
    if kind in ("restart", "end"):
        code = whole(record, "exit_code")
        return dataclasses.replace(
            attempt,
            ended=attempt.ended or t,
            state=text(record, "state"),
            reason=text(record, "reason"),
            exit_code=attempt.exit_code if code is None else code,
            signal=text(record, "signal") or attempt.signal,
        )
    return attempt


def attempt_line(attempt: Attempt) -> str:
    """What a person is told of an ended attempt: `attempt 1: failed rc=1 at step 150: boom`,
    `attempt 1: stopped on request at step 150`.
    """
    if attempt.reason.startswith(("killed by ", "stopped on request")):  # it says it all, in these words
        return f"attempt {attempt.number}: {attempt.reason}"
    how = attempt.state or "ended without a word"
    if attempt.signal and attempt.signal not in attempt.reason:
        how += f" by {attempt.signal}"
    elif attempt.exit_code and not attempt.signal:
        how += f" rc={attempt.exit_code}"
    if attempt.step:
        how += f" at step {attempt.step:,}"
    return f"attempt {attempt.number}: {how}" + (f": {attempt.reason}" if attempt.reason else "")
