"""One line for each event of `events.jsonl` and `supervisor.jsonl`, and how much it matters.

`step` events are not lines (they are the curves), everything else is. An unknown kind of another version
is shown by its name, since a reader that hides what it does not know hides the news.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable

from controller.figures import amount
from controller.run_records import Record, number, numbers, table, text, whole

KEPT = 300
"""Most events kept for the list; the newest."""

FEW_LEFT_OUT = 0.01
"""Part of a dataset that may be left out without a warning: nearly every set has some samples too long, and a
warning that stands on every screen all night hides the next one.
"""


class Level(enum.IntEnum):
    """How much an event matters."""

    INFO = 0
    GOOD = 1
    WARNING = 2
    BAD = 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line of the events list; `t` is Unix seconds of the container."""

    t: float | None
    kind: str
    level: Level
    line: str
    step: int | None = None


def events(records: Iterable[Record]) -> list[Event]:
    """The lines of `records`, without `step`."""
    return [_event(record) for record in records if text(record, "kind") not in _SILENT]


_SILENT = ("step",)


def _event(record: Record) -> Event:
    kind = text(record, "kind") or "?"
    level, line = _LINES.get(kind, _unknown)(record)
    return Event(t=number(record, "t"), kind=kind, level=level, line=line, step=whole(record, "step"))


Line = tuple[Level, str]


def _count(record: Record, key: str) -> str:
    value = whole(record, key)
    return "?" if value is None else f"{value:,}"


def _figure(record: Record, key: str, form: str) -> str:
    value = number(record, key)
    return "?" if value is None else format(value, form)


def _dataset(r: Record) -> Line:
    skipped = table(r, "skipped")
    left_out = sum(whole(skipped, why) or whole(table(skipped, why), "count") or 0 for why in skipped)
    line = f"{_count(r, 'samples')} samples, {_count(r, 'batches')} batches an epoch"
    line += f" (min={_count(r, 'batch_min')} max={_count(r, 'batch_max')}"
    line += f" avg={_figure(r, 'batch_mean', '.1f')})"
    if not left_out:
        return Level.INFO, line
    level = Level.WARNING if left_out > FEW_LEFT_OUT * (whole(r, "samples") or 0) else Level.INFO
    return level, f"{line}, {left_out:,} left out: {', '.join(map(str, skipped))}"


def _bucket(r: Record) -> Line:
    span = f"[{_count(r, 'low')}, {_count(r, 'high')})"
    share = number(r, "share")
    part = "" if share is None else f" ({share:.1%})"
    return Level.INFO, f"bucket {_count(r, 'bucket')} {span}: {_count(r, 'batches')} batches{part}"


def _roles(r: Record) -> Line:
    best = r.get("arithmetic")
    said = str(best[0]) if isinstance(best, list) and best else "?"
    return Level.INFO, f"roles {'taken' if r.get('taken') is True else 'proposed'}: {said}"


def _target(r: Record) -> Line:
    known = []
    if whole(r, "layers") is not None:  # a log of another program does not say it
        known.append(f"{_count(r, 'layers')} layers, width {_count(r, 'width')}")
    if number(r, "load_s") is not None:
        known.append(f"loaded in {_figure(r, 'load_s', '.1f')}s")
    said = f"target {_count(r, 'target')} on {text(r, 'device') or '?'}"
    return Level.INFO, ": ".join(filter(None, (said, ", ".join(known))))


def _target_ready(r: Record) -> Line:
    line = f"target {_count(r, 'target')} runs {text(r, 'execution') or '?'}"
    shapes = r.get("shapes")
    if isinstance(shapes, list) and shapes:
        many = f"{len(shapes)} graph{'s' * (len(shapes) != 1)}"
        line += f", {many} of {_figure(r, 'graphs_gib', '.1f')} GiB"
    timed = [(name, number(r, f"{name}_pass_s")) for name in ("eager", "graph")]
    shown = [f"{seconds * 1e3:.0f} ms {name}" for name, seconds in timed if seconds is not None]
    line += f", pass {', '.join(shown)}" if shown else ""
    reason = text(r, "reason")
    return Level.INFO, f"{line}: {reason}" if reason else line


def _compile(r: Record) -> Line:
    line = f"replica {_count(r, 'replica')} runs {text(r, 'execution') or '?'}"
    reason = text(r, "reason")
    timed = [(rung, number(r, f"{rung}_step_s")) for rung in ("eager", "compiled", "graph")]
    shown = [f"{seconds * 1e3:.0f} ms {rung}" for rung, seconds in timed if seconds is not None]
    if len(shown) > 1:
        line += f", step {', '.join(shown)}"
    return Level.INFO, f"{line}: {reason}" if reason else line


def _ready(r: Record) -> Line:
    line = f"replica {_count(r, 'replica')} ready on {text(r, 'device') or '?'}"
    if whole(r, "parameters") is not None:
        line += f", {_count(r, 'parameters')} parameters"
    if number(r, "warmup_s") is not None:
        line += f", warm-up {_figure(r, 'warmup_s', '.1f')}s"
    return Level.GOOD, line


def _start(r: Record) -> Line:
    if "steps" not in r:
        return Level.INFO, f"supervisor started (pid {_pid(r)})"
    return Level.INFO, (
        f"training starts: {_count(r, 'steps')} steps,"
        f" {_count(r, 'steps_per_epoch')} an epoch, {_count(r, 'rows_per_step')} rows a step"
    )


def _pid(r: Record) -> str:
    value = whole(r, "pid")
    return "?" if value is None else str(value)


def _eval(r: Record) -> Line:
    line = f"evaluation: tau {_figure(r, 'tau', '.3f')} over {_count(r, 'prompts')} prompts"
    line += f" in {_figure(r, 'eval_s', '.1f')}s"
    wrong = _unexplained(r)
    if wrong:
        return Level.BAD, f"{line}, {wrong:,} texts are not the target's own"
    if ties := whole(r, "diverged_allowed"):
        line += f", {ties:,} texts part at ties"
    return Level.GOOD, line


def _unexplained(r: Record) -> int | None:
    """Texts of an evaluation that are not the target's own and that rounding does not explain."""
    diverged = whole(r, "diverged")
    return None if diverged is None else diverged - (whole(r, "diverged_allowed") or 0)


def _checkpoint(r: Record) -> Line:
    size = number(r, "bytes")
    large = "" if size is None else f", {amount(int(size))}"
    seconds = _figure(r, "seconds", ".1f")
    return Level.GOOD, f"checkpoint of step {_count(r, 'step')}{large} in {seconds}s"


def _checkpoint_failed(r: Record) -> Line:
    return Level.BAD, f"checkpoint of step {_count(r, 'step')} not written: {text(r, 'error') or '?'}"


def _best(r: Record) -> Line:
    return Level.GOOD, f"best so far: tau {_figure(r, 'tau', '.3f')} at step {_count(r, 'step')}"


def _alarm(r: Record) -> Line:
    reason, step = text(r, "reason"), _count(r, "step")
    if reason == "leak_or_misalignment":
        return Level.BAD, (
            f"alarm at step {step}: training promises tau {_figure(r, 'tau_estimate', '.2f')}, decoding keeps"
            f" {_figure(r, 'tau', '.2f')}; a leaking mask, shifted features, or learned by heart"
        )
    detail = text(r, "detail")
    return Level.BAD, f"alarm at step {step}: {reason.replace('_', ' ') or '?'}" + (
        f": {detail}" if detail else ""
    )


def _unusable(r: Record) -> Line:
    sample = whole(r, "sample")
    return Level.WARNING, f"sample {'?' if sample is None else sample} left out: {text(r, 'reason') or '?'}"


def _nonfinite(r: Record) -> Line:
    samples = r.get("samples")
    which = f", samples {', '.join(map(str, samples[:5]))}" if isinstance(samples, list) else ""
    return Level.BAD, (
        f"loss or gradient not finite at step {_count(r, 'step')}, bucket {_count(r, 'bucket')}{which}"
    )


def _step_down(r: Record) -> Line:
    who = "target" if "target" in r else "replica"
    return Level.WARNING, (
        f"{who} {_count(r, who)} runs {text(r, 'new') or '?'} and no longer {text(r, 'old') or '?'}:"
        f" {text(r, 'reason') or 'no reason given'}"
    )


def _pipeline(r: Record) -> Line:
    names = ("targets_for_batches", "targets_for_room", "drafters_for_features")
    shares = [
        f"{name.replace('_', ' ')} {share:.0%}" for name in names if (share := number(r, name)) is not None
    ]
    found = text(r, "bottleneck") or "?"
    said = "neither side holds up the other" if found == "none" else f"bottleneck: {found}"
    return Level.INFO, f"step {_count(r, 'step')}: waits of {', '.join(shares) or '?'}; {said}"


def _recompile(r: Record) -> Line:
    return Level.WARNING, f"replica {_count(r, 'replica')} recompiled: {text(r, 'reason') or '?'}"


def _request(r: Record) -> Line:
    name = text(r, "request") or text(r, "name") or "?"
    by = text(r, "by")
    late = ", too late: the attempt before had ended" if r.get("late") is True else ""
    return Level.INFO, f"request: {name}" + (f" by {by}" if by else "") + late


def _crash(r: Record) -> Line:
    where = " ".join(filter(None, (text(r, "thread") or "?", text(r, "device"))))
    first = "first to fail: " if r.get("first") is True else "crashed: "
    return Level.BAD, f"{first}{where} at step {_count(r, 'step')}: {text(r, 'error')}"


def _end(r: Record) -> Line:
    how = text(r, "outcome") or text(r, "state") or "?"
    good = how in ("finished", "stopped")
    code = whole(r, "exit_code")
    line = f"end: {how}" + ("" if code is None else f", exit code {code}")
    reason = text(r, "reason")
    return Level.GOOD if good else Level.BAD, f"{line}, {reason}" if reason else line


def _trainer_started(r: Record) -> Line:
    return Level.INFO, f"trainer started (pid {_pid(r)}, attempt {_count(r, 'attempt')})"


def _trainer_exited(r: Record) -> Line:
    signal = text(r, "signal")
    code = whole(r, "exit_code")
    how = f"by {signal}" if signal else f"with exit code {'?' if code is None else code}"
    runtime = _figure(r, "runtime_s", ".0f")
    return Level.INFO if code in (0, 3) else Level.BAD, f"trainer ended {how} after {runtime}s"


def _restart(r: Record) -> Line:
    line = f"attempt {_count(r, 'attempt')} {text(r, 'state') or '?'}, the next one begins in"
    line += f" {_figure(r, 'wait_s', '.0f')}s ({_count(r, 'count')} of {_count(r, 'limit')})"
    reason = text(r, "reason")
    return Level.BAD, f"{line}: {reason}" if reason else line


def _resume(r: Record) -> Line:
    if "from_step" in r:  # the trainer's word, after the supervisor's
        path = text(r, "path")
        return Level.INFO, f"going on from {path}" if path else "no checkpoint yet: beginning at step 0"
    line = f"resumed as attempt {_count(r, 'attempt')}"
    by, payload, before = text(r, "by"), text(r, "payload"), text(r, "payload_before")
    line += f" by {by}" if by else ""
    if payload != before:
        line += f", payload {payload[:12]} instead of {before[:12] or '?'}"
    changes = [
        f"{key} {values[0]} to {values[1]}"
        for key, values in table(r, "changes").items()
        if isinstance(values, list) and len(values) == 2
    ]
    return Level.INFO, f"{line}, {', '.join(changes)}" if changes else line


def _signal(r: Record) -> Line:
    why = text(r, "why")
    level = Level.INFO if why.startswith("asked ") else Level.WARNING  # somebody's own wish is no warning
    return level, f"{text(r, 'name') or '?'} sent" + (f": {why}" if why else "")


def _gpu_problem(r: Record) -> Line:
    return Level.WARNING, f"GPU telemetry: {text(r, 'text') or text(r, 'reason') or '?'}"


def _unknown(r: Record) -> Line:
    return Level.INFO, text(r, "kind") or "?"


_LINES: dict[str, Callable[[Record], Line]] = {
    "dataset": _dataset,
    "bucket": _bucket,
    "roles": _roles,
    "target": _target,
    "target_ready": _target_ready,
    "compile": _compile,
    "ready": _ready,
    "start": _start,
    "eval": _eval,
    "checkpoint": _checkpoint,
    "checkpoint_failed": _checkpoint_failed,
    "best": _best,
    "alarm": _alarm,
    "unusable": _unusable,
    "nonfinite": _nonfinite,
    "pipeline": _pipeline,
    "recompile": _recompile,
    "step_down": _step_down,
    "request": _request,
    "crash": _crash,
    "end": _end,
    "trainer_started": _trainer_started,
    "trainer_exited": _trainer_exited,
    "signal": _signal,
    "restart": _restart,
    "resume": _resume,
    "gpu_problem": _gpu_problem,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One evaluation by real decoding; `by_kind` holds (kind of prompt, tau, prompts)."""

    attempt: int
    step: int | None
    tau: float | None
    tau_macro: float | None
    acceptance: tuple[float | None, ...]
    prompts: int | None
    unexplained: int | None
    """Texts that are not the target's own by more than a tie: decoding was not lossless."""
    tokens_per_s: float | None
    plain_tokens_per_s: float | None
    by_kind: tuple[tuple[str, float | None, int | None], ...]


def evaluation(record: Record) -> Evaluation:
    """The record of an `eval` event."""
    kinds = table(record, "by_kind")
    return Evaluation(
        attempt=whole(record, "attempt") or 1,
        step=whole(record, "step"),
        tau=number(record, "tau"),
        tau_macro=number(record, "tau_macro"),
        acceptance=numbers(record, "acceptance"),
        prompts=whole(record, "prompts"),
        unexplained=_unexplained(record),
        tokens_per_s=number(record, "tokens_per_s"),
        plain_tokens_per_s=number(record, "plain_tokens_per_s"),
        by_kind=tuple(
            (str(kind), number(table(kinds, kind), "tau"), whole(table(kinds, kind), "prompts"))
            for kind in kinds
        ),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """What the `dataset` event says."""

    path: str
    samples: int | None
    usable: int | None
    tokens: int | None
    batches: int | None


def dataset(record: Record) -> Dataset:
    """The record of a `dataset` event."""
    return Dataset(
        path=text(record, "path"),
        samples=whole(record, "samples"),
        usable=whole(record, "usable"),
        tokens=whole(record, "tokens"),
        batches=whole(record, "batches"),
    )
