"""The threads' tab: what each thread does, and of a run that died what they died of, with all tracebacks."""

from __future__ import annotations

from rich.text import Text

from controller.run_state import RunState
from controller.tui.crash_panel import crash_lines, other_crashes
from controller.tui.lines import line
from controller.tui.thread_panel import thread_lines


def thread_tab_lines(state: RunState, width: int) -> list[Text]:
    """The table, the failed thread first; below it the crash, and those that followed."""
    rows = thread_lines(state, width)
    if state.has_crash:
        rows += [line(), *crash_lines(state, width), *other_crashes(state, width)]
    return rows
