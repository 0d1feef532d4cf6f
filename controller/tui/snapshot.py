"""What the app is given from outside its thread: states of the run, and the mirror that keeps them coming."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from textual.message import Message

from controller.run_state import RunState


class Snapshot(Message):
    """One immutable state from the ticker; a newer one replaces it."""

    def __init__(self, state: RunState, source: Path) -> None:
        super().__init__()
        self.state = state
        self.source = source

    def can_replace(self, message: Message) -> bool:
        """Only the newest snapshot is of interest."""
        return isinstance(message, Snapshot)


class Watched(Protocol):
    """What the TUI needs of a mirror."""

    def start(self) -> None:
        """Begin to mirror."""

    def stop(self, timeout: float = ...) -> None:
        """End within about `timeout` seconds."""

    def poke(self) -> None:
        """Reconnect now."""
