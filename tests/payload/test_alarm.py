"""A drafter that does well in training and cannot draft raises the alarm; an honest one does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from remote_payload.train.alarm import FLOOR, TauWatch
from tests.payload.tiny import random_samples, write_arrow
from tests.payload.trial import Trial


def judged(estimates: list[float], tau: float, ratio: float = 2.0) -> float | None:
    """The estimate that raised the alarm after one report a step, or None."""
    watch = TauWatch(ratio)
    for estimate in estimates:
        watch.read(estimate, 1)
    watch.mark(len(estimates))
    alarm = watch.judge(len(estimates), tau)
    return None if alarm is None else alarm.tau_estimate


def test_the_reported_leak_raises_the_alarm_and_a_drafter_that_keeps_its_promise_does_not() -> None:
    """SpecForge #455: 70 % accuracy at each of 15 positions, decoded 1.02 to 1.29."""
    promised = 1 + sum(0.7**k for k in range(1, 16))
    for decoded in (1.02, 1.29):
        assert judged([promised] * 10, decoded) == pytest.approx(promised)
    for decoded in (promised, 0.8 * promised, 0.51 * promised, 3 * promised):
        assert judged([promised] * 10, decoded) is None


def test_small_estimates_raise_none_whatever_the_ratio() -> None:
    assert judged([FLOOR - 0.01], 1.0, ratio=1.1) is None
    assert judged([FLOOR + 0.01], 1.0, ratio=1.1) is not None


def test_a_ratio_of_0_turns_it_off() -> None:
    assert judged([9.0], 1.0, ratio=0.0) is None


def test_the_estimate_is_the_mean_of_the_newer_half_of_the_steps_since_the_last_evaluation() -> None:
    watch = TauWatch(2.0)
    for estimate, steps in ((1.0, 8), (4.0, 2), (5.0, 6)):
        watch.read(estimate, steps)
    watch.read(None, 3)
    watch.mark(16)
    assert watch.estimate(16) == pytest.approx((4.0 * 2 + 5.0 * 6) / 8)
    watch.read(3.0, 1)
    watch.mark(17)
    watch.mark(18)  # no report since: what was known before
    assert (watch.estimate(17), watch.estimate(18)) == (3.0, 3.0)


def test_the_verdict_is_of_its_own_step_when_evaluations_lag_behind() -> None:
    watch = TauWatch(2.0)
    watch.read(5.0, 1)
    watch.mark(10)
    watch.read(1.2, 1)
    watch.mark(20)
    alarm = watch.judge(10, 1.1)
    assert alarm is not None and (alarm.step, alarm.tau, alarm.tau_estimate) == (10, 1.1, 5.0)
    assert watch.judge(20, 1.1) is None
    assert watch.judge(30, 1.1) is None  # never marked: before the first step


def test_its_record_and_its_line_say_what_it_is_and_what_to_check() -> None:
    watch = TauWatch(2.0)
    watch.read(5.0, 1)
    watch.mark(10)
    alarm = watch.judge(10, 1.25)
    assert alarm is not None
    assert alarm.record() == {
        "reason": "leak_or_misalignment",
        "step": 10,
        "tau": 1.25,
        "tau_estimate": 5.0,
        "ratio": 4.0,
    }
    for words in ("step 10", "5.00", "1.25", "leaking mask", "features", "by heart", "Check the mask"):
        assert words in alarm.line()


def leaking_mask() -> None:
    """Every block sees the features of the tokens it is to predict, as far as they are in its row."""
    from remote_payload.train import row_mask

    honest = row_mask.dense_mask

    def leaking(starts: Tensor, anchors: Tensor, context: int, block_size: int) -> Tensor:
        further = (anchors + block_size).clamp(max=context)
        return honest(starts, torch.where(starts < context, further, anchors), context, block_size)

    vars(row_mask)["dense_mask"] = leaking


@pytest.mark.slow
def test_a_run_whose_mask_leaks_raises_the_alarm_and_an_honest_one_does_not(tmp_path: Path) -> None:
    """Random tokens: nothing can be learned of them but what leaks."""
    changes = {"steps": 240, "eval_every": 60, "anchors": 64, "token_budget": 256, "max_batch": 8}
    trials = [Trial(tmp_path, name, **changes) for name in ("leaking", "honest")]
    write_arrow(tmp_path / "train.arrow", *random_samples(1500, seed=5))
    leaking, honest = trials
    assert leaking.fork(leaking_mask) == 0, leaking.log
    events = leaking.events("alarm")
    assert events and events[-1]["step"] == 240
    last = events[-1]
    assert last["reason"] == "leak_or_misalignment" and last["ratio"] > 2
    assert last["ratio"] == pytest.approx(last["tau_estimate"] / last["tau"], abs=1e-3)
    said = leaking.progress["alarm"]
    assert said == {key: last[key] for key in ("reason", "step", "tau", "tau_estimate", "ratio")}
    assert "ALARM at step 240: training's own estimate of tau is" in leaking.log
    assert leaking.exit["outcome"] == "finished"  # a warning, not a failure
    assert honest.fork() == 0, honest.log
    assert not honest.events("alarm") and honest.progress["alarm"] is None and "ALARM" not in honest.log
