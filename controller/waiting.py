"""Waiting for a mirror: for its news, or until it holds all that its run has written so far."""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from controller.errors import LocalStateError
from controller.extents import Extents
from controller.figures import amount
from controller.mirror_reader import MirrorReader
from controller.narration import is_quiet
from controller.run_records import number, table, whole
from controller.timing import Timing
from controller.trouble import Trouble

if TYPE_CHECKING:
    from controller.mirror import Mirror

_READER_S: Final = 0.01
"""How often a reader looks for new bytes when another process writes the mirror: two calls of stat."""
_LONGEST_S: Final = 0.25
"""A wait in which nothing came ends after so long: ages and countdowns go on."""
_PATIENCE_S: Final = 2.0
"""A wait that takes no longer is not worth a line; and how long a writer that stands still is believed."""


class Waiter:
    """Waits for news of the mirror, wherever it is written; `out` is watched for its reader's end.

    `mirror` is the one that this process runs for the folder; None: only others write. `between` is
    called before every wait.
    """

    def __init__(
        self,
        reader: MirrorReader,
        mirror: Mirror | None,
        out: BinaryIO | None = None,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        self._reader = reader
        self.mirror = mirror
        self._between = between
        self._start = time.time()
        self._stale_s = 5 * Timing.from_environment().beat_s
        self._poll = select.poll()
        if out is not None:
            with contextlib.suppress(OSError, ValueError):  # not every stream has a descriptor
                self._poll.register(out.fileno(), 0)  # asks for nothing but its reader's end

    def seen(self) -> tuple[int, ...]:
        """What `wait` is to compare with."""
        if self.mirror is not None and self.mirror.holds_lock:
            return (self.mirror.news_count,)
        return self._reader.stamp()

    @property
    def gave_up(self) -> bool:
        """Our own mirror has ended, for whatever reason."""
        return self.mirror is not None and not self.mirror.running

    def has_ended(self, record: Mapping[str, Any]) -> bool:
        """Whether `record` (`mirror.json`) says that the run has ended, and its place was asked."""
        return record.get("state") == "ended" and not (self.mirror is not None and self.mirror.is_asking)

    def is_settled(self, record: Mapping[str, Any]) -> bool:
        """Whether `record` (`mirror.json`) tells of all that can be had now.

        A record that a dead process left may say so too; only one that somebody keeps counts.
        """
        settled = record.get("complete") is True or record.get("state") in (
            "reconnecting",
            "refused",
            "ended",
        )
        if self.mirror is None or self.mirror.reads_only:
            t = number(record, "t")
            if t is None or abs(time.time() - t) > self._stale_s:
                return time.time() - self._start > _PATIENCE_S  # its writer stands still
            return settled
        if isinstance(self.mirror.error, LocalStateError):
            return True  # it cannot write here, and may never: what was copied before is all there is
        return not self.mirror.running or (self.mirror.holds_lock and settled)

    def wait(self, seen: tuple[int, ...]) -> None:
        """Until there may be news; raises BrokenPipeError when nobody reads our output any more."""
        if any(event & select.POLLERR for _, event in self._poll.poll(0)):
            raise BrokenPipeError
        self._between()
        if self.mirror is not None and self.mirror.holds_lock:
            if len(seen) == 1:  # otherwise it took the folder over meanwhile: there may be news
                self.mirror.wait_for_news(seen[0], _LONGEST_S)
            return
        until = time.monotonic() + _LONGEST_S
        while time.monotonic() < until and self.seen() == seen:
            time.sleep(_READER_S)


def wait_until_current(reader: MirrorReader, trouble: Trouble, waiter: Waiter) -> None:
    """Wait until all that the run has written is here, or it is known that it cannot be had now."""
    begun, told = time.monotonic(), is_quiet()
    while True:
        seen = waiter.seen()
        record = reader.record()
        if waiter.is_settled(record):
            return
        trouble.tell(record, waiter.mirror, time.time())
        slow = record.get("state") == "connected" and time.monotonic() - begun > _PATIENCE_S
        if slow and not told and (left := _to_come(record)):
            told = True
            trouble.note(f"copying what the run wrote: {amount(left)} are still to come")
        waiter.wait(seen)


def _to_come(record: Mapping[str, Any]) -> int:
    """Bytes behind what is here of each file."""
    left = 0
    for name in (files := table(record, "files")):
        file = table(files, name)
        left += (whole(file, "size") or 0) - Extents.from_json(file.get("extents")).end
    return max(0, left)
