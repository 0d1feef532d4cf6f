"""Lines of a log of another trainer to records: what is known is understood, and nothing else."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller import run_events, run_records
from controller.foreign_log import ForeignRun, parse

LOG = """\
[2026-11-30 02:31:07] INFO 1095082 samples loaded (Arrow-backed, lazy access)
Batches per epoch: 59823 (min=4 max=64 avg=18.3)
Bucket 0 [   0,  770):   2283 batches (  3.8%)
Bucket 1 [ 770, 1216):   8311 batches ( 13.9%)
Bucket 5 [3072, 8192):  12,004 batches ( 20.1%)
Loading 2 target models...
Target 0 on cuda:0...
[rank0]: Target 1 on cuda:1... 11.2s
replica 0 ready on cuda:2: compiled, warm-up 24.1s
step     5/400  loss 2.345  tau~ 3.41  grad 1.20  lr 3.0e-04  123,000 tokens/s  0.120 s/step
Epoch 1 | Step: 6 | Loss: 2.2 | lr=1e-4 | 98k tok/s
""".splitlines()


@pytest.mark.parametrize(
    ("line", "record"),
    [
        (LOG[0], {"kind": "dataset", "samples": 1095082}),
        (LOG[1], {"kind": "dataset", "batches": 59823, "batch_min": 4, "batch_max": 64, "batch_mean": 18.3}),
        (LOG[2], {"kind": "bucket", "bucket": 0, "low": 0, "high": 770, "batches": 2283, "share": 0.038}),
        (LOG[3], {"kind": "bucket", "bucket": 1, "low": 770, "high": 1216, "batches": 8311, "share": 0.139}),
        (LOG[5], {"kind": "targets", "count": 2}),
        (LOG[6], {"kind": "target", "target": 0, "device": "cuda:0", "load_s": None}),
        (LOG[7], {"kind": "target", "target": 1, "device": "cuda:1", "load_s": 11.2}),
        (LOG[8], {"kind": "ready", "replica": 0, "device": "cuda:2"}),
        ("step 7 loss nan", {"kind": "step", "step": 7, "loss": None}),
        ("the next step is bucket 3", None),
        ("Bucket list [a, b): many batches", None),
        ("", None),
    ],
)  # fmt: skip
def test_a_line_is_understood_as_the_trainer_meant_it(line: str, record: dict[str, object] | None) -> None:
    found = parse(line)
    if record is None:
        assert found is None
    else:
        assert found is not None
        shown = {k: round(v, 6) if isinstance(v, float) else v for k, v in found.items()}
        assert shown == record


def test_a_line_of_a_step_gives_its_numbers_and_what_is_reckoned_in_thousands() -> None:
    ours, others = parse(LOG[9]), parse(LOG[10])
    assert ours == {
        "kind": "step", "step": 5, "steps": 400, "loss": 2.345, "tau_estimate": 3.41, "learning_rate": 3e-4,
        "gradient_norm": 1.2, "step_s": 0.12, "tokens_per_s": 123_000.0,
    }  # fmt: skip
    assert others == {
        "kind": "step", "step": 6, "loss": 2.2, "learning_rate": 1e-4, "epoch": 1.0, "tokens_per_s": 98_000.0,
    }  # fmt: skip


def test_the_lines_together_are_the_events_and_the_progress_of_a_run() -> None:
    run = ForeignRun()
    assert run.progress(None) is None
    events = run.take(LOG)
    kinds = [event["kind"] for event in events]
    assert kinds == ["dataset", *["bucket"] * 3, "target", "target", "ready", "step", "step"]
    assert events[0]["samples"] == 1095082
    assert events[0]["batches"] == 59823
    lines = [event.line for event in run_events.events(events)]
    assert "1,095,082 samples, 59,823 batches an epoch (min=4 max=64 avg=18.3)" in lines
    assert "bucket 0 [0, 770): 2,283 batches (3.8%)" in lines
    record = run.progress(1000.0)
    assert record is not None
    progress = run_records.progress(record)
    assert [(b.bucket, b.low, b.high, b.planned) for b in progress.buckets] == [
        (0, 0, 770, 2283), (1, 770, 1216, 8311), (5, 3072, 8192, 12004),
    ]  # fmt: skip
    assert [(d.device, d.roles) for d in progress.devices] == [
        ("cuda:0", ("target",)), ("cuda:1", ("target",)), ("cuda:2", ("drafter",)),
    ]  # fmt: skip
    assert (progress.step, progress.steps, progress.loss, progress.phase) == (6, 400, 2.2, "training")


def test_the_beginning_read_after_the_end_adds_what_it_says_and_takes_no_step_back() -> None:
    run = ForeignRun()
    assert [event["step"] for event in run.take(["step 100 loss 2.0"])] == [100]
    assert {event["kind"] for event in run.take(LOG, steps=False)} == {"dataset", "bucket", "target", "ready"}
    assert run.take(LOG, steps=False) == []
    assert run.take(LOG) == []
    record = run.progress(None)
    assert record is not None
    assert record["step"] == 100


@pytest.mark.parametrize(
    "hostile",
    ["9" * 100_000, "step 1 loss 1 " + "1," * 50_000, "step 1 loss 1." * 9000],
    ids=["digits", "commas", "steps"],
)
def test_a_hostile_line_costs_little(hostile: str) -> None:
    began = time.process_time()  # a busy machine adds nothing
    for _ in range(20):
        parse(hostile)
    assert time.process_time() - began < 1.0


DAMAGE = st.sampled_from(["9" * 400, "x", "-", ","])
DAMAGED = st.tuples(st.sampled_from(LOG), st.integers(0, 60), DAMAGE).map(
    lambda drawn: drawn[0][: drawn[1]] + drawn[2] + drawn[0][drawn[1] :]
)


@settings(max_examples=100)
@given(st.lists(st.one_of(st.text(max_size=60), DAMAGED), max_size=8))
def test_no_line_raises_and_every_record_is_json(lines: list[str]) -> None:
    run = ForeignRun()
    for event in run.take(lines):
        json.dumps(event, allow_nan=False)
    json.dumps(run.progress(0.0), allow_nan=False)
    run_events.events(run.take(lines))
