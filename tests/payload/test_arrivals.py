"""Features on their way to a replica's device: every row gets its own, whatever waits for whatever."""

from __future__ import annotations

import collections
import contextlib
import functools
import random
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from remote_payload.job import Job
from remote_payload.train.arrivals import SLOTS, Arrivals, CudaStreams
from remote_payload.train.batch import Batch
from remote_payload.train.features import Features
from tests.payload.small_replica import make_replica, rows

CPU = torch.device("cpu")
OTHER = torch.device("meta")
"""Anything but the replica's own device."""
TOKENS, COLUMNS = 4, 3


class SimulatedMark:
    """An event of the simulation."""

    def __init__(self, streams: SimulatedStreams) -> None:
        self._streams = streams
        self.passed = False

    def wait(self) -> None:
        self._streams.queue().append((lambda: None, self))

    def query(self) -> bool:
        return self.passed


class SimulatedStreams:
    """Streams whose work is done later and in any order that their events allow."""

    def __init__(self) -> None:
        self.work: dict[str, collections.deque[tuple[Callable[[], Any], SimulatedMark | None]]] = {
            name: collections.deque() for name in ("replica", "beside", "target")
        }
        self.current = "replica"

    def queue(self) -> collections.deque[tuple[Callable[[], Any], SimulatedMark | None]]:
        return self.work[self.current]

    def mark(self) -> SimulatedMark:
        mark = SimulatedMark(self)
        self.queue().append((lambda: setattr(mark, "passed", True), None))
        return mark

    @contextlib.contextmanager
    def on(self, name: str) -> Iterator[None]:
        before, self.current = self.current, name
        yield
        self.current = before

    def beside(self, _source: torch.device) -> contextlib.AbstractContextManager[None]:
        return self.on("beside")

    def copy(self, into: Tensor, source: Tensor) -> None:
        memory = source.data  # as a kernel: an address, whoever owns it by then
        self.queue().append((lambda: into.copy_(memory), None))

    def advance(self, dice: random.Random) -> bool:
        """Do one piece of work of a stream that need not wait; False when there is none."""
        free = [q for q in self.work.values() if q and (q[0][1] is None or q[0][1].passed)]
        if free:
            dice.choice(free).popleft()[0]()
        return bool(free)


@given(st.integers(0, 2**32 - 1), st.sampled_from(["elsewhere", "here"]))
def test_every_row_reads_its_own_features_in_any_order_that_streams_may_work_in(
    seed: int, where: str
) -> None:
    """Memory of features goes to somebody else when they are let go, and a slot to the next row."""
    dice = random.Random(seed)
    streams = SimulatedStreams()
    arrivals = Arrivals(CPU, streams)
    if where == "elsewhere":
        arrivals.reserve(TOKENS, COLUMNS, torch.float32)
        arrivals._device = OTHER
    read: list[Tensor] = []
    for number in range(6):
        memory = torch.full((dice.randrange(1, TOKENS + 1), COLUMNS), torch.nan)
        packed = memory.view_as(memory)
        taken_by_another = (functools.partial(memory.fill_, -1.0), None)
        weakref.finalize(packed, streams.work["target"].append, taken_by_another)
        with streams.on("target"):
            streams.queue().append((functools.partial(memory.fill_, number), None))
            ready = streams.mark()
        with arrivals.bring(Features(cast(Batch, None), packed, cast(torch.cuda.Event, ready))) as there:
            seen = torch.empty(there.shape)
            streams.copy(seen, there)
        del packed, there, ready
        read.append(seen)
        for _ in range(dice.randrange(8)):
            streams.advance(dice)
    while streams.advance(dice):
        pass
    assert not any(streams.work.values())
    for number, seen in enumerate(read):
        assert seen.eq(number).all(), number
    assert len(arrivals._held) <= 6


def test_what_comes_from_elsewhere_is_copied_before_the_step_that_runs_has_ended() -> None:
    """As many rows as there are slots arrive while the replica's stream does nothing at all."""
    streams = SimulatedStreams()
    arrivals = Arrivals(CPU, streams)
    arrivals.reserve(TOKENS, COLUMNS, torch.float32)
    arrivals._device = OTHER
    for number in range(SLOTS + 1):
        packed = torch.full((TOKENS, COLUMNS), float(number))
        with arrivals.bring(Features(cast(Batch, None), packed, None)) as there:
            streams.copy(torch.empty(there.shape), there)
    beside, busy = streams.work["beside"], streams.work.pop("replica")
    while streams.advance(random.Random(0)):
        pass
    assert [slot.flatten()[0].item() for slot in arrivals._slots] == list(range(SLOTS))
    assert beside and busy  # the next one waits until its slot was read


def test_there_are_slots_only_where_features_come_from_another_device() -> None:
    def slots(device: str, **changes: Any) -> list[Tensor]:
        job = Job.from_mapping({"target": "t", "dataset": "d", "mask_token_id": 1} | changes, "test")
        return Arrivals.of(job, torch.device(device), TOKENS, COLUMNS)._slots

    assert slots("cpu") == [] == slots("cpu", targets=["cpu"], features="cached")
    if torch.cuda.is_available():
        assert slots("cuda:0", targets=["cuda:0"]) == []
        assert [s.dtype for s in slots("cuda:0", targets=["cpu"], target_dtype="float16")] == [
            torch.float16
        ] * 2
        assert len(slots("cuda:0", targets=["cuda:0"], features="cached")) == SLOTS


SOURCES = ["cpu", "cuda:1"]
LONG = 200_000_000
"""Clock ticks of a device: about a tenth of a second."""


def on_gpu(test: Callable[..., None]) -> Callable[..., None]:
    marks = (
        pytest.mark.gpu,
        pytest.mark.filterwarnings("default"),  # torch's, of a debug mode that is a prototype
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
        pytest.mark.parametrize("source", SOURCES),
    )
    for mark in marks:
        test = mark(test)
    return test


def features_of(source: torch.device, value: float, delay: int = 0) -> Features:
    """Features of `source` that are `value` throughout, ready after `delay` ticks."""
    if source.type == "cpu":
        packed = torch.full((512, 256), value, dtype=torch.bfloat16).pin_memory()
        return Features(cast(Batch, None), packed, None)
    with torch.cuda.device(source):
        if delay:
            torch.cuda._sleep(delay)
        packed = torch.full((512, 256), value, dtype=torch.bfloat16, device=source)
        ready = torch.cuda.Event()
        ready.record()
    return Features(cast(Batch, None), packed, ready)


def arrivals_on(source: str, device: torch.device) -> Arrivals:
    if source != "cpu" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    arrivals = Arrivals(device)
    arrivals.reserve(512, 256, torch.bfloat16)
    return arrivals


@on_gpu
@pytest.mark.parametrize("slow", ["source", "replica", "neither"])
def test_rows_get_their_features_whoever_is_slow_and_the_host_never_waits(source: str, slow: str) -> None:
    """Sources are let go at once, and their memory is taken by the next ones."""
    device = torch.device("cuda:0")
    arrivals, read = arrivals_on(source, device), []
    with torch.cuda.stream(torch.cuda.Stream(device)):
        torch.cuda.set_sync_debug_mode("error")
        try:
            for number in range(12):
                features = features_of(torch.device(source), number, LONG // 10 if slow == "source" else 0)
                with arrivals.bring(features) as packed:
                    read.append(packed.clone())
                del features
                if slow == "replica":
                    torch.cuda._sleep(LONG // 10)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for number, seen in enumerate(read):
            assert bool(seen.eq(number).all()), number


@on_gpu
def test_features_arrive_while_the_replicas_stream_is_busy(source: str) -> None:
    device = torch.device("cuda:0")
    arrivals = arrivals_on(source, device)
    features = features_of(torch.device(source), 1.0)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        with arrivals.bring(features):  # peer access is enabled by the first copy
            pass
        torch.cuda.synchronize(device)
        torch.cuda._sleep(5 * LONG)
        busy = CudaStreams(device).mark()
        with arrivals.bring(features) as packed:
            seen = packed.clone()
        while arrivals._held and not arrivals._held[-1][1].query():  # let go where it is here already
            assert not busy.query(), "the copy waited for the step before"
        assert not busy.query()
        assert bool(seen.eq(1).all())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("source", SOURCES)
def test_a_replica_reads_what_came_from_another_device_and_clears_what_a_longer_row_left(
    tmp_path: Path, source: str
) -> None:
    if source != "cpu" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    device = torch.device("cuda:0")
    replica = make_replica(tmp_path, device, "bfloat16", targets=[source], target_dtype="bfloat16")
    assert len(replica._arrivals._slots) == SLOTS
    (row, _), *_ = rows(tmp_path, 1)
    width, read = replica.features.shape[1], []
    for number, tokens in enumerate([512, 100, 300, 7]):
        packed = torch.full((tokens, width), number + 1.0, dtype=torch.bfloat16)
        packed = packed.pin_memory() if source == "cpu" else packed.to(source)
        replica.load(Features(cast(Batch, None), packed, None), row)
        read.append((tokens, replica.features.clone()))
    for number, (tokens, seen) in enumerate(read):
        assert bool(seen[:tokens].eq(number + 1).all()) and not bool(seen[tokens:].any())
