"""The mirror that a command runs for itself while it looks at a run."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from controller.errors import NotInTimeError, ProtocolError
from controller.mirror import Mirror
from controller.mirror_reader import MirrorReader
from controller.place import open_place
from controller.run_place import RunPlace
from controller.run_reader import RunReader
from controller.run_state import RunState
from controller.trouble import Trouble
from controller.waiting import Waiter, wait_until_current


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


def last_state(directory: Path) -> RunState:
    """The run's state after one look."""
    with mirrored(directory, once=True) as mirror:
        seen = -1
        while mirror.running:
            seen = mirror.wait_for_news(seen, 1.0)
    return RunReader(directory).catch_up(time.time())


def catch_up(directory: Path, mirror: Mirror) -> None:
    """Wait until `mirror` has all that the run wrote so far, or it is known that it cannot be had now.

    Trouble of the connection is told on stderr meanwhile.
    """
    reader, trouble = MirrorReader(directory), Trouble(sys.stderr, lambda: True)
    try:
        wait_until_current(reader, trouble, Waiter(reader, mirror))
        trouble.tell_own(mirror)
    finally:
        trouble.clear()


def wait_for(
    directory: Path, mirror: Mirror, found: Callable[[RunState], bool], *, limit_s: float, what: str
) -> RunState:
    """The run's state once `found` is true of it, or once it has ended and all that it wrote is here.

    `mirror` keeps the folder up to date. Raises NotInTimeError, with `what` was waited for, after `limit_s`
    seconds, and the mirror's error when it gave up.
    """
    reader = RunReader(directory)
    deadline = time.monotonic() + limit_s
    while True:
        seen, running, asking = mirror.news_count, mirror.running, mirror.is_asking
        state = reader.catch_up(time.time())
        if found(state):
            return state
        late = time.monotonic() > deadline
        if state.ended and ((state.connection == "ended" and not asking) or late):
            return state  # whole, if it could be had
        if not running:
            raise mirror.error or ProtocolError("the mirror ended before the run did")
        if late:
            how = state.health.headline
            raise NotInTimeError(
                f"{state.run_id}: {what} did not come within {limit_s:.0f} s ({how})",
                f"It may come yet: dflashctl status {state.run_id}",
            )
        mirror.wait_for_news(seen, 0.5)
