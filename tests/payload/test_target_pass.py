"""A target's graphs, with a stand-in for CUDA's: what they give out, and what a failure leaves."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from remote_payload.train import execution, target_attention, target_graphs, target_pass
from remote_payload.train.execution import AUTO, COMPILED, EAGER, GRAPH
from remote_payload.train.features import pack
from remote_payload.train.target import Target
from remote_payload.train.target_attention import OPERATOR
from remote_payload.train.target_graphs import TargetGraphs, apart
from remote_payload.train.target_layout import Packed, Padded, real_places
from remote_payload.train.target_pass import TargetPass
from remote_payload.train.target_shapes import PackedShape, PaddedShape
from tests.payload.families import write_family

CPU = torch.device("cpu")
TAPS = (0, 2, 3)
PACKED = Packed([PackedShape(60, 5, 24), PackedShape(30, 3, 24), PackedShape(40, 5, 12)])
PADDED = Padded([PaddedShape(3, 24), PaddedShape(4, 12)])
BATCHES = [[24, 20, 9], [5, 24], [3, 12, 7, 1], [24], [1, 1], [10, 11, 12]]


def plain_documents(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scale: float | None, back: int
) -> Tensor:
    """Each document by itself with a mask; what stands after the last is not touched, as by the kernel."""
    found = torch.full_like(query, torch.nan).contiguous()
    groups = query.shape[1] // key.shape[1]
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        assert end - begin <= longest
        place = torch.arange(end - begin)
        distance = place[:, None] - place
        seen = (distance >= 0) & ((distance <= back) if back >= 0 else True)
        q, k, v = (x[begin:end].transpose(0, 1) for x in (query, key, value))
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        found[begin:end] = F.scaled_dot_product_attention(q, k, v, seen, scale=scale).transpose(0, 1)
    return found


torch.library.impl(OPERATOR, "CPU", plain_documents)


class RecordedGraph:
    """Stands in for a CUDA graph: a capture computes nothing, a replay runs the work on the same buffers."""

    def __init__(self, work: Callable[[], Any], _device: torch.device, memory_of: Any = None) -> None:
        self.work, self.memory_of, self.replays = work, memory_of, 0

    def replay(self) -> None:
        self.replays += 1
        with torch.no_grad():
            self.work()


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A CPU that is said to have graphs, of the speed of anything else."""
    monkeypatch.setattr(execution, "Graph", RecordedGraph)
    monkeypatch.setattr(
        execution,
        "decide_target",
        lambda wanted, _device: (GRAPH if wanted == AUTO else wanted, "for a test"),
    )
    monkeypatch.setattr(target_pass, "CLEARLY_SLOWER", 1e9)
    yield


OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "mistral, windows")]


@pytest.fixture(scope="module", params=["llama", "gemma3, windows", *OTHERS])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load(tmp_path_factory.mktemp("target"), request.param, torch.bfloat16)


def load(folder: Path, family: str = "llama", dtype: torch.dtype = torch.float32) -> Target:
    return Target.load(write_family(folder, family), TAPS, device=CPU, dtype=dtype)


def ids_of(lengths: list[int], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 60, (len(lengths), max(lengths)), generator=generator)
    return ids * (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None])


def graphs_of(forward: TargetPass) -> TargetGraphs:
    assert forward.graphs is not None
    return forward.graphs


def recorded(forward: TargetPass) -> list[RecordedGraph]:
    return list(graphs_of(forward)._graphs.values())  # type: ignore[arg-type]


def replays(forward: TargetPass) -> list[int]:
    return [graph.replays for graph in recorded(forward)]


@pytest.mark.parametrize("last_hidden", [False, True])
@pytest.mark.parametrize("layout", [PACKED, PADDED], ids=["packed", "padded"])
def test_replays_give_every_batch_the_features_of_the_models_own_pass(
    target: Target, layout: Any, last_hidden: bool
) -> None:
    forward, shapes = TargetPass(target, last_hidden), set(layout.shapes)
    result = forward.warm_up(GRAPH, [layout])
    assert result.execution == GRAPH and forward.layout is layout, result.reason
    for number, lengths in enumerate(BATCHES):
        ids = ids_of(lengths, number)
        own = pack(target.features(ids, last_hidden), lengths)
        found = forward.packed(ids, lengths)
        assert found.shape == own.shape and found.dtype == own.dtype
        assert apart(found, own)[0] < 2e-2
    assert {shape for shape in shapes if shape in graphs_of(forward)} == shapes
    assert sum(replays(forward)) >= len(BATCHES)


@pytest.mark.parametrize("layout", [PACKED, PADDED], ids=["packed", "padded"])
def test_features_that_were_given_out_are_touched_by_no_later_replay(target: Target, layout: Any) -> None:
    forward = TargetPass(target, False)
    forward.warm_up(GRAPH, [layout])
    first = forward.packed(ids_of(BATCHES[0]), BATCHES[0])
    kept = first.clone()
    for lengths in BATCHES:
        forward.packed(ids_of(lengths, 7), lengths)
    assert first.equal(kept)
    assert first.untyped_storage().data_ptr() != graphs_of(forward)._out.untyped_storage().data_ptr()


def test_in_float32_padded_rows_are_equal_to_the_bit_and_packed_ones_refused_with_one_reason(
    tmp_path: Path,
) -> None:
    target = load(tmp_path)
    forward = TargetPass(target, False)
    result = forward.warm_up(GRAPH, [PACKED, PADDED])
    assert result.execution == GRAPH and forward.layout is PADDED and forward.apart == 0
    (down,) = result.steps_down
    assert (down.old, down.new) == ("graph, packed", "graph, padded") and "needs 16 bits" in down.reason
    shape = PADDED.shapes[0]
    lengths = [shape.longest] * shape.rows
    ids = ids_of(lengths)
    assert forward.packed(ids, lengths).equal(pack(target.features(ids), lengths))


def test_all_graphs_share_the_pool_of_the_first(tmp_path: Path) -> None:
    forward = TargetPass(load(tmp_path), False)
    forward.warm_up(GRAPH, [PADDED])
    first, *others = recorded(forward)
    assert first.memory_of is None and others
    assert all(graph.memory_of is first for graph in others)


def test_a_batch_that_fits_no_graph_runs_eagerly(tmp_path: Path) -> None:
    target = load(tmp_path)
    forward = TargetPass(target, False)
    forward.warm_up(GRAPH, [PADDED])
    before = replays(forward)
    for lengths in ([25, 3], [12] * 5):
        assert forward.packed(ids_of(lengths), lengths).equal(pack(target.features(ids_of(lengths)), lengths))
    assert replays(forward) == before


def broken(how: str) -> type[RecordedGraph]:
    """A graph of which the second that is captured fails in one way."""
    made: list[int] = []

    class Broken(RecordedGraph):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(1)
            if len(made) == 2 and how == "memory":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB")

        def replay(self) -> None:
            if not (len(made) == 2 and how == "nothing"):
                super().replay()

    return Broken


@pytest.mark.parametrize(
    ("how", "reason"),
    [("memory", "CUDA out of memory"), ("nothing", r"differs from the model's own pass by")],
)
def test_one_failure_leaves_an_eager_target_one_reason_and_nothing_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, reason: str
) -> None:
    target = load(tmp_path)
    monkeypatch.setattr(execution, "Graph", broken(how))
    staged: list[weakref.ref[Tensor]] = []
    stage = TargetGraphs._stage

    def noted(self: TargetGraphs, *arguments: Any) -> None:
        stage(self, *arguments)
        staged.extend(weakref.ref(each) for each in (self._staged, self._out))

    monkeypatch.setattr(TargetGraphs, "_stage", noted)
    forward = TargetPass(target, False)
    result = forward.warm_up(GRAPH, [PADDED])
    assert result.execution == forward.rung == EAGER and forward.layout is None and forward.gib is None
    (down,) = result.steps_down
    assert (down.old, down.new) == ("graph, padded", EAGER)
    assert result.reason == down.reason and reason in down.reason
    assert forward.graphs is None and staged and all(each() is None for each in staged)
    lengths = BATCHES[0]
    assert forward.packed(ids_of(lengths), lengths).equal(pack(target.features(ids_of(lengths)), lengths))


def test_graphs_that_are_slower_than_the_models_own_pass_are_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_pass, "CLEARLY_SLOWER", 0.0)
    result = TargetPass(load(tmp_path), False).warm_up(GRAPH, [PADDED])
    assert result.execution == EAGER and "the model's own pass is faster" in result.reason
    assert not result.step_s


def test_layers_that_cannot_be_compiled_are_captured_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: Any, **_options: Any) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(target_graphs, "compile_layers", fail)
    forward = TargetPass(load(tmp_path, dtype=torch.bfloat16), False)
    result = forward.warm_up(COMPILED, [PACKED, PADDED])
    assert result.execution == forward.rung == GRAPH and forward.layout is PACKED
    (down,) = result.steps_down
    assert (down.old, down.new) == ("compiled, packed", "graph, packed") and "no compiler" in down.reason


def test_a_run_that_is_to_end_ends_between_two_captures(tmp_path: Path) -> None:
    calls: list[int] = []

    def check() -> None:
        calls.append(1)
        if len(calls) >= 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        TargetPass(load(tmp_path), False).warm_up(GRAPH, [PADDED], check)


def test_a_family_that_takes_no_bounds_is_captured_padded(tmp_path: Path) -> None:
    """Its state runs on from one document into the next, which the proof sees."""
    forward = TargetPass(load(tmp_path, "lfm2, convolutions", torch.bfloat16), False)
    result = forward.warm_up(GRAPH, [PACKED, PADDED])
    assert forward.layout is PADDED, result.steps_down
    assert [down.new for down in result.steps_down] == ["graph, padded"]


@pytest.mark.parametrize("fault", ["one document sees another", "a window too wide"])
def test_the_proof_sees_documents_that_are_not_read_as_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    stage, attend = Packed.stage, target_attention.attend_in_documents

    def wrong(self: Packed, shape: PackedShape, *arguments: Any, **options: Any) -> Tensor:
        staged = stage(self, shape, *arguments, **options)
        if fault == "one document sees another":
            staged[2 * shape.tokens + 1] -= 1  # the second begins with the end of the first
        return staged

    def wide(*arguments: Any, **options: Any) -> Any:
        return attend(*arguments, **options | {"sliding_window": 2 * options["sliding_window"]})

    monkeypatch.setattr(Packed, "stage", wrong)
    if fault == "a window too wide":
        monkeypatch.setattr(target_attention, "attend_in_documents", wide)
    target = load(tmp_path, "mistral, windows", torch.bfloat16)
    result = TargetPass(target, False).warm_up(GRAPH, [PACKED])
    assert result.execution == EAGER and "differs from the model's own pass" in result.reason


def test_whoever_else_runs_the_model_sees_nothing_of_the_views(target: Target) -> None:
    ids = ids_of([20, 20])
    before, configs = target.model(input_ids=ids).logits, target.model.config.to_dict()
    target.forget_taps()
    TargetPass(target, True).warm_up(GRAPH, [PACKED])
    assert target.model(input_ids=ids).logits.equal(before)
    target.forget_taps()
    assert target.model.config.to_dict() == configs and target.attention == "sdpa"


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["none", "one foreign token", "one later token"])
def test_the_proof_sees_one_token_too_many_however_much_rounding_is_let_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """As in a target of so many layers that a comparison with its own pass would not see it."""

    def attend(
        _module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        bounds, place = options["cu_seq_lens_q"], torch.arange(query.shape[2])
        document = torch.bucketize(place, bounds[1:], right=True)
        seen = (document[:, None] == document) & (place[:, None] >= place)
        begin, end = bounds[2:4].tolist()  # the third document, a long one
        if fault == "one foreign token":
            seen[end - 2, begin - 1] = True
        elif fault == "one later token":
            seen[end - 2, end - 1] = True
        groups = query.shape[1] // key.shape[1]
        k, v = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        found = F.scaled_dot_product_attention(query, k, v, seen, scale=options["scaling"])
        return found.transpose(1, 2), None

    target = load(tmp_path, "llama", torch.bfloat16)
    monkeypatch.setitem(target_graphs.OTHER_KERNELS, torch.bfloat16, 1.0)
    monkeypatch.setattr(target_attention, "attend_in_documents", attend)
    result = TargetPass(target, False).warm_up(GRAPH, [PACKED])
    if fault == "none":
        assert result.execution == GRAPH, result.reason
    else:
        assert result.execution == EAGER
        assert "what stands after a token or in another document changes its features" in result.reason


def test_rounding_may_grow_with_the_layers_that_run(tmp_path: Path) -> None:
    target = load(tmp_path, "llama", torch.bfloat16)
    assert target_graphs.layers_run(target, False) == 4 == max(TAPS) + 1
    shallow = TargetGraphs(target, False, GRAPH, PACKED)._bound
    assert shallow == 5e-2
    target.tap_layers = (99,)
    assert TargetGraphs(target, False, GRAPH, PACKED)._bound == pytest.approx(2 * shallow)
    assert TargetGraphs(target, False, GRAPH, PADDED)._bound == 1e-2  # by the same kernels nothing grows


class Compiled:
    """Stands in for inductor: layers stay as they are; replays take `takes` seconds, plain ones 1."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, takes: float) -> None:
        self.calls = 0
        monkeypatch.setattr(target_graphs, "compile_layers", self.compile)
        monkeypatch.setattr(
            TargetGraphs,
            "seconds",
            lambda graphs, _shape, _repeats=2: takes if graphs.rung == COMPILED else 1.0,
        )

    def compile(self, *_arguments: Any) -> None:
        self.calls += 1


@pytest.mark.parametrize(("takes", "rung"), [(0.8, COMPILED), (0.96, GRAPH), (1.04, GRAPH)])
def test_auto_takes_compiled_layers_where_they_are_clearly_faster_with_one_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, takes: float, rung: str
) -> None:
    stand_in = Compiled(monkeypatch, takes)
    target = load(tmp_path, dtype=torch.bfloat16)
    forward = TargetPass(target, False)
    result = forward.warm_up(AUTO, [PACKED, PADDED])
    assert result.execution == forward.rung == graphs_of(forward).rung == rung
    assert stand_in.calls == 1 and not result.steps_down and forward.layout is PACKED
    assert result.reason == f"compiled layers take {takes * 1000:.1f} ms, plain ones 1000.0 ms"
    assert all(shape in graphs_of(forward) for shape in PACKED.shapes)
    lengths = BATCHES[0]
    own = pack(target.features(ids_of(lengths)), lengths)
    assert apart(forward.packed(ids_of(lengths), lengths), own)[0] < 2e-2


@pytest.mark.parametrize("when", ["at once", "at the second shape"])
def test_auto_stays_with_plain_layers_where_compiled_ones_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    Compiled(monkeypatch, 0.5)
    real = TargetGraphs.capture

    def fail(self: TargetGraphs, shape: Any) -> None:
        if self.rung == COMPILED and (when == "at once" or shape != PACKED.shapes[0]):
            raise RuntimeError("no compiler")
        real(self, shape)

    monkeypatch.setattr(TargetGraphs, "capture", fail)
    forward = TargetPass(load(tmp_path, dtype=torch.bfloat16), False)
    result = forward.warm_up(AUTO, [PACKED, PADDED])
    assert result.execution == forward.rung == graphs_of(forward).rung == GRAPH
    (down,) = result.steps_down
    assert (down.old, down.new) == ("compiled, packed", "graph, packed")
    assert "no compiler" in down.reason and result.reason == down.reason
    assert all(shape in graphs_of(forward) for shape in PACKED.shapes) and forward.layout is PACKED


def test_auto_ends_between_two_captures_when_the_run_is_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Compiled(monkeypatch, 0.5)
    calls: list[int] = []

    def check() -> None:
        calls.append(1)
        if len(calls) >= 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        TargetPass(load(tmp_path, dtype=torch.bfloat16), False).warm_up(AUTO, [PACKED], check)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # what torch warns of while it compiles is no failed compilation
@pytest.mark.parametrize("layout", [PACKED, PADDED], ids=["packed", "padded"])
def test_compiled_layers_are_compiled_once_for_all_shapes_and_give_the_same(
    tmp_path: Path, layout: Any
) -> None:
    # Any width but the longest's: sizes that are equal at first are one to the compiler.
    folder = write_family(tmp_path, "qwen3", hidden_size=32)
    target = Target.load(folder, TAPS, device=CPU, dtype=torch.bfloat16)
    forward = TargetPass(target, False)
    before = execution.compiled_graphs()
    result = forward.warm_up(COMPILED, [layout])
    assert result.execution == COMPILED, result.reason
    assert execution.compiled_graphs() - before == 1
    for number, lengths in enumerate(BATCHES):
        ids = ids_of(lengths, number)
        assert apart(forward.packed(ids, lengths), pack(target.features(ids), lengths))[0] < 5e-2


def test_places_of_real_tokens_are_those_that_packing_takes() -> None:
    lengths, longest = [3, 1, 4], 6
    rows = torch.arange(3 * longest).view(3, longest, 1)
    assert real_places(lengths, longest).tolist() == pack(rows, lengths).flatten().tolist()


def test_features_that_are_not_numbers_are_infinitely_far() -> None:
    wanted = torch.ones(5, 4)
    found = wanted.clone()
    assert apart(found, wanted) == (0, 0)
    found[3, 1] = torch.nan
    assert apart(found, wanted) == (float("inf"), float("inf"))
