"""The evaluator beside training: what it takes and costs, and what a text not the target's own means."""

from __future__ import annotations

import contextlib
import functools
import queue
import re
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from remote_payload import rundir
from remote_payload.train import evaluating
from remote_payload.train.decode import Decoded, Decoder
from remote_payload.train.evaluating import (
    MOST_WAITING,
    Pace,
    evaluation_line,
    evaluator_takes,
    offer_snapshot,
)
from remote_payload.train.evaluation import Evaluation
from remote_payload.train.run import Snapshot
from remote_payload.train.run_control import RunControl, ThreadStatus
from tests.payload.trial import Trial
from tests.waiting import until

DOCUMENTED = Path(__file__).parents[2] / "docs" / "rundir.md"


def run_of(**values: Any) -> Any:
    """What these functions read of a run."""
    said: list[str] = []
    written: list[tuple[str, dict[str, Any]]] = []
    return SimpleNamespace(
        **{
            "steps": 100,
            "step": 0,
            "training_s": 0.0,
            "evaluation": object(),
            "to_evaluate": queue.SimpleQueue(),
            "said": said,
            "log": said.append,
            "written": written,
            "events": SimpleNamespace(write=lambda kind, **fields: written.append((kind, fields))),
            "progress": SimpleNamespace(values={"tau_estimate": 1.5}),
            **values,
        }
    )


def test_what_the_drafters_lost_is_how_much_longer_their_steps_took_than_between_evaluations() -> None:
    run = run_of()
    pace = Pace(run)
    pace.begin()
    assert pace.lost_s() == 0.0  # of step 0, before anything trains
    run.step, run.training_s = 20, 2.0  # a step takes 0.1 s
    pace.begin()
    run.step, run.training_s = 30, 5.0  # ten steps take 3 s during the evaluation
    assert pace.lost_s() == pytest.approx(2.0)
    run.step, run.training_s = 40, 6.0  # 0.1 s again: the evaluation's steps do not spoil the comparison
    pace.begin()
    run.step, run.training_s = 45, 6.4  # a little faster: nothing was lost
    assert pace.lost_s() == 0.0


def test_without_a_pace_to_compare_with_the_loss_is_not_known() -> None:
    run = run_of()
    pace = Pace(run)
    pace.begin()
    run.step, run.training_s = 10, 3.0  # the first evaluation runs beside the first steps
    assert pace.lost_s() is None
    run.step, run.training_s = 11, 3.1
    pace.begin()
    run.step, run.training_s = 20, 9.0
    assert pace.lost_s() is None  # one step between two evaluations says nothing
    run.step, run.training_s = 100, 17.0
    pace.begin()
    assert pace.lost_s() == 0.0  # after the last step nobody waits


def test_snapshots_that_come_too_fast_are_left_out_and_named_but_never_the_last() -> None:
    replica: Any = SimpleNamespace(snapshot=lambda: {"w": torch.ones(1)}, device=torch.device("cpu"))
    run = run_of()
    for step in range(MOST_WAITING):
        assert evaluator_takes(run, step)
        offer_snapshot(run, replica, step)
    assert not evaluator_takes(run, 50)
    assert run.written == [("eval_skipped", {"step": 50, "waiting": MOST_WAITING})]
    assert len(run.said) == 1 and "Step 50 is not evaluated" in run.said[0]
    assert evaluator_takes(run, 100)
    first = run.to_evaluate.get()
    assert (first.step, first.tau_estimate, first.ready) == (0, 1.5, None) and first.seconds >= 0
    without = run_of(evaluation=None)
    offer_snapshot(without, replica, 0)
    assert without.to_evaluate.empty()


def test_all_evaluations_run_on_one_stream_and_all_but_the_last_on_one_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch's streams are few, and cuBLAS keeps memory for each that a thread was on."""
    entered: list[str] = []

    @contextlib.contextmanager
    def recorded(name: str, *given: Any) -> Iterator[None]:
        entered.append(" ".join(map(str, (name, *given))))
        yield

    for name in ("on_device", "on_cores"):
        monkeypatch.setattr(evaluating, name, functools.partial(recorded, name))
    report: Any = SimpleNamespace(record={}, tau=1.0, not_lossless=())
    monkeypatch.setattr(evaluating, "_decode_prompts", lambda *_: report)
    for name in ("evaluation_line", "judge"):
        monkeypatch.setattr(evaluating, name, lambda *_: "")
    run = run_of(
        control=RunControl(),
        targets=[SimpleNamespace(wait=lambda: SimpleNamespace(device="cpu"))],
        reports=[],
        progress=SimpleNamespace(update=lambda **_: None),
    )
    for step in (0, 50, 100):
        run.to_evaluate.put(Snapshot(step, {}, None, 0.0, None))
    run.to_evaluate.put(None)
    evaluating.evaluate(run, ThreadStatus("evaluator", "evaluator", "cpu"))
    assert entered == ["on_device cpu", "on_cores cpu 1", "on_cores cpu 1", "on_cores cpu None"]
    assert len(run.reports) == 3


def test_the_log_says_what_an_evaluation_costs() -> None:
    record = {
        "step": 5, "tau": 2.5, "tau_macro": 2.75, "prompts": 9, "text_equal": 7, "diverged": 2,
        "diverged_allowed": 2, "tokens_per_s": 40.0, "plain_tokens_per_s": 20.0, "eval_s": 3.25,
        "drafter_wait_s": 0.5,
    }  # fmt: skip
    line = evaluation_line(record)
    assert (
        "tau 2.500 (macro 2.750) on 9 held-out prompts, 9 texts the target's own, 2 of them but for ties"
        in line
    )
    assert "took 3.2 s, of which the drafters lost 0.5 s" in line
    assert evaluation_line(record | {"drafter_wait_s": None}).endswith("took 3.2 s")


def evaluating_run(monkeypatch: pytest.MonkeyPatch, decode: Any, *steps: int, **values: Any) -> Any:
    """A run whose evaluator is given snapshots of `steps`, and decodes by `decode(target, drafter, step)`."""
    monkeypatch.setattr(evaluating, "drafter_with", lambda *_: torch.ones(3))
    for name in ("evaluation_line", "judge", "leave_unjudged"):
        monkeypatch.setattr(evaluating, name, lambda *_: "")
    forgotten: list[int] = []
    target = SimpleNamespace(
        device=torch.device("cpu"), dtype=torch.float32, forget_taps=lambda: forgotten.append(1)
    )
    run = run_of(
        evaluation=SimpleNamespace(run=lambda target, drafter, step, _go_on: decode(target, drafter, step)),
        config=None, control=RunControl(), targets=[SimpleNamespace(wait=lambda: target)], reports=[],
        progress=SimpleNamespace(update=lambda **_: None, values={"alarm": None}), unevaluated=0,
        forgotten=forgotten, **values,
    )  # fmt: skip
    for step in steps:
        run.to_evaluate.put(Snapshot(step, {"w": torch.ones(3)}, None, 0.0, None))
    run.to_evaluate.put(None)
    return run


NO_MEMORY = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
)


@pytest.mark.parametrize("error", NO_MEMORY)
def test_an_evaluation_without_memory_is_left_out_with_advice_and_the_next_one_is_tried(
    monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def decode(_target: Any, drafter: torch.Tensor, step: int) -> Any:
        assert all(ref() is None for ref in held), "what an evaluation held is given back before the next"
        texts = drafter + 1
        held.extend(map(weakref.ref, (drafter, texts)))
        if step in (10, 30):
            raise type(error)(str(error))
        return SimpleNamespace(record={"step": step}, tau=1.0, not_lossless=())

    run = evaluating_run(monkeypatch, decode, 0, 10, 20, 30, 40)
    evaluating.evaluate(run, ThreadStatus("evaluator", "evaluator", "cpu"))
    assert [report.record["step"] for report in run.reports] == [0, 20, 40]
    alarms = [fields for kind, fields in run.written if kind == "alarm"]
    assert [(fields["reason"], fields["step"], fields["skipped"]) for fields in alarms] == [
        ("evaluation_out_of_memory", 10, 1),
        ("evaluation_out_of_memory", 30, 2),
    ]
    assert all(str(error).splitlines()[0] in fields["detail"] for fields in alarms)
    told = [line for line in run.said if line.startswith("ALARM")]
    assert len(told) == 2 and len(run.forgotten) == 2
    for words in ("step 30 is not evaluated, cpu has no", "2 left out", "eval_max_new_tokens", "targets"):
        assert words in told[1]


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), ValueError("no such token")])
def test_any_other_failure_of_an_evaluation_is_a_defect_and_goes_on_to_end_the_run(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def decode(*_: Any) -> Any:
        raise error

    run = evaluating_run(monkeypatch, decode, 10)
    with pytest.raises(type(error), match=str(error)):
        evaluating.evaluate(run, ThreadStatus("evaluator", "evaluator", "cpu"))
    assert not run.written


def test_the_last_evaluation_begins_when_the_drafters_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    began = threading.Event()

    def decode(_target: Any, _drafter: Any, step: int) -> Any:
        if step == 100:
            began.set()
        return SimpleNamespace(record={"step": step}, tau=1.0, not_lossless=())

    run = evaluating_run(monkeypatch, decode)
    assert run.to_evaluate.get() is None
    status = ThreadStatus("evaluator", "evaluator", "cpu")
    for step in (50, 100):
        run.to_evaluate.put(Snapshot(step, {}, None, 0.0, None))
    thread = threading.Thread(target=evaluating.evaluate, args=(run, status))
    thread.start()
    until(lambda: status.state == "waiting for the drafters to end", seen=lambda: status.state)
    assert not began.is_set()
    run.to_evaluate.put(None)
    thread.join(60)
    assert began.is_set() and not thread.is_alive()
    assert [report.record["step"] for report in run.reports] == [50, 100]


def test_a_drafter_whose_device_has_no_room_for_a_copy_is_copied_into_main_memory() -> None:
    values = {"w": torch.ones(2, 2)}

    def full() -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    weights = SimpleNamespace(values=None, named=lambda _values: values)
    replica: Any = SimpleNamespace(snapshot=full, device=torch.device("cpu"), weights=weights)
    run = run_of()
    offer_snapshot(run, replica, 7)
    copied = run.to_evaluate.get().weights
    values["w"].zero_()  # the next step
    assert copied["w"].equal(torch.ones(2, 2))


def no_memory_at(*steps: int) -> None:
    """Evaluations of these steps find their GPU full after the first text."""
    honest = Evaluation.run

    def full(self: Any, target: Any, drafter: Any, step: int = 0, *rest: Any) -> Any:
        report = honest(self, target, drafter, step, *rest)
        if step in steps:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return report

    Evaluation.run = full  # type: ignore[method-assign]
    vars(evaluating)["MOST_WAITING"] = 99


@pytest.mark.slow
def test_a_run_whose_evaluations_have_no_memory_trains_to_its_end_and_resumes_owing_the_last(
    tmp_path: Path,
) -> None:
    trial = Trial(tmp_path, steps=8, eval_every=2, checkpoint_keep=1)
    assert trial.fork(functools.partial(no_memory_at, 0, 4, 8)) == 0, trial.log
    assert [event["step"] for event in trial.events("eval")] == [2, 6]
    alarms = trial.events("alarm")
    assert [(event["step"], event["skipped"]) for event in alarms] == [(0, 1), (4, 2), (8, 3)]
    assert trial.progress["alarm"] == {"reason": "evaluation_out_of_memory", "step": 8, "skipped": 3}
    end = trial.exit
    assert (end["outcome"], end["tau_before"], end["best_step"] in (2, 6)) == ("finished", None, True)
    assert rundir.checkpoint_steps(trial.run_dir) == sorted({end["best_step"], 8})
    index = (trial.run_dir / "checkpoints" / "index.json").read_text()
    assert "evaluating" not in index, "nothing waits for an evaluation that does not come"
    assert re.search(r"not evaluated +3 times, for want of memory", trial.log)
    assert re.search(r"all \(over rounds\) +- +\d\.\d+", trial.log)
    assert "after: step 6, the newest that was evaluated" in trial.log and not trial.crashes()
    # With memory again the next attempt makes up for the last one, and takes the alarm back.
    assert trial.fork(attempt=2) == 0, trial.log
    assert trial.events("eval")[-1]["step"] == 8 and trial.progress["alarm"] is None


def say_something_else() -> None:
    honest = Decoder.speculative

    def lying(self: Decoder, prompt: torch.Tensor, drafter: Any) -> Decoded:
        decoded = honest(self, prompt, drafter)
        decoded.tokens[1] = (decoded.tokens[1] + 1) % 97
        return decoded

    Decoder.speculative = lying  # type: ignore[method-assign]


@pytest.mark.slow
def test_a_text_that_is_not_the_targets_own_is_an_alarm_and_the_run_goes_on(tmp_path: Path) -> None:
    trial = Trial(tmp_path, steps=4)
    assert trial.fork(say_something_else) == 0, trial.log
    alarms = [event for event in trial.events("alarm") if event["reason"] == "not_lossless"]
    assert [(event["step"], event["texts"]) for event in alarms] == [(0, 4), (4, 4)]
    assert re.match(r"held-out prompt 0 \(\w+\): token 1 is not the target's own", alarms[0]["detail"])
    assert trial.log.count("decoding is not lossless, 4 of 4 texts") == 2
    assert "4 texts are NOT the target's own" in trial.log
    for event in trial.events("eval"):
        assert (event["text_equal"], event["diverged"], event["diverged_allowed"]) == (0, 4, 0)
        assert event["largest_gap"] > 1e-3


def crop_nothing() -> None:
    from transformers import DynamicCache

    DynamicCache.crop = lambda _self, _tokens: None  # type: ignore[method-assign]


@pytest.mark.slow
def test_a_target_that_cannot_take_tokens_back_is_refused_before_training(tmp_path: Path) -> None:
    trial = Trial(tmp_path)
    assert trial.fork(crop_nothing) == 2, trial.log
    assert "error: target of model_type 'qwen3' cannot take back tokens" in trial.last_line
    assert not trial.events("step") and not trial.events("crash") and "Traceback" not in trial.log
    without = Trial(tmp_path, "without", held_out="")
    assert without.fork(crop_nothing) == 0, without.log


@pytest.mark.slow
def test_an_evaluation_every_n_steps_says_all_that_is_documented_of_it(tmp_path: Path) -> None:
    trial = Trial(tmp_path, steps=60, eval_every=20)
    assert trial.fork() == 0, trial.log
    records = trial.events("eval")
    assert {0, 60} <= {record["step"] for record in records}
    (row,) = re.findall(r"(?m)^\| `eval` \|(.*)\|$", DOCUMENTED.read_text())
    documented = set(re.findall(r"`([a-z_]+)`", re.sub(r"\([^()]*\)", "", row)))
    for record in records:
        assert record.keys() - {"v", "t", "mono", "attempt", "kind"} == documented
        assert record["text_equal"] == record["prompts"] == 4
        assert len(record["acceptance"]) == len(record["conditional_acceptance"]) == 3
        assert record["eval_s"] > 0
    assert records[0]["tau_estimate"] is None and records[-1]["tau_estimate"] >= 1
    assert records[-1]["drafter_wait_s"] is not None
    assert evaluating.MOST_WAITING == 2
