"""Devices: which one a name means, how a worker thread lives on it, and how workers share a CPU.

On a GPU every worker has a stream of its own and they overlap. On a CPU the operations of a target or a
drafter already use all cores: two such workers at once make OpenMP's teams wait for each other at every
barrier (measured on two cores: 8 s a step with a target and an evaluation beside it, against 0.3 s), so
there they take turns. Decoding one token is bound by memory and gains nothing from a second core (70 ms a
token on one, 62 on two), so the evaluator keeps to one and asks for no turn.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from remote_payload.job import JobError

Found = TypeVar("Found")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Number types of weights by the names that jobs, configs and records use."""

DRAFTERS_FIRST = -1
"""Priority of a drafter's stream, before a target's on a GPU that has both. As equals each would get half
of it, and a drafter that needs more would hold up the targets of all other GPUs."""

WAKE_S = 0.1
"""The main thread looks so often for signals while it waits."""


def resolve_devices(names: list[str]) -> list[str]:
    """Device names with `auto` decided; raises JobError for a GPU that is not there."""
    found = torch.cuda.device_count()
    devices = [("cuda:0" if found else "cpu") if name == "auto" else name for name in names]
    for name in devices:
        if name.startswith("cuda") and int(name[5:]) >= found:
            there = f"GPUs cuda:0 to cuda:{found - 1}" if found else "no GPU"
            raise JobError(f"device {name!r} is not there: torch {torch.__version__} sees {there}")
    return devices


def out_of_memory(error: RuntimeError) -> bool:
    """Whether a GPU had no memory: by torch's own word, or by that of cuBLAS or the driver under it."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return any(words in str(error) for words in ("CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory"))


def compute_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """A job's `compute_dtype` or `target_dtype` on `device`."""
    if wanted == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return DTYPES[wanted]


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a number type in jobs, configs and records."""
    return str(dtype).removeprefix("torch.")


def aside(work: Callable[[], Found]) -> Found:
    """What `work` gives or raises, in a worker thread: the main one takes signals and touches no device."""
    given: list[Found] = []
    failed: list[BaseException] = []

    def guarded() -> None:
        try:
            given.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(guarded,), name="aside")
    thread.start()
    while thread.is_alive():
        thread.join(WAKE_S)
    if failed:
        raise failed[0]
    return given[0]


def keep_guard() -> None:
    """Let this thread own what torch takes for the guard of a GPU that is not there; it outlives all others.

    A build for CUDA that sees none gives it to the first thread that compiles. Where that one has ended, as
    the one that measures roles has, the next to compile reads freed memory (torch 2.11 crashes).
    """
    make = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)
    if torch.version.cuda and make is not None and not torch.cuda.device_count():
        make()


@contextlib.contextmanager
def on_device(device: torch.device, priority: int = 0) -> Iterator[None]:
    """What every worker does first: its device, a stream of its own, backward in its own thread.

    `priority` is that of the stream on a GPU, lower first. Entered once in a worker's life: torch has 32
    streams of a priority, and cuBLAS keeps a workspace for every one that a thread was on.

    With multithreaded autograd off, backward runs in the thread that called it, so that configuration,
    thread-local state and a later capture all belong to one thread.
    """
    with torch.autograd.set_multithreading_enabled(False):
        if device.type != "cuda":
            torch.get_num_threads()  # asked for it, torch gives a new thread the number that main has set
            yield
            return
        torch.cuda.set_device(device)
        with torch.cuda.stream(torch.cuda.Stream(device, priority)):
            yield


def synchronise(device: torch.device) -> None:
    """Wait until `device` has done all that was asked of it; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def on_cores(device: torch.device, cores: int | None) -> Iterator[None]:
    """Where `device` is a CPU, work on so many of its cores, in this thread alone; None: on the job's."""
    if device.type != "cpu" or cores is None:
        yield
        return
    everybody = torch.get_num_threads()
    torch.set_num_threads(cores)
    try:
        yield
    finally:
        torch.set_num_threads(everybody)


@contextlib.contextmanager
def turn(device: torch.device) -> Iterator[None]:
    """Hold the CPU for one piece of heavy work, in the order of asking; free on a GPU. Not reentrant."""
    if device.type != "cpu":
        yield
        return
    _CPU.acquire()
    try:
        yield
    finally:
        _CPU.release()


class _FairLock:
    """A lock that goes to who has waited longest; threading.Lock goes to who is quickest to ask again."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._held = False
        self._waiting: collections.deque[threading.Lock] = collections.deque()

    def acquire(self) -> None:
        with self._guard:
            if not self._held:
                self._held = True
                return
            mine = threading.Lock()
            mine.acquire()
            self._waiting.append(mine)
        mine.acquire()  # released by whoever hands the CPU over

    def release(self) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._held = False


_CPU = _FairLock()
