"""The trainer's threads and the run's events, a line each.

Thread columns: name, role, device, what it does, step, bucket, time since its last sign, and which part of
its time it waited for others. The failed thread stands first.
"""

from __future__ import annotations

from rich.text import Text

from controller.health import age_text
from controller.run_records import Thread
from controller.run_state import RunState
from controller.tui import figures
from controller.tui.lines import heading, line, remote
from controller.tui.overview import PROGRESS_STALE_S
from controller.tui.palette import BAD, FAINT, LABEL, LEVELS, PLAIN, VALUE, WARN

SILENT_S = 30.0
"""A thread with no sign of life for so long is marked."""

_COLUMNS = (("thread", 12), ("device", 8), ("state", 20), ("step", 8), ("bucket", 6), ("sign", 7))


def thread_lines(state: RunState, width: int) -> list[Text]:
    """Heading, column names, and a row for each thread."""
    progress = state.progress
    stale = float("inf") if state.ended else PROGRESS_STALE_S
    rows = [heading("Threads", width, state.ages.progress, stale)]
    if progress is None or not progress.threads:
        return [*rows, line(("  not known yet", LABEL))]
    names = "  " + " ".join(f"{name:<{columns}}" for name, columns in _COLUMNS) + " waited"
    if state.ended:
        names = names.replace("sign  ", "before")  # the end
    rows.append(line((names, LABEL)))
    failed = {crash.thread for crash in state.crashes}
    first = state.first_crash.thread if state.first_crash else ""

    def order(thread: Thread) -> tuple[bool, bool]:
        return (thread.name != first, thread.name not in failed and thread.state != "failed")

    rows += [_thread(t, state, t.name in failed) for t in sorted(progress.threads, key=order)]
    return rows


def _cell(text: str, columns: int) -> str:
    shown = remote(text)
    shown.truncate(columns, overflow="ellipsis", pad=True)
    return shown.plain


def _thread(thread: Thread, state: RunState, failed: bool) -> Text:
    bad = failed or thread.state == "failed"
    age = _age(thread, state)
    quiet = age is not None and age > SILENT_S and not state.ended and thread.state != "ended"
    style = BAD if bad else PLAIN
    shape = "✗" if bad else "!" if quiet else "·"
    spent = (thread.busy_s or 0.0) + (thread.waited_s or 0.0)
    waited = (thread.waited_s or 0.0) / spent if spent else None
    cells = (
        thread.name,
        thread.device,
        "failed" if failed else thread.state,
        figures.count(thread.step),
        figures.count(thread.bucket),
    )
    shown = " ".join(_cell(c, n) for c, (_, n) in zip(cells, _COLUMNS[:5], strict=True))
    sign = figures.UNKNOWN if age is None else age_text(age)
    return line(
        (f"{shape} ", BAD if bad else WARN if quiet else LABEL),
        (f"{shown} ", style),
        (f"{sign:<7}", WARN if quiet else LABEL if state.ended else VALUE),
        (f" {figures.share(waited):>6}", FAINT if state.ended else VALUE),
    )


def _age(thread: Thread, state: RunState) -> float | None:
    """Seconds since its last sign; of a run that has ended, until the trainer's last record."""
    last = state.progress.t if state.progress else None
    if not state.ended or last is None or thread.last_sign is None:
        return state.container_age(thread.last_sign)
    return max(0.0, last - thread.last_sign)


def event_lines(state: RunState, width: int) -> list[Text]:
    """The events, oldest first, and at their end what is wrong with the history itself."""
    rows = []
    for event in state.events:
        shape, style = LEVELS[event.level]
        rows.append(
            line(
                (f"{figures.clock(event.t)} ", LABEL),
                (f"{shape} ", style),
                remote(event.line, style),
            )
        )
    for name, count in state.unparsable.items():
        lines = "line holds" if count == 1 else "lines hold"
        rows.append(line((f"         ! {count:,} {lines} no record: {name}", WARN)))
    if state.unread_bytes and state.total_bytes:
        part = 1 - state.unread_bytes / state.total_bytes
        rows.append(line((f"         history is being read: {part:.0%}", WARN)))
    return rows or [line(("  no events yet", LABEL))]
