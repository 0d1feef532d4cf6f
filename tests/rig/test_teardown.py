"""A rig leaves nothing behind, however it ends, and two rigs do not meet."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.rig import cgroups, leftovers
from tests.rig.cgroups import RigError
from tests.rig.rig import Rig

ROOT = Path(__file__).resolve().parents[2]


def traces(name: str) -> dict[str, object]:
    """What there is of the rig called `name`, looked for without the rig's own means."""
    processes = []
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            state = (proc / "stat").read_text().rpartition(")")[2].split()[0]
            text = (proc / "cmdline").read_text() + (proc / "cgroup").read_text()
        except OSError:
            continue
        if name in text and state != "Z" and int(proc.name) != os.getpid():
            processes.append(proc.name)
    return {
        "processes": processes,
        "mounts": [x for x in Path("/proc/self/mounts").read_text().splitlines() if name in x],
        "cgroups": list(Path("/sys/fs/cgroup").glob(f"**/{name}")),
        "files": [*Path("/var/tmp").glob(f"{name}*"), *Path("/run/lxc").glob(f"**/{name}*")],
    }


NOTHING: dict[str, object] = {"processes": [], "mounts": [], "cgroups": [], "files": []}


@contextmanager
def rig_by_hand() -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """`python -m tests.rig` as a process of its own, and its state directory."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.rig"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if match := re.match(r"Everything is in (\S+)\. ", line):
                yield process, Path(match[1])
                break
        else:
            pytest.fail("python -m tests.rig did not come up")
    finally:
        process.kill()
        process.communicate()


def test_a_rig_that_ends_leaves_nothing_though_processes_ran_in_all_its_corners(rig: Rig) -> None:
    with Rig() as second:
        name = second.state.name
        second.pct("start", "201")
        for vmid in ("200", "201"):
            script = "setsid sleep 1000 </dev/null >/dev/null 2>&1 &"
            second.pct("exec", vmid, "--", "sh", "-c", script)
        second.ssh("setsid sleep 1000 </dev/null >/dev/null 2>&1 &")
        ssh = subprocess.Popen(
            ["ssh", "-F", second.ssh_config, "rig", "pct exec 200 -- sh -c 'echo up; cat'"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert ssh.stdout is not None
        assert ssh.stdout.readline() == b"up\n"
        second.freeze_container()
        second.freeze_connections()
        there = traces(name)
        assert len(there["processes"]) >= 8  # type: ignore[arg-type]
        assert there["cgroups"]
    ssh.communicate(timeout=60)
    assert traces(name) == NOTHING
    assert rig.pct("status", "200").stdout == b"status: running\n"


def test_an_error_in_a_test_or_on_the_way_up_takes_everything_down(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    del rig
    with pytest.raises(ZeroDivisionError), Rig() as second:
        name = second.state.name
        raise ZeroDivisionError
    assert traces(name) == NOTHING

    names = []

    def interrupted(self: Rig, *_: str) -> None:
        names.append(self.state.name)
        raise KeyboardInterrupt

    monkeypatch.setattr(Rig, "pct", interrupted)
    with pytest.raises(KeyboardInterrupt), Rig():
        pytest.fail("it came up")
    assert traces(names[0]) == NOTHING


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_rig_by_hand_ends_on_ctrl_c_and_leaves_nothing(rig: Rig, number: signal.Signals) -> None:
    del rig
    with rig_by_hand() as (process, state):
        assert traces(state.name) != NOTHING
        process.send_signal(number)
        assert process.wait(60) == 0
        assert traces(state.name) == NOTHING


def test_the_next_rig_takes_down_what_a_killed_one_left_and_no_living_one(rig: Rig) -> None:
    with rig_by_hand() as (process, state):
        assert state not in leftovers.sweep(), "its owner lives"
        process.kill()
        process.wait()
        left = traces(state.name)
        assert left["processes"]
        assert left["files"]
        assert leftovers.sweep() == [state]
        assert traces(state.name) == NOTHING
    assert rig.ssh("true").returncode == 0


def test_two_rigs_have_the_same_numbers_and_nothing_else_in_common(rig: Rig) -> None:
    with Rig() as second:
        assert second.port != rig.port
        second.container_path("/workspace/second").write_text("here")
        assert not rig.container_path("/workspace/second").exists()
        second.stop_container()
        assert rig.pct("status", "200").stdout == b"status: running\n"
        assert second.pct("status", "200").stdout == b"status: stopped\n"


def test_a_state_directory_with_the_hosts_root_mounted_in_it_is_not_deleted(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    del rig
    state, descriptor = leftovers.claim()
    try:
        (state / "lower").mkdir()
        (state / "lower" / "precious").touch()
        with monkeypatch.context() as patch:
            patch.setattr(leftovers, "mounts_below", lambda _: [f"{state}/lower"])
            with pytest.raises(RigError, match="still mounted"):
                leftovers.take_down(state)
        with pytest.raises(OSError, match="not empty"):
            leftovers.take_down(state)
        os.close(descriptor)
        assert state not in leftovers.sweep()
        assert f"leftover {state} cannot be taken down" in capsys.readouterr().err
        assert (state / "lower" / "precious").exists()
    finally:
        (state / "lower" / "precious").unlink()
    assert state in leftovers.sweep()
    assert not state.exists()


def test_only_processes_of_its_own_groups_are_ended(rig: Rig) -> None:
    assert os.getpid() not in cgroups.members(rig.state.name)
    bystander = subprocess.Popen(["sleep", "1000"])
    try:
        with Rig():
            pass
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.parametrize(
    ("ci", "code", "said"),
    [
        (None, 0, "the rig's tests are left out: the rig needs root"),
        ("true", 1, "which CI=true forbids: the rig needs root"),
    ],
)
def test_without_root_the_rigs_tests_are_left_out_aloud_and_fail_in_ci(
    rig: Rig, ci: str | None, code: int, said: str
) -> None:
    del rig
    program = "import os, sys, pytest; os.geteuid = lambda: 1000; sys.exit(pytest.main(sys.argv[1:]))"
    env = {key: value for key, value in os.environ.items() if key != "CI"}
    test = f"{Path(__file__).with_name('test_rig.py')}::test_login_noise_comes_before_a_commands_own_output"
    call = subprocess.run(
        [sys.executable, "-c", program, test, "-p", "no:cacheprovider"],
        cwd=ROOT,
        env=env | ({"CI": ci} if ci else {}),
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert call.returncode == code, call.stdout
    assert said in call.stdout
