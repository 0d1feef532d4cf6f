"""A target's graphs on a GPU: equal to its own pass, in threads, without a wait, and made at the start."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from remote_payload.train import execution
from remote_payload.train.devices import on_device
from remote_payload.train.execution import AUTO, COMPILED, EAGER, GRAPH
from remote_payload.train.features import pack
from remote_payload.train.target import Target
from remote_payload.train.target_graphs import apart
from remote_payload.train.target_layout import Packed, Padded
from remote_payload.train.target_pass import TargetPass
from remote_payload.train.target_shapes import PackedShape, PaddedShape
from tests.payload.families import write_family
from tests.payload.recompiles import no_recompiles
from tests.payload.test_target_pass import plain_documents

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # what torch warns of while it compiles is no failed compilation
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(300),
]

DEVICE = torch.device("cuda:0")
TAPS = (0, 2, 3)
PACKED = Packed([PackedShape(512, 9, 200), PackedShape(256, 5, 128)])
PADDED = Padded([PaddedShape(4, 128), PaddedShape(9, 40)])
FAMILIES = ["llama", "qwen3", "gemma3, windows", "mistral, windows"]


@pytest.fixture
def worker() -> Iterator[None]:
    """What a worker thread lives in: its own stream."""
    with on_device(DEVICE):
        yield


def load(folder: Path, family: str = "llama", dtype: torch.dtype = torch.bfloat16) -> Target:
    if not (folder / "config.json").exists():
        write_family(folder, family)
    return Target.load(folder, TAPS, device=DEVICE, dtype=dtype)


def batches(count: int) -> list[tuple[Tensor, list[int]]]:
    """Random ones, all of which fit a shape of either layout."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for number in range(count):
        rows, longest = (4, 120) if number % 2 else (9, 40)
        lengths = torch.randint(1, longest + 1, (rows,), generator=generator).tolist()
        ids = torch.randint(3, 60, (rows, max(lengths)), generator=generator)
        made.append((ids, lengths))
    return made


def captured(target: Target, rung: str, layout: Any, last_hidden: bool = False) -> TargetPass:
    forward = TargetPass(target, last_hidden)
    with execution.WARM_UP_LOCK:
        result = forward.warm_up(rung, [layout])
    assert result.execution == rung and forward.layout is layout, result.reason
    return forward


def own(target: Target, ids: Tensor, lengths: list[int], last_hidden: bool = False) -> Tensor:
    return pack(target.features(ids.to(DEVICE), last_hidden), lengths)


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("family", FAMILIES)
def test_padded_replays_in_float32_are_the_models_own_pass_to_the_bit(tmp_path: Path, family: str) -> None:
    target = load(tmp_path, family, torch.float32)
    forward = captured(target, GRAPH, PADDED)
    assert forward.apart == 0
    for shape in PADDED.shapes:
        lengths = [shape.longest] * shape.rows
        for seed in range(5):
            ids = torch.randint(
                3, 60, (shape.rows, shape.longest), generator=torch.Generator().manual_seed(seed)
            )
            assert forward.packed(ids, lengths).equal(own(target, ids, lengths))


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("layout", [PACKED, PADDED], ids=["packed", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_replays_over_random_batches_are_the_models_own_passes(
    tmp_path: Path, family: str, layout: Any
) -> None:
    target, last_hidden = load(tmp_path, family), family in FAMILIES[::2]
    forward = captured(target, GRAPH, layout, last_hidden)
    kept = []
    with no_recompiles():
        for ids, lengths in batches(40):
            found = forward.packed(ids, lengths)
            assert apart(found, own(target, ids, lengths, last_hidden))[0] < 5e-2
            kept.append((found, found.clone()))
    assert all(found.equal(copy) for found, copy in kept)


@pytest.mark.usefixtures("worker")
def test_compiled_layers_are_compiled_in_warm_up_alone_and_give_the_same(tmp_path: Path) -> None:
    target = load(tmp_path, "qwen3")
    forward = captured(target, COMPILED, PACKED)
    with no_recompiles():
        for ids, lengths in batches(20):
            assert apart(forward.packed(ids, lengths), own(target, ids, lengths))[0] < 5e-2


@pytest.mark.usefixtures("worker")
def test_auto_tries_compiled_layers_and_says_what_it_took_and_why(tmp_path: Path) -> None:
    target = load(tmp_path, "qwen3")
    forward = TargetPass(target, False)
    with execution.WARM_UP_LOCK:
        result = forward.warm_up(AUTO, [PACKED, PADDED])
    assert result.execution in (GRAPH, COMPILED) and not result.steps_down and forward.layout is PACKED
    assert "compiled layers take" in result.reason and "plain ones" in result.reason
    with no_recompiles():
        for ids, lengths in batches(6):
            assert apart(forward.packed(ids, lengths), own(target, ids, lengths))[0] < 5e-2


@pytest.mark.parametrize("back", [-1, 5])
def test_attention_in_documents_is_that_of_each_by_itself(back: int) -> None:
    generator = torch.Generator(DEVICE).manual_seed(0)
    query = torch.randn(64, 4, 8, device=DEVICE, dtype=torch.bfloat16, generator=generator)
    key, value = torch.randn(2, 64, 2, 8, device=DEVICE, dtype=torch.bfloat16, generator=generator)
    bounds = torch.tensor([0, 1, 30, 47, 47, 47], device=DEVICE, dtype=torch.int32)
    found = torch.ops.dflashctl.document_attention(query, key, value, bounds, 32, 0.3, back)
    q, k, v = (x.float().cpu() for x in (query, key, value))
    wanted = plain_documents(q, k, v, bounds.cpu(), 32, 0.3, back)
    torch.testing.assert_close(found[:47].float().cpu(), wanted[:47], atol=2e-2, rtol=2e-2)


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("layout", [PACKED, PADDED], ids=["packed", "padded"])
def test_nothing_in_a_pass_waits_for_the_device(tmp_path: Path, layout: Any) -> None:
    forward = captured(load(tmp_path), GRAPH, layout)
    given = batches(6)
    forward.packed(*given[0])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")  # likely process-wide: nobody else runs here
    try:
        for ids, lengths in given:
            forward.packed(ids, lengths)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("worker")
def test_graphs_without_memory_leave_an_eager_target_and_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load(tmp_path)
    real, held = Padded.run, []

    def greedy(self: Padded, *arguments: Any) -> None:
        real(self, *arguments)
        if torch.cuda.is_current_stream_capturing():
            held.append(torch.empty(1 << 40, dtype=torch.uint8, device=DEVICE))  # a TiB

    monkeypatch.setattr(Padded, "run", greedy)
    forward = TargetPass(target, False)
    result = forward.warm_up(GRAPH, [PADDED])
    assert result.execution == EAGER and "memory" in result.reason and forward.layout is None
    assert len(result.steps_down) == 1
    monkeypatch.undo()
    for ids, lengths in batches(3):
        assert forward.packed(ids, lengths).equal(own(target, ids, lengths))
    captured(target, GRAPH, PADDED)  # and the device still captures


def test_two_targets_in_two_threads_capture_in_turn_and_replay_beside_each_other(tmp_path: Path) -> None:
    """While a third thread computes and allocates on the same device."""
    load(tmp_path)  # writes the model once
    given = batches(60)
    stop, errors = threading.Event(), []
    ready = threading.Barrier(2)
    found: dict[int, list[Tensor]] = {}
    captures: list[int] = []

    def guarded(work: Any, *arguments: Any) -> None:
        try:
            with on_device(DEVICE):
                work(*arguments)
        except BaseException as error:
            errors.append(error)
            ready.abort()

    def busy() -> None:
        generator = torch.Generator(DEVICE).manual_seed(0)
        while not stop.is_set():
            a = torch.randn(1024, 1024, device=DEVICE, generator=generator)
            (a @ a).sum().item()
            torch.empty(int(a[0, 0].abs() * 1000 + 1) << 16, device=DEVICE)

    def work(number: int) -> None:
        with execution.WARM_UP_LOCK:
            target = load(tmp_path)
            forward = TargetPass(target, False, number)
            result = forward.warm_up(GRAPH, [PACKED, PADDED])
            assert result.execution == GRAPH, result.reason
        ready.wait(200)
        before = len(captures)
        found[number] = [forward.packed(ids, lengths) for ids, lengths in given]
        torch.cuda.current_stream().synchronize()
        assert len(captures) == before  # nothing is captured again once both are ready

    real = execution.Graph.__init__

    def counted(self: execution.Graph, *arguments: Any) -> None:
        captures.append(1)
        real(self, *arguments)

    threads = [threading.Thread(target=guarded, args=(busy,))]
    threads += [threading.Thread(target=guarded, args=(work, number)) for number in range(2)]
    execution.Graph.__init__ = counted  # type: ignore[method-assign,assignment]
    try:
        for thread in threads:
            thread.start()
        for thread in threads[1:]:
            thread.join()
    finally:
        execution.Graph.__init__ = real  # type: ignore[method-assign]
        stop.set()
        threads[0].join()
    assert not errors and len(captures) == 4
    assert all(mine.equal(other) for mine, other in zip(found[0], found[1], strict=True))
    with on_device(DEVICE):
        target = load(tmp_path)
        for (ids, lengths), mine in zip(given, found[0], strict=True):
            assert apart(mine, own(target, ids, lengths))[0] < 5e-2
