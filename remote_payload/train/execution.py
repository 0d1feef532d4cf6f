"""How a step runs: compiled or eager, decided here alone, with one reason logged for every step down.

Nothing else in the project calls torch.compile. Plain inductor with `dynamic=False` is safe in worker
threads (measured on torch 2.11, two H200s, both threads compiling at once); CUDA graphs by
`mode="reduce-overhead"` are not: below torch 2.13 they fail in any thread but main.

- One compiled callable per replica, on its own clone of the code object: replicas that share a code object
  share its cache, and the ninth entry raises or falls silently back to eager.
- `fullgraph=True, dynamic=False`: fixed shapes, no graph break, and everything that changes is an argument.
- Replicas warm up in turn, under one lock. From then on a recompile is counted and shown.
"""

from __future__ import annotations

import shutil
import threading
import types
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])

COMPILED = "compiled"
EAGER = "eager"

WARM_UP_LOCK = threading.Lock()
"""Held by the replica that warms up; the others wait for their turn."""


def decide(wanted: str, device: torch.device) -> tuple[str, str]:
    """The first rung to try for a job's `execution` on `device`, and the reason.

    `auto` and `compiled` try inductor wherever a compiler for it exists.
    """
    if wanted == EAGER:
        return EAGER, "the job says so"
    if device.type == "cpu" and not compiler():
        return EAGER, "inductor needs a C++ compiler on a CPU, and there is none (CXX, g++, clang++)"
    return COMPILED, "the job says so" if wanted == COMPILED else "inductor is safe in threads; fixed shapes"


def compiler() -> str | None:
    """The C++ compiler that inductor would use on a CPU, or None."""
    from torch._inductor import config

    candidates = config.cpp.cxx
    names = candidates if isinstance(candidates, list | tuple) else (candidates,)
    return next((found for name in names if name and (found := shutil.which(name))), None)


def build(function: Function, execution: str, name: str) -> Function:
    """`function` as `execution` runs it; `name` tells replicas apart in compiler messages."""
    if execution == EAGER:
        return function
    return cast(Function, torch.compile(_clone(function, name), fullgraph=True, dynamic=False))


def compiled_graphs() -> int:
    """Graphs compiled in this process so far; more after warm-up than before means a recompile."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def _clone(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    assert isinstance(function, types.FunctionType)
    code = function.__code__.replace(co_name=f"{function.__name__}_{name}")
    clone = types.FunctionType(
        code, function.__globals__, code.co_name, function.__defaults__, function.__closure__
    )
    clone.__kwdefaults__ = function.__kwdefaults__
    return clone
