"""The terminal's driver: Textual's, but for keys it waits instead of looking for them ten times a second, and
it leaves an empty screen behind.

The looking is two thirds of what a view costs that has nothing to show (0.12 % of a core, and a laptop that
never comes to rest), and leaving waits for it: 0.2 s. Only after a key is it looked for the next one as often
as Textual does, because the rest of an escape sequence may be on its way, or not.
"""

from __future__ import annotations

import codecs
import os
import selectors
import threading
from typing import Any

from textual import constants
from textual._parser import ParseError
from textual._xterm_parser import XTermParser
from textual.drivers.linux_driver import LinuxDriver

LOOKS = 3
"""How often it is looked for the rest of a sequence: the parser gives one up after the first or second."""


class ReadableEvent(threading.Event):
    """An event for which a selector can wait: its `fileno` is readable while it is set."""

    def __init__(self) -> None:
        super().__init__()
        self._readable, self._writable = os.pipe()

    def fileno(self) -> int:
        """What a selector takes."""
        return self._readable

    def set(self) -> None:
        """Set it, and wake the selector."""
        if not self.is_set():
            super().set()
            os.write(self._writable, b"!")

    def clear(self) -> None:
        """The opposite."""
        if self.is_set():
            os.read(self._readable, 1)
            super().clear()


class PatientDriver(LinuxDriver):
    """Textual's driver for Linux and macOS with another loop in its thread of input."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.exit_event: ReadableEvent = ReadableEvent()

    def stop_application_mode(self) -> None:
        """Leave the terminal, and nothing on it: tmux (3.3) shows rows of a view that was made larger
        meanwhile above the shell's prompt.
        """
        self.write("\x1b[2J")
        super().stop_application_mode()

    def run_input_thread(self) -> None:
        """Hand on what is typed, until `exit_event` is set or the terminal is gone."""
        parser = XTermParser(self._debug)
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        looks = 0
        with selectors.SelectSelector() as selector:  # macOS has no other for a terminal
            selector.register(self.fileno, selectors.EVENT_READ)
            selector.register(self.exit_event, selectors.EVENT_READ)
            while not self.exit_event.is_set():
                ready = [key.fd for key, _ in selector.select(constants.ESCAPE_DELAY if looks else None)]
                looks = max(0, looks - 1)
                if self.fileno in ready:
                    data = os.read(self.fileno, 4096)
                    if not data:
                        break
                    looks = LOOKS
                    if typed := decode(data):
                        for message in parser.feed(typed):
                            self.process_message(message)
                for message in parser.tick():
                    self.process_message(message)
        try:
            for _ in parser.feed(""):  # as Textual does: half a sequence is nothing
                pass
        except (EOFError, ParseError):
            pass
