"""The trainer's threads and the run's events, a line each.

Thread columns: name, role, device, what it does, step, bucket, time since its last sign, and which part of
its time it waited for others. The failed thread stands first.
"""

from __future__ import annotations

from collections.abc import Mapping

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from controller import figures
from controller.health import age_text
from controller.run_records import Thread
from controller.run_state import RunState
from controller.text import safe_line
from controller.tui.lines import hanging, heading, line, remote
from controller.tui.overview import PROGRESS_STALE_S
from controller.tui.palette import BAD, FAINT, HEADING, LABEL, LEVELS, PLAIN, VALUE, WARN

SILENT_S = 30.0
"""A thread with no sign of life for so long is marked."""

_COLUMNS = {"thread": 10, "device": 7, "state": 24, "step": 8, "bucket": 6, "sign": 6, "waited": 6}
"""What fits into a panel of 76 columns; with more, state and thread get what they need."""

_LEFT = ("thread", "device", "state")


def thread_lines(state: RunState, width: int) -> list[Text]:
    """Heading, column names, and a row for each thread."""
    progress = state.progress
    stale = float("inf") if state.ended else PROGRESS_STALE_S
    rows = [heading("Threads", width, state.ages.progress, stale)]
    if progress is None or not progress.threads:
        return [*rows, line(("  not known yet", LABEL))]
    columns = dict(_COLUMNS)
    spare = width - 2 - sum(columns.values()) - len(columns) + 1
    for name, longest in (
        ("state", max(cell_len(thread.state) for thread in progress.threads)),
        ("thread", max(cell_len(thread.name) for thread in progress.threads)),
    ):
        more = max(0, min(spare, longest - columns[name]))
        columns[name] += more
        spare -= more
    names = {name: "before" if state.ended and name == "sign" else name for name in columns}  # the end
    rows.append(line((f"  {_row(names, columns)}", LABEL)))
    failed = {crash.thread for crash in state.crashes}
    first = state.first_crash.thread if state.first_crash else ""

    def order(thread: Thread) -> tuple[bool, bool]:
        return (thread.name != first, thread.name not in failed and thread.state != "failed")

    rows += [_thread(t, state, columns, t.name in failed) for t in sorted(progress.threads, key=order)]
    return rows


def _row(cells: Mapping[str, str], columns: Mapping[str, int]) -> str:
    shown = []
    for name, wide in columns.items():
        if name in cells:
            cell = safe_line(cells[name])
            if cell_len(cell) > wide:
                cell = set_cell_size(cell, wide - 1) + "…"
            blank = " " * (wide - cell_len(cell))
            shown.append(cell + blank if name in _LEFT else blank + cell)
    return " ".join(shown)


def _thread(thread: Thread, state: RunState, columns: Mapping[str, int], failed: bool) -> Text:
    bad = failed or thread.state == "failed"
    age = _age(thread, state)
    quiet = age is not None and age > SILENT_S and not state.ended and thread.state != "ended"
    shape = "✗" if bad else "!" if quiet else "·"
    spent = (thread.busy_s or 0.0) + (thread.waited_s or 0.0)
    waited = (thread.waited_s or 0.0) / spent if spent else None
    what = {
        "thread": thread.name,
        "device": thread.device,
        "state": "failed" if failed else thread.state,
        "step": figures.count(thread.step),
        "bucket": figures.count(thread.bucket),
    }
    sign = {"sign": figures.UNKNOWN if age is None else age_text(age)}
    return line(
        (f"{shape} ", BAD if bad else WARN if quiet else LABEL),
        (f"{_row(what, columns)} ", BAD if bad else PLAIN),
        (f"{_row(sign, columns)} ", WARN if quiet else LABEL if state.ended else VALUE),
        (_row({"waited": figures.share(waited)}, columns), FAINT if state.ended else VALUE),
    )


def _age(thread: Thread, state: RunState) -> float | None:
    """Seconds since its last sign; of a run that has ended, until the trainer's last record."""
    last = state.progress.t if state.progress else None
    if not state.ended or last is None or thread.last_sign is None:
        return state.container_age(thread.last_sign)
    return max(0.0, last - thread.last_sign)


def event_lines(state: RunState, width: int) -> list[Text]:
    """The events, oldest first, a line with the date before those of each day, and at their end what is wrong
    with the history itself. Times are of this machine's clock.
    """
    rows: list[Text] = []
    day = ""
    for event in state.events:
        t = state.here(event.t)
        if t is not None and (today := figures.clock(t, "%a %Y-%m-%d")) != day:
            day = today
            rows.append(line((day, HEADING)))
        shape, style = LEVELS[event.level]
        lead = line((f"{figures.clock(t)} ", LABEL), (f"{shape} ", style))
        rows += hanging(lead, remote(event.line, style), width)
    for name, count in state.unparsable.items():
        lines = "line holds" if count == 1 else "lines hold"
        rows.append(line((f"         ! {count:,} {lines} no record: {name}", WARN)))
    if state.unread_bytes and state.total_bytes:
        part = 1 - state.unread_bytes / state.total_bytes
        rows.append(line((f"         history is being read: {part:.0%}", WARN)))
    return rows or [line(("  no events yet", LABEL))]
