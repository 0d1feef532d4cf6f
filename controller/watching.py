"""The mirror that a command runs for itself while it looks at a run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from controller.launch import RunPlace
from controller.mirror import Mirror
from controller.place import open_place
from controller.run_reader import RunReader
from controller.run_state import RunState


def new_mirror(directory: Path, *, once: bool = False) -> Mirror:
    """A mirror for the folder, not started. Raises LocalStateError when its place.json is damaged."""
    RunPlace.read(directory)
    return Mirror(directory, place_opener=lambda: open_place(RunPlace.read(directory).host), once=once)


@contextlib.contextmanager
def mirrored(directory: Path, *, once: bool = False) -> Iterator[Mirror]:
    """A mirror that keeps the folder up to date meanwhile; with `once`, brings it up to date and ends."""
    mirror = new_mirror(directory, once=once)
    mirror.start()
    try:
        yield mirror
    finally:
        mirror.stop()


def last_state(directory: Path, *, wait: bool) -> RunState:
    """The run's state after one look, or, with `wait`, once it has ended."""
    with mirrored(directory, once=not wait) as mirror:
        seen = -1
        while mirror.running:
            seen = mirror.wait_for_news(seen, 1.0)
    reader = RunReader(directory)
    state = reader.poll(time.time())
    while state.unread_bytes:
        state = reader.poll(time.time())
    return state
