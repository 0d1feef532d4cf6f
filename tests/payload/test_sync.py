"""The reduction: several replicas take the step that one replica would take."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from remote_payload.job import Job
from remote_payload.train.batch import Batch, BatchMaker, Row, RowShape, empty_row
from remote_payload.train.dataset import Dataset
from remote_payload.train.drafter import DrafterConfig
from remote_payload.train.features import Features, pack
from remote_payload.train.replica import Replica
from remote_payload.train.run_control import Aborted, RunControl
from remote_payload.train.statistics import Statistics
from remote_payload.train.sync import Agreement, Contribution, Reduction
from remote_payload.train.target import Target, read_config
from tests.payload.tiny import MASK, VOCABULARY, job_values, write_arrow, write_model

SHAPE = RowShape(token_budget=1104, anchors=128, block_size=4, mask_token_id=MASK, gamma=4.0)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sync")
    write_model(folder / "model")
    return folder


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return Target.load(folder / "model", (1, 2, 3), device=CPU, dtype=torch.float32)


@pytest.fixture(scope="module")
def batches(folder: Path) -> list[Batch]:
    """A row of 10 supervised tokens and one of 1000."""
    dice = np.random.default_rng(2)
    samples = [dice.integers(2, MASK, n).tolist() for n in (14, 1100)]
    dataset = Dataset.open(write_arrow(folder / "a.arrow", samples, [4, 100]))
    maker = BatchMaker(dataset, SHAPE, seed=0, vocabulary=VOCABULARY, pad_id=0)
    made = [maker.make(np.asarray([sample]), 0, 0, sample) for sample in (0, 1)]
    assert [batch.drawn for batch in made] == [9, 128]
    return made


def replica_of(folder: Path, target: Target, number: int, replicas: int, objective: str = "ce") -> Replica:
    job = Job.from_mapping(
        job_values(folder, drafters=["cpu"] * replicas, layers=1, clip=1e9, seed=5, objective=objective),
        "test",
    )
    config = DrafterConfig.for_target(
        read_config(folder / "model"), layers=1, tap_layers=(1, 2, 3), block_size=4, mask_token_id=MASK
    )
    return Replica(number, CPU, job, config, SHAPE, Statistics(4, 1), target)


def run_row(replica: Replica, target: Target, batch: Batch | None, *, first: bool = True) -> float:
    """Forward and backward of a batch, or of an empty row; the weight it brings."""
    row: Row = empty_row(SHAPE) if batch is None else batch.row
    features = None
    if batch is not None:
        tapped = target.features(batch.ids, last_hidden=replica.objective.needs_teacher)
        features = Features(batch, pack(tapped, batch.lengths), None)
    replica.load(features, row)
    replica.run_row(row, 0, first)
    return replica.objective.weight_of(batch) if batch else 0.0


def together(work: Sequence[Callable[[], object]]) -> list[BaseException]:
    """Run `work` in a thread each; what they raised."""
    raised: list[BaseException] = []

    def guarded(one: Callable[[], object]) -> None:
        try:
            one()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=guarded, args=(one,), daemon=True) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert not any(thread.is_alive() for thread in threads)
    return raised


SHARES = {
    "1-1": [[0], [1]],
    "2-0": [[0, 1], []],
    "1-0-1": [[0], [], [1]],
    "2-2": [[0, 1], [1, 0]],
    "2-2-2": [[0, 0], [1, 0], [0, 1]],
}
"""The batches of each replica; more than one: rows are accumulated."""


@pytest.mark.parametrize(
    ("objective", "shares"),
    [
        *(("ce", shares) for shares in SHARES.values()),
        *(
            pytest.param(name, SHARES[shares], marks=[pytest.mark.slow] if shares == "2-2-2" else [])
            for name in ("dpace", "focal", "chain", "forward_kl", "lk")
            for shares in ("2-0", "2-2-2")
        ),
    ],
)
def test_replicas_with_10_1000_or_no_supervised_tokens_take_the_step_of_a_single_one(
    folder: Path, target: Target, batches: list[Batch], shares: list[list[int]], objective: str
) -> None:
    alone = replica_of(folder, target, 0, 1, objective)
    given = [batches[number] for mine in shares for number in mine]
    weight = sum(run_row(alone, target, batch, first=n == 0) for n, batch in enumerate(given))
    agreed, expected = Reduction([CPU], RunControl()).reduce(
        0, Contribution(alone.weights, alone.statistics, weight)
    )
    gradient = alone.weights.total.clone()
    alone.optimizer.step(agreed.weight, 0.01)

    replicas = [replica_of(folder, target, number, len(shares), objective) for number in range(len(shares))]
    reduction = Reduction([CPU] * len(shares), RunControl())
    results: dict[int, tuple[Agreement, Tensor]] = {}
    rounding = 2e-5 * float(gradient.abs().max())

    def step(replica: Replica, mine: list[int]) -> None:
        weight = 0.0
        for number in range(max(1, len(mine))):
            batch = batches[mine[number]] if mine else None
            weight += run_row(replica, target, batch, first=number == 0)
        results[replica.number] = reduction.reduce(
            replica.number, Contribution(replica.weights, replica.statistics, weight)
        )
        torch.testing.assert_close(replica.weights.total, gradient, atol=rounding, rtol=1e-4)
        replica.optimizer.step(results[replica.number][0].weight, 0.01)

    work = [functools.partial(step, replica, mine) for replica, mine in zip(replicas, shares, strict=True)]
    assert together(work) == []
    for replica in replicas:
        found, statistics = results[replica.number]
        assert found.weight == pytest.approx(agreed.weight)
        torch.testing.assert_close(statistics, expected, atol=1e-4, rtol=1e-5)
        assert replica.weights.masters.equal(replicas[0].weights.masters)
        torch.testing.assert_close(replica.weights.masters, alone.weights.masters, atol=1e-5, rtol=1e-5)
        assert replica.optimizer.read().norm == pytest.approx(alone.optimizer.read().norm, rel=1e-5)


@pytest.mark.parametrize("objective", ["ce", "dpace", "focal", "chain", "forward_kl", "lk"])
def test_a_step_divides_by_what_the_statistics_say_that_its_loss_is_divided_by(
    folder: Path, target: Target, batches: list[Batch], objective: str
) -> None:
    replica = replica_of(folder, target, 0, 1, objective)
    weight = sum(run_row(replica, target, batch) for batch in batches)
    divisor = float(replica.statistics[-1])
    assert weight == pytest.approx(divisor, rel=1e-6)
    by_block = objective in ("dpace", "focal", "chain")
    assert weight == pytest.approx(sum(batch.drawn if by_block else batch.weight for batch in batches))


def test_a_row_with_a_nan_in_its_features_does_not_spoil_shorter_or_empty_rows_after_it(
    folder: Path, target: Target, batches: list[Batch]
) -> None:
    replica = replica_of(folder, target, 0, 1)
    packed = pack(target.features(batches[1].ids), batches[1].lengths)
    replica.load(Features(batches[1], torch.full_like(packed, torch.nan), None), batches[1].row)
    replica.run_row(batches[1].row, 0, True)
    assert bool(replica.weights.local.isnan().any())
    for batch in (batches[0], None):
        run_row(replica, target, batch)
        assert bool(replica.weights.local.isfinite().all())


def contribution(folder: Path, target: Target, number: int, flag: str = "") -> Contribution:
    replica = replica_of(folder, target, number, 2)
    given = Contribution(replica.weights, replica.statistics, 1.0)
    if flag:
        setattr(given, flag, True)
    return given


@pytest.mark.parametrize("flag", ["stop", "checkpoint", "report"])
def test_what_one_replica_wants_all_do(folder: Path, target: Target, flag: str) -> None:
    reduction, found = Reduction([CPU] * 2, RunControl()), {}
    given = [
        contribution(folder, target, 0),
        contribution(folder, target, 1, flag),
    ]

    def reduce(number: int) -> None:
        found[number] = reduction.reduce(number, given[number])[0]

    assert together([lambda: reduce(0), lambda: reduce(1)]) == []
    for agreed in found.values():
        assert {name: getattr(agreed, name) for name in ("stop", "checkpoint", "report")} == {
            name: name == flag for name in ("stop", "checkpoint", "report")
        }


def test_a_replica_that_waits_for_a_failed_one_is_woken(folder: Path, target: Target) -> None:
    control = RunControl()
    reduction = Reduction([CPU] * 2, control)
    given = contribution(folder, target, 0)
    threading.Timer(0.2, control.abort).start()
    raised = together([lambda: reduction.reduce(0, given)])
    assert [type(error) for error in raised] == [Aborted]


def test_after_a_failure_nobody_begins_to_wait(folder: Path, target: Target) -> None:
    control = RunControl()
    reduction = Reduction([CPU] * 2, control)
    control.abort()
    with pytest.raises(Aborted):
        reduction.reduce(0, contribution(folder, target, 0))
