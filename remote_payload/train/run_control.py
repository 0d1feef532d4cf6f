"""How the threads of a run end together: by the last step, by request, or because one of them failed.

A request to stop is taken up by all replicas at the same step, because it travels with the gradient. A
failure is different: whoever waits for anything is woken at once and leaves by `Aborted`.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Aborted(Exception):
    """Another thread failed; this one has nothing to report."""


class Flag:
    """A request that a signal handler raises.

    It has no lock, unlike threading.Event: a second signal may come while the first is being handled, in the
    same thread, and would wait for it for ever.
    """

    def __init__(self) -> None:
        self._raised = False

    def set(self) -> None:
        """Raise it."""
        self._raised = True

    def clear(self) -> None:
        """Take it back."""
        self._raised = False

    def is_set(self) -> bool:
        """Whether it is raised."""
        return self._raised


class RunControl:
    """Shared by all threads of a run."""

    def __init__(self) -> None:
        self.stop = Flag()
        """Asks for a clean end after the current step."""
        self.checkpoint = Flag()
        """Asks for a checkpoint after the current step."""
        self._aborted = threading.Event()
        self._wake: list[Callable[[], None]] = []

    @property
    def aborted(self) -> bool:
        """True once a thread has failed."""
        return self._aborted.is_set()

    def on_abort(self, wake: Callable[[], None]) -> None:
        """Call `wake` when a thread fails, so that others stop waiting."""
        self._wake.append(wake)
        if self.aborted:
            wake()

    def abort(self) -> None:
        """End every thread; called by the one that failed."""
        self._aborted.set()
        for wake in self._wake:
            wake()

    def check(self) -> None:
        """Raise Aborted if a thread has failed."""
        if self.aborted:
            raise Aborted


class OrderedQueue(Generic[Item]):
    """A bounded queue whose items come out by their number, whatever order they went in.

    With it a run is a function of its seed and not of which thread was faster. An item within `capacity` of
    the next one always gets in, so the one that a reader waits for is never kept out.
    """

    def __init__(self, capacity: int, control: RunControl, first: int = 0) -> None:
        """`first` is the number of the first item, more than 0 in a resumed run."""
        self.capacity = capacity
        self._control = control
        self._items: dict[int, Item] = {}
        self._next = first
        self._closed = False
        self._changed = threading.Condition()
        control.on_abort(self._wake)

    def __len__(self) -> int:
        return len(self._items)

    def put(self, number: int, item: Item) -> None:
        """Add `item` as number `number` (each once); waits while it is too far ahead.

        Raises Aborted when a thread failed. After `close` the item is dropped: nobody will come for it.
        """
        with self._changed:
            while number >= self._next + self.capacity and not self._closed:
                self._control.check()
                self._changed.wait()
            self._control.check()
            if not self._closed:
                self._items[number] = item
                self._changed.notify_all()

    def get(self) -> Item | None:
        """The next item by number, or None when the queue was closed. Raises Aborted."""
        with self._changed:
            while self._next not in self._items and not self._closed:
                self._control.check()
                self._changed.wait()
            self._control.check()
            if self._next not in self._items:
                return None
            item = self._items.pop(self._next)
            self._next += 1
            self._changed.notify_all()
            return item

    def close(self) -> None:
        """No more will be put, or no more will be taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


class Handover(Generic[Item]):
    """One value that a thread makes and others wait for."""

    def __init__(self, control: RunControl) -> None:
        self._control = control
        self._set = threading.Event()
        self._value: Item | None = None
        control.on_abort(self._set.set)

    def give(self, value: Item) -> None:
        """Hand `value` over, once."""
        self._value = value
        self._set.set()

    def wait(self) -> Item:
        """The value; waits for it. Raises Aborted when a thread failed."""
        self._set.wait()
        self._control.check()
        assert self._value is not None
        return self._value


class ThreadStatus:
    """What one thread does at the moment; written by it, read by the thread that reports."""

    def __init__(self, name: str, role: str, device: str) -> None:
        self.name = name
        self.role = role
        self.device = device
        self.state = "starting"
        self.step: int | None = None
        self.bucket: int | None = None
        self.samples: list[int] = []
        self.last_sign = time.time()
        self.busy_s = 0.0
        self.waited_s = 0.0
        self._since = time.monotonic()
        self.recent: collections.deque[tuple[float, str]] = collections.deque(maxlen=64)
        """The newest spans (seconds, state), for the share of time spent waiting."""

    def enter(
        self,
        state: str,
        *,
        step: int | None = None,
        bucket: int | None = None,
        samples: list[int] | None = None,
    ) -> None:
        """Begin `state`; one that begins with "waiting" counts as waiting. None keeps the old value."""
        now = time.monotonic()
        spent, waiting = now - self._since, self.state.startswith("waiting")
        if waiting:
            self.waited_s += spent
        else:
            self.busy_s += spent
        self.recent.append((spent, self.state))
        self._since = now
        self.state = state
        self.step = self.step if step is None else step
        self.bucket = self.bucket if bucket is None else bucket
        self.samples = self.samples if samples is None else samples
        self.last_sign = time.time()

    def waiting_share(self, state: str = "waiting") -> float:
        """Share of the last spans, the present one among them, in states that begin with `state`."""
        spans = [*self.recent, (time.monotonic() - self._since, self.state)]
        total = sum(spent for spent, _ in spans)
        return sum(spent for spent, seen in spans if seen.startswith(state)) / total if total else 0.0

    def record(self) -> dict[str, object]:
        """The thread's entry in progress.json."""
        return {
            "name": self.name,
            "role": self.role,
            "device": self.device,
            "state": self.state,
            "step": self.step,
            "bucket": self.bucket,
            "last_sign": round(self.last_sign, 3),
            "busy_s": round(self.busy_s, 3),
            "waited_s": round(self.waited_s, 3),
        }
