"""Graphs in worker threads: what a replay computes, what may go on beside it, and what a failure leaves."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from remote_payload.job import Job
from remote_payload.train import execution
from remote_payload.train.devices import on_device
from remote_payload.train.optimizer import Optimizer, adamw
from remote_payload.train.replay import BOUND
from remote_payload.train.replica import Replica
from remote_payload.train.weights import FlatWeights
from tests.payload.recompiles import no_recompiles
from tests.payload.small_replica import load, make_replica, rows, run_rows
from tests.payload.tiny import job_values

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # what torch warns of while it compiles is no failed compilation
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(300),
]

DEVICE = torch.device("cuda:0")


def warmed(folder: Path, rung: str, dtype: str = "bfloat16", **changes: Any) -> Replica:
    """A replica on a rung; fails when it had to step down."""
    replica = make_replica(folder, DEVICE, dtype, **changes)
    result = replica.warm_up(rung)
    assert result.execution == rung, result.reason
    return replica


@pytest.fixture
def worker() -> Iterator[None]:
    """What a worker thread lives in: its own stream, backward in its own thread."""
    with on_device(DEVICE):
        yield


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_replay_is_the_compiled_pass_to_the_bit_over_200_rows_and_nothing_is_compiled_again(
    tmp_path: Path, dtype: str
) -> None:
    """The same kernels in the same order, over rows with other masks, anchors and empty slots."""
    given = rows(tmp_path, 200)
    compiled, graph = (warmed(tmp_path, rung, dtype) for rung in (execution.COMPILED, execution.GRAPH))
    with no_recompiles():
        results = [run_rows(replica, given) for replica in (compiled, graph)]
    for number, ((loss, slope), (other, replayed)) in enumerate(zip(*results, strict=True)):
        assert loss == other, number
        assert slope.equal(replayed), number


@pytest.mark.usefixtures("worker")
def test_steps_by_graph_are_those_of_compiled_calls(tmp_path: Path) -> None:
    given = rows(tmp_path, 12)
    pair = [warmed(tmp_path, rung) for rung in (execution.COMPILED, execution.GRAPH)]
    assert all(replica.weights.direct for replica in pair)
    for replica in pair:
        for number, (row, tokens) in enumerate(given):
            load(replica, row, tokens, number)
            replica.run_row(row, 0, first=True)
            replica.step(100.0, 1e-2)
    first, second = pair
    assert first.weights.masters.equal(second.weights.masters)
    assert first.statistics.equal(second.statistics)
    assert first.optimizer.read() == second.optimizer.read()


@pytest.mark.usefixtures("worker")
def test_rows_of_one_step_add_up_by_graph_as_they_do_compiled(tmp_path: Path) -> None:
    given = rows(tmp_path, 3)
    pair = [warmed(tmp_path, rung, rows_per_step=3) for rung in (execution.COMPILED, execution.GRAPH)]
    assert not any(replica.weights.direct for replica in pair)
    sums = [run_rows(replica, given, first=False)[-1][1] for replica in pair]
    assert sums[0].equal(sums[1])
    single = [slope for _, slope in run_rows(pair[1], given)]
    torch.testing.assert_close(sums[1], torch.stack(single).sum(0), rtol=1e-5, atol=1e-6)
    for replica in pair:
        run_rows(replica, given, first=False)
        replica.step(100.0, 1e-2)
    assert pair[0].weights.masters.equal(pair[1].weights.masters)


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("rung", [execution.COMPILED, execution.GRAPH])
def test_nothing_in_a_step_waits_for_the_device(tmp_path: Path, rung: str) -> None:
    replica = warmed(tmp_path, rung)
    given = rows(tmp_path, 3)
    load(replica, *given[0], 0)
    torch.cuda.set_sync_debug_mode("error")  # likely process-wide: nobody else runs here
    try:
        for row, _ in given:
            replica.load(None, row)
            replica.run_row(row, 0, first=True)
            replica.step(100.0, 1e-3)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("worker")
def test_a_capture_without_memory_falls_back_to_compiled_and_trains_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Replica._forward_backward
    held: list[Tensor] = []

    def greedy(self: Replica, used: int | None = None) -> None:
        whole(self, used)
        if torch.cuda.is_current_stream_capturing():
            held.append(torch.empty(1 << 40, dtype=torch.uint8, device=DEVICE))  # a TiB: OutOfMemoryError

    monkeypatch.setattr(Replica, "_forward_backward", greedy)
    replica = make_replica(tmp_path, DEVICE, "bfloat16")
    result = replica.warm_up("auto")
    assert result.execution == execution.COMPILED
    assert "capturing failed" in result.reason and "memory" in result.reason
    assert [(down.old, down.new) for down in result.steps_down] == [(execution.GRAPH, execution.COMPILED)]
    monkeypatch.undo()
    given = rows(tmp_path, 2)
    plain = warmed(tmp_path, execution.COMPILED)
    for (loss, slope), (other, expected) in zip(
        run_rows(replica, given), run_rows(plain, given), strict=True
    ):
        assert loss == other and slope.equal(expected)
    again = warmed(tmp_path, execution.GRAPH)  # and the device still captures
    assert run_rows(again, given)[0][0] == run_rows(plain, given)[0][0]


Rows = list[tuple[float, Tensor]]
"""Loss and flat gradient of each row."""


def parted(replica: Replica, some: Rows, others: Rows) -> str | None:
    """Where two passes over the same rows differ in any bit: rows, parameters, numbers; None: nowhere."""
    pairs = list(zip(some, others, strict=True))
    rows = [n for n, (one, other) in enumerate(pairs) if one[0] != other[0] or not one[1].equal(other[1])]
    if not rows:
        return None
    (loss, slope), (other_loss, other_slope) = pairs[rows[0]]
    said = [f"in {len(rows)} of {len(pairs)} rows; in row {rows[0]} losses are {loss} and {other_loss}"]
    sizes = [leaf.numel() for leaf in replica.weights.leaves]
    for name, mine, other in zip(
        replica.weights.leaf_names, slope.split(sizes), other_slope.split(sizes), strict=True
    ):
        if count := int((mine != other).sum()):
            most, size = float((mine - other).abs().max()), float(other.abs().max())
            said.append(f"{name}: {count} of {len(mine)} numbers, by at most {most:.3g} of {size:.3g}")
    return "; ".join(said)


def compiled_modules() -> list[ModuleType]:
    """What inductor has loaded in this process."""
    from torch._inductor.codecache import PyCodeCache

    return PyCodeCache.modules


def chosen_kernels(first: int) -> dict[str, str]:
    """The blocks and warps of inductor's kernels in what was loaded from module number `first` on.

    Where it has several choices it measures them in the first run. Sums of other blocks round otherwise.
    """
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    found = {}
    for module in compiled_modules()[first:]:
        for name, kernel in vars(module).items():
            if isinstance(kernel, CachingAutotuner) and kernel.launchers:
                place = Path(str(module.__file__)).stem
                found[f"{place}.{name}"] = str(kernel.launchers[0].config)
    return found


def test_two_threads_capture_and_replay_while_a_third_computes_and_allocates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its own generator: the default one of a device must rest while a graph is captured on it.

    A replica's steps are those that it takes alone, to the bit, and those of the other where inductor chose
    the same kernels for both. It keeps its choices on disk, where another process may replace them between
    two warm-ups, so this test has a folder of its own.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    given = rows(tmp_path, 30)
    make_replica(tmp_path, DEVICE, "bfloat16")  # writes the model once
    stop, resting, errors = threading.Event(), threading.Event(), []
    replicas: dict[int, Replica] = {}
    kernels: dict[int, dict[str, str]] = {}
    beside: dict[int, Rows] = {}
    alone: dict[int, Rows] = {}
    again: dict[int, Rows] = {}
    ready, done, one_by_one = threading.Barrier(2), threading.Barrier(2), threading.Lock()

    def guarded(work: Any, *arguments: Any) -> None:
        try:
            with on_device(DEVICE):
                work(*arguments)
        except BaseException as error:
            errors.append(error)
            ready.abort()
            done.abort()

    def busy() -> None:
        generator = torch.Generator(DEVICE).manual_seed(0)
        while not stop.is_set():
            a = torch.randn(1024, 1024, device=DEVICE, generator=generator)
            (a @ a).sum().item()
            torch.empty(int(a[0, 0].abs() * 1000 + 1) << 16, device=DEVICE)
        resting.set()

    def drafter(number: int) -> None:
        with execution.WARM_UP_LOCK:
            loaded = len(compiled_modules())
            replicas[number] = replica = warmed(tmp_path, execution.GRAPH)
            kernels[number] = chosen_kernels(loaded)
        ready.wait(200)
        beside[number] = run_rows(replica, given)
        done.wait(200)
        stop.set()
        resting.wait(60)
        with one_by_one:
            alone[number], again[number] = run_rows(replica, given), run_rows(replica, given)

    threads = [threading.Thread(target=guarded, args=(busy,))]
    threads += [threading.Thread(target=guarded, args=(drafter, number)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads[1:]:
        thread.join()
    stop.set()
    threads[0].join()
    assert not errors, errors
    wrong = []
    for number, replica in sorted(replicas.items()):
        if found := parted(replica, alone[number], again[number]):
            wrong.append(
                f"replica {number} alone does not repeat itself, so something is not ordered: {found}"
            )
        if found := parted(replica, beside[number], alone[number]):
            wrong.append(f"replica {number} beside the other is not what it is alone: {found}")
    pairs = {name: (kernels[0].get(name), kernels[1].get(name)) for name in kernels[0] | kernels[1]}
    others = [f"{name}: {one} and {other}" for name, (one, other) in pairs.items() if one != other]
    between = parted(replicas[0], alone[0], alone[1])
    print(f"{len(pairs)} kernels, not the same in both replicas: {others}; replicas differ: {between}")
    if between and not others:
        wrong.append(f"replicas differ by the same {len(pairs)} kernels: {between}")
    assert not wrong, "\n".join(wrong)
    for (_, mine), (_, other) in zip(alone[0], alone[1], strict=True):
        assert float((mine - other).norm() / other.norm()) < BOUND


@pytest.mark.usefixtures("worker")
def test_the_one_pass_step_compiled_is_torchs_adamw(tmp_path: Path) -> None:
    job = Job.from_mapping(job_values(tmp_path, weight_decay=0.1, clip=0.5), "test")
    pair = []
    for _ in range(2):
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(64, 96, bias=False), torch.nn.RMSNorm(96)).to(DEVICE)
        weights = FlatWeights(module, torch.bfloat16)
        pair.append((weights, Optimizer(weights, job)))
    (mine, one_pass), (_, fused) = pair
    one_pass.use(execution.build(adamw, execution.COMPILED, "test"))
    generator = torch.Generator(DEVICE).manual_seed(0)
    for step in range(8):
        slope = torch.randn(mine.total.shape, device=DEVICE, generator=generator)
        if step == 4:
            slope[5] = torch.nan
        for weights, optimizer in pair:
            weights.total.copy_(slope)
            optimizer.step(3.0, 0.02)
    assert one_pass.read().skipped == fused.read().skipped == 1
    for name, value in one_pass.state().items():
        torch.testing.assert_close(value, fused.state()[name], rtol=1e-5, atol=1e-6, equal_nan=True)
    assert mine.values.equal(mine.masters.to(torch.bfloat16))


@pytest.mark.usefixtures("worker")
def test_warming_up_changes_neither_weights_nor_optimizer(tmp_path: Path) -> None:
    replica = make_replica(tmp_path, DEVICE, "bfloat16")
    (row, tokens), *_ = rows(tmp_path, 1)
    assert replica.warm_up("eager").execution == execution.EAGER
    load(replica, row, tokens, 0)
    replica.run_row(row, 0, first=True)
    replica.step(100.0, 1e-2)  # as a resumed optimizer: its moments are not zero
    before = {name: value.clone() for name, value in replica.optimizer.state().items()}
    with contextlib.suppress(AssertionError):
        replica.warm_up("graph")
    for name, value in replica.optimizer.state().items():
        assert value.equal(before[name]), name
    assert not bool(replica.statistics.any())
