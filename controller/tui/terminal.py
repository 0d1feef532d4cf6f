"""What Textual takes for granted of a terminal: that it has a size, and that it is there.

Without one it blocks for ever, at full load of a core; so a view must not outlive its terminal either.
And which driver reads its keys.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from typing import Final

import textual
from textual.driver import Driver
from textual.drivers.linux_driver import LinuxDriver

_WRITTEN_FOR: Final = "8.2."
"""Releases of Textual whose driver ours takes the place of."""
_SIZE_S = 1.0
"""How long a terminal may take to get its size: some programs make one first and size it then."""


def has_size(descriptor: int) -> bool:
    """Whether the terminal at `descriptor` has rows and columns, or gets some within a second.

    On one of 0x0 Textual would draw without end. COLUMNS and LINES take the place of either, as there.
    """
    until = time.monotonic() + _SIZE_S
    while True:
        columns, rows = os.get_terminal_size(descriptor)
        if (columns or _number("COLUMNS")) and (rows or _number("LINES")):
            return True
        if time.monotonic() > until:
            return False
        time.sleep(0.02)


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else 0


def end_with_terminal(descriptor: int) -> None:
    """End this process as soon as the terminal at `descriptor` is gone, whether a SIGHUP comes or not.

    The run goes on, and the mirror's lock is free with the process's end; nothing else needs to be tidied.
    """

    def wait() -> None:
        poll = select.poll()
        poll.register(descriptor, 0)  # only that it hangs up is told; this costs nothing meanwhile
        if any(event & select.POLLHUP for _, event in poll.poll()):  # macOS answers POLLNVAL for terminals
            os._exit(128 + signal.SIGHUP)

    threading.Thread(target=wait, name="tui-terminal", daemon=True).start()


def driver_for(textuals: type[Driver]) -> type[Driver]:
    """Ours in place of Textual's, whose insides it knows, in those releases that it was written for."""
    if textuals is not LinuxDriver or not textual.__version__.startswith(_WRITTEN_FOR):
        return textuals
    from controller.tui.driver import PatientDriver  # another release may not have what it imports

    return PatientDriver
