"""The thread that writes beside training: one at a time, and whatever it raises is heard."""

from __future__ import annotations

import threading

import pytest

from remote_payload.train.run_control import Aborted, RunControl
from remote_payload.train.saver import Saver


def test_what_is_written_next_waits_for_what_is_being_written() -> None:
    saver, slow, order = Saver(RunControl()), threading.Event(), []

    def first() -> None:
        slow.wait(60)
        order.append("first")

    saver.submit(first)
    threading.Timer(0.1, slow.set).start()
    saver.submit(lambda: order.append("second"))
    assert order[:1] == ["first"]
    saver.wait()
    assert order == ["first", "second"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("error", [OSError(5, "no"), TimeoutError(110, "the disk is behind a network")])
def test_what_writing_raises_reaches_who_waits(error: OSError) -> None:
    saver = Saver(RunControl())

    def fail() -> None:
        raise error

    saver.submit(fail)
    with pytest.raises(type(error), match=error.strerror):
        saver.wait()


def test_who_waits_for_a_disk_that_hangs_is_woken_by_a_failure_elsewhere() -> None:
    control, hangs = RunControl(), threading.Event()
    saver = Saver(control)

    def write() -> None:
        hangs.wait(100)

    saver.submit(write)
    control.abort()
    with pytest.raises(Aborted):
        saver.wait()
    hangs.set()
