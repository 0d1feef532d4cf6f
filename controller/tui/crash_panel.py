"""How a run died: what it is known to mean and what to do, above the traceback of the first thread.

A run that was killed or lost has no traceback; then the log's last lines stand in its place.
"""

from __future__ import annotations

from rich.text import Text

from controller import figures
from controller.diagnose import Diagnosis
from controller.run_records import Crash
from controller.run_state import RunState
from controller.text import safe_lines
from controller.tui.lines import hanging, line, remote
from controller.tui.palette import BAD, HEADING, KEY, LABEL, PLAIN, VALUE
from controller.tui.traceback_lines import traceback_lines

MOST_ERROR_ROWS = 4
"""Of the error above the diagnosis; the traceback ends with all of it."""


def crash_lines(state: RunState, width: int) -> list[Text]:
    """Title, diagnosis, how to go on, and the traceback of the first thread that failed, or the log's end."""
    crash = state.first_crash
    rows: list[Text] = []
    if crash is not None:
        title = _who(crash)
        title.append(" failed first", style=BAD)
        if crash.step is not None:
            title.append(f", step {figures.count(crash.step)}", style=PLAIN)
        if crash.bucket is not None:
            title.append(f", bucket {crash.bucket}", style=PLAIN)
        others = len(state.crashes) - 1
        if others:
            title.append(f"; {others} more after it", style=LABEL)
        rows += hanging(line(("✗ ", BAD)), title, width)
        rows += hanging(line("  "), remote(crash.error, BAD), width)[:MOST_ERROR_ROWS]
    else:
        said = state.health.detail or "no thread wrote a traceback"
        rows += hanging(line(("✗ ", BAD)), remote(f"{state.health.headline}: {said}", BAD), width)
    rows += _diagnosis(state.diagnosis, width)
    rows += _going_on(state, width)
    if crash is not None:
        if crash.samples:
            rows.append(line(("samples ", LABEL), remote(crash.samples, PLAIN)))
        rows.append(line(("Traceback", HEADING), (f"  crash/{remote(crash.file).plain}", LABEL)))
        rows += traceback_lines(crash.traceback, width)
        rows += memory_lines(state, crash)
    if state.last_words:
        rows.append(line(("The log's last lines", HEADING)))
        rows += [line("  ", remote(text, PLAIN)) for text in state.last_words]
    return rows


def _who(crash: Crash) -> Text:
    """`drafter-1 (cuda:7)`."""
    where = f" ({crash.where})" if crash.where else ""
    return line(remote(crash.thread or "a thread", BAD), remote(where, PLAIN))


def memory_lines(state: RunState, crash: Crash) -> list[Text]:
    """The memory of the crash's device: by the crash's own word, or by the last progress before it."""
    if crash.memory:
        rows = [line(("Memory at that moment", HEADING))]
        return rows + [line("  ", Text(text, style=PLAIN)) for text in safe_lines(crash.memory)]
    devices = state.progress.devices if state.progress else ()
    device = next((one for one in devices if one.device == crash.device), None)
    if device is None or device.allocated_gib is None:
        return []
    before = ""
    if crash.t is not None and state.progress is not None and state.progress.t is not None:
        seconds = abs(crash.t - state.progress.t)
        before = f", {seconds:.0f}s {'before' if state.progress.t <= crash.t else 'after'}"
    rows = [line(remote(f"Memory of {crash.device}", HEADING), (f"  by the last progress{before}", LABEL))]
    figure = line("  ")
    for name, value in (
        ("allocated", device.allocated_gib), ("reserved", device.reserved_gib), ("peak", device.peak_gib),
        ("of", device.total_gib),
    ):  # fmt: skip
        if value is not None:
            figure.append(f"{name} ", style=LABEL)
            figure.append(f"{value:.1f} ", style=VALUE)
    figure.append("GiB", style=LABEL)
    return [*rows, figure]


def other_crashes(state: RunState, width: int) -> list[Text]:
    """The threads that failed after the first, with their tracebacks."""
    rows: list[Text] = []
    for crash in state.crashes[1:]:
        title = line(("✗ ", BAD), _who(crash))
        if crash.t is not None and state.first_crash and state.first_crash.t is not None:
            title.append(f" {max(0.0, crash.t - state.first_crash.t):.1f}s later", style=LABEL)
        rows += [line(), title, *traceback_lines(crash.traceback, width)]
    return rows


def _diagnosis(diagnosis: Diagnosis | None, width: int) -> list[Text]:
    if diagnosis is None:
        return []
    rows: list[Text] = []
    for label, text, style in (
        ("what", diagnosis.what, VALUE),
        ("why ", diagnosis.why, PLAIN),
        ("do  ", diagnosis.do, VALUE),
    ):
        rows += hanging(line((f"{label} ", KEY)), line((text, style)), width)
    return rows


def _going_on(state: RunState, width: int) -> list[Text]:
    """How to go on with a run that died; one that still lives ends, or is restarted, by itself."""
    if not state.ended or not state.run_id:
        return []
    step = state.progress.checkpoint_step if state.progress else None
    where = (
        "its newest checkpoint, or from step 0 without one" if step is None
        else f"the checkpoint of step {figures.count(step)}"
    )  # fmt: skip
    name = remote(state.run_id, PLAIN)
    text = line(("`dflashctl resume ", PLAIN), name, (f"` goes on from {where}", PLAIN))
    return hanging(line(("then ", KEY)), text, width)
