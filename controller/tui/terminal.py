"""A view must not outlive its terminal: without one Textual blocks for ever, at full load of a core."""

from __future__ import annotations

import os
import select
import signal
import threading


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
