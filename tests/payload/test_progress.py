"""What a run says of itself: statistics added up on the device, and the record of progress."""

from __future__ import annotations

import json
import math
import random
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from remote_payload import rundir
from remote_payload.train.batch import BatchMaker, RowShape
from remote_payload.train.dataset import Dataset
from remote_payload.train.objective import BlockScores
from remote_payload.train.progress import Progress
from remote_payload.train.run_control import ThreadStatus
from remote_payload.train.statistics import Reading, Statistics
from remote_payload.train.step_clock import StepClock
from tests.payload.tiny import MASK, VOCABULARY, random_samples, write_arrow

FIELDS = """
phase step steps epoch eta_s loss loss_ema ce tau_estimate tau tau_step gradient_norm learning_rate
tokens anchors anchor_coverage_share document_coverage_share tokens_per_s step_s mfu_share execution
recompiles nonfinite_steps wait queues buckets threads devices skipped checkpoint checkpoint_error
best alarm
"""
THREAD_FIELDS = "name role device state step bucket last_sign busy_s waited_s"


def reading(loss: float | None, *buckets: float | None) -> Reading:
    return Reading(
        loss=loss,
        ce=loss,
        tau_estimate=None,
        accuracy=[],
        conditional_accuracy=[],
        bucket_loss=list(buckets),
    )


def test_statistics_over_rows_are_the_means_that_a_slow_count_gives() -> None:
    dice, generator = random.Random(1), torch.Generator().manual_seed(1)
    layout = Statistics(block_size=5, buckets=3)
    vector = layout.zeros(torch.device("cpu"))
    losses, divisors, ce, decay = [0.0] * 3, [0.0] * 3, 0.0, 0.0
    right, counted, anchors = [0] * 4, [0] * 4, 0
    accepted, reached = [0] * 4, [0] * 4
    for row in range(6):
        bucket, loss, plain, divisor = row % 2, *(dice.uniform(1, 9) for _ in range(3))
        weights = torch.zeros(7, 4)
        hits = torch.rand(7, 4, generator=generator) < 0.6
        for slot in range(dice.randrange(5)):
            weights[slot, : dice.randrange(1, 5)] = dice.uniform(0.1, 1)
        scores = BlockScores(torch.tensor(loss), torch.tensor(plain), torch.tensor(divisor), hits)
        layout.add(vector, scores, weights, torch.tensor(bucket))
        losses[bucket] += loss
        divisors[bucket] += divisor
        ce += plain
        decay += float(weights.double().sum())
        for slot in range(7):
            anchors += bool(weights[slot, 0] > 0)
            run = True
            for place in range(4):
                if weights[slot, place] > 0:
                    counted[place] += 1
                    right[place] += bool(hits[slot, place])
                    reached[place] += run
                    run = run and bool(hits[slot, place])
                    accepted[place] += run
    found = layout.read(vector)
    assert found.loss == pytest.approx(sum(losses) / sum(divisors), rel=1e-6)
    assert found.ce == pytest.approx(ce / decay, rel=1e-6)
    assert found.tau_estimate == pytest.approx(1 + sum(accepted) / anchors)
    assert found.accuracy == pytest.approx([r / c for r, c in zip(right, counted, strict=True)])
    assert found.conditional_accuracy == pytest.approx(
        [a / r for a, r in zip(accepted, reached, strict=True)]
    )
    assert found.bucket_loss[:2] == pytest.approx(
        [loss / weight for loss, weight in zip(losses[:2], divisors[:2], strict=True)], rel=1e-6
    )
    assert found.bucket_loss[2] is None


def test_a_loss_that_is_not_a_number_stays_in_its_own_bucket() -> None:
    layout = Statistics(block_size=3, buckets=2)
    vector = layout.zeros(torch.device("cpu"))
    for bucket, loss in ((0, math.nan), (1, 6.0)):
        scores = BlockScores(torch.tensor(loss), torch.tensor(loss), torch.tensor(2.0), torch.ones(1, 2) > 0)
        layout.add(vector, scores, torch.ones(1, 2), torch.tensor(bucket))
    found = layout.read(vector)
    assert math.isnan(found.bucket_loss[0] or 0.0) and found.bucket_loss[1] == 3.0


def test_nothing_seen_reads_as_nothing_known_and_not_as_zero() -> None:
    layout = Statistics(block_size=3, buckets=2)
    found = layout.read(layout.zeros(torch.device("cpu")))
    none = [None] * 2
    assert found == Reading(
        loss=None, ce=None, tau_estimate=None, accuracy=none, conditional_accuracy=none, bucket_loss=none
    )


def test_the_moving_average_is_debiased_and_survives_losses_that_are_not_finite() -> None:
    progress = Progress([0, 10])
    progress.read(reading(4.0, 4.0), 1)
    assert progress.values["loss_ema"] == pytest.approx(4.0)
    for bad in (math.nan, math.inf, None):
        progress.read(reading(bad, bad), 3)
        assert progress.values["loss_ema"] == pytest.approx(4.0)
    for _ in range(400):
        progress.read(reading(2.0, 2.0), 1)
    assert progress.values["loss_ema"] == pytest.approx(2.0, abs=1e-2)
    assert progress.snapshot()["buckets"][0]["loss"] == 2.0


def test_one_reading_over_many_steps_weighs_as_much_as_so_many_readings() -> None:
    one, many = Progress([0, 10]), Progress([0, 10])
    for progress in (one, many):
        progress.read(reading(5.0, 5.0), 10)
    one.read(reading(1.0, 1.0), 30)
    for _ in range(30):
        many.read(reading(1.0, 1.0), 1)
    assert one.values["loss_ema"] == pytest.approx(many.values["loss_ema"], abs=1e-4)


def test_rows_are_counted_into_their_buckets_and_coverage_is_drawn_over_possible(tmp_path: Path) -> None:
    samples, prompts = random_samples(4)
    dataset = Dataset.open(write_arrow(tmp_path / "a.arrow", samples, prompts))
    shape = RowShape(token_budget=128, anchors=8, block_size=4, mask_token_id=MASK, gamma=4.0)
    maker = BatchMaker(dataset, shape, seed=0, vocabulary=VOCABULARY, pad_id=0)
    batches = [maker.make(np.asarray(s), bucket, 0, 0) for s, bucket in (([0, 1], 0), ([2], 1), ([3], 1))]
    progress = Progress([0, 30, 64])
    for batch in batches:
        progress.row_done(batch, 0.5)
    progress.set_plan([1, 3])
    seen = progress.snapshot()
    assert seen["tokens"] == sum(map(len, samples)) and seen["anchors"] == sum(b.drawn for b in batches)
    possible = sum(len(s) - p - 1 for s, p in zip(samples, prompts, strict=True))
    assert seen["anchor_coverage_share"] == pytest.approx(seen["anchors"] / possible, abs=1e-4)
    first, second = seen["buckets"]
    assert (first["low"], first["high"], second["low"], second["high"]) == (0, 30, 30, 64)
    assert (first["batches"], second["batches"]) == (1, 2)
    for bucket, rows in ((first, batches[:1]), (second, batches[1:])):
        share = sum(b.drawn for b in rows) / sum(b.supervised for b in rows)
        assert bucket["anchor_coverage_share"] == pytest.approx(share, abs=1e-4)
    assert seen["document_coverage_share"] == 1.0
    assert progress.coverage() == {
        name: seen[name] for name in ("anchor_coverage_share", "document_coverage_share")
    }
    assert (first["planned_share"], second["planned_share"]) == (0.25, 0.75)
    assert second["tokens"] == len(samples[2]) + len(samples[3]) and second["padding_share"] == 0.0
    assert second["tokens_per_s"] == pytest.approx(second["tokens"] / 1.0)
    longest = max(len(samples[0]), len(samples[1]))
    padded = 1 - (len(samples[0]) + len(samples[1])) / (2 * longest)
    assert first["padding_share"] == pytest.approx(padded, abs=1e-4)


def test_progress_has_every_field_of_the_contract_and_is_json_from_the_start() -> None:
    progress = Progress([0, 10, 20])
    progress.thread("drafter-0", "drafter", "cpu").enter("forward", step=3, bucket=1)
    seen = json.loads(rundir.encode(progress.snapshot()))
    assert set(seen) == set(FIELDS.split())
    assert set(seen["threads"][0]) == set(THREAD_FIELDS.split())
    assert seen["devices"][0]["roles"] == ["drafter-0"] and seen["devices"][0]["total_gib"] is None
    assert set(seen["wait"]) == {"targets_share", "drafters_share"}


def test_an_unknown_progress_value_is_a_mistake_and_not_a_new_field() -> None:
    with pytest.raises(AssertionError):
        Progress([0, 10]).update(stepp=1)


def test_the_clock_reports_rates_since_the_last_report_and_leaves_the_first_steps_out_of_the_eta(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    clock = StepClock()
    assert not clock.due()
    now[0] = 160.0  # a first step that compiled for a minute
    assert clock.due()
    first = clock.report(1, 100, 50)
    assert first == {"step_s": 60.0, "tokens_per_s": pytest.approx(50 / 60, abs=0.1), "eta_s": None}
    now[0] = 161.0
    assert clock.report(5, 100, 250) == {"step_s": 0.25, "tokens_per_s": 200.0, "eta_s": None}
    now[0] = 163.0
    assert clock.report(15, 100, 750) == {"step_s": 0.2, "tokens_per_s": 250.0, "eta_s": 17.0}


def test_time_is_split_into_waiting_and_work(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    status = ThreadStatus("target-0", "target", "cpu")
    for state, seconds in (("loading", 2), ("waiting for batches", 3), ("forward", 1)):
        status.enter(state)
        now[0] += seconds
    assert (status.busy_s, status.waited_s) == (2.0, 3.0)
    assert status.waiting_share() == pytest.approx(0.5)
    status.enter("waiting for the drafters", step=4, bucket=2, samples=[7])
    status.enter("forward")
    assert (status.step, status.bucket, status.samples) == (4, 2, [7])


def test_counters_go_on_in_a_later_attempt_and_what_an_older_checkpoint_lacks_stays_as_it_is() -> None:
    before, after = (Progress([0, 10, 20]) for _ in range(2))
    before.tokens, before.drawn, before.candidates = 70, 8, 9
    before.buckets[1].batches, before.buckets[1].loss = 4, 2.5
    before.update(nonfinite_steps=3, tau=2.0, tau_step=40, checkpoint={"step": 40, "t": 1.0})
    state = json.loads(json.dumps(before.state()))
    del state["buckets"][1]["tokens"]
    after.restore(state)
    seen = after.snapshot()
    assert (seen["tokens"], seen["anchors"], seen["nonfinite_steps"]) == (70, 8, 3)
    assert (seen["tau"], seen["tau_step"], after.rows()) == (2.0, 40, 4)
    assert (seen["buckets"][1]["batches"], seen["buckets"][1]["loss"]) == (4, 2.5)
    assert seen["buckets"][1]["tokens"] == 0 and seen["checkpoint"] is None
