"""`status`: how a run is, as a few lines for a person or one JSON object for a program.

Both are drawn from the `RunState` that the terminal view shows. The JSON object is its twin: every field
by its own name, curves as lists of `[step, value]`, and nothing that is not in the state. Text of the
remote is cleaned for the lines; in JSON it is left as it was written, since JSON escapes control codes.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from controller import figures
from controller.attempts import attempt_line
from controller.diagnose import alarms
from controller.health import age_text
from controller.mirror_reader import MirrorReader
from controller.run_reader import RunReader
from controller.run_state import RunState
from controller.series import Series
from controller.text import safe_line, safe_lines
from controller.trouble import Trouble
from controller.waiting import Waiter, wait_until_current

if TYPE_CHECKING:
    from controller.mirror import Mirror

_EVENTS = 5
_ATTEMPTS = 5
_TRACEBACK = 12
_OLD_S = 20.0
"""Figures that are older say so: progress is written once a second, and nvidia-smi asked every 5 s."""


def print_status(
    directory: Path, as_json: bool, *, mirror: Mirror | None = None, out: TextIO | None = None
) -> int:
    """Print the state of the run mirrored in `directory`; returns 0, however the run is.

    `mirror` is the one that this process started to bring the folder up to date: it is waited for. Raises
    its error when nothing was ever heard of the run.
    """
    out = sys.stdout if out is None else out
    reader = MirrorReader(directory)
    trouble = Trouble(sys.stderr, lambda: True)
    try:
        wait_until_current(reader, trouble, Waiter(reader, mirror))
        trouble.tell_own(mirror)
    finally:
        trouble.clear()
    if mirror is not None and mirror.error is not None and reader.record().get("last_heard") is None:
        raise mirror.error
    state = RunReader(directory).catch_up(time.time())
    if state.ended and mirror is not None and mirror.error is not None:
        trouble.tell_age(reader.record(), mirror, state.now)
    text = json.dumps(state_record(state)) if as_json else "\n".join(status_lines(state))
    out.write(text + "\n")
    out.flush()
    return 0


def state_record(state: RunState) -> dict[str, Any]:
    """The JSON twin of `state`: only objects, lists, text, booleans, null and finite numbers."""
    record: dict[str, Any] = {
        "run": state.run_id,
        "job_name": state.job_name,
        "state": state.state,
        "headline": state.health.headline,
        "detail": state.health.detail,
        "written_state": state.health.written,
        "ended": state.ended,
        "exit_code": state.exit_code,
        "news_age_s": state.news_age_s,
        "alarms": alarms(state.progress),
        "events": state.events,
        "gpus": state.gpus,
        "gpus_none_reason": state.gpu_table.none_reason,
        "curves": state.curves,
        "accuracy": state.history.accuracy,
        "dataset": state.history.dataset,
        "evaluations": state.history.evaluations,
        "nonfinite": state.history.nonfinite,
    }
    left_out = ("run_id", "health", "history", "gpu_table", "supervisor_events")
    for field in dataclasses.fields(state):
        if field.name not in left_out and field.name not in record:
            record[field.name] = getattr(state, field.name)
    plain = _plain(record)
    assert isinstance(plain, dict)
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, Series):
        return _plain(value.all_points)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str):
        return str(value)
    return value


def status_lines(state: RunState) -> list[str]:
    """A few lines for a person, every one of them safe to print."""
    lines = [_headline(state)]
    if state.health.detail:
        lines.append(f"  {safe_line(state.health.detail)}")
    lines += [f"  {line}" for line in (*_training(state), *_where(state))]
    before = [attempt for attempt in state.attempts if attempt.number < state.attempt]
    lines += [f"  {safe_line(attempt_line(attempt))}" for attempt in before[-_ATTEMPTS:]]
    lines += [f"  ! {alarm.what} {alarm.do}" for alarm in alarms(state.progress)]
    for name, count in state.unparsable.items():
        which, hold = ("line", "holds") if count == 1 else ("lines", "hold")
        lines.append(f"  ! {figures.count(count)} {which} of {name} {hold} no record")
    interesting = [event for event in state.events if event.level >= 2][-_EVENTS:]
    for event in interesting:
        lines.append(f"  {figures.clock(state.here(event.t))} {safe_line(event.line)}")
    crash = state.first_crash
    if crash is not None:
        where = f" ({safe_line(crash.where)})" if crash.where else ""
        lines.append(f"  failed first: thread {safe_line(crash.thread)}{where}")
        lines += [f"    {line}" for line in safe_lines(crash.traceback)[-_TRACEBACK:]]
    elif state.health.word.died:
        lines += [f"    {safe_line(line)}" for line in state.last_words]
    if state.diagnosis is not None:
        lines += [f"  cause: {state.diagnosis.what}", f"  what to do: {state.diagnosis.do}"]
    return lines


def _headline(state: RunState) -> str:
    age = state.news_age_s
    news = "nothing was heard of it yet" if age is None else f"news of {age_text(age)} ago"
    name = safe_line(state.run_id) or "run"
    return f"{name}  {safe_line(state.health.headline)}  ({news})"


def _as_of(age: float | None) -> str:
    return "" if age is None or age <= _OLD_S else f"as of {age_text(age)} ago"


def _training(state: RunState) -> list[str]:
    p = state.progress
    if p is None:
        return []
    lines = []
    if p.step is not None:
        step = f"step {figures.count(p.step)}"
        if p.steps:
            step += f" of {figures.count(p.steps)} ({figures.share(p.step / p.steps)})"
        if p.epoch is not None:
            step += f", epoch {p.epoch:.2f}"
        if not state.ended:
            step += f", {safe_line(p.phase).replace('_', ' ')}"
            if p.eta_s is not None:
                step += f", {figures.span(p.eta_s)} left"
            if old := _as_of(state.ages.progress):
                step += f", {old}"
        lines.append(step)
    loss = "NaN" if p.loss_is_nan else figures.decimal(p.loss)
    tau = figures.decimal(p.tau, 2)
    if p.tau is not None and p.tau_step is not None:
        tau += f" at step {figures.count(p.tau_step)}"
    if p.best_tau is not None and p.best_step != p.tau_step:
        tau += f", best {figures.decimal(p.best_tau, 2)} at step {figures.count(p.best_step)}"
    if p.step or p.loss_is_nan or (p.loss, p.tau) != (None, None):
        lines.append(
            f"loss {loss} (average {figures.decimal(p.loss_ema)}), tau {tau} "
            f"(in training {figures.decimal(p.tau_estimate, 2)})"
        )
    if p.step or p.execution:
        lines.append(
            f"{figures.short(p.tokens_per_s)} tokens/s, {figures.seconds(p.step_s)} a step, "
            f"{safe_line(p.execution) or 'execution not yet decided'}"
            f"{'' if p.mfu_share is None else f', MFU {figures.share(p.mfu_share)}'}"
        )
    if p.checkpoint_step is not None:
        age = state.container_age(p.checkpoint_t)
        when = "" if age is None else f", {figures.span(age)} ago"
        lines.append(f"checkpoint of step {figures.count(p.checkpoint_step)}{when}")
    return lines


def _where(state: RunState) -> list[str]:
    place = safe_line(state.place) or "?"
    lines = [f"job {safe_line(state.job_name) or '?'} on {place}, attempt {state.attempt}"]
    if state.gpus and (old := _as_of(state.ages.gpu)):
        lines.append(f"GPUs {old}:")
    for gpu in state.gpus:
        word = f"  {gpu.word}" if gpu.word else ""
        lines.append(
            f"GPU {'?' if gpu.index is None else gpu.index} {safe_line(gpu.name)}: "
            f"{figures.share(gpu.utilization_share)} busy, {figures.decimal(gpu.memory_used_gib, 1)} of "
            f"{figures.decimal(gpu.memory_total_gib, 1)} GiB{word}"
        )
    if not state.gpus and state.gpu_table.none_reason:
        lines.append(f"no GPU: {safe_line(state.gpu_table.none_reason)}")
    return lines
