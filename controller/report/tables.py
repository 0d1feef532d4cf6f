"""The report's tables: buckets, GPUs, evaluations, checkpoints, attempts, threads, events, configuration."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from controller import figures
from controller.gpu_state import GpuWord, gpu_role
from controller.health import age_text
from controller.job_table import job_table
from controller.report.markup import Child, Markup, el
from controller.run_events import Level
from controller.run_state import RunState

Column = tuple[str, bool]
"""A heading, and whether its cells are numbers."""


def table(columns: Sequence[Column], rows: Iterable[tuple[str, Sequence[Child]]]) -> Markup:
    """A table; each row has a class (or an empty one) and its cells."""
    head = [el("th", name, class_="n" if number else None) for name, number in columns]
    body = [
        el(
            "tr",
            *(
                el("td", cell, class_="n" if number else None)
                for cell, (_, number) in zip(cells, columns, strict=True)
            ),
            class_=style or None,
        )
        for style, cells in rows
    ]
    return el("div", el("table", el("thead", el("tr", *head)), el("tbody", *body)), class_="scroll")


def moment(t: float | None, state: RunState) -> str:
    """The container's time `t` as this machine's date and time."""
    return figures.UNKNOWN if t is None else figures.clock(state.here(t), "%Y-%m-%d %H:%M:%S")


def _meter(share: float | None) -> Markup | None:
    if share is None:
        return None
    return el("span", el("i", style=f"width:{min(1.0, max(0.0, share)) * 100:.1f}%"), class_="meter")


def buckets(state: RunState) -> Markup | None:
    """What the length buckets hold and how they train."""
    found = state.progress.buckets if state.progress else ()
    if not found:
        return None
    total = sum(bucket.batches or 0 for bucket in found)
    rows = []
    for one in found:
        part = (one.batches or 0) / total if total else one.planned_share
        high = figures.count(one.high) if one.high is not None else "∞"
        rows.append((
            "",
            [f"{one.bucket}", f"[{figures.count(one.low)}, {high})", figures.count(one.batches),
             figures.count(one.planned), [figures.share(part, 1), _meter(part)],
             figures.share(one.padding_share, 1), figures.short(one.tokens_per_s),
             figures.decimal(one.loss), figures.decimal(one.peak_gib, 1)],
        ))  # fmt: skip
    return table(
        [("", False), ("tokens", False), ("batches", True), ("planned", True), ("share", True),
         ("padding", True), ("tokens/s", True), ("loss", True), ("peak GiB", True)], rows,
    )  # fmt: skip


def gpus(state: RunState) -> Markup | None:
    """The GPUs by their newest sample."""
    if not state.gpus:
        why = state.gpu_table.none_reason
        return el("p", f"none: {why}", class_="soft") if why else None
    rows = []
    for one in state.gpus:
        bad = one.word not in (GpuWord.WORKING, GpuWord.NO_DATA)
        why = one.throttle_text or "; ".join(text for _, text in one.why)
        rows.append((
            "warn" if bad else "",
            [figures.UNKNOWN if one.index is None else f"{one.index}", one.name, gpu_role(one),
             [figures.share(one.utilization_share), _meter(one.utilization_share)],
             f"{figures.decimal(one.memory_used_gib, 1)} of {figures.decimal(one.memory_total_gib, 1)}",
             figures.count(one.power_w), figures.count(one.temperature_c),
             [el("span", str(one.word), class_="word"), f" {why}" if why else ""] if bad else why],
        ))  # fmt: skip
    return table(
        [("", False), ("GPU", False), ("role", False), ("busy", True), ("memory GiB", True), ("W", True),
         ("°C", True), ("", False)], rows,
    )  # fmt: skip


def evaluations(state: RunState) -> Markup | None:
    """Every evaluation by real decoding, newest first."""
    found = state.history.evaluations
    if not found:
        return None
    best = max((one.tau for one in found if one.tau is not None), default=None)
    rows = [
        (
            "bad" if one.unexplained else "",
            [figures.count(one.step), el("b", figures.decimal(one.tau, 3)) if one.tau == best else
             figures.decimal(one.tau, 3), figures.decimal(one.tau_macro, 3), figures.count(one.prompts),
             figures.count(one.unexplained), figures.decimal(one.tokens_per_s, 1),
             figures.decimal(one.plain_tokens_per_s, 1),
             ", ".join(f"{kind} {figures.decimal(tau, 2)}" for kind, tau, _ in one.by_kind)],
        )
        for one in reversed(found)
    ]  # fmt: skip
    return table(
        [("step", True), ("tau", True), ("tau, mean of prompts", True), ("prompts", True),
         ("texts not the target's own", True), ("tokens/s", True), ("without drafter", True),
         ("by kind", False)],
        rows,
    )  # fmt: skip


def checkpoints(state: RunState) -> Markup | None:
    """What was written, and what could not be."""
    kinds = ("checkpoint", "checkpoint_failed", "best")
    found = [event for event in state.history.events if event.kind in kinds]
    if not found:
        return None
    rows = [
        ("bad" if one.level is Level.BAD else "", [moment(one.t, state), one.line]) for one in reversed(found)
    ]
    return table([("time", False), ("", False)], rows)


def attempts(state: RunState) -> Markup | None:
    """How each attempt began and ended."""
    if not state.attempts:
        return None
    rows = []
    for one in state.attempts:
        how = one.state or ("" if one.number == state.attempt and not state.ended else "no end was written")
        if one.signal:
            how += f" by {one.signal}"
        elif one.exit_code:
            how += f" rc={one.exit_code}"
        changes = ", ".join(
            f"{key} {values[0]} to {values[1]}"
            for key, values in one.changes.items()
            if isinstance(values, list) and len(values) == 2
        )
        taken = one.ended - one.begun if one.ended is not None and one.begun is not None else None
        rows.append((
            "bad" if one.state in ("failed", "killed") else "",
            [f"{one.number}", " by ".join(filter(None, (one.begun_by, one.by))), moment(one.begun, state),
             figures.span(taken), how or "goes on", figures.count(one.step), one.payload[:12],
             "; ".join(filter(None, (one.reason, changes)))],
        ))  # fmt: skip
    return table(
        [("", False), ("begun", False), ("at", False), ("for", True), ("how it ended", False), ("step", True),
         ("payload", False), ("", False)], rows,
    )  # fmt: skip


def threads(state: RunState) -> Markup | None:
    """What each thread did last."""
    found = state.progress.threads if state.progress else ()
    if not found:
        return None
    failed = {crash.thread for crash in state.crashes}
    last = state.progress.t if state.progress else None
    rows = []
    for one in sorted(found, key=lambda thread: thread.name not in failed):
        age = None if last is None or one.last_sign is None else max(0.0, last - one.last_sign)
        spent = (one.busy_s or 0.0) + (one.waited_s or 0.0)
        rows.append((
            "bad" if one.name in failed else "",
            [one.name, one.role, one.device, "failed" if one.name in failed else one.state,
             figures.count(one.step), figures.count(one.bucket),
             figures.UNKNOWN if age is None else age_text(age),
             figures.share((one.waited_s or 0.0) / spent if spent else None)],
        ))  # fmt: skip
    return table(
        [("thread", False), ("role", False), ("device", False), ("state", False), ("step", True),
         ("bucket", True), ("last sign before the newest record", True), ("waited", True)], rows,
    )  # fmt: skip


def events(state: RunState) -> Markup | None:
    """The events, newest first."""
    styles = {Level.BAD: "bad", Level.WARNING: "warn"}
    rows = [(styles.get(one.level, ""), [moment(one.t, state), one.line]) for one in reversed(state.events)]
    return table([("time", False), ("", False)], rows) if rows else None


def configuration(state: RunState) -> Markup | None:
    """The job: first the keys that are not the default, then the others."""
    keys = job_table(state.job)
    if not keys:
        return None

    def part(changed: bool) -> Markup:
        return table(
            [("key", False), ("value", False), ("default", False), ("meaning", False)],
            [
                (
                    "changed" if changed else "",
                    [el("code", one.name), el("code", one.value),
                     (el("code", one.default) if one.default else "no default") if changed else "same",
                     one.text],
                )
                for one in keys if one.changed is changed
            ],
        )  # fmt: skip

    rest = sum(1 for one in keys if not one.changed)
    return Markup(
        part(True) + el("details", el("summary", f"{rest} keys that have their default"), part(False))
    )
