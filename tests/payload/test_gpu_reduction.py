"""The sum over replicas on two GPUs or more: by NCCL, against torch's own sum and against peer copies."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.cuda.comm import reduce_add_coalesced

from remote_payload.train import execution, weights
from remote_payload.train.agreement import Contribution
from remote_payload.train.devices import on_device
from remote_payload.train.replica import Replica
from remote_payload.train.run_control import RunControl
from remote_payload.train.sync import AUTO, NCCL, PEER, Reduction
from remote_payload.train.weights import FlatWeights
from tests.payload.small_replica import load, make_replica, rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
    pytest.mark.timeout(120),
]

GPUS = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
SHARED = [*GPUS[:1], *GPUS]
"""Two replicas on the first GPU."""
Work = Callable[[], object]


@pytest.fixture(autouse=True)
def several_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "BUCKET_BYTES", 2**20)


def flat(device: torch.device, dtype: torch.dtype, place: weights.SumPlace) -> FlatWeights:
    """1.3 million numbers in three buckets or more; none by a GPU's own generator, since others capture."""
    module = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(5)), nn.RMSNorm(777))
    return FlatWeights(module.to(device), dtype, gradient=dtype, place=place)


def square(device: torch.device) -> Tensor:
    """Something to multiply, likewise."""
    dice = torch.Generator(device).manual_seed(0)
    return torch.randn(2048, 2048, device=device, dtype=torch.bfloat16, generator=dice)


def random_gradients(
    like: FlatWeights, seed: int, *, whole: bool = False, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Gradients by leaf; `whole`: small whole numbers, whose sums are exact."""
    generator = torch.Generator(like.masters.device).manual_seed(seed)
    made = [
        torch.randn(leaf.shape, device=leaf.device, generator=generator, dtype=torch.float32)
        for leaf in like.leaves
    ]
    return [(g * 4).round().to(dtype) if whole else g.to(dtype) for g in made]


def together(
    devices: Sequence[torch.device], work: Sequence[Work], control: RunControl, limit_s: float = 60.0
) -> list[BaseException]:
    """Each piece of work in a thread on its device and a stream of its own; what they raised."""
    raised: list[BaseException] = []

    def guarded(device: torch.device, one: Work) -> None:
        try:
            with on_device(device):
                one()
                torch.cuda.current_stream(device).synchronize()
        except BaseException as error:
            raised.append(error)
            control.abort()

    threads = [
        threading.Thread(target=guarded, args=pair, daemon=True) for pair in zip(devices, work, strict=True)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), f"every thread ends; {raised}"
    return raised


def summed(
    devices: list[torch.device], wanted: str, dtype: torch.dtype, steps: int = 3
) -> tuple[list[Tensor], list[list[Tensor]], list[Tensor]]:
    """Totals of all replicas after some steps, the gradients of the last, and the summed statistics."""
    control = RunControl()
    reduction = Reduction(devices, control, wanted)
    totals: list[Any] = [None] * len(devices)
    given: list[Any] = [None] * len(devices)
    statistics: list[Any] = [None] * len(devices)
    calm = threading.Barrier(len(devices))
    control.on_abort(calm.abort)

    def replica(number: int) -> None:
        mine = flat(devices[number], dtype, reduction.place(number))
        assert len(mine.buckets) >= 3
        every = [random_gradients(mine, 10 * step + number, dtype=dtype) for step in range(steps)]
        own = torch.full((50,), 1.0 + number, dtype=torch.float64, device=devices[number])
        for step, gradients in enumerate(every):
            if step == 1:
                torch.cuda.synchronize()
                calm.wait()
                torch.cuda.set_sync_debug_mode("error")  # for all threads: also the communication thread's
            mine.collect(gradients, first=True)
            agreed, found = reduction.reduce(number, Contribution(mine, own, weight=1.0 + number))
            assert agreed.weight == sum(range(len(devices) + 1))
        calm.wait()
        torch.cuda.set_sync_debug_mode("default")
        totals[number], given[number], statistics[number] = mine.total.clone(), every[-1], found.clone()

    try:
        with reduction.serving() as choice:
            assert choice.way == wanted, choice.reason
            work = [functools.partial(replica, number) for number in range(len(devices))]
            assert together(devices, work, control) == []
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return totals, given, statistics


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "devices",
    [
        pytest.param(GPUS[:2], id="two"),
        pytest.param(GPUS, id="all", marks=pytest.mark.skipif(len(GPUS) < 3, reason="they are two")),
        pytest.param(SHARED, id="shared"),
    ],
)
def test_a_sum_by_nccl_is_torchs_coalesced_sum_and_that_of_peer_copies(
    devices: list[torch.device], dtype: torch.dtype
) -> None:
    """To the bit where two are added; with more, orders differ by rounding. No step waits for a device."""
    totals, given, statistics = summed(devices, NCCL, dtype)
    for total, mine in zip(totals, statistics, strict=True):
        assert total.to(GPUS[0]).equal(totals[0]), "all replicas hold the same bits"
        assert mine.tolist() == [sum(range(len(devices) + 1))] * 50
    rounding = (len(devices) - 1) * torch.finfo(dtype).eps
    size = sum(torch.cat([g.flatten() for g in each]).abs().to(GPUS[0]) for each in given)
    copies, same, _ = summed(devices, PEER, dtype)
    assert all(a.equal(b) for pair in zip(given, same, strict=True) for a, b in zip(*pair, strict=True))
    found = totals[0].float()
    assert bool(((found - copies[0].float()).abs() <= rounding * size).all())
    if len(devices) == 2:
        assert found.equal(copies[0].to(dtype).float())
    if len(set(devices)) == len(devices):
        oracle = reduce_add_coalesced(given, destination=0)
        expected = torch.cat([part.flatten() for part in oracle]).float()
        assert bool(((found - expected).abs() <= rounding * size).all())
        if len(devices) == 2:
            assert found.equal(expected)


def test_200_sums_are_right_while_other_threads_compute_copy_allocate_and_capture() -> None:
    devices, control = GPUS[:2], RunControl()
    reduction = Reduction(devices, control, AUTO)
    wrong: dict[int, Tensor] = {}
    over = threading.Event()
    control.on_abort(over.set)

    def replica(number: int) -> None:
        mine = flat(devices[number], torch.float32, reduction.place(number))
        every = [
            [random_gradients(mine, 7 * step + n, whole=True) for step in range(4)]
            for n in range(len(devices))
        ]
        expected = [
            sum(torch.cat([g.flatten() for g in every[n][step]]) for n in range(len(devices)))
            for step in range(4)
        ]
        a = square(devices[number])
        bad = torch.zeros((), dtype=torch.int64, device=devices[number])
        statistics = torch.zeros(3, dtype=torch.float64, device=devices[number])
        try:
            for step in range(200):
                for _ in range(1 + (step + number) % 3):  # replicas are not equally fast
                    a = torch.nn.functional.normalize(a @ a)
                mine.collect(every[number][step % 4], first=True)
                reduction.reduce(number, Contribution(mine, statistics, 1.0))
                bad += (mine.total != expected[step % 4]).sum()
        finally:
            over.set()
        wrong[number] = bad

    def target(number: int) -> None:
        """Computes, copies to the other GPU, and allocates."""
        other = devices[1 - number]
        a = square(devices[number])
        turn = 0
        while not over.is_set():
            turn += 1
            a = torch.nn.functional.normalize(a @ a)
            (a.to(other, non_blocking=True) + 1).sum()
            torch.empty(2**20 * (1 + turn % 50), device=devices[number])
            if turn % 10 == 0:
                torch.cuda.current_stream().synchronize()

    def capture() -> None:
        """Entering a capture waits for all devices and empties their caches."""
        a = torch.zeros(1000, device=devices[0])
        a.add_(1)
        while not over.is_set():
            execution.Graph(lambda: a.add_(1), devices[0]).replay()
            time.sleep(0.05)

    with reduction.serving() as choice:
        assert choice.way == NCCL, choice.reason
        work: list[Work] = [functools.partial(replica, number) for number in (0, 1)]
        work += [functools.partial(target, number) for number in (0, 1)]
        assert together([*devices, *devices, devices[0]], [*work, capture], control) == []
    assert [int(bad) for bad in wrong.values()] == [0, 0]


def test_a_replica_that_fails_frees_the_others_and_the_gpus_at_once_and_nccl_works_again() -> None:
    control = RunControl()
    reduction = Reduction(GPUS[:2], control, AUTO)
    left: dict[int, float] = {}

    def replica(number: int) -> None:
        mine = flat(GPUS[number], torch.float32, reduction.place(number))
        gradients = random_gradients(mine, number)
        statistics = torch.zeros(3, dtype=torch.float64, device=GPUS[number])
        try:
            for step in range(20):
                mine.collect(gradients, first=True)
                if (number, step) == (1, 10):
                    time.sleep(0.5)
                    left[-1] = time.monotonic()
                    raise ArithmeticError("broken")
                reduction.reduce(number, Contribution(mine, statistics, 1.0))
        finally:
            left[number] = time.monotonic()

    with reduction.serving():
        work = [functools.partial(replica, number) for number in (0, 1)]
        raised = together(GPUS[:2], work, control)
        assert sorted(type(error).__name__ for error in raised) == ["Aborted", "ArithmeticError"]
        assert left[0] - left[-1] < 5
    for device in GPUS[:2]:
        torch.cuda.synchronize(device)
    totals, _, _ = summed(GPUS[:2], NCCL, torch.float32)
    assert totals[0].equal(totals[1].to(GPUS[0]))


@pytest.mark.timeout(300)
def test_two_replicas_by_graph_in_bfloat16_add_up_what_one_adds_up_and_stay_the_same_bits(
    tmp_path: Path,
) -> None:
    """One with two rows a step sums them in float32, two with a row each in bfloat16."""
    given = rows(tmp_path, 10)
    with on_device(GPUS[0]):
        alone = make_replica(tmp_path, GPUS[0], "bfloat16", rows_per_step=2)
        result = alone.warm_up(execution.GRAPH)
        assert result.execution == execution.GRAPH, result.reason
        for number, (row, tokens) in enumerate(given[:2]):
            load(alone, row, tokens, number)
            alone.run_row(row, 0, first=number == 0)
        expected = alone.weights.total.clone()
    control = RunControl()
    reduction = Reduction(GPUS[:2], control, AUTO)
    replicas: dict[int, Replica] = {}
    first: dict[int, Tensor] = {}
    ready = threading.Barrier(2)
    control.on_abort(ready.abort)

    def replica(number: int) -> None:
        with execution.WARM_UP_LOCK:
            mine = make_replica(
                tmp_path,
                GPUS[number],
                "bfloat16",
                place=reduction.place(number),
                drafters=[str(device) for device in GPUS[:2]],
            )
            result = mine.warm_up(execution.GRAPH)
        assert result.execution == execution.GRAPH, result.reason
        assert mine.weights.local.dtype == torch.bfloat16 and mine.weights.total is mine.weights.local
        replicas[number] = mine
        ready.wait()
        for step in range(5):
            row, tokens = given[2 * step + number]
            load(mine, row, tokens, 2 * step + number)
            mine.run_row(row, 0, first=True)
            agreed, _ = reduction.reduce(number, Contribution(mine.weights, mine.statistics, 50.0))
            if step == 0:
                first[number] = mine.weights.total.float()
            mine.step(agreed.weight, 1e-3)

    with reduction.serving() as choice:
        assert choice.way == NCCL, choice.reason
        work = [functools.partial(replica, n) for n in (0, 1)]
        assert together(GPUS[:2], work, control, limit_s=240) == []  # both compile, one after the other
    assert first[0].equal(first[1].to(GPUS[0]))
    difference = (first[0] - expected).norm() / expected.norm()
    assert difference <= 2 * torch.finfo(torch.bfloat16).eps, difference
    assert replicas[0].weights.masters.equal(replicas[1].weights.masters.to(GPUS[0]))
    assert replicas[0].optimizer.read() == replicas[1].optimizer.read()
