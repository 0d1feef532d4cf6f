"""Notify hooks: once per event, told by variables, and harmless when they fail."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from controller.errors import InventoryError
from controller.notify import EVENTS, Hook, call, hook_file, load_hook, notifying, shell
from remote_payload import rundir
from tests.waiting import until


@pytest.fixture(autouse=True)
def _fast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASHCTL_TIME_SCALE", "0.02")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


class Folder:
    """A mirror folder whose files a test writes."""

    def __init__(self, tmp_path: Path) -> None:
        self.path = tmp_path / "runs" / "a-run" / "10.1.2.6"
        self.path.mkdir(parents=True)
        self.log = tmp_path / "notified.log"
        self.said: list[str] = []
        self.write("run.json", job="tiny")
        self.write("progress.json", step=1234567, steps=2000000, loss=2.5, tau=1.75, t=time.time())

    def write(self, name: str, **fields: object) -> None:
        rundir.write_whole(self.path / name, rundir.encode(fields))

    def status(self, state: str, attempt: int = 1, **fields: object) -> None:
        self.write("status.json", t=time.time(), state=state, attempt=attempt, since=5.0, **fields)

    def hook(self, text: str = 'echo "$DFLASHCTL_STATE" >> "$LOG"') -> Hook:
        return Hook(shell(text.replace("$LOG", str(self.log))))

    def told(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_a_run_that_ends_is_told_of_with_everything_that_a_hook_may_want(folder: Folder) -> None:
    folder.status("running")
    show = 'env | grep ^DFLASHCTL_ | grep -v TIME_SCALE | sort > "$LOG"'
    with notifying(folder.path, folder.said.append, folder.hook(show)):
        folder.status("failed", exit_code=1, reason="boom\x1b[31m $(touch /tmp/never)\nsecond line")
    told = dict(line.split("=", 1) for line in folder.told())
    assert told.pop("DFLASHCTL_DIRECTORY") == str(folder.path)
    assert told.pop("DFLASHCTL_REASON").startswith("boom")
    assert told == {
        "DFLASHCTL_RUN": "a-run",
        "DFLASHCTL_HOST": "10.1.2.6",
        "DFLASHCTL_JOB": "tiny",
        "DFLASHCTL_STATE": "failed",
        "DFLASHCTL_EXIT_CODE": "1",
        "DFLASHCTL_ATTEMPT": "1",
        "DFLASHCTL_STEP": "1234567",
        "DFLASHCTL_STEPS": "2000000",
        "DFLASHCTL_LOSS": "2.5",
        "DFLASHCTL_TAU": "1.75",
    }
    assert folder.said == []


def test_several_followers_tell_of_one_event_once(folder: Folder) -> None:
    folder.status("running")
    barrier = threading.Barrier(4)

    def follow() -> None:
        with notifying(folder.path, folder.said.append, folder.hook()):
            barrier.wait()
            until(lambda: (folder.path / "go").exists())

    threads = [threading.Thread(target=follow) for _ in range(3)]
    for thread in threads:
        thread.start()
    barrier.wait()
    folder.status("finished", exit_code=0)
    (folder.path / "go").touch()
    for thread in threads:
        thread.join()
    assert folder.told() == ["finished"]


def test_each_attempt_and_each_stall_is_an_event_of_its_own(folder: Folder) -> None:
    folder.status("running")
    with notifying(folder.path, folder.said.append, folder.hook()):
        folder.status("failed", exit_code=1)
        until(lambda: folder.told() == ["failed"])
        folder.status("running", attempt=2)
        folder.status("failed", attempt=2, exit_code=1)
        until(lambda: folder.told() == ["failed", "failed"])


def test_what_was_known_to_have_ended_before_is_no_news(folder: Folder) -> None:
    folder.status("failed", exit_code=1)
    with notifying(folder.path, folder.said.append, folder.hook()):
        time.sleep(0.1)
    assert folder.told() == []
    assert not (folder.path / "notified").exists()


def test_no_news_of_a_run_is_no_event(folder: Folder) -> None:
    folder.status("running")
    with notifying(folder.path, folder.said.append, folder.hook()):
        folder.write("mirror.json", t=time.time(), state="reconnecting", last_heard=time.time() - 999)
        time.sleep(0.1)
    assert folder.told() == []


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        (Hook(shell("echo no bus >&2; exit 3")), "notify: the command ended with exit status 3: no bus"),
        (Hook(("/nonexistent/notify",)), "notify: /nonexistent/notify cannot be run"),
        (Hook(shell("sleep 60"), timeout_s=0.1), "notify: the command took more than 0.1 s and was ended"),
    ],
)
def test_a_hook_that_fails_is_one_line(folder: Folder, hook: Hook, said: str) -> None:
    folder.status("running")
    with notifying(folder.path, folder.said.append, hook):
        folder.status("finished", exit_code=0)
    (line,) = folder.said
    assert line.startswith(said)


def test_what_a_hook_that_was_ended_left_behind_is_not_waited_for(tmp_path: Path) -> None:
    go = tmp_path / "go"
    left = f"setsid sh -c 'while [ ! -e {go} ]; do sleep 0.05; done' & sleep 60"
    said: list[str] = []
    hook = Hook(shell(left), timeout_s=0.5)
    caller = threading.Thread(target=lambda: said.append(call(hook, {})), daemon=True)
    caller.start()
    try:
        until(lambda: said)
    finally:
        go.touch()
    assert said == ["the command took more than 0.5 s and was ended"]


def test_the_users_file_says_what_is_run_and_when(folder: Folder) -> None:
    assert load_hook() is None
    path = hook_file()
    path.parent.mkdir(parents=True)
    path.write_text('command = ["notify-send", "$x"]\non = ["failed", "stalled"]\ntimeout = 5\n')
    assert load_hook() == Hook(("notify-send", "$x"), frozenset({"failed", "stalled"}), 5.0)
    path.write_text(
        f"command = {json.dumps('echo $DFLASHCTL_STATE >> ' + str(folder.log))}\non = ['killed']\n"
    )
    folder.status("running")
    with notifying(folder.path, folder.said.append):
        folder.status("failed", exit_code=1)
        time.sleep(0.1)
        folder.status("killed", attempt=2, exit_code=137, signal="SIGKILL")
    assert folder.told() == ["killed"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "command = None: expected a string"),
        ("command = 3", "command = 3: expected a string"),
        ('command = "x"\nwhen = 3', "unknown key 'when'; known: command, on, timeout"),
        ('command = "x"\non = ["dead"]', f"expected a list of {', '.join(EVENTS)}"),
        ('command = "x"\ntimeout = 0', "timeout = 0: expected a number of seconds above 0"),
        (
            'command = "x"\ntimeout = inf',
            "timeout = inf: expected a number of seconds above 0, at most 86400",
        ),
        (
            'command = "x"\ntimeout = nan',
            "timeout = nan: expected a number of seconds above 0, at most 86400",
        ),
        ("command = ", "cannot be read"),
    ],
)
def test_a_damaged_file_is_a_warning_that_names_it_and_the_follower_goes_on(
    folder: Folder, text: str, said: str
) -> None:
    hook_file().parent.mkdir(parents=True)
    hook_file().write_text(text)
    with pytest.raises(InventoryError, match=r"notify\.toml"):
        load_hook()
    with notifying(folder.path, folder.said.append):
        pass
    (line,) = folder.said
    assert line.startswith(f"warning: {hook_file()}: ")
    assert said in line
