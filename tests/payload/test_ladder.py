"""The ladder of a replica, with stand-ins for inductor and CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from remote_payload.train import execution, logit_passes, swiglu
from remote_payload.train import replica as replica_module
from remote_payload.train.execution import COMPILED, EAGER, GRAPH
from remote_payload.train.replay import difference
from remote_payload.train.replica import Replica
from tests.payload.small_replica import make_replica, rows, run_rows

pytestmark = pytest.mark.slow  # each compiles

CPU = torch.device("cpu")


class RecordedGraph:
    """Stands in for a CUDA graph: a replay runs the work again and leaves results at the first addresses."""

    made: list[RecordedGraph]

    def __init__(self, work: Callable[[], Any], _device: torch.device) -> None:
        self.work, self.replays = work, 0
        self.owner = getattr(work, "__self__", None)
        if isinstance(self.owner, Replica):  # only its results must lie somewhere; a capture computes nothing
            work()
        RecordedGraph.made.append(self)

    def replay(self) -> None:
        self.replays += 1
        if not isinstance(self.owner, Replica):
            self.work()
            return
        elsewhere = self.owner._gradients
        self.work()
        for captured, gradient in zip(self.owner._captured, self.owner._gradients, strict=True):
            captured.copy_(gradient)
        self.owner._gradients = elsewhere


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> type[RecordedGraph]:
    """A CPU that thinks it has graphs, and whose compiler gives functions back as they are."""
    RecordedGraph.made = []
    monkeypatch.setattr(execution, "Graph", RecordedGraph)
    monkeypatch.setattr(execution, "decide", lambda wanted, _device: (GRAPH, f"the test wants {wanted}"))
    monkeypatch.setattr(torch, "compile", lambda function, **_options: function)
    return RecordedGraph


def test_a_graph_replica_replays_all_rows_and_steps(tmp_path: Path, graphs: type[RecordedGraph]) -> None:
    given = rows(tmp_path, 4)
    plain, replica = (make_replica(tmp_path, CPU, "float32") for _ in range(2))
    plain.use(EAGER)
    result = replica.warm_up("graph")
    assert (result.execution, result.steps_down) == (GRAPH, [])
    assert set(result.step_s) == {EAGER, COMPILED, GRAPH} and result.seconds > 0
    row_graph, step_graph = graphs.made
    before = row_graph.replays
    for one, other in zip(run_rows(replica, given), run_rows(plain, given), strict=True):
        assert one[0] == other[0] and one[1].equal(other[1])
    assert row_graph.replays - before == len(given)
    taken = step_graph.replays
    for each in (plain, replica):
        each.step(10.0, 1e-2)
    assert step_graph.replays == taken + 1
    assert replica.weights.masters.equal(plain.weights.masters)


def test_warming_up_leaves_weights_optimizer_statistics_and_gradient_as_they_were(
    tmp_path: Path, graphs: type[RecordedGraph]
) -> None:
    replica = make_replica(tmp_path, CPU, "float32")
    run_rows(replica, rows(tmp_path, 1))
    replica.step(10.0, 1e-2)
    before = {name: value.clone() for name, value in replica.optimizer.state().items()}
    assert replica.warm_up("graph").execution == GRAPH
    for name, value in replica.optimizer.state().items():
        assert value.equal(before[name]), name
    assert not bool(replica.statistics.any()) and not bool(replica.weights.local.any())
    assert not bool(replica.features.any())


@pytest.mark.parametrize("failing", [0, 1], ids=["forward-backward", "optimizer"])
def test_a_failed_capture_falls_back_to_compiled_with_the_reason(
    tmp_path: Path, graphs: type[RecordedGraph], monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    class Fails(RecordedGraph):
        def __init__(self, work: Callable[[], Any], device: torch.device) -> None:
            if len(RecordedGraph.made) == failing:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB")
            super().__init__(work, device)

    monkeypatch.setattr(execution, "Graph", Fails)
    replica = make_replica(tmp_path, CPU, "float32")
    result = replica.warm_up("graph")
    assert result.execution == COMPILED and "out of memory" in result.reason
    (down,) = result.steps_down
    assert (down.old, down.new) == (GRAPH, COMPILED) and down.reason == result.reason
    given = rows(tmp_path, 2)
    plain = make_replica(tmp_path, CPU, "float32")
    plain.use(EAGER)
    assert run_rows(replica, given)[1][1].equal(run_rows(plain, given)[1][1])


def test_a_replay_that_computes_something_else_is_not_trusted(
    tmp_path: Path, graphs: type[RecordedGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stale(RecordedGraph):
        def replay(self) -> None:
            """As if the capture had kept the first row's mask."""

    monkeypatch.setattr(execution, "Graph", Stale)
    result = make_replica(tmp_path, CPU, "float32").warm_up("graph")
    assert result.execution == COMPILED and "differs from the compiled one by" in result.reason
    assert "in the gradient of " in result.reason


@pytest.mark.parametrize(
    ("spoilt", "told"),
    [
        ((0,), "the gradient of fc.weight is not finite in the compiled step"),
        ((1,), "the gradient of fc.weight is not finite in the replayed step"),
        ((0, 1), "the gradient of fc.weight is not finite in the compiled and the replayed step"),
    ],
)
def test_a_gradient_that_is_not_finite_is_named_with_the_step_that_made_it(
    spoilt: tuple[int, ...], told: str
) -> None:
    sides = [[torch.ones(3), torch.ones(2, 2)] for _ in range(2)]
    names = ["norm.weight", "fc.weight"]
    assert difference(names, *sides) is None
    for side in spoilt:
        sides[side][1][0, 1] = torch.inf
    assert difference(names, *sides) == told


def test_what_does_not_compile_runs_eagerly_with_the_reason(
    tmp_path: Path, graphs: type[RecordedGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(_function: Any, **_options: Any) -> Any:
        raise RuntimeError("no Triton here")

    monkeypatch.setattr(torch, "compile", refuses)
    result = make_replica(tmp_path, CPU, "float32").warm_up("graph")
    assert (result.execution, result.reason) == (EAGER, "compiling failed: RuntimeError: no Triton here")
    assert [(down.old, down.new) for down in result.steps_down] == [(GRAPH, EAGER)] and not graphs.made


def test_auto_on_a_cpu_takes_the_faster_of_compiled_and_eager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_options: function)
    for eager, compiled, expected in ((1.0, 1.2, EAGER), (1.0, 1.05, COMPILED), (1.0, 0.5, COMPILED)):
        times = iter([eager, compiled])
        monkeypatch.setattr(Replica, "_time_step", lambda _self, times=times: next(times))
        result = make_replica(tmp_path, CPU, "float32").warm_up("auto")
        assert result.execution == expected
        assert (result.eager_step_s, result.compiled_step_s) == (eager, compiled)
        if expected == EAGER:
            assert result.reason == "eager is faster here: 1.000 s a step against 1.200 s compiled"


def test_a_replica_steps_down_in_the_middle_of_a_run_and_computes_the_same(
    tmp_path: Path, graphs: type[RecordedGraph]
) -> None:
    given = rows(tmp_path, 3)
    replica = make_replica(tmp_path, CPU, "float32")
    replica.warm_up("graph")
    before = run_rows(replica, given)
    replays = graphs.made[0].replays
    down = replica.step_down("9 graphs compiled after warm-up")
    assert (down.old, down.new, down.reason) == (GRAPH, EAGER, "9 graphs compiled after warm-up")
    for one, other in zip(before, run_rows(replica, given), strict=True):
        assert one[0] == other[0] and one[1].equal(other[1])
    assert graphs.made[0].replays == replays


@pytest.mark.parametrize("objective", ["ce", "forward_kl"])
def test_a_loss_by_kernels_of_our_own_is_the_plain_one_and_ends_with_compiled_steps(
    tmp_path: Path, graphs: type[RecordedGraph], monkeypatch: pytest.MonkeyPatch, objective: str
) -> None:
    scan, scans = logit_passes.scan, []
    monkeypatch.setattr(logit_passes, "scan", lambda *given: scans.append(1) or scan(*given))
    given = rows(tmp_path, 2)
    replica = make_replica(tmp_path, CPU, "float32", objective=objective)
    replica.kernels.loss = True  # as a proof on a GPU leaves it
    result = replica.warm_up("graph")
    assert (result.execution, result.loss_kernels) == (GRAPH, True)
    before, read = run_rows(replica, given), len(scans)
    assert read
    replica.step_down("9 graphs compiled after warm-up")
    for one, other in zip(before, run_rows(replica, given), strict=True):
        assert one[0] == pytest.approx(other[0], rel=1e-4)
        torch.testing.assert_close(one[1], other[1], rtol=1e-3, atol=1e-5)
    assert len(scans) == read


@pytest.mark.parametrize("also", ["", "run_drafter"])
def test_kernels_for_the_loss_that_no_compiled_step_can_have_are_left_before_compiled_steps_are(
    tmp_path: Path, graphs: type[RecordedGraph], monkeypatch: pytest.MonkeyPatch, also: str
) -> None:
    def refuses(function: Any, **_options: Any) -> Any:
        if function.__name__.startswith("kernel_chunk_scores") or (also and also in function.__name__):
            raise RuntimeError(f"no {function.__name__}")
        return function

    monkeypatch.setattr(torch, "compile", refuses)
    replica = make_replica(tmp_path, CPU, "float32")
    replica.kernels.loss = True  # as a proof on a GPU leaves it
    result = replica.warm_up("graph")
    assert (
        result.loss_kernels is False
        and "our own are not used: compiling failed" in result.loss_kernels_reason
    )
    if also:
        assert (result.execution, len(result.steps_down)) == (EAGER, 1)
    else:
        assert (result.execution, result.steps_down) == (GRAPH, [])
        run_rows(replica, rows(tmp_path, 1))


def test_swiglu_by_kernels_of_our_own_is_the_plain_one_and_ends_with_compiled_steps(
    tmp_path: Path, graphs: type[RecordedGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, runs = swiglu.forward, []
    monkeypatch.setattr(swiglu, "forward", lambda between: runs.append(1) or forward(between))
    given = rows(tmp_path, 2)
    replica = make_replica(tmp_path, CPU, "float32")
    run_rows(replica, given)
    assert not runs, "nothing is left to kernels that were not proved"
    replica.kernels.swiglu = True  # as a proof on a GPU leaves it
    result = replica.warm_up("graph")
    assert (result.execution, result.swiglu_kernels, result.loss_kernels) == (GRAPH, True, False)
    before, run = run_rows(replica, given), len(runs)
    assert run
    replica.step_down("9 graphs compiled after warm-up")
    for one, other in zip(before, run_rows(replica, given), strict=True):
        assert one[0] == pytest.approx(other[0], rel=1e-4)
        torch.testing.assert_close(one[1], other[1], rtol=1e-3, atol=1e-5)
    assert len(runs) == run


def test_swiglu_kernels_that_no_compiled_step_can_have_are_left_before_compiled_steps_are(
    tmp_path: Path, graphs: type[RecordedGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = make_replica(tmp_path, CPU, "float32")

    def refuses(function: Any, **_options: Any) -> Any:
        if replica.drafter._layers()[0].mlp.kernels:
            raise RuntimeError("an operator in the way")
        return function

    monkeypatch.setattr(torch, "compile", refuses)
    replica.kernels.swiglu = True  # as a proof on a GPU leaves it
    result = replica.warm_up("graph")
    assert (result.execution, result.steps_down, result.swiglu_kernels) == (GRAPH, [], False)
    assert result.swiglu_kernels_reason.startswith("our own are not used: compiling failed")
    assert result.loss_kernels_reason == "not compiled for a GPU"
    run_rows(replica, rows(tmp_path, 1))


def test_where_a_step_is_one_row_the_optimizer_reads_gradients_where_autograd_left_them(
    tmp_path: Path, graphs: type[RecordedGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU with one replica and one row: no second copy of the gradient, and the same step."""
    plain = make_replica(tmp_path, CPU, "float32")
    plain.use(EAGER)
    flat = replica_module.FlatWeights

    def direct(*arguments: Any, **options: Any) -> Any:
        return flat(*arguments, **{**options, "direct": True})

    monkeypatch.setattr(replica_module, "FlatWeights", direct)
    replica = make_replica(tmp_path, CPU, "float32")
    assert replica.warm_up("graph").execution == GRAPH and not replica.weights.local.numel()
    results: list[Tensor] = []
    for each in (plain, replica):
        results.append(run_rows(each, rows(tmp_path, 2))[1][1])
        each.step(10.0, 1e-2)
    assert results[0].equal(results[1])
    torch.testing.assert_close(replica.weights.masters, plain.weights.masters, rtol=1e-6, atol=1e-7)
