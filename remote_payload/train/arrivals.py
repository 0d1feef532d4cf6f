"""How features come to the device of a replica: read where they lie, or copied into slots that stay.

On one device the replica's stream waits for the target's event and reads them in place: one copy, into the
buffer that the step reads. From another device, or from main memory, they are brought into a static slot by a
stream of its own, as soon as they are computed and while the replica's earlier step still runs; the replica's
stream waits for the copy alone, and takes it from the slot within its own memory. The host waits for nothing:
it is a step ahead of the device, and that is when a copy begins.

A slot is filled again once what was in it has been read. The source belongs to a stream of another device, so
it is held until the copy from it is done: memory that `record_stream` gives back could be in the middle of
somebody's capture.

Shapes: n real tokens of a batch, W columns of its features.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from remote_payload.job import Job
from remote_payload.train.devices import compute_dtype
from remote_payload.train.features import CACHED, Features

SLOTS = 2
"""Rows that may be on their way to a replica at once."""


class Mark(Protocol):
    """A place in the work of a stream; torch.cuda.Event is one."""

    def wait(self) -> None:
        """Let the current stream go on only after it."""

    def query(self) -> bool:
        """Whether the stream has passed it."""


class Streams(Protocol):
    """What `Arrivals` asks of a device."""

    def mark(self) -> Mark:
        """Mark the current stream's work so far."""

    def beside(self, source: torch.device) -> contextlib.AbstractContextManager[None]:
        """Make those streams current that copy from `source`, beside the replica's own."""

    def copy(self, into: Tensor, source: Tensor) -> None:
        """Copy in the order of the current streams."""


class CudaStreams:
    """Streams of the GPU that features come to."""

    def __init__(self, device: torch.device) -> None:
        self._arriving = torch.cuda.Stream(device)
        self._leaving: dict[torch.device, torch.cuda.Stream] = {}

    def mark(self) -> torch.cuda.Event:
        """An event on the current stream."""
        event = torch.cuda.Event()
        event.record()
        return event

    @contextlib.contextmanager
    def beside(self, source: torch.device) -> Iterator[None]:
        """torch copies between GPUs on the source's current stream, in order with that of the other."""
        with contextlib.ExitStack() as current:
            if source.type == "cuda":
                if source not in self._leaving:
                    self._leaving[source] = torch.cuda.Stream(source)
                current.enter_context(torch.cuda.stream(self._leaving[source]))
            current.enter_context(torch.cuda.stream(self._arriving))
            yield

    def copy(self, into: Tensor, source: Tensor) -> None:
        """Without waiting; from main memory only where it is page-locked."""
        into.copy_(source, non_blocking=True)


class Arrivals:
    """Brings features to one replica; used by its thread."""

    def __init__(self, device: torch.device, streams: Streams | None = None) -> None:
        """`streams` are those of the GPU `device`; on a CPU there are none."""
        self._device = device
        if streams is None and device.type == "cuda":
            streams = CudaStreams(device)
        self._streams = streams
        self._slots: list[Tensor] = []
        self._read: list[Mark | None] = [None] * SLOTS
        """By slot: after what it may be filled again."""
        self._next = 0
        self._held: collections.deque[tuple[Features, Mark]] = collections.deque()

    @classmethod
    def of(cls, job: Job, device: torch.device, tokens: int, columns: int) -> Arrivals:
        """For a replica of `job` on `device`; with slots [tokens, columns] where features come from afar."""
        arrivals = cls(device)
        cached = job.features == "cached"
        others = [name for name in job.targets if name != "auto" and torch.device(name) != device]
        if device.type == "cuda" and (cached or others):
            dtype = CACHED if cached else compute_dtype(job.target_dtype, device)
            arrivals.reserve(tokens, columns, dtype)
        return arrivals

    def reserve(self, tokens: int, columns: int, dtype: torch.dtype) -> None:
        """Make the slots, for features of up to `tokens` tokens; without them all are read where they lie."""
        self._slots = [torch.zeros(tokens, columns, dtype=dtype, device=self._device) for _ in range(SLOTS)]

    @contextlib.contextmanager
    def bring(self, features: Features) -> Iterator[Tensor]:
        """The packed features [n, W], to be read inside, in the order of the current stream."""
        streams = self._streams
        if streams is None:
            yield features.packed
        elif features.packed.device == self._device or not self._slots:
            if features.ready is not None:
                features.ready.wait()
            yield features.packed
            self._hold(features, streams.mark())
        else:
            number, self._next = self._next, (self._next + 1) % SLOTS
            slot = self._slots[number][: len(features.packed)]
            with streams.beside(features.packed.device):
                for mark in (features.ready, self._read[number]):
                    if mark is not None:
                        mark.wait()
                streams.copy(slot, features.packed)
                arrived = streams.mark()
            self._hold(features, arrived)
            arrived.wait()
            yield slot
            self._read[number] = streams.mark()

    def _hold(self, features: Features, until: Mark) -> None:
        self._held.append((features, until))
        while self._held and self._held[0][1].query():
            self._held.popleft()
