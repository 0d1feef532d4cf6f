import time

import pytest

from controller.errors import UsageError
from controller.timing import Timing, awake_and_asleep


def test_the_rules_of_the_design_are_the_defaults() -> None:
    timing = Timing()
    assert (timing.beat_s, timing.silence_s, timing.ping_s) == (2.0, 15.0, 5.0)
    assert timing.backoff == (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
    assert timing.jitter > 0


def test_a_factor_scales_rules_but_not_the_time_that_a_process_takes_to_start() -> None:
    fast = Timing.scaled(0.1)
    assert fast.silence_s == pytest.approx(1.5)
    assert fast.backoff[-1] == pytest.approx(3.0)
    assert fast.hello_s >= 10
    slow = Timing.scaled(10)
    assert slow.silence_s == pytest.approx(150)
    assert slow.poll_s == Timing().poll_s  # being stopped never takes longer


def test_the_environment_gives_the_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASHCTL_TIME_SCALE", "0.5")
    assert Timing.from_environment() == Timing.scaled(0.5)
    monkeypatch.delenv("DFLASHCTL_TIME_SCALE")
    assert Timing.from_environment() == Timing.scaled(1)


@pytest.mark.parametrize("text", ["", "fast", "0", "-1", "nan", "inf", "1e9"])
def test_what_is_no_factor_is_refused_by_name(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASHCTL_TIME_SCALE", text)
    with pytest.raises(UsageError, match="DFLASHCTL_TIME_SCALE"):
        Timing.from_environment()


def test_the_clock_of_silence_goes_on() -> None:
    first = awake_and_asleep()
    time.sleep(0.01)
    assert 0.005 < awake_and_asleep() - first < 60
