"""Who holds up whom, told from what threads wait for."""

from __future__ import annotations

import pytest

from remote_payload.train import bottleneck, run_control
from remote_payload.train.bottleneck import Periodic, Waiting
from remote_payload.train.run_control import ThreadStatus


@pytest.mark.parametrize(
    ("batches", "room", "features", "expected"),
    [
        (0.0, 0.0, 0.5, "targets"),
        (0.9, 0.0, 0.9, "reader"),
        (0.0, 0.6, 0.0, "drafters"),
        (0.05, 0.0, 0.05, "none"),
        (0.0, 0.4, 0.45, "none"),
        (None, None, 0.8, "targets"),
        (None, None, None, "none"),
    ],
)
def test_the_side_that_the_others_wait_for_is_the_bottleneck(
    batches: float | None, room: float | None, features: float | None, expected: str
) -> None:
    assert Waiting(batches, room, features).bottleneck == expected


def test_the_words_name_the_shares_that_there_are_and_what_would_help() -> None:
    assert Waiting(0.0, 0.0, 0.5).words() == (
        "targets wait for batches 0%, for room 0%, drafters for features 50% of their time;"
        " the targets are the bottleneck: more of them, or fewer drafters, would be faster"
    )
    assert "targets" not in Waiting(None, None, 0.02).words()


def test_shares_are_of_the_time_that_threads_of_each_kind_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(run_control.time, "monotonic", lambda: now)
    target, idle, drafter = (
        ThreadStatus(name, role, "cpu")
        for name, role in (("t0", "target"), ("t1", "target"), ("d0", "drafter"))
    )
    for status, spans in (
        (target, [("forward", 6.0), ("waiting for the drafters", 2.0), ("waiting for batches", 2.0)]),
        (idle, [("waiting for batches", 10.0)]),
        (drafter, [("waiting for features", 2.5), ("forward and backward", 7.5)]),
    ):
        now = 0.0
        status._since = 0.0
        for state, seconds in spans:
            status.enter(state)
            now += seconds
    now = 10.0
    found = Waiting.of([target, idle, drafter])
    assert found == Waiting(targets_for_batches=0.6, targets_for_room=0.1, drafters_for_features=0.25)
    assert target.waiting_share() == pytest.approx(0.4)


def test_it_is_said_once_in_a_period(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(bottleneck.time, "monotonic", lambda: now)
    periodic = Periodic()
    seen = []
    for step in (10.0, 19.0, 2.0, 5.0, 30.0):
        now += step
        seen.append(periodic.due())
    assert seen == [False, False, True, False, True]
