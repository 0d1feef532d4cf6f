"""Just enough of Gluon on torch's CPU tensors to run the kernels for Hopper, one program after the other.

What a device does later is done here either as early or as late as it may be (`EARLY`, `LATE`): a copy when
it is issued or when its barrier is waited for, a product when it is issued or when waited for, with what
shared memory holds then. Shared memory begins as NaN. So a buffer that is filled again while a product still
reads it, or read before it is full, gives wrong numbers in one of the two; a barrier whose phase never comes
is an error. Layouts, registers and threads are not simulated: only a GPU shows those.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

EARLY, LATE = "early", "late"


class Machine:
    """What is under way in the program that runs."""

    copies: str
    products: str

    def __init__(self, copies: str, products: str) -> None:
        self.copies, self.products = copies, products
        self.running: list[Product] = []
        self.leaving: list[Callable[[], None]] = []
        self.program = 0


MACHINE = Machine(EARLY, EARLY)


@dataclasses.dataclass
class Shared:
    """Shared memory, or a view of it."""

    data: Tensor

    def index(self, place: int) -> Any:
        return self.data[place] if isinstance(self.data, Barriers) else Shared(self.data[place])

    def reshape(self, shape: list[int]) -> Shared:
        return Shared(self.data.view(shape))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data.permute(order))

    def load(self, _layout: Any) -> Tensor:
        return self.data.clone()

    def store(self, value: Tensor) -> None:
        self.data.copy_(value)


class Barrier:
    """An mbarrier: a phase ends when all bytes that were expected have come."""

    def __init__(self) -> None:
        self.phases, self.missing = 0, 0
        self.waiting: list[Callable[[], None]] = []

    def expect(self, count: int) -> None:
        assert self.missing == 0, "two phases at once"
        self.missing = count

    def came(self, count: int) -> None:
        self.missing -= count
        assert self.missing >= 0, "more bytes than were expected"
        if self.missing == 0:
            self.phases += 1

    def wait(self, parity: int) -> None:
        for copy in self.waiting:
            copy()
        self.waiting.clear()
        assert (self.phases - 1) % 2 == parity and self.phases > 0, "a deadlock, or a phase too early"


class Barriers(list[Barrier]):
    """Several of them, as they are allocated."""


@dataclasses.dataclass
class Descriptor:
    """A tensor that is copied in blocks of `block`, with zeros beyond its end."""

    tensor: Tensor
    block: list[int]
    item: int = 2
    """Bytes that each number stands for."""
    layout: None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def part(self, at: list[int]) -> Tensor:
        return self.tensor[tuple(slice(a, a + n) for a, n in zip(at, self.block, strict=True))]


@dataclasses.dataclass
class Pointer:
    """Places in a flat tensor."""

    tensor: Tensor
    places: Any = 0

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.tensor, self.places + more)


class Product:
    """A matrix product under way."""

    def __init__(self, a: Any, b: Shared, start: Tensor) -> None:
        self.a, self.b, self.start = a, b, start
        self.value: Tensor | None = None
        if MACHINE.products == EARLY:
            self.finish()

    def finish(self) -> Tensor:
        if self.value is None:
            a = self.a.data if isinstance(self.a, Shared) else self.a
            self.value = self.start + a.float() @ self.b.data.float()
        return self.value


def _multiply(a: Any, b: Shared, acc: Tensor, use_acc: bool = True, is_async: bool = False) -> Any:
    product = Product(a, b, acc if use_acc else torch.zeros_like(acc))
    if not is_async:
        return product.finish()
    MACHINE.running.append(product)
    return product


def _products_wait(number: int, deps: tuple[Product, ...]) -> Any:
    done = len(MACHINE.running) - number
    for product in MACHINE.running[: max(0, done)]:
        product.finish()
    del MACHINE.running[: max(0, done)]
    for product in deps:
        assert product not in MACHINE.running, "read before it is waited for"
    found = tuple(product.finish() for product in deps)
    return found[0] if len(found) == 1 else found


def _copy(source: Descriptor, at: list[int], barrier: Barrier, to: Shared, pred: bool = True) -> None:
    if not pred:
        return

    def arrive() -> None:
        part = source.part(at)
        whole = torch.zeros_like(to.data)
        whole[tuple(slice(0, n) for n in part.shape)] = part
        to.data.copy_(whole)
        barrier.came(to.data.numel() * source.item)

    if MACHINE.copies == EARLY:
        arrive()
    else:
        barrier.waiting.append(arrive)


def _add(target: Descriptor, at: list[int], source: Shared) -> None:
    def leave() -> None:
        target.part(at).add_(source.data)

    if MACHINE.copies == EARLY:
        leave()
    else:
        MACHINE.leaving.append(leave)


def _store_wait(_number: int) -> None:
    for leave in MACHINE.leaving:
        leave()
    MACHINE.leaving.clear()


def _allocate(dtype: Any, shape: list[int], _layout: Any) -> Any:
    if dtype == "barrier":
        made = Barriers(Barrier() for _ in range(shape[0]))
        return made[0] if len(shape) == 1 else Shared(made)  # type: ignore[arg-type]
    return Shared(torch.full(shape, torch.nan, dtype=dtype))


def _load(pointer: Pointer) -> Any:
    found = pointer.tensor.view(-1)[pointer.places]
    return Scalar(int(found)) if found.ndim == 0 else found


class Scalar(int):
    """A number of the device."""

    def to(self, _dtype: Any) -> int:
        return int(self)


def _store(pointer: Pointer, value: Tensor) -> None:
    pointer.tensor.view(-1)[pointer.places.reshape(-1)] = value.reshape(-1)


def _where(condition: Any, yes: Any, no: Any) -> Any:
    return torch.where(condition, yes, torch.tensor(no, dtype=yes.dtype))


def _language() -> Any:
    gl: Any = ModuleType("gluon.language")
    gl.program_id = lambda _axis: MACHINE.program
    gl.num_warps = lambda: 8
    gl.NVMMADistributedLayout = gl.SliceLayout = gl.DotOperandLayout = lambda *_: None
    gl.NVMMASharedLayout = mock.Mock()
    gl.arange = lambda start, end, _layout: torch.arange(start, end)
    gl.zeros = lambda shape, _dtype, _layout: torch.zeros(shape)
    gl.load, gl.store, gl.where = _load, _store, _where
    gl.exp2, gl.log2, gl.maximum = torch.exp2, torch.log2, torch.maximum
    gl.max, gl.sum = (lambda x, axis: x.amax(axis)), (lambda x, axis: x.sum(axis))
    gl.convert_layout = lambda value, _layout: value
    gl.allocate_shared_memory = _allocate
    gl.int64, gl.int32, gl.float32 = "barrier", torch.int32, torch.float32
    gl.thread_barrier = lambda: None
    gl.static_range = range
    return gl


def load_kernels(path: Path) -> Any:
    """The module at `path` with this Gluon in place of Triton's."""
    hopper: Any = ModuleType("hopper")
    hopper.fence_async_shared = lambda: None
    hopper.warpgroup_mma, hopper.warpgroup_mma_wait = _multiply, _products_wait
    hopper.mbarrier, hopper.tma = mock.Mock(), mock.Mock()
    hopper.mbarrier.expect = lambda bar, count, pred=True: bar.expect(count) if pred else None
    hopper.mbarrier.wait = lambda bar, parity, pred=True: bar.wait(parity) if pred else None
    hopper.tma.async_copy_global_to_shared, hopper.tma.store_wait = _copy, _store_wait
    experimental: Any = ModuleType("experimental")
    experimental.gluon = mock.Mock(jit=lambda f: f)
    gluon: Any = ModuleType("gluon")
    gluon.language = _language()
    core: Any = ModuleType("core")
    core.builtin = lambda f: f
    fakes = {
        "triton": ModuleType("triton"),
        "triton._C": ModuleType("triton._C"),
        "triton._C.libtriton": mock.Mock(),
        "triton.experimental": experimental,
        "triton.experimental.gluon": gluon,
        "triton.experimental.gluon.language": gluon.language,
        "triton.experimental.gluon.language._core": core,
        "triton.experimental.gluon.language.nvidia": ModuleType("nvidia"),
        "triton.experimental.gluon.language.nvidia.hopper": hopper,
    }
    spec = importlib.util.spec_from_file_location(f"{path.stem}_on_cpu", path)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, fakes):
        spec.loader.exec_module(module)
    module.add_from_shared = _add
    return module


def launch(kernel: Callable[..., None], programs: int, copies: str, products: str, **arguments: Any) -> None:
    """Run all programs; `copies`, `products`: EARLY or LATE."""
    global MACHINE
    for program in range(programs):
        MACHINE = Machine(copies, products)
        MACHINE.program = program
        kernel(**arguments)
        assert not MACHINE.leaving, "ended before its sums had left"
