"""The communication thread: one caller of NCCL, complete groups, nothing that waits for a device."""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from remote_payload.job import JobError
from remote_payload.train import communication, weights
from remote_payload.train.agreement import Agreement, Contribution
from remote_payload.train.communication import Gpus
from remote_payload.train.run_control import Aborted, RunControl
from remote_payload.train.sync import AUTO, NCCL, PEER, Reduction
from remote_payload.train.weights import FlatWeights, SumPlace
from tests.payload.deferred_gpus import DeferredGpus

TRIALS = len(communication._TRIALS)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets of a few numbers, and a trial that takes no time on a CPU."""
    monkeypatch.setattr(weights, "BUCKET_BYTES", 160)
    monkeypatch.setattr(
        communication, "_TRIALS", [(dtype, min(size, 1000)) for dtype, size in communication._TRIALS]
    )


def device_of(letters: str) -> list[torch.device]:
    """Devices of replicas, a letter each: `aab` are two on one GPU and one on another."""
    return [torch.device("cuda", "abcdefgh".index(letter)) for letter in letters]


def module() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7, bias=False), nn.RMSNorm(7), nn.Linear(7, 6, bias=False))


@dataclasses.dataclass
class Seen:
    """What one replica saw of one step."""

    agreement: Agreement
    total: Tensor
    statistics: Tensor


class Fleet:
    """Replicas of a small module on devices that wait to be told to work."""

    def __init__(self, letters: str, gpus: DeferredGpus, control: RunControl, wanted: str = AUTO) -> None:
        self.gpus, self.control = gpus, control
        self.devices = device_of(letters)
        self.reduction = Reduction(self.devices, control, wanted, gpus)
        self.dice = torch.Generator().manual_seed(1)
        self.given: dict[tuple[int, int], list[list[Tensor]]] = {}
        self.seen: dict[tuple[int, int], Seen] = {}

    def prepare(self, steps: int, rows: int) -> None:
        """Gradients of whole numbers, so that sums are exact in any order; float32."""
        shapes = [leaf.shape for leaf in FlatWeights(module(), torch.float32).leaves]
        for number in range(len(self.devices)):
            for step in range(steps):
                self.given[number, step] = [
                    [torch.randint(-50, 50, shape, generator=self.dice).float() for shape in shapes]
                    for _ in range(rows)
                ]

    def live(self, number: int, steps: int, fault: Callable[[int, int], None] | None = None) -> None:
        """A replica's thread: collect, reduce, read, again and again, without any wait for its device."""
        mine = FlatWeights(module(), torch.float32, place=self.reduction.place(number))
        mine.ready = [self.gpus.event() for _ in mine.buckets]
        assert len(mine.buckets) == 2
        statistics = torch.zeros(3, dtype=torch.float64)
        with self.gpus.on(self.gpus.side(self.devices[number])):
            for step in range(steps):
                if fault is not None:
                    fault(number, step)
                statistics.add_(torch.tensor([1.0, number, step], dtype=torch.float64))  # as backward does
                for row, gradients in enumerate(self.given[number, step]):
                    mine.collect(gradients, row == 0)
                agreement, summed = self.reduction.reduce(
                    number,
                    Contribution(
                        mine, statistics, weight=number + step, stop=step == steps - 1 and number == 0
                    ),
                )
                seen = Seen(agreement, torch.zeros_like(mine.total), torch.zeros_like(statistics))
                seen.total.copy_(mine.total)
                seen.statistics.copy_(summed)
                self.seen[number, step] = seen
                if mine.total is not mine.local:
                    mine.total.add_(1000.0)  # as an optimizer may scale it in place
        self.reduction.close()

    def run(self, steps: int, fault: Callable[[int, int], None] | None = None) -> list[BaseException]:
        """All threads to their end; what they raised."""
        work: list[Callable[[], object]] = [
            functools.partial(self.live, number, steps, fault) for number in range(len(self.devices))
        ]
        return together([self.reduction.serve, *work], self.control)

    def check(self, steps: int) -> None:
        """All replicas saw the sum of what all gave, in every step."""
        count = len(self.devices)
        for step in range(steps):
            rows = [row for number in range(count) for row in self.given[number, step]]
            expected = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows]).sum(0)
            for number in range(count):
                seen = self.seen[number, step]
                assert seen.total.equal(expected), (number, step)
                assert seen.statistics.tolist() == [
                    count * (step + 1),
                    sum(range(count)) * (step + 1),
                    count * sum(range(step + 1)),
                ]
                assert seen.agreement == Agreement(
                    weight=sum(range(count)) + count * step,
                    stop=step == steps - 1,
                    checkpoint=False,
                    report=False,
                )


def together(work: Sequence[Callable[[], object]], control: RunControl) -> list[BaseException]:
    """Run `work` in a thread each, as the trainer does: the first failure ends all; what they raised."""
    raised: list[BaseException] = []

    def guarded(one: Callable[[], object]) -> None:
        try:
            one()
        except BaseException as error:
            raised.append(error)
            control.abort()

    threads = [threading.Thread(target=guarded, args=(one,), daemon=True) for one in work]
    threads[0].name = "communication"
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert not any(thread.is_alive() for thread in threads), "every thread ends"
    return raised


LAYOUTS = ["ab", "abc", "abcde", "aab", "aabb", "abab", "aaab"]


@pytest.mark.parametrize("letters", LAYOUTS)
@pytest.mark.parametrize("rows", [1, 3])
def test_whatever_order_devices_work_in_all_replicas_see_the_sum_of_every_step(
    letters: str, rows: int
) -> None:
    """The hosts go through all steps before any device has begun: nobody waits for a device."""
    for seed in range(4):
        gpus = DeferredGpus(seed)
        fleet = Fleet(letters, gpus, RunControl())
        fleet.prepare(6, rows)
        assert fleet.run(6) == []
        assert len(fleet.seen) == 6 * len(letters) and gpus.waiting > 0
        gpus.run()
        assert gpus.waiting == 0, "no collective is left half begun"
        fleet.check(6)


def test_only_one_thread_calls_nccl_and_every_group_has_all_gpus_once_bucket_by_bucket() -> None:
    gpus = DeferredGpus()
    fleet = Fleet("abab", gpus, RunControl())
    fleet.prepare(3, 1)
    assert fleet.run(3) == []
    assert gpus.callers == {"communication"}
    assert {tuple(group[1:]) for group in gpus.groups} == {("cuda:0", "cuda:1")}
    sums = [group[0] for group in gpus.groups[TRIALS:]]
    assert sums == ["torch.float32 77", "torch.float32 7", "torch.float64 3"] * 3


def test_a_missing_wait_is_found_by_the_devices_of_these_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measure: without the side streams' waits the sums above come out wrong in some order."""
    monkeypatch.setattr("tests.payload.deferred_gpus.Stream.wait_event", lambda self, event: None)
    wrong = 0
    for seed in range(4):
        gpus = DeferredGpus(seed)
        fleet = Fleet("ab", gpus, RunControl())
        fleet.prepare(4, 1)
        assert fleet.run(4) == []
        gpus.run()
        try:
            fleet.check(4)
        except AssertionError:
            wrong += 1
    assert wrong


@pytest.mark.parametrize("letters", ["ab", "abc", "aab"])
def test_a_replica_that_fails_leaves_no_collective_behind_and_the_others_go_at_once(letters: str) -> None:
    last = len(letters) - 1

    def fault(number: int, step: int) -> None:
        if (number, step) == (last, 2):
            time.sleep(0.05)  # the others wait for it by then
            raise ArithmeticError("broken")

    gpus, control = DeferredGpus(), RunControl()
    fleet = Fleet(letters, gpus, control)
    fleet.prepare(5, 1)
    started = time.monotonic()
    raised = fleet.run(5, fault)
    assert time.monotonic() - started < 60
    assert sorted(type(error).__name__ for error in raised) == ["Aborted"] * len(letters) + [
        "ArithmeticError"
    ]
    gpus.run()
    assert gpus.waiting == 0 and len(gpus.groups) == TRIALS + 2 * 3


def test_after_a_failure_nobody_begins_to_wait() -> None:
    control = RunControl()
    fleet = Fleet("ab", DeferredGpus(), control)
    control.abort()
    with pytest.raises(Aborted):
        fleet.reduction.choice()
    with pytest.raises(Aborted):
        fleet.reduction.serve()


def test_a_failure_of_the_communication_thread_ends_the_replicas() -> None:
    gpus, control = DeferredGpus(), RunControl()
    fleet = Fleet("ab", gpus, control)
    fleet.prepare(5, 1)

    def fault(number: int, step: int) -> None:
        if step == 2:
            gpus.refuse = RuntimeError("NCCL Error 1: unhandled cuda error")

    raised = fleet.run(5, fault)
    assert sorted(type(error).__name__ for error in raised) == ["Aborted", "Aborted", "RuntimeError"]


@pytest.mark.parametrize("wrong", [True, False])
def test_where_the_trial_fails_replicas_add_up_by_peer_copies_and_the_choice_says_why(wrong: bool) -> None:
    gpus = DeferredGpus()
    gpus.wrong = wrong
    gpus.refuse = None if wrong else RuntimeError("NCCL Error 2: unhandled system error\nmore")
    reduction = Reduction(device_of("ab"), RunControl(), AUTO, gpus)
    with reduction.serving() as choice:
        assert choice.way == PEER and choice.trial_s is None
        assert ("wrong sums of" if wrong else "NCCL Error 2: unhandled system error") in choice.reason
        assert choice.reason.startswith("NCCL's trial failed: ") and "\n" not in choice.reason
        assert [reduction.place(number) for number in (0, 1)] == [SumPlace.IN_FLOAT32] * 2
        found = by_peer_copies(reduction)
    assert found[0].equal(found[1]) and found[0].equal(torch.full((84,), 3.0))


def by_peer_copies(reduction: Reduction) -> list[Tensor]:
    """One step of two replicas on the CPU."""
    replicas = [FlatWeights(module(), torch.float32, place=SumPlace.IN_FLOAT32) for _ in range(2)]

    def reduce(number: int) -> None:
        replicas[number].local.fill_(number + 1)
        reduction.reduce(number, Contribution(replicas[number], torch.zeros(2), 1.0))

    assert together([functools.partial(reduce, number) for number in (0, 1)], RunControl()) == []
    return [replica.total for replica in replicas]


def test_a_job_that_insists_on_nccl_is_refused_where_its_trial_fails() -> None:
    gpus = DeferredGpus()
    gpus.refuse = RuntimeError("NCCL Error 2")
    reduction = Reduction(device_of("ab"), RunControl(), NCCL, gpus)
    why = r"reduction = 'nccl': NCCL's trial failed: .*NCCL Error 2"
    with pytest.raises(JobError, match=why), reduction.serving():
        raise AssertionError("never chosen")


def test_a_job_that_insists_on_nccl_is_refused_at_once_where_it_cannot_be() -> None:
    with pytest.raises(JobError, match="reduction = 'nccl': NCCL sums between GPUs alone"):
        Reduction([torch.device("cpu")] * 2, RunControl(), NCCL)


def test_nccl_that_never_ends_its_trial_ends_the_run_naming_the_way_around_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(communication, "TRIAL_LIMIT_S", 0.05)
    gpus = DeferredGpus()
    monkeypatch.setattr(gpus, "run", lambda: None)  # a device that does nothing
    reduction = Reduction(device_of("ab"), RunControl(), AUTO, gpus)
    with pytest.raises(JobError, match="not done after 0 s; set reduction = 'peer'"), reduction.serving():
        raise AssertionError("never chosen")


@pytest.mark.parametrize(
    ("letters", "wanted", "why"),
    [
        ("aa", AUTO, "all replicas are on cuda:0"),
        ("ab", PEER, "the job says so"),
    ],
)
def test_without_nccl_no_thread_is_wanted_and_the_choice_says_why(
    letters: str, wanted: str, why: str
) -> None:
    reduction = Reduction(device_of(letters), RunControl(), wanted)
    assert not reduction.threaded
    assert (reduction.choice().way, reduction.choice().reason) == (PEER, why)


def test_obstacles_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    two = device_of("ab")
    monkeypatch.setattr(torch._C, "_nccl_all_reduce", lambda: None, raising=False)
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    assert Gpus().obstacle(two) is None
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert "CUDA_LAUNCH_BLOCKING" in cast(str, Gpus().obstacle(two))
    monkeypatch.delattr(torch._C, "_nccl_all_reduce")
    assert Gpus().obstacle(two) == "this torch was built without NCCL"
    assert Gpus().obstacle([torch.device("cpu"), *two]) == "NCCL sums between GPUs alone"


@pytest.mark.parametrize(
    ("letters", "places"),
    [
        ("a", [SumPlace.ALONE]),
        ("ab", [SumPlace.IN_PLACE] * 2),
        ("aab", [SumPlace.BESIDE, SumPlace.BESIDE, SumPlace.IN_PLACE]),
    ],
)
def test_a_sum_takes_the_gradients_place_where_a_gpu_has_one_replica(
    letters: str, places: list[SumPlace]
) -> None:
    reduction = Reduction(device_of(letters), RunControl(), AUTO, DeferredGpus())
    with reduction.serving():
        assert [reduction.place(number) for number in range(len(letters))] == places


def test_calls_of_nccl_are_torchs_own_with_a_stream_for_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def all_reduce(
        inputs: Any, outputs: Any = None, op: int = 0, streams: Any = None, comms: Any = None
    ) -> None:
        seen.update(inputs=inputs, outputs=outputs, op=op, streams=streams, comms=comms)

    monkeypatch.setattr("torch.cuda.nccl.all_reduce", all_reduce)
    Gpus().all_reduce(["x", "y"], ["s", "t"])  # type: ignore[list-item]
    assert seen == {"inputs": ["x", "y"], "outputs": None, "op": 0, "streams": ["s", "t"], "comms": None}
