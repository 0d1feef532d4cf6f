"""When a crashed run is tried again: the rules, without processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from remote_payload.outcome import Outcome
from remote_payload.restart_policy import Decision, Ended, RestartPolicy, Restarts
from remote_payload.rundir import State

POLICY = RestartPolicy(on_crash=True, limit=3, wait_s=10.0)
CRASH = Outcome(State.FAILED, "boom", 1, None)


def ended(
    outcome: Outcome = CRASH, *, step: int = 7, trained_s: float = 60.0, asked_to_stop: bool = False
) -> Ended:
    return Ended(outcome, step, trained_s, asked_to_stop)


def test_crashes_are_followed_by_attempts_after_growing_waits_until_the_limit() -> None:
    restarts = Restarts(POLICY)
    waits = [restarts.after(ended(step=step)).wait_s for step in (1, 2, 3)]
    assert waits == [10.0, 20.0, 40.0]
    last = restarts.after(ended(step=4))
    assert (last.wait_s, "3 times" in last.why_not) == (None, True)


def test_a_wait_is_never_longer_than_five_minutes() -> None:
    restarts = Restarts(RestartPolicy(on_crash=True, limit=20, wait_s=10.0))
    assert [restarts.after(ended(step=step)).wait_s for step in range(1, 12)][-1] == 300.0


def test_half_an_hour_of_training_begins_the_count_anew() -> None:
    restarts = Restarts(POLICY)
    for step in (1, 2, 3):
        restarts.after(ended(step=step))
    assert restarts.after(ended(step=900, trained_s=1800.0)).wait_s == 10.0


@pytest.mark.parametrize(
    "outcome",
    [Outcome(State.FINISHED, None, 0, None), Outcome(State.FINISHED, "stopped on request", 3, None)],
)
def test_a_run_that_ended_well_is_not_restarted(outcome: Outcome) -> None:
    assert Restarts(POLICY).after(ended(outcome)) == Decision(None)


def test_a_run_that_was_asked_to_stop_is_not_restarted_however_it_ended() -> None:
    killed = Outcome(State.KILLED, "killed by SIGKILL", 137, "SIGKILL")
    assert Restarts(POLICY).after(ended(killed, asked_to_stop=True)) == Decision(None)
    assert Restarts(POLICY).after(ended(killed)).wait_s == 10.0


def test_what_would_repeat_at_once_is_not_restarted_and_says_why() -> None:
    refused = Outcome(State.FAILED, "no such dataset", 2, None)
    assert "refused" in Restarts(POLICY).after(ended(refused)).why_not
    assert "before its first step" in Restarts(POLICY).after(ended(step=0)).why_not
    restarts = Restarts(POLICY)
    assert restarts.after(ended(step=150)).wait_s is not None
    assert "in the same way at step 150" in restarts.after(ended(step=150)).why_not


def test_a_restart_that_fails_before_its_first_step_is_tried_again() -> None:
    restarts = Restarts(POLICY)
    restarts.after(ended(step=150))
    lost = Outcome(State.FAILED, "GPU is lost", 1, None)
    assert restarts.after(ended(lost, step=0)).wait_s == 20.0
    assert restarts.after(ended(lost, step=0)).wait_s == 40.0


def test_what_a_later_attempt_is_refused_may_pass_since_the_job_could_be_run_before() -> None:
    """A GPU that is lost is a device that is not there; a disk that hangs is a dataset that is not there."""
    restarts = Restarts(POLICY)
    restarts.after(ended(step=150))
    refused = Outcome(State.FAILED, "device 'cuda:1' is not there", 2, None)
    assert [restarts.after(ended(refused, step=0)).wait_s for _ in range(3)] == [20.0, 40.0, None]


def test_without_the_key_nothing_is_restarted(tmp_path: Path) -> None:
    assert Restarts(RestartPolicy()).after(ended()) == Decision(None)
    path = tmp_path / "job.toml"
    assert not RestartPolicy.read(path, 1.0).on_crash
    path.write_text("this is not TOML")
    assert not RestartPolicy.read(path, 1.0).on_crash
    path.write_text('restart = "on-crash"\nrestart_limit = 2\nrestart_wait = 5\n')
    assert RestartPolicy.read(path, 0.1) == RestartPolicy(True, 2, 5.0, 0.1)
    for odd in ('"many"', "inf", "nan", "-1", "1" + "0" * 400):
        path.write_text(f'restart = "on-crash"\nrestart_limit = {odd}\nrestart_wait = {odd}\n')
        assert RestartPolicy.read(path, 1.0) == RestartPolicy(True, 5, 10.0, 1.0)
