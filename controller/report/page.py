"""The page, in the order of what is asked: is it well, what did it learn, why did it die; then the rest."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from controller import __version__, figures
from controller.diagnose import alarms
from controller.health import SHAPES, Word, age_text
from controller.report import tables
from controller.report.markup import Markup, el, join, lines, text
from controller.report.plots import plots
from controller.report.style import CSS, SCRIPT, policy
from controller.run_records import Crash, number, whole
from controller.run_state import RunState
from controller.text import safe_lines

_STATE_CLASSES = {
    Word.LIVE: "good", Word.FINISHED: "blue", Word.STOPPED: "blue", Word.FAILED: "dead", Word.KILLED: "dead",
    Word.LOST: "dead", Word.LAUNCHING: "busy", Word.STOPPING: "busy", Word.ENDING: "busy",
    Word.RESTARTING: "busy", Word.STALLED: "away",
}  # fmt: skip


def report_page(state: RunState, log: Sequence[str], *, log_left_out: int = 0) -> str:
    """The report on the run in `state` as an HTML document; `log`: the last lines of its log.

    `log_left_out`: how many bytes of the log stand before them.
    """
    figures_ = plots(state)
    body = [
        _head(state),
        _facts(state),
        *(
            el("p", el("b", one.what), " ", one.do, class_="alarm")
            for one in alarms(state.progress)
            if not state.ended
        ),
        _crash(state),
        _section("Curves", el("div", *figures_, class_="plots") if figures_ else None),
        _section("Length buckets", tables.buckets(state)),
        _section("GPUs", tables.gpus(state)),
        _section("Evaluations", tables.evaluations(state)),
        _section("Checkpoints", tables.checkpoints(state)),
        _section("Attempts", tables.attempts(state)),
        _section("Threads", tables.threads(state)),
        _section("Configuration", tables.configuration(state)),
        _section("Events", _folded(tables.events(state), f"{len(state.events)} events, newest first")),
        _section("Log", _log(log, log_left_out)),
        el(
            "footer",
            f"dflashctl {__version__}, {_when(state.now)}. The page loads nothing and sends nothing.",
        ),
    ]
    title = f"{state.run_id or state.job_name or 'run'} {state.health.headline}"
    document = el(
        "html",
        el(
            "head",
            el("meta", charset="utf-8"),
            el("meta", http_equiv="Content-Security-Policy", content=policy()),
            el("meta", name="viewport", content="width=device-width,initial-scale=1"),
            el("title", title),
            el("style", Markup(CSS)),
        ),
        el("body", *body, el("script", Markup(SCRIPT))),
        lang="en",
    )
    return f"<!DOCTYPE html>\n{document}\n"


def _section(title: str, content: Markup | None) -> Markup:
    return join([el("h2", title), content]) if content else Markup()


def _folded(content: Markup | None, summary: str) -> Markup | None:
    return el("details", el("summary", summary), content) if content else None


def _when(t: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(t))


def _head(state: RunState) -> Markup:
    health = state.health
    shape = SHAPES[health.word]
    style = _STATE_CLASSES.get(health.word, "away")
    said = []
    if health.word.no_news and health.written:
        said.append(f"was {health.written}")
    if health.news_age_s is not None and not state.ended:
        said.append(f"as of {age_text(health.news_age_s)} before this page was made")
    if health.detail:
        said.append(health.detail)
    where = " on ".join(filter(None, (state.job_name, state.place or state.host)))
    begun = f"launched {tables.moment(state.created, state)}" if state.created else ""
    attempt = f"attempt {state.attempt}" if state.attempt > 1 else ""
    return join([
        el("span", f"{shape} {health.headline}", class_=f"state {style}"),
        el("h1", state.run_id or state.job_name or "run"),
        el("p", ", ".join(filter(None, (where, begun, attempt))), class_="soft"),
        el("p", "; ".join(said)) if said else None,
    ])  # fmt: skip


def _facts(state: RunState) -> Markup:
    """The few numbers that say whether it is well."""
    p, outcome = state.progress, state.outcome or {}
    facts: list[tuple[str, str, str]] = []
    if p is not None:
        share = f"{p.step / p.steps:.0%} of {p.steps:,}" if p.step is not None and p.steps else ""
        facts.append(("step", figures.count(p.step), share))
        first = number(outcome, "loss_first")
        facts.append((
            "loss", "NaN" if p.loss_is_nan else figures.decimal(p.loss),
            f"average {figures.decimal(p.loss_ema)}" + (f", first {figures.decimal(first)}" if first else ""),
        ))  # fmt: skip
        at = f"decoded at step {figures.count(p.tau_step)}" if p.tau_step is not None else "not decoded yet"
        facts.append(("tau", figures.decimal(p.tau, 3), at))
        if p.best_tau is not None:
            facts.append(
                ("best tau", figures.decimal(p.best_tau, 3), f"at step {figures.count(p.best_step)}")
            )
        facts.append(("tau, estimated", figures.decimal(p.tau_estimate, 3), "on training blocks"))
        speed = (
            f"{figures.seconds(p.step_s)} a step, {p.execution}" if p.execution else figures.seconds(p.step_s)
        )
        facts.append(("tokens/s", figures.short(p.tokens_per_s), speed))
        facts.append(
            ("tokens", figures.short(p.tokens), f"MFU {figures.share(p.mfu_share)}" if p.mfu_share else "")
        )
    seconds = number(outcome, "seconds")
    if seconds is not None:
        facts.append(("took", figures.span(seconds), f"{figures.count(whole(outcome, 'step'))} steps"))
    elif p is not None and p.eta_s is not None and not state.ended:
        facts.append(("to go", figures.span(p.eta_s), "at this rate"))
    if p is not None and p.checkpoint_step is not None:
        facts.append(("checkpoint", figures.count(p.checkpoint_step), tables.moment(p.checkpoint_t, state)))
    return el(
        "div",
        *(el("div", el("span", name), el("b", value), el("small", note)) for name, value, note in facts),
        class_="facts",
    )


def _crash(state: RunState) -> Markup | None:
    if not state.has_crash:
        return None
    crash, diagnosis = state.first_crash, state.diagnosis
    parts: list[Markup | None] = []
    if crash is not None:
        parts += [
            el("p", el("b", crash.thread or "a thread"), _where(crash), " failed first"),
            el("p", crash.error, class_="error"),
        ]
    else:
        said = state.health.detail or "no thread wrote a traceback"
        parts.append(el("p", f"{state.health.headline}: {said}", class_="error"))
    if diagnosis is not None:
        rows = (("what", diagnosis.what), ("why", diagnosis.why), ("do", diagnosis.do))
        parts.append(el("dl", *(join([el("dt", name), el("dd", said)]) for name, said in rows)))
    for number_, one in enumerate(state.crashes):
        if number_:
            parts.append(el("h3", one.thread or "a thread", _where(one), " failed after it"))
        if one.samples:
            parts.append(el("p", f"samples {one.samples}", class_="soft"))
        parts.append(el("pre", traceback_markup(one.traceback)))
        if one.memory:
            parts += [el("h3", "Memory at that moment"), el("pre", lines(safe_lines(one.memory)))]
    return join([el("h2", "How it died"), el("div", *parts, class_="crash")])


def _where(crash: Crash) -> str:
    found = f" ({crash.where})" if crash.where else ""
    found += "" if crash.step is None else f", step {crash.step:,}"
    return found + ("" if crash.bucket is None else f", bucket {crash.bucket}")


_FRAME = re.compile(r'\s*File "')


def traceback_markup(traceback: str) -> Markup:
    """A traceback with this project's frames marked."""
    rows = []
    own = False
    found = safe_lines(traceback)
    for place, content in enumerate(found):
        if _FRAME.match(content):
            own = "/remote_payload/" in content
            rows.append(el("span", Markup(lines([content])), class_="own" if own else "away"))
        elif place == len(found) - 1:
            rows.append(el("span", Markup(lines([content])), class_="bad"))
        else:
            rows.append(lines([content]) if own or not content.startswith(" ") else
                        el("span", lines([content]), class_="away"))  # fmt: skip
    return Markup("\n".join(rows))


def _log(log: Sequence[str], left_out: int) -> Markup | None:
    if not log:
        return None
    before = f"the last {len(log):,} lines; {figures.short(left_out)} bytes stand before them"
    return join(
        [el("p", text(before) if left_out else text("all of it"), class_="soft"), el("pre", lines(log))]
    )
