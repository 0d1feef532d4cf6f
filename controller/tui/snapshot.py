"""What the app is given from outside its thread: states of the run, and the mirror that keeps them coming."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Protocol

from textual.message import Message

from controller.errors import LocalStateError
from controller.mirror import Mirror
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


def explained(state: RunState, mirror: Watched | None) -> RunState:
    """`state` with what keeps `mirror` from its folder, where there is no news: the folder cannot say it."""
    error = mirror.error if isinstance(mirror, Mirror) else None
    if not isinstance(error, LocalStateError) or not state.health.word.no_news:
        return state
    why = f"{error.message}: {error.hint}"
    return dataclasses.replace(state, health=dataclasses.replace(state.health, detail=why))
