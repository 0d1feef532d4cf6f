"""What the views say of checkpoints, the best of them, alarms, and where a resumed run goes on."""

from __future__ import annotations

from typing import Any

import pytest

from controller.run_events import Level, evaluation, events
from controller.run_state import News, RunState, reduce
from controller.status import status_lines
from controller.tui.overview import learning_line

NOW = 1_700_000_000.0


@pytest.mark.parametrize(
    ("record", "level", "line"),
    [
        (
            {"kind": "request", "name": "stop", "by": "me@laptop", "late": True},
            Level.INFO,
            "request: stop by me@laptop, too late: the attempt before had ended",
        ),
        ({"kind": "best", "step": 400, "tau": 3.14159}, Level.GOOD, "best so far: tau 3.142 at step 400"),
        (
            {"kind": "checkpoint_failed", "step": 40, "error": "No space left on device"},
            Level.BAD,
            "checkpoint of step 40 not written: No space left on device",
        ),
        (
            {"kind": "alarm", "reason": "leak_or_misalignment", "step": 9, "tau": 1.25, "tau_estimate": 3.5},
            Level.BAD,
            "alarm at step 9: training promises tau 3.50, decoding keeps 1.25; a leaking mask, shifted"
            " features, or learned by heart",
        ),
        (
            {"kind": "alarm", "reason": "not_lossless", "step": 9, "detail": "prompt 3: token 5"},
            Level.BAD,
            "alarm at step 9: not lossless: prompt 3: token 5",
        ),
        ({"kind": "alarm"}, Level.BAD, "alarm at step ?: ?"),
        (
            {"kind": "signal", "name": "SIGUSR2", "why": "asked for checkpoint"},
            Level.INFO,
            "SIGUSR2 sent: asked for checkpoint",
        ),
        (
            {"kind": "signal", "name": "SIGKILL", "why": "it did not end in time"},
            Level.WARNING,
            "SIGKILL sent: it did not end in time",
        ),
        (
            {"kind": "unusable", "sample": 10405, "reason": "ids outside the vocabulary"},
            Level.WARNING,
            "sample 10405 left out: ids outside the vocabulary",
        ),
        ({"kind": "unusable"}, Level.WARNING, "sample ? left out: ?"),
        (
            {"kind": "resume", "from_step": 400, "path": "checkpoints/step-400"},
            Level.INFO,
            "going on from checkpoints/step-400",
        ),
        (
            {"kind": "resume", "from_step": 0, "path": None},
            Level.INFO,
            "no checkpoint yet: beginning at step 0",
        ),
    ],
)
def test_each_event_is_one_line_that_says_what_happened(
    record: dict[str, Any], level: Level, line: str
) -> None:
    (event,) = events([record])
    assert (event.level, event.line) == (level, line)


@pytest.mark.parametrize(
    ("diverged", "allowed", "level", "end"),
    [
        (0, 0, Level.GOOD, "in 31.0s"),
        (60, 60, Level.GOOD, "in 31.0s, 60 texts part at ties"),
        (60, 57, Level.BAD, "in 31.0s, 3 texts are not the target's own"),
    ],
)
def test_an_evaluation_says_whether_its_texts_are_the_targets_own(
    diverged: int, allowed: int, level: Level, end: str
) -> None:
    record = {"kind": "eval", "step": 9, "tau": 2.5, "prompts": 64, "eval_s": 31.04}
    record |= {"text_equal": 64 - diverged, "diverged": diverged, "diverged_allowed": allowed}
    (event,) = events([record])
    assert (event.level, event.line) == (level, f"evaluation: tau 2.500 over 64 prompts {end}")
    assert evaluation(record).unexplained == diverged - allowed


@pytest.mark.parametrize(("left_out", "level"), [(14, Level.INFO), (200, Level.WARNING)])
def test_a_few_samples_left_out_of_a_dataset_are_told_and_many_are_a_warning(
    left_out: int, level: Level
) -> None:
    record = {"kind": "dataset", "samples": 10_000, "skipped": {"too_long": {"count": left_out, "first": []}}}
    (event,) = events([record])
    assert event.level is level
    assert event.line.endswith(f", {left_out} left out: too_long")


def test_the_best_and_what_went_wrong_are_read_from_the_progress_and_absent_ones_are_none() -> None:
    record = {"kind": "progress", "t": NOW, "attempt": 1}
    bare = reduce(RunState(), News(progress=record), NOW).progress
    assert bare is not None
    assert (bare.best_tau, bare.best_step, bare.alarm, bare.checkpoint_error) == (None, None, "", "")
    record |= {
        "best": {"step": 400, "tau": 3.1},
        "alarm": {"reason": "not_lossless"},
        "checkpoint_error": "x",
    }
    full = reduce(RunState(), News(progress=record), NOW).progress
    assert full is not None
    assert (full.best_tau, full.best_step, full.alarm, full.checkpoint_error) == (
        3.1,
        400,
        "not_lossless",
        "x",
    )


def test_the_best_is_shown_beside_the_newest_tau_unless_it_is_that_one() -> None:
    record = {"kind": "progress", "t": NOW, "attempt": 1, "step": 900, "tau": 2.5, "tau_step": 800}
    for best, shown in (({"step": 400, "tau": 3.1}, True), ({"step": 800, "tau": 2.5}, False), (None, False)):
        state = reduce(RunState(), News(progress={**record, "best": best}), NOW)
        assert ("best 3.10 at step 400" in "\n".join(status_lines(state))) is shown
        assert ("best 3.10@400" in learning_line(state, 80).plain) is shown
        assert "best 3.10@400" not in learning_line(state, 60).plain  # its step is the first that goes
        narrow = learning_line(state, 32).plain
        assert "tau 2.50" in narrow and "best" not in narrow
