"""How a step runs: by CUDA graph, compiled or eager; decided here alone, with a reason for every step down.

Nothing else in the project calls torch.compile or captures a graph. Plain inductor with `dynamic=False` is
safe in worker threads, and so is a capture by hand in thread-local mode (measured on torch 2.11, two H200s,
both threads at once); `mode="reduce-overhead"` is not: below torch 2.13 it fails in any thread but main.

- One compiled callable per replica, on its own clone of the code object: replicas that share a code object
  share its cache, and the ninth entry raises or falls silently back to eager.
- `fullgraph=True, dynamic=False`: fixed shapes, no graph break, and everything that changes is an argument.
- Replicas warm up in turn, under one lock, and captures too: entering one empties the caches of all devices.
  From then on a recompile is counted and shown, and more than a few end compilation.
- A graph has a pool of its own, and holds neither random numbers nor anything that talks to another device.
"""

from __future__ import annotations

import gc
import shutil
import threading
import types
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from remote_payload.job import JobError

Function = TypeVar("Function", bound=Callable[..., Any])

AUTO = "auto"
GRAPH = "graph"
COMPILED = "compiled"
EAGER = "eager"
REDUCE_OVERHEAD = "reduce-overhead"

TREES_IN_THREADS = (2, 13)
"""The first torch whose CUDA graph trees work in any thread (pytorch PR 184357)."""

RECOMPILES_ALLOWED = 8
"""Graphs compiled after warm-up before a compiled replica goes on eagerly: what one function may have."""

WARM_UP_LOCK = threading.Lock()
"""Held by the replica that warms up; the others wait for their turn."""

CAPTURE_LOCK = threading.Lock()
"""Held while a graph is captured, and while a collective is begun on one device and not yet on the others:
entering a capture frees memory of all devices, which waits for them."""


def decide(wanted: str, device: torch.device, version: str = torch.__version__) -> tuple[str, str]:
    """The first rung to try for a job's `execution` on `device`, and the reason.

    `auto` tries the highest rung that the device has. Raises JobError for a way that cannot work in threads.
    """
    if wanted == REDUCE_OVERHEAD and (refusal := refuse_trees(version)):
        raise JobError(f"execution = {REDUCE_OVERHEAD!r}: {refusal}; use {GRAPH!r}, which is as fast")
    if wanted == EAGER:
        return EAGER, "the job says so"
    if device.type == "cpu":
        if not compiler():
            return EAGER, "inductor needs a C++ compiler on a CPU, and there is none (CXX, g++, clang++)"
        if wanted in (GRAPH, REDUCE_OVERHEAD):
            return COMPILED, "a CPU has no CUDA graphs"
        return (
            COMPILED,
            "the job says so" if wanted == COMPILED else "inductor is safe in threads; fixed shapes",
        )
    if wanted == AUTO:
        return GRAPH, "captured by hand in thread-local mode, which is safe in threads; fixed shapes"
    return wanted, "the job says so"


def decide_target(wanted: str, device: torch.device) -> tuple[str, str]:
    """The first rung to try for a job's `target_execution` on `device`, and the reason.

    For `auto` warm-up may leave it for a higher one.
    """
    if wanted == EAGER:
        return EAGER, "the job says so"
    if device.type == "cpu":
        return EAGER, "a CPU has no CUDA graphs"
    if wanted == AUTO:
        return GRAPH, "captured by hand in thread-local mode; a few shapes hold all batches"
    return wanted, "the job says so"


def refuse_trees(version: str = torch.__version__) -> str | None:
    """Why `mode="reduce-overhead"` cannot run in worker threads of this torch; None where it can."""
    if torch_version(version) >= TREES_IN_THREADS:
        return None
    return (
        f"below torch {'.'.join(map(str, TREES_IN_THREADS))} CUDA graph trees fail in a worker thread, since"
        f" their state lies in storage of the main thread's own (pytorch #123177); this is torch {version}"
    )


def torch_version(version: str = torch.__version__) -> tuple[int, int]:
    """Major and minor number of a torch release."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def configure() -> None:
    """Set what compiled steps rely on, in the thread that runs them; called first where anything compiles.

    From torch 2.12 on the configuration belongs to a context, and a worker need not see what main has set
    (pytorch #186537).
    """
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor

    dynamo.suppress_errors = False  # a graph that cannot be compiled is a step down, not silently eager
    inductor.triton.cudagraphs = False
    if torch_version() == (2, 13):
        inductor.use_static_triton_launcher = False  # it crashes: pytorch #190502
    assert not inductor.triton.cudagraphs and not dynamo.suppress_errors


def compiler() -> str | None:
    """The C++ compiler that inductor would use on a CPU, or None."""
    from torch._inductor import config

    candidates = config.cpp.cxx
    names = candidates if isinstance(candidates, list | tuple) else (candidates,)
    return next((found for name in names if name and (found := shutil.which(name))), None)


def build(
    function: Function, execution: str, name: str, *, trees: bool = True, dynamic: bool = False
) -> Function:
    """`function` as `execution` runs it; `name` tells replicas apart in compiler messages.

    A graph is captured from the compiled function, so `graph` builds the same as `compiled`. `trees` is for
    `reduce-overhead`: whether inductor keeps its graphs in trees, or each for itself as it did before.
    `dynamic`: for any size of its arguments; only of what is captured in warm-up and never called after it.
    """
    if execution == EAGER:
        return function
    options: dict[str, Any] = {"fullgraph": True, "dynamic": dynamic}
    if execution == REDUCE_OVERHEAD:
        options["options"] = {**mode_options(REDUCE_OVERHEAD), "triton.cudagraph_trees": trees}
    return cast(Function, torch.compile(_clone(function, name), **options))


def mode_options(mode: str) -> dict[str, Any]:
    """The inductor options that a mode of torch.compile stands for; a mode and options exclude each other."""
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode))


def compiled_graphs() -> int:
    """Graphs compiled in this process so far; more after warm-up than before means a recompile."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


class Graph:
    """Work on fixed addresses, captured once and replayed; used by the thread that captured it."""

    def __init__(self, work: Callable[[], Any], device: torch.device, memory_of: Graph | None = None) -> None:
        """Capture `work`, which has run on this thread's stream before, so that nothing in it is new.

        Whatever `work` leaves behind (tensors that it stored) is filled by every replay. Raises whatever the
        capture raises, also for lack of memory; the device is as it was then. `memory_of`: a graph of the
        same stream whose pool this one uses too, when neither leaves anything behind in it.
        """
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(device)
        assert stream != torch.cuda.default_stream(device), "capture needs a stream of the thread's own"
        with CAPTURE_LOCK:
            try:
                with torch.cuda.graph(
                    self._graph,
                    pool=None if memory_of is None else memory_of._graph.pool(),
                    stream=stream,
                    capture_error_mode="thread_local",
                ):
                    work()
            except BaseException:
                self._graph = torch.cuda.CUDAGraph()
                gc.collect()  # what the failed capture allocated hangs on the exception's frames
                torch.cuda.synchronize(device)
                raise

    def replay(self) -> None:
        """Run the captured work once, on the current stream."""
        self._graph.replay()


def _clone(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    assert isinstance(function, types.FunctionType)
    code = function.__code__.replace(co_name=f"{function.__name__}_{name}")
    clone = types.FunctionType(
        code, function.__globals__, code.co_name, function.__defaults__, function.__closure__
    )
    clone.__kwdefaults__ = function.__kwdefaults__
    return clone
