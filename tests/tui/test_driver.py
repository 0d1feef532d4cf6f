"""The driver that waits for keys: what is typed arrives, silence costs nothing, leaving waits for nobody."""

from __future__ import annotations

import os
import pty
import selectors
import threading
import time
import tty
from collections.abc import Callable, Iterator

import pytest
import textual
from textual import constants
from textual.drivers.headless_driver import HeadlessDriver
from textual.drivers.linux_driver import LinuxDriver
from textual.events import Key
from textual.message import Message

from controller.tui.driver import PatientDriver, ReadableEvent
from controller.tui.terminal import driver_for
from tests.waiting import PATIENCE_S, until


class Typing:
    """The driver's thread of input on one end of a terminal, and a typist on the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.typist, self.terminal = pty.openpty()
        tty.setraw(self.terminal)
        self.keys: list[str] = []
        self.waits: list[float | None] = []
        """How long each look was ready to wait; None: until something comes."""
        driver = object.__new__(PatientDriver)  # without a screen, which is not what is looked at
        driver.fileno, driver._debug, driver.exit_event = self.terminal, False, ReadableEvent()
        driver.process_message = self._take  # type: ignore[method-assign]
        select = selectors.SelectSelector.select

        def watched(selector: selectors.SelectSelector, timeout: float | None = None) -> object:
            self.waits.append(timeout)
            return select(selector, timeout)

        monkeypatch.setattr(selectors.SelectSelector, "select", watched)
        self.driver = driver
        self.thread = threading.Thread(target=driver.run_input_thread, daemon=True)

    def _take(self, message: Message) -> None:
        if isinstance(message, Key):
            self.keys.append(message.key)

    def until(self, condition: Callable[[], bool]) -> None:
        until(condition, seen=lambda: (self.keys, self.waits[-3:]))

    def type(self, data: bytes) -> None:
        os.write(self.typist, data)


@pytest.fixture
def typing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Typing]:
    one = Typing(monkeypatch)
    one.thread.start()
    yield one
    one.driver.exit_event.set()
    one.thread.join(PATIENCE_S)
    assert not one.thread.is_alive()
    for descriptor in (one.typist, one.terminal):
        os.close(descriptor)


def test_keys_arrive_also_in_halves_and_a_byte_that_is_no_character_ends_nothing(
    typing: Typing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ESCAPE_DELAY", 10 * PATIENCE_S)  # a busy machine is no slow typist
    typing.type(b"q\x1b[A")
    typing.until(lambda: typing.keys == ["q", "up"])
    typing.type("é".encode()[:1])
    typing.type("é".encode()[1:])
    typing.type(b"\x1b[")
    typing.type(b"B")
    typing.until(lambda: typing.keys[-1:] == ["down"])
    typing.type(b"\xffz")
    typing.until(lambda: typing.keys[-1:] == ["z"])
    assert len(typing.keys) <= 6


def test_escape_alone_is_a_key_although_a_sequence_could_begin_so(typing: Typing) -> None:
    typing.type(b"\x1b")
    typing.until(lambda: typing.keys == ["escape"])


def test_when_nothing_is_typed_nothing_is_looked_for(typing: Typing) -> None:
    typing.until(lambda: typing.waits == [None])
    typing.type(b"q")
    typing.until(lambda: len(typing.waits) > 2 and typing.waits[-1] is None)
    looks = len(typing.waits)
    time.sleep(0.35)
    assert len(typing.waits) == looks


def test_leaving_waits_for_no_key(typing: Typing) -> None:
    typing.until(lambda: typing.waits == [None])
    typing.driver.exit_event.set()
    typing.driver.exit_event.set()
    typing.until(lambda: not typing.thread.is_alive())
    typing.driver.exit_event.clear()
    with selectors.SelectSelector() as selector:
        selector.register(typing.driver.exit_event, selectors.EVENT_READ)
        assert not selector.select(0), "it can be waited for again"


def test_a_terminal_that_is_gone_ends_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Typing(monkeypatch)
    reading, writing = os.pipe()
    one.driver.fileno = reading
    one.thread.start()
    os.close(writing)
    one.thread.join(PATIENCE_S)
    assert not one.thread.is_alive()
    for descriptor in (reading, one.typist, one.terminal):
        os.close(descriptor)


def test_only_the_driver_that_ours_was_written_for_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(textual, "__version__", "8.2.8")
    assert driver_for(LinuxDriver) is PatientDriver
    assert driver_for(HeadlessDriver) is HeadlessDriver
    monkeypatch.setattr(textual, "__version__", "8.3.0")
    assert driver_for(LinuxDriver) is LinuxDriver
