from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from remote_payload import identity


def test_this_process_is_alive_in_this_boot() -> None:
    known = identity.identity(os.getpid())
    assert known is not None
    assert identity.state_of(known, identity.boot_id()) == "alive"


def test_another_start_time_under_the_same_pid_is_a_reused_pid() -> None:
    known = identity.identity(os.getpid())
    assert known is not None
    known["start_ticks"] -= 1
    assert identity.state_of(known, identity.boot_id()) == "reused"


def test_a_process_of_another_boot_is_gone_even_if_pid_and_start_time_fit() -> None:
    assert identity.state_of(identity.identity(os.getpid()), "another-boot") == "gone"


def test_an_ended_process_is_gone_before_and_after_it_is_reaped() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        known = identity.identity(process.pid)
        assert identity.state_of(known, identity.boot_id()) == "alive"
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert Path(f"/proc/{process.pid}").exists(), "a zombie is still listed"
        assert identity.state_of(known, identity.boot_id()) == "gone"
    assert identity.state_of(known, identity.boot_id()) == "gone"


@pytest.mark.parametrize("known", [None, {}, {"pid": 1}, {"pid": "1", "start_ticks": 3}])
def test_who_was_never_written_down_is_none(known: dict[str, object] | None) -> None:
    assert identity.state_of(known, identity.boot_id()) == "none"


def test_a_command_name_with_spaces_and_parentheses_does_not_shift_the_fields() -> None:
    code = "open('/proc/self/comm', 'w').write(') S 1 (2'); print(1, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert identity.parent_of(process.pid) == os.getpid()
        ticks = identity.start_ticks(process.pid)
        own = identity.start_ticks(os.getpid())
        assert ticks is not None and own is not None
        assert ticks >= own
        process.kill()


def test_a_handler_of_a_signal_is_seen_from_outside() -> None:
    code = (
        "import signal, time; signal.signal(signal.SIGUSR1, lambda *_: None);"
        "print(1, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert identity.catches(process.pid, signal.SIGUSR1)
        assert not identity.catches(process.pid, signal.SIGUSR2)
        process.kill()
    assert not identity.catches(process.pid, signal.SIGUSR1)


def test_children_are_listed_while_they_live() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        assert process.pid in identity.children()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
        assert process.pid not in identity.children()
