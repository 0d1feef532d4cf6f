"""What holds for every test."""

from __future__ import annotations

import signal
import threading

import pytest
from hypothesis import HealthCheck, settings

# A property holds or does not; how long a busy machine takes to try it says nothing.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_configure() -> None:
    """Ctrl-C reaches what tests start, also where a shell began them in the background and so ignores it."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)  # once each has its marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes half a minute where it is alone may take some where the machine is busy."""
    for item in items:
        slow = item.get_closest_marker("slow") or item.get_closest_marker("rig")
        if slow and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(600))
