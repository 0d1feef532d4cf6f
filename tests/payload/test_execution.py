"""The ladder: what is tried, why not, and that nothing else compiles."""

from __future__ import annotations

import ast
import contextvars
import threading
from pathlib import Path

import pytest
import torch

import remote_payload
from remote_payload.job import JobError
from remote_payload.train import execution
from remote_payload.train.execution import COMPILED, EAGER, GRAPH, REDUCE_OVERHEAD, build, compiler, decide
from tests.payload.recompiles import no_recompiles

PACKAGE = Path(remote_payload.__file__).parent
CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")


def double(x: torch.Tensor, *, offset: float = 1.0) -> torch.Tensor:
    return x * 2 + offset


def names_used(path: Path) -> set[str]:
    """Every dotted name and imported name in a source file."""
    tree = ast.parse(path.read_text())
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def test_torch_compile_and_graphs_are_named_nowhere_but_in_execution() -> None:
    forbidden = ("torch.compile", "torch.compiler", "torch._dynamo", "torch._inductor", "torch.cuda.graph")
    users = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if any(name.startswith(forbidden) for name in names_used(path))
    }
    assert users == {"train/execution.py"}


def test_without_a_compiler_a_cpu_runs_eager_and_the_reason_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    from torch._inductor import config

    with config.patch({"cpp.cxx": (None, "g++")}):
        assert compiler() is None
        for wanted in ("auto", COMPILED):
            choice, reason = decide(wanted, CPU)
            assert choice == EAGER and "C++ compiler" in reason
        assert decide("auto", CUDA)[0] == GRAPH  # a GPU needs Triton and no C++


def test_a_job_that_says_eager_is_eager_and_one_that_says_compiled_is_tried_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(execution, "compiler", lambda: "/usr/bin/g++")
    assert decide(EAGER, CUDA) == (EAGER, "the job says so")
    assert decide(COMPILED, CPU) == (COMPILED, "the job says so")
    assert decide("auto", CPU)[0] == COMPILED
    assert decide(COMPILED, CUDA) == (COMPILED, "the job says so")


def test_a_cpu_has_no_graphs_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "compiler", lambda: "/usr/bin/g++")
    assert decide(GRAPH, CPU) == (COMPILED, "a CPU has no CUDA graphs")
    assert decide(GRAPH, CUDA) == (GRAPH, "the job says so")


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.12.1"])
def test_reduce_overhead_in_threads_is_refused_below_torch_2_13_with_the_reason(version: str) -> None:
    for device in (CPU, CUDA):
        with pytest.raises(
            JobError, match=r"'reduce-overhead'.*2\.13.*worker thread.*use 'graph'"
        ) as refused:
            decide(REDUCE_OVERHEAD, device, version)
        assert version in str(refused.value)


def test_reduce_overhead_is_tried_where_trees_work_in_threads() -> None:
    assert decide(REDUCE_OVERHEAD, CUDA, "2.14.1")[0] == REDUCE_OVERHEAD
    assert execution.refuse_trees("2.13.0") is None


def test_every_worker_gets_the_configuration_although_main_set_another() -> None:
    """Rule 1: from torch 2.12 on what main sets is not what a thread sees."""
    from torch._inductor import config

    seen = []

    def work() -> None:
        execution.configure()
        seen.append(bool(config.triton.cudagraphs))

    with config.patch({"triton.cudagraphs": True}):
        thread = threading.Thread(target=contextvars.copy_context().run, args=(work,))
        thread.start()
        thread.join()
    assert seen == [False]


@pytest.mark.slow
def test_a_recompile_raises_where_none_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_ = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **options: compile_(function, backend="eager", **options)
    )
    run = build(double, COMPILED, "strict")
    run(torch.ones(3))
    with no_recompiles():
        assert run(torch.zeros(3)).equal(torch.ones(3))
        with pytest.raises(RuntimeError, match="recompile"):
            run(torch.ones(4))


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        (
            "empty_cache",
            {"target_graphs.py", "role_times.py", "useful_work.py", "generation.py", "evaluating.py"},
        ),
        ("_dynamo.reset", set()),
        ("cudagraph_mark_step_begin", set()),
        ("skip_guard_eval", set()),
    ],
)
def test_nothing_in_the_trainer_calls_what_breaks_the_other_threads(name: str, allowed: set[str]) -> None:
    """Caches are emptied before training, and by the evaluator while it holds the lock of captures.

    `set_num_threads` is for main before the threads start, and for one thread on a CPU.
    """
    users = {path.name for path in PACKAGE.rglob("*.py") if any(name in used for used in names_used(path))}
    assert users <= allowed


def test_eager_is_the_function_itself() -> None:
    assert build(double, EAGER, "replica0") is double


def test_each_replica_compiles_its_own_clone_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def recorded(function: object, **options: object) -> object:
        given.append((function, options))
        return function

    monkeypatch.setattr(torch, "compile", recorded)
    clones = [build(double, COMPILED, f"replica{n}") for n in range(2)]
    codes = {clone.__code__ for clone in clones} | {double.__code__}
    assert len(codes) == 3 and "replica1" in clones[1].__code__.co_name
    x = torch.ones(3)
    assert all(clone(x).equal(double(x)) for clone in clones)
    assert clones[0](x, offset=5.0).equal(double(x, offset=5.0))
    assert [options for _, options in given] == [{"fullgraph": True, "dynamic": False}] * 2


def test_compiled_graphs_counts_every_thread_so_that_a_recompile_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With dynamo's own eager backend: this is about counting, and inductor takes seconds."""
    compile_ = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **options: compile_(function, backend="eager", **options)
    )
    run = build(double, COMPILED, "counted")
    before = execution.compiled_graphs()

    def work(size: int) -> None:
        run(torch.ones(size))

    for size, graphs in ((3, 1), (3, 1), (4, 2), (3, 2)):
        thread = threading.Thread(target=work, args=(size,))
        thread.start()
        thread.join()
        assert execution.compiled_graphs() - before == graphs


class RecordedCapture:
    """Stands in for `torch.cuda.graph`: keeps what it was asked for, and fails if told to."""

    asked: list[dict[str, object]]
    fails: BaseException | None = None

    def __init__(self, graph: object, **options: object) -> None:
        RecordedCapture.asked.append({"graph": graph, "locked": execution.CAPTURE_LOCK.locked(), **options})

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        if RecordedCapture.fails is not None:
            raise RecordedCapture.fails


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> type[RecordedCapture]:
    """A torch that thinks it can capture."""
    RecordedCapture.asked, RecordedCapture.fails = [], None
    monkeypatch.setattr(torch.cuda, "graph", RecordedCapture)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: "its own")
    monkeypatch.setattr(torch.cuda, "default_stream", lambda _device: "the default")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    return RecordedCapture


def test_a_capture_is_thread_local_on_the_threads_own_stream_with_a_pool_of_its_own_under_one_lock(
    captures: type[RecordedCapture],
) -> None:
    """Rule 7."""
    ran = []
    for _ in range(2):
        execution.Graph(lambda: ran.append(1), CUDA)
    assert len(ran) == 2 and captures.asked[0]["graph"] is not captures.asked[1]["graph"]
    for asked in captures.asked:
        assert asked["capture_error_mode"] == "thread_local" and asked["stream"] == "its own"
        assert asked["locked"] is True and asked["pool"] is None  # that is: one of its own
    assert not execution.CAPTURE_LOCK.locked()


def test_a_capture_that_fails_gives_the_lock_back_and_says_why(captures: type[RecordedCapture]) -> None:
    captures.fails = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        execution.Graph(lambda: None, CUDA)
    captures.fails = None
    execution.Graph(lambda: None, CUDA)
    assert not execution.CAPTURE_LOCK.locked()


def test_a_capture_on_the_default_stream_is_a_defect(
    captures: type[RecordedCapture], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: "the default")
    with pytest.raises(AssertionError, match="stream of the thread's own"):
        execution.Graph(lambda: None, CUDA)
    assert not captures.asked
