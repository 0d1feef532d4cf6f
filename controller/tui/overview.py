"""The first lines of the screen, in the order an operator looks: is it alive and how old is this; does it
learn; how fast; who waits for whom.

State and age come first on their line, because a narrow terminal cuts its right end. Every function is
pure: a `RunState` and a width in columns to lines.
"""

from __future__ import annotations

from collections import Counter

from rich.style import Style
from rich.text import Text

from controller import figures
from controller.diagnose import alarms
from controller.health import Word, age_text
from controller.run_events import Level
from controller.run_records import Progress, Record, number, whole
from controller.run_records import text as remote_text
from controller.run_state import RunState
from controller.tui.lines import Part, fitted, hanging, line, remote, shortened
from controller.tui.palette import (
    BAD,
    FAINT,
    GOOD,
    LABEL,
    PLAIN,
    STATES,
    VALUE,
    WARN,
)

PROGRESS_STALE_S = 10.0
"""The trainer writes its progress once a second."""

MOST_DETAIL_ROWS = 3
"""Of what is wrong and what to do about it: at 80 columns every alarm's advice is whole."""

_WORKERS = ("target", "drafter")


def age_mark(state: RunState, age: float | None, stale_s: float) -> Text:
    """How old the data of a line is; says so in words when it is old."""
    if age is None or state.ended:
        return line()
    if age > stale_s:
        return line((f"○ stale {age_text(age)}", WARN))
    return line((age_text(age), LABEL))


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
    first = line(remote(chip, style))  # the headline may have the name of a signal, as the container wrote it
    if health.word.no_news and health.written:
        first.append_text(remote(f" was {health.written}", WARN))
        if health.word is not Word.STALE and age is not None:
            first.append(f" {age_text(age)} ago", style=WARN)
    elif state.ended:
        ended = state.container_age(_end_time(state))
        if ended is not None:
            first.append(f" {figures.span(ended)} ago", style=LABEL)
    name = shortened(remote(state.run_id or "no run id yet").plain, max(20, width // 3))
    where = shortened(remote(state.place or state.host).plain, max(12, width // 5))
    parts: list[Part] = [(0, "", first), (3, " │ ", line((name, VALUE)))]
    if state.hosts > 1:
        parts.append((4, " ", line((f"host {state.rank + 1}/{state.hosts}", WARN))))
    if where:
        parts.append((7, " ", line((where, LABEL))))
    if state.attempt > 1:
        parts.append((6, " │ ", line(("attempt ", LABEL), (figures.count(state.attempt), VALUE))))
    progress, value = state.progress, _value_style(state)
    if progress is not None and progress.step is not None:
        parts.append((1, " │ ", line(("step ", LABEL), (figures.count(progress.step), value))))
        if progress.steps:
            parts.append((5, "", line((f"/{figures.count(progress.steps)}", LABEL))))
            parts.append((2, " ", line((f"{progress.step / progress.steps:.0%}", value))))
    if progress is not None and not state.ended:
        if progress.phase not in ("", "training"):
            parts.append((2, " │ ", line((_phase(progress), WARN))))
        elif progress.eta_s is not None:
            parts.append((4, " │ ", line(("ETA ", LABEL), (figures.span(progress.eta_s), value))))
    return fitted(parts, width)


def _phase(progress: Progress) -> str:
    """What is done before the first step or after the last, and how far it is where a thread says so."""
    phase = remote(progress.phase).plain.replace("_", " ")
    said = (remote(thread.state).plain for thread in progress.threads)
    return next((state for state in said if state.startswith(f"{phase} ")), phase)


def _end_time(state: RunState) -> float | None:
    for event in reversed(state.supervisor_events):
        if event.kind == "end":
            return event.t
    return state.progress.t if state.progress else None


def learning_line(state: RunState, width: int) -> Text:
    """Loss and its average, acceptance length by decoding and by training's estimate, gradient, rate."""
    if state.ended and state.outcome is not None and number(state.outcome, "loss_last") is not None:
        return _outcome_line(state.outcome, width)
    p = state.progress
    if p is None:
        return line((_waiting_for(state), LABEL))
    mark = age_mark(state, state.ages.progress, PROGRESS_STALE_S)
    if p.loss is None and not p.loss_is_nan and p.phase in ("loading", "warming_up"):
        return fitted([(0, "", _beginning(state, p))], width, mark)
    value = _value_style(state)
    beside = FAINT if value is FAINT else PLAIN
    loss = line(("loss ", LABEL))
    loss.append("NaN" if p.loss_is_nan else figures.decimal(p.loss), style=BAD if p.loss_is_nan else value)
    parts: list[Part] = [(0, "", loss), (3, " ", _figure("ema", figures.decimal(p.loss_ema), beside))]
    tau = _figure("tau", figures.decimal(p.tau, 2), value)
    parts.append((1, "  ", tau))
    if p.tau_step is not None and p.tau is not None:
        parts.append((6, "", line((f"@{figures.short(p.tau_step)}", LABEL))))
    parts.append((2, " ", _figure("est", figures.decimal(p.tau_estimate, 2), beside)))
    if p.best_tau is not None:
        parts.append((4, " ", _figure("best", figures.decimal(p.best_tau, 2), beside)))
        if p.best_step is not None and p.best_step != p.tau_step:
            parts.append((8, "", line((f"@{figures.short(p.best_step)}", LABEL))))
    parts.append((5, "  ", _figure("gnorm", figures.decimal(p.gradient_norm, 2), value)))
    parts.append((7, "  ", _figure("lr", figures.scientific(p.learning_rate), value)))
    if p.epoch is not None:
        parts.append((9, "  ", _figure("epoch", f"{p.epoch:.2f}", value)))
    return fitted(parts, width, mark)


def _figure(name: str, shown: str, style: Style) -> Text:
    return line((f"{name} ", LABEL), (shown, style))


def _beginning(state: RunState, p: Progress) -> Text:
    """What the threads are at before the first step: `loading since 27s: 6 × loading, 2 × waiting`."""
    text = line((_phase(p), WARN))
    begun = state.container_age(state.attempts[-1].begun) if state.attempts else None
    text.append(": " if begun is None else f" since {figures.span(begun)}: ", style=LABEL)
    found = Counter(remote(thread.state).plain for thread in p.threads if thread.role in _WORKERS)
    shown = [f"{count} × {state}" for state, count in found.most_common(4)]
    text.append(", ".join(shown) if shown else "no thread has begun", style=PLAIN)
    return text


def _outcome_line(outcome: Record, width: int) -> Text:
    """What the whole run achieved, by its own last word."""
    parts: list[Part] = []
    for goes, name, first, last, places in (
        (0, "loss", "loss_first", "loss_last", 3),
        (1, "tau", "tau_before", "tau_after", 2),
    ):
        text = line((f"{name} {figures.decimal(number(outcome, first), places)} → ", LABEL))
        text.append(figures.decimal(number(outcome, last), places), style=VALUE)
        parts.append((goes, "  ", text))
    spent = figures.span(number(outcome, "seconds"))
    parts.append((3, "  ", line(("in ", LABEL), (spent, VALUE))))
    best = number(outcome, "best_tau")
    if best is not None:
        step = figures.count(whole(outcome, "best_step"))
        parts.append((2, "  ", line((f"best {figures.decimal(best, 2)} @{step}", LABEL))))
    checkpoint = remote_text(outcome, "checkpoint")
    if checkpoint:
        parts.append((4, "  ", remote(checkpoint, LABEL)))
    return fitted(parts, width)


def _waiting_for(state: RunState) -> str:
    if state.health.word.no_news or state.ended:
        return "no progress was ever heard of this run"
    return "waiting for the trainer's first progress record"


def _value_style(state: RunState) -> Style:
    return FAINT if is_stale(state) else VALUE


def speed_line(state: RunState, width: int) -> Text:
    """Rate, step time, how it runs, MFU, recompiles, the newest checkpoint, and events that warn."""
    p = state.progress
    if p is None:
        return remote(state.health.detail, LABEL)
    value = _value_style(state)
    parts: list[Part] = [
        (0, "", _figure("tok/s", figures.short(p.tokens_per_s), value)),
        (1, "  ", _figure("step", figures.seconds(p.step_s), value)),
    ]
    if p.execution:
        parts.append((6, " ", remote(p.execution, LABEL)))
    if p.mfu_share is not None:
        parts.append((4, "  ", _figure("MFU", figures.share(p.mfu_share), value)))
    if p.recompiles is not None:  # a log that is no run's says nothing of them, nor of checkpoints
        recompiled = _figure("recompiles", figures.count(p.recompiles), WARN if p.recompiles else value)
        parts.append((2 if p.recompiles else 9, "  ", recompiled))
        if p.checkpoint_step is None:
            parts.append((3, "  ", _figure("ckpt", "none", value)))
    if p.checkpoint_step is not None:
        parts.append((3, "  ", _figure("ckpt", figures.count(p.checkpoint_step), value)))
        ago = figures.span(state.container_age(p.checkpoint_t))
        parts.append((5, " ", line((f"{ago} ago", LABEL))))
    if p.anchor_coverage_share is not None:
        parts.append((9, "  ", _figure("anchors", figures.share(p.anchor_coverage_share), value)))
    warnings = sum(1 for event in state.history.events if event.level >= Level.WARNING)
    if warnings:
        parts.append((1, "  ", line((f"! {warnings} event{'s' * (warnings != 1)}", WARN))))
    return fitted(parts, width)


def detail_lines(state: RunState, width: int, rows: int = MOST_DETAIL_ROWS) -> list[Text]:
    """Why the state is what it is, or the alarms of a run that goes on and what to do about the worst.

    At most `rows` lines, the last of them marked when there is more to say; none: there is nothing to say.
    """
    health = state.health
    found = alarms(state.progress)
    lead, style = line(("  ", PLAIN)), LABEL
    if found and not (state.ended or health.word.no_news):
        worst, *others = found
        also = " Also: " + " ".join(one.what for one in others) if others else ""
        lead, style, said = line(("! ", WARN)), WARN, f"{worst.what} {worst.do}{also}"
    elif not health.detail:
        return []
    elif health.word.no_news:
        style, said = WARN, health.detail
    elif health.word.died:
        style, said = BAD, health.detail
    elif health.word is Word.STALLED:
        known = health.silent != "supervisor" and state.progress is not None and state.progress.threads
        style, said = WARN, f"{health.detail}{': 3 shows where each thread was' if known else ''}"
        said += f". {state.diagnosis.do}" if state.diagnosis else ""
    elif health.word in (Word.ENDING, Word.STOPPING, Word.STOPPED):
        said = health.detail
    else:
        return []
    lines = hanging(lead, remote(said, style), width)
    if len(lines) > rows > 0:
        lines[rows - 1].append(" …", style=style)
        lines[rows - 1].truncate(width, overflow="ellipsis")
    return lines[:rows]


def flow_line(state: RunState, width: int) -> Text:
    """The pipeline with its queues: who waits for whom, and so who is the bottleneck."""
    p = state.progress
    if p is None or not (p.queues or p.targets_wait_share is not None):
        return line(("pipeline: no figures yet", LABEL))
    value = _value_style(state)
    text = line()
    for cells in (4, 1, 0, -1, -2):
        text = _flow(state, p, value, cells)
        if text.cell_len <= width:
            break
    return text


def _flow(state: RunState, p: Progress, value: Style, cells: int) -> Text:
    """The flow with bars of `cells` cells at its queues; -1: without spaces, -2: without a verdict."""
    arrow = " ▸ " if cells >= 0 else "▸"
    queues = {queue.name: queue for queue in p.queues}
    workers = Counter(thread.role for thread in p.threads)
    text = line(("reader", PLAIN))

    def queue(name: str) -> None:
        text.append(arrow, style=LABEL)
        q = queues.get(name)
        if q is None or q.depth is None or not q.capacity:
            text.append("–", style=LABEL)
        else:
            filled = min(1.0, q.depth / q.capacity)
            if cells > 1:
                full = round(cells * filled)
                text.append("▰" * full + "▱" * (cells - full) + " ", style=value)
            elif cells == 1:
                text.append("▁▂▃▄▅▆▇█"[min(7, round(7 * filled))] + " ", style=value)
            text.append(f"{q.depth}/{q.capacity}", style=value)
        text.append(arrow, style=LABEL)

    def side(role: str, waiting: float | None) -> None:
        many = workers[role]
        text.append(f"{many} {role}{'s' * (many != 1)}" if many else f"{role}s", style=PLAIN)
        text.append(" wait ", style=LABEL)
        text.append(figures.share(waiting), style=value)

    queue("batches")
    side("target", p.targets_wait_share)
    queue("features")
    side("drafter", p.drafters_wait_share)
    verdict = _bottleneck(p.targets_wait_share, p.drafters_wait_share)
    if verdict and not state.ended and cells > -2:
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
