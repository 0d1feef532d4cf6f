"""What holds for every test."""

from __future__ import annotations

import signal
import threading

from hypothesis import HealthCheck, settings

# A property holds or does not; how long a busy machine takes to try it says nothing.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_configure() -> None:
    """Ctrl-C reaches what tests start, also where a shell began them in the background and so ignores it."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)
