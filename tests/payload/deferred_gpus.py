"""GPUs that do nothing until they are told to, in any order that streams, events and collectives allow.

Numbers live on the CPU. What is put on a stream waits there, so a host that waited for a device would wait
for ever; `run` then takes the head of one stream after the other, at random, as long as nothing holds it: an
event that was not reached yet, or a collective that another stream has not come to. A missing wait shows as a
wrong number in some order, a missing part of a collective as streams that never end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from remote_payload.train.communication import Gpus

DEFERRED = ("copy_", "add_")
"""Operations that change a tensor; views of it are taken at once, as on a GPU."""


class Ticket:
    """One recording of an event."""

    reached = False


@dataclasses.dataclass
class Item:
    """The head of a stream: `ready` says whether it may go."""

    ready: Callable[[], bool]
    go: Callable[[], None]
    name: str


class Stream:
    """A queue of work of one device."""

    def __init__(self, gpus: DeferredGpus, device: torch.device, name: str) -> None:
        self.gpus, self.device, self.name = gpus, device, name
        self.items: list[Item] = []

    def wait_event(self, event: Event) -> None:
        """Hold what comes after until the newest recording of `event` is reached."""
        ticket = event.ticket
        if ticket is not None:
            self.gpus.put(self, Item(lambda: ticket.reached, lambda: None, "wait"))


class Event:
    """As torch.cuda.Event."""

    def __init__(self, gpus: DeferredGpus) -> None:
        self.gpus = gpus
        self.ticket: Ticket | None = None

    def record(self) -> None:
        """On this thread's stream."""
        stream = self.gpus.here.streams[-1]
        self.ticket = ticket = Ticket()

        def reach() -> None:
            ticket.reached = True

        self.gpus.put(stream, Item(lambda: True, reach, "record"))

    def query(self) -> bool:
        """Whether it was reached; gives the devices some time."""
        self.gpus.run()
        return self.ticket is None or self.ticket.reached


class _Deferring(TorchFunctionMode):
    def __init__(self, gpus: DeferredGpus) -> None:
        super().__init__()
        self.gpus = gpus

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        if getattr(function, "__name__", "") not in DEFERRED:
            return function(*args, **kwargs)
        stream = self.gpus.here.streams[-1]
        self.gpus.put(stream, Item(lambda: True, lambda: function(*args, **kwargs), function.__name__))
        return args[0]


class _Here(threading.local):
    def __init__(self) -> None:
        self.streams: list[Stream] = []


class DeferredGpus(Gpus):
    """See above; `seed` chooses the order."""

    def __init__(self, seed: int = 0) -> None:
        self.here = _Here()
        self.streams: list[Stream] = []
        self.groups: list[list[str]] = []
        """Of each collective: its type and size, then its devices in order."""
        self.callers: set[str] = set()
        """Names of the threads that began collectives."""
        self.refuse: Exception | None = None
        """What NCCL raises."""
        self.wrong = False
        """Whether sums come out wrong."""
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def obstacle(self, devices: Sequence[torch.device]) -> str | None:
        return None if len(set(devices)) > 1 else "one device"

    def side(self, device: torch.device) -> Any:
        stream = Stream(self, device, f"{device} {len(self.streams)}")
        self.streams.append(stream)
        return stream

    def current(self, device: torch.device) -> Any:
        assert self.here.streams[-1].device == device
        return self.here.streams[-1]

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        self.here.streams.append(stream)
        try:
            with _Deferring(self):
                yield
        finally:
            self.here.streams.pop()

    def event(self) -> Any:
        return Event(self)

    def all_reduce(self, tensors: Sequence[Tensor], streams: Sequence[Any]) -> None:
        if self.refuse is not None:
            raise self.refuse
        assert len({stream.device for stream in streams}) == len(streams) == len(tensors)
        assert len({(tensor.dtype, tensor.shape) for tensor in tensors}) == 1
        self.callers.add(threading.current_thread().name)
        self.groups.append([f"{tensors[0].dtype} {len(tensors[0])}", *(str(s.device) for s in streams)])
        arrived: set[str] = set()
        left: set[str] = set()

        def begin(name: str) -> None:
            arrived.add(name)

        def sum_once(name: str) -> None:
            if not left:
                total = torch.stack(list(tensors)).sum(0)
                for tensor in tensors:
                    tensor.copy_(total + 1 if self.wrong else total)
            left.add(name)

        for stream in streams:
            name = stream.name
            self.put(stream, Item(lambda: True, lambda name=name: begin(name), "begin"))  # type: ignore[misc]
            self.put(
                stream,
                Item(
                    lambda: len(arrived) == len(streams),
                    lambda name=name: sum_once(name),  # type: ignore[misc]
                    "sum",
                ),
            )

    def put(self, stream: Stream, item: Item) -> None:
        """Put work on a stream."""
        with self._lock:
            stream.items.append(item)

    @property
    def waiting(self) -> int:
        """How much work is on all streams."""
        return sum(len(stream.items) for stream in self.streams)

    def run(self) -> None:
        """Let the devices work until nothing can go on."""
        with self._lock:
            while able := [s for s in self.streams if s.items and s.items[0].ready()]:
                item = self._random.choice(able).items.pop(0)
                item.go()
