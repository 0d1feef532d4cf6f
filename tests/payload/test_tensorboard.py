"""TensorBoard as a sink: every number of the events once, and no way to hurt a run."""

from __future__ import annotations

import importlib
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from remote_payload import rundir
from remote_payload.train import tensorboard
from remote_payload.train.tensorboard import TensorBoardSink, scalars, summary_writer
from tests.payload.trial import Trial
from tests.waiting import until


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorboard, "PERIOD_S", 0.01)


class Board:
    """A writer that remembers."""

    def __init__(self) -> None:
        self.numbers: list[tuple[str, float, int]] = []
        self.purged: list[int | None] = []
        self.closed = False

    def make(self, _folder: Path, purge_step: int | None) -> Board:
        self.purged.append(purge_step)
        return self

    def add_scalar(self, tag: str, value: float, step: int, walltime: float) -> None:
        assert walltime > 1e9
        self.numbers.append((tag, value, step))

    def flush(self) -> None: ...

    def close(self) -> None:
        self.closed = True


def events(run_dir: Path, attempt: int = 1) -> rundir.RecordWriter:
    return rundir.RecordWriter(run_dir / rundir.EVENTS, attempt=attempt)


def test_every_number_of_a_record_has_a_tag_of_its_own_and_nothing_else_has_one() -> None:
    record = {
        "v": 1, "t": 1e9, "mono": 2.0, "attempt": 1, "kind": "eval", "step": 7, "tau": 2.5, "gap": None,
        "acceptance": [0.5, 0.25], "by_kind": {"code": {"tau": 3, "prompts": 2}}, "note": "x", "flag": True,
    }  # fmt: skip
    assert dict(scalars(record)) == {
        "eval/tau": 2.5,
        "eval/acceptance/1": 0.5,
        "eval/acceptance/2": 0.25,
        "eval/by_kind/code/tau": 3.0,
        "eval/by_kind/code/prompts": 2.0,
    }


def test_the_numbers_of_step_and_eval_events_arrive_while_the_run_goes_on_and_all_of_them_at_its_end(
    tmp_path: Path,
) -> None:
    board, writer, said = Board(), events(tmp_path), []
    sink = TensorBoardSink(tmp_path, 1, said.append, board.make)
    sink.start()
    writer.write("dataset", samples=3)
    writer.write("step", step=1, loss=4.0)
    until(lambda: board.numbers)
    for step in range(2, 3000):
        writer.write("step", step=step, loss=4.0 / step)
    writer.write("eval", step=2999, tau=1.5)
    sink.stop(60.0)
    assert board.numbers[:2999] == [("step/loss", 4.0 / step, step) for step in range(1, 3000)][:2999]
    assert board.numbers[-1] == ("eval/tau", 1.5, 2999)
    assert len(board.numbers) == 3000 and board.closed and board.purged == [None] and said == []


def test_a_later_attempt_writes_only_its_own_events_and_voids_the_steps_it_makes_again(
    tmp_path: Path,
) -> None:
    first = events(tmp_path)
    for step in range(1, 9):
        first.write("step", step=step, loss=1.0)
    board = Board()
    sink = TensorBoardSink(tmp_path, 2, print, board.make)
    sink.start()
    events(tmp_path, attempt=2).write("step", step=6, loss=0.5)
    sink.stop(60.0)
    assert board.numbers == [("step/loss", 0.5, 6)] and board.purged == [6]


def test_a_line_that_is_not_complete_yet_is_read_when_it_is(tmp_path: Path) -> None:
    board = Board()
    path = tmp_path / rundir.EVENTS
    line = rundir.encode(rundir.stamp("step", {"attempt": 1, "step": 1, "loss": 2.0}))
    path.write_bytes(b"no record\n" + line[:20])
    sink = TensorBoardSink(tmp_path, 1, print, board.make)
    sink.start()
    time.sleep(0.05)
    with path.open("ab") as file:
        file.write(line[20:])
    sink.stop(60.0)
    assert board.numbers == [("step/loss", 2.0, 1)]


@pytest.mark.parametrize("failing", ["make", "add_scalar", "flush", "close"])
def test_a_writer_that_fails_is_one_line_and_the_end_of_the_sink(tmp_path: Path, failing: str) -> None:
    board, said = Board(), []

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    setattr(board, failing, fail)
    sink = TensorBoardSink(tmp_path, 1, said.append, board.make)
    writer = events(tmp_path)
    sink.start()
    for step in range(50):
        writer.write("step", step=step, loss=1.0)
    sink.stop(60.0)
    assert len(said) == 1 and "No space left on device" in said[0] and "goes on" in said[0]


def test_a_missing_package_is_one_line_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorboard, "PACKAGES", ("no_such_package", "nor_this_one"))
    said: list[str] = []
    sink = TensorBoardSink(tmp_path, 1, said.append)
    events(tmp_path).write("step", step=1, loss=1.0)
    sink.start()
    sink.stop(60.0)
    assert len(said) == 1 and "pip install tensorboard" in said[0] and not (tmp_path / "tensorboard").exists()


def test_a_writer_that_hangs_is_left_behind(tmp_path: Path) -> None:
    release, said = threading.Event(), []
    board = Board()
    board.add_scalar = lambda *_: release.wait(100)  # type: ignore[method-assign, assignment]
    sink = TensorBoardSink(tmp_path, 1, said.append, board.make)
    writer = events(tmp_path)
    sink.start()
    began = time.monotonic()
    for step in range(1000):
        writer.write("step", step=step, loss=1.0)
    sink.stop(patience_s=0.2)
    assert time.monotonic() - began < 60 and sink._thread.daemon
    assert said == ["TensorBoard did not take all events within 0.2 s; the run does not wait for it"]
    board.add_scalar = lambda *_: None  # type: ignore[method-assign, assignment]
    release.set()
    sink._thread.join(60)


@pytest.mark.parametrize("package", tensorboard.PACKAGES)
@pytest.mark.filterwarnings("ignore")
def test_a_real_writer_makes_files_that_hold_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    pytest.importorskip(package)
    monkeypatch.setattr(tensorboard, "PACKAGES", (package,))
    sink = TensorBoardSink(tmp_path, 1, print, summary_writer)
    writer = events(tmp_path)
    sink.start()
    for step in range(1, 6):
        writer.write("step", step=step, loss=1.0 / step, accuracy=[0.5, None])
    writer.write("eval", step=5, tau=2.25)
    sink.stop(60.0)
    written = list((tmp_path / tensorboard.FOLDER).glob("events.out.tfevents.*"))
    assert len(written) == 1 and written[0].stat().st_size > 200
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = reader.EventAccumulator(str(tmp_path / tensorboard.FOLDER)).Reload()
    assert sorted(found.Tags()["scalars"]) == ["eval/tau", "step/accuracy/1", "step/loss"]
    assert [(e.step, pytest.approx(e.value)) for e in found.Scalars("step/loss")] == [
        (step, 1.0 / step) for step in range(1, 6)
    ]


def break_the_writer() -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a board on fire")

    tensorboard.summary_writer = fail  # type: ignore[assignment]
    TensorBoardSink.__init__.__defaults__ = (fail,)  # type: ignore[misc]


@pytest.mark.slow
def test_a_run_whose_board_fails_or_is_absent_finishes_with_one_line_about_it(tmp_path: Path) -> None:
    trial = Trial(tmp_path, tensorboard=True)
    assert trial.fork(break_the_writer) == 0, trial.log
    assert trial.log.count("TensorBoard failed and is dropped") == 1 and "a board on fire" in trial.log
    assert not trial.events("crash")
    installed = [name for name in tensorboard.PACKAGES if _there(name)]
    plain = Trial(tmp_path, "plain", tensorboard=True)
    assert plain.fork() == 0, plain.log
    assert plain.log.count("No TensorBoard") == (0 if installed else 1)
    assert (plain.run_dir / tensorboard.FOLDER).exists() == bool(installed)
    assert Trial(tmp_path, "off").fork() == 0


def _there(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True
