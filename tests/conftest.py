"""What holds for every test."""

from __future__ import annotations

import signal
import threading


def pytest_configure() -> None:
    """Ctrl-C reaches what tests start, also where a shell began them in the background and so ignores it."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)
