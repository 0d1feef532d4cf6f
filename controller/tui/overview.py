"""The first lines of the screen, in the order an operator looks: is it alive and how old is this; does it
learn; how fast; who waits for whom.

State and age come first on their line, because a narrow terminal cuts its right end. Every function is
pure: a `RunState` and a width in columns to lines.
"""

from __future__ import annotations

from rich.style import Style
from rich.text import Text

from controller.diagnose import alarms
from controller.health import Word, age_text
from controller.run_events import Level
from controller.run_records import Record, number, whole
from controller.run_records import text as remote_text
from controller.run_state import RunState
from controller.tui import figures
from controller.tui.lines import line, remote
from controller.tui.palette import (
    BAD,
    FAINT,
    GOOD,
    LABEL,
    PLAIN,
    RULE_STYLE,
    STATES,
    VALUE,
    WARN,
)

PROGRESS_STALE_S = 10.0
"""The trainer writes its progress once a second."""

ROOMY_COLUMNS = 90
"""From this width on lines also have what is only nice to know."""

WIDE_COLUMNS = 120
"""And from this one on what is longer."""

DEAD_WORDS = (Word.FAILED, Word.KILLED, Word.LOST)


def is_stale(state: RunState) -> bool:
    """Whether what the panels show is old: no news, or no progress although the run goes on."""
    if state.ended:
        return False
    age = state.ages.progress
    return state.health.word.no_news or (age is not None and age > PROGRESS_STALE_S)


def status_line(state: RunState, width: int) -> Text:
    """State and age, then run, place, step and what is left."""
    health = state.health
    shape, style = STATES[health.word]
    age = health.news_age_s
    chip = f" {shape} {health.headline} "
    if health.word in (Word.LIVE, Word.LAUNCHING, Word.STOPPING, Word.ENDING) and age is not None:
        chip = f" {shape} {health.headline} {age_text(age)} "
    text = line((chip, style))
    if health.word.no_news and health.written:
        text.append(f" was {health.written}", style=WARN)
        if health.word is not Word.STALE and age is not None:
            text.append(f" {age_text(age)} ago", style=WARN)
    elif state.ended:
        ended = state.container_age(_end_time(state))
        if ended is not None:
            text.append(f" {figures.span(ended)} ago", style=LABEL)
    progress = state.progress
    parts: list[Text] = []
    if state.attempt > 1:
        parts.append(line(("attempt ", LABEL), (figures.count(state.attempt), VALUE)))
    if progress is not None and progress.step is not None:
        step = line(("step ", LABEL), (figures.count(progress.step), VALUE))
        if progress.steps:
            step.append(f"/{figures.count(progress.steps)}", style=PLAIN)
            step.append(f" {progress.step / progress.steps:.0%}", style=VALUE)
        parts.append(step)
    if progress is not None and not state.ended:
        if progress.phase and progress.phase != "training":
            parts.append(remote(progress.phase.replace("_", " "), WARN))
        if progress.eta_s is not None:
            parts.append(line(("ETA ", LABEL), (figures.span(progress.eta_s), VALUE)))
    name = state.run_id or "no run id yet"
    where = state.place or state.host
    parts.insert(0, line(remote(where, LABEL), " " if where else "", remote(name, VALUE)))
    for part in parts:
        text.append(" │ ", style=RULE_STYLE)
        text.append_text(part)
    return text


def _end_time(state: RunState) -> float | None:
    for event in reversed(state.supervisor_events):
        if event.kind == "end":
            return event.t
    return state.progress.t if state.progress else None


def learning_line(state: RunState, width: int) -> Text:
    """Loss and its average, acceptance length by decoding and by training's estimate, gradient, rate."""
    if state.ended and state.outcome is not None and number(state.outcome, "loss_last") is not None:
        return _outcome_line(state.outcome)
    p = state.progress
    if p is None:
        return line((_waiting_for(state), LABEL))
    value = _value_style(state)
    text = line(("loss ", LABEL))
    if p.loss_is_nan:
        text.append("NaN", style=BAD)
    else:
        text.append(figures.decimal(p.loss), style=value)
    text.append(f" (ema {figures.decimal(p.loss_ema)})", style=LABEL)
    text.append("  tau ", style=LABEL)
    text.append(figures.decimal(p.tau, 2), style=value)
    if p.tau_step is not None and p.tau is not None:
        text.append(f" @{figures.count(p.tau_step)}", style=LABEL)
    text.append(f" (train {figures.decimal(p.tau_estimate, 2)})", style=LABEL)
    if p.best_tau is not None and p.best_step != p.tau_step and width >= WIDE_COLUMNS:
        text.append(f" best {figures.decimal(p.best_tau, 2)} @{figures.count(p.best_step)}", style=LABEL)
    text.append("  gnorm ", style=LABEL)
    text.append(figures.decimal(p.gradient_norm, 2), style=value)
    text.append("  lr ", style=LABEL)
    text.append(figures.scientific(p.learning_rate), style=value)
    if p.epoch is not None and width >= ROOMY_COLUMNS:
        text.append("  epoch ", style=LABEL)
        text.append(f"{p.epoch:.2f}", style=value)
    return text


def _outcome_line(outcome: Record) -> Text:
    """What the whole run achieved, by its own last word."""
    text = line()
    for name, first, last, places in (
        ("loss", "loss_first", "loss_last", 3),
        ("  tau", "tau_before", "tau_after", 2),
    ):
        text.append(f"{name} ", style=LABEL)
        text.append(f"{figures.decimal(number(outcome, first), places)} → ", style=LABEL)
        text.append(figures.decimal(number(outcome, last), places), style=VALUE)
    text.append("  in ", style=LABEL)
    text.append(figures.span(number(outcome, "seconds")), style=VALUE)
    best = number(outcome, "best_tau")
    if best is not None:
        step = figures.count(whole(outcome, "best_step"))
        text.append(f"  best {figures.decimal(best, 2)} @{step}", style=LABEL)
    checkpoint = remote_text(outcome, "checkpoint")
    if checkpoint:
        text.append_text(line(("  ", LABEL), remote(checkpoint, LABEL)))
    return text


def _waiting_for(state: RunState) -> str:
    if state.health.word.no_news or state.ended:
        return "no progress was ever heard of this run"
    return "waiting for the trainer's first progress record"


def _value_style(state: RunState) -> Style:
    return FAINT if is_stale(state) else VALUE


def speed_line(state: RunState, width: int) -> Text:
    """Rate, step time, how it runs, MFU, recompiles, the newest checkpoint, and alarms."""
    p = state.progress
    if p is None:
        return remote(state.health.detail, LABEL)
    value = _value_style(state)
    text = line(("tok/s ", LABEL), (figures.short(p.tokens_per_s), value))
    text.append("  step ", style=LABEL)
    text.append(figures.seconds(p.step_s), style=value)
    if p.execution:
        text.append_text(line(" ", remote(p.execution, LABEL)))
    if p.mfu_share is not None:
        text.append("  MFU ", style=LABEL)
        text.append(figures.share(p.mfu_share), style=value)
    if p.recompiles or width >= ROOMY_COLUMNS:
        text.append("  recompiles ", style=LABEL)
        text.append(figures.count(p.recompiles), style=WARN if p.recompiles else value)
    text.append("  ckpt ", style=LABEL)
    if p.checkpoint_step is None:
        text.append("none", style=value)
    else:
        text.append(figures.count(p.checkpoint_step), style=value)
        ago = figures.span(state.container_age(p.checkpoint_t))
        text.append(f" ({ago} ago)" if width >= ROOMY_COLUMNS else f" ({ago})", style=LABEL)
    warnings = sum(1 for event in state.history.events if event.level >= Level.WARNING)
    if warnings:
        text.append(f"  ! {warnings} event{'s' * (warnings != 1)}", style=WARN)
    return text


def detail_line(state: RunState, width: int) -> Text | None:
    """Why the state is what it is, or the worst alarm of a run that goes on; None: nothing to say."""
    health = state.health
    found = alarms(state)
    if found and not (state.ended or health.word.no_news):
        return line(("! ", WARN), (f"{found[0].what} {found[0].do}", WARN))
    if not health.detail:
        return None
    if health.word.no_news:
        return line(("  ", PLAIN), remote(health.detail, WARN))
    if health.word in DEAD_WORDS:
        return line(("  ", PLAIN), remote(health.detail, BAD))
    if health.word in (Word.STALLED, Word.ENDING, Word.STOPPING, Word.STOPPED):
        return line(("  ", PLAIN), remote(health.detail, LABEL))
    return None


def flow_line(state: RunState, width: int) -> Text:
    """The pipeline with its queues: who waits for whom, and so who is the bottleneck."""
    p = state.progress
    if p is None or not (p.queues or p.targets_wait_share is not None):
        return line(("pipeline: no figures yet", LABEL))
    queues = {queue.name: queue for queue in p.queues}
    value = _value_style(state)
    text = line(("reader", PLAIN))

    def queue(name: str) -> None:
        text.append(" ▸ ", style=RULE_STYLE)
        q = queues.get(name)
        if q is None or q.depth is None or not q.capacity:
            text.append("[–]", style=LABEL)
            return
        cells = min(q.capacity, 8)
        full = round(cells * min(1.0, q.depth / q.capacity))
        text.append("▰" * full + "▱" * (cells - full), style=value)
        if width >= ROOMY_COLUMNS:
            text.append(f" {q.depth}/{q.capacity}", style=LABEL)
        text.append(" ▸ ", style=RULE_STYLE)

    queue("batches")
    text.append("targets ", style=PLAIN)
    text.append(f"wait {figures.share(p.targets_wait_share)}", style=value)
    queue("features")
    text.append("drafters ", style=PLAIN)
    text.append(f"wait {figures.share(p.drafters_wait_share)}", style=value)
    verdict = _bottleneck(p.targets_wait_share, p.drafters_wait_share)
    if verdict and not state.ended:
        text.append(f"  {verdict}", style=FAINT if is_stale(state) else GOOD)
    return text


def _bottleneck(targets: float | None, drafters: float | None) -> str:
    """Who waits least holds the others up; a difference below ten points says nothing."""
    if targets is None or drafters is None:
        return ""
    if drafters - targets >= 0.1:
        return "targets limit"
    if targets - drafters >= 0.1:
        return "drafters limit"
    return "reader limits" if min(targets, drafters) > 0.3 else "balanced"
