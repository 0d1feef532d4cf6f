import io
import json
import os
import pwd
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from controller import paths
from controller.defect_report import write_report
from controller.errors import LocalStateError, UsageError
from controller.listing import print_runs
from tests.tui import golden


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "dflashctl"


def launched(run_id: str, created: float, host: str = "local") -> Path:
    directory = paths.make_mirror_dir(run_id, host)
    (directory / paths.PLACE).write_text(json.dumps({"created": created, "job_name": "demo"}))
    return directory


def test_the_state_root_follows_xdg_and_ignores_a_relative_one(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert paths.state_root() == state
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/someone")
    assert paths.state_root() == Path("/home/someone/.local/state/dflashctl")


def test_a_user_without_a_home_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(uid: int) -> None:
        raise KeyError(uid)

    for name in ("HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    with pytest.raises(LocalStateError, match="this user has no home folder") as caught:
        paths.state_root()
    assert "Set HOME" in caught.value.hint
    assert write_report(ValueError("a defect"), {}) is None


def test_the_home_of_an_unknown_user_is_a_name_as_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert paths.expanded("~/x") == Path("/home/me/x")
    assert paths.expanded("~nobody-here/x") == Path("~nobody-here/x")


def test_a_mirror_folder_is_for_its_owner_only(state: Path) -> None:
    directory = paths.make_mirror_dir("run-1", "10.1.2.6")
    assert directory == state / "runs" / "run-1" / "10.1.2.6"
    for folder in (directory, *directory.parents[:3]):
        assert folder.stat().st_mode & 0o077 == 0, folder
    assert paths.make_mirror_dir("run-1", "10.1.2.6") == directory


def test_what_is_kept_is_for_its_owner_only_and_a_link_is_not_followed(state: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("stays")
    state.mkdir()
    (state / "copied.txt").symlink_to(other)
    path = paths.kept(state / "copied.txt", "of a log")
    assert (path.read_text(), path.stat().st_mode & 0o077) == ("of a log", 0)
    assert other.read_text() == "stays"
    with pytest.raises(LocalStateError, match=r"copied\.txt/x: File exists|Not a directory"):
        paths.kept(state / "copied.txt" / "x", "")


@pytest.mark.parametrize(
    ("run_id", "host"), [("../x", "h"), ("a", "../h"), ("a", ".."), ("A", "h"), ("a", "")]
)
def test_names_that_leave_the_state_root_are_refused(run_id: str, host: str) -> None:
    with pytest.raises(UsageError):
        paths.mirror_dir(run_id, host)


def test_runs_are_listed_newest_first_and_a_spoilt_place_file_does_not_hide_one() -> None:
    old, new = launched("b-old", 100.0), launched("a-new", 200.0)
    spoilt = paths.make_mirror_dir("spoilt", "local")
    (spoilt / paths.PLACE).write_text("{half")
    os.utime(spoilt, (150.0, 150.0))
    assert [run.directory for run in paths.known_runs()] == [new, spoilt, old]
    assert paths.find_run(None) == new


@pytest.mark.parametrize("created", [float("inf"), float("nan"), 1e300])
def test_a_run_of_no_time_that_a_calendar_has_is_listed_as_all_others(created: float) -> None:
    launched("odd", created)
    launched("even", 100.0)
    out = io.StringIO()
    print_runs(out, as_json=False)
    assert [line.split()[0] for line in out.getvalue().splitlines()][1:] == ["odd", "even"]


def test_the_list_of_runs_says_how_old_its_news_is_and_what_was_known_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for number, name in enumerate(("dead_thread", "no_news", "healthy", "killed")):
        golden.SITUATIONS[name]().write(launched(name.replace("_", "-"), float(number)))
    launched("never-seen", 9.0)
    monkeypatch.setattr("time.time", lambda: golden.NOW)
    out = io.StringIO()
    print_runs(out, as_json=False)
    rows = [re.split(r"  +", line)[:3] for line in out.getvalue().splitlines()]
    assert rows == [
        ["RUN", "STATE", "NEWS"],
        ["never-seen", "UNKNOWN", "none yet"],
        ["killed", "KILLED SIGKILL", "1.2s ago"],
        ["healthy", "LIVE", "1.2s ago"],
        ["no-news", "STALE, was running", "40s ago"],
        ["dead-thread", "FAILED rc=1", "1.2s ago"],
    ]


def test_a_run_that_goes_while_they_are_listed_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, gone = launched("kept", 1.0), launched("gone", 2.0).parent
    listed = Path.iterdir

    def iterdir(folder: Path) -> Iterator[Path]:
        if folder == gone:
            shutil.rmtree(gone)  # as a launch does that was refused
        return listed(folder)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    assert [run.directory for run in paths.known_runs()] == [kept]


def test_a_run_is_found_by_its_id_or_a_beginning_that_only_one_has() -> None:
    one, other = launched("0101-fox", 1.0), launched("0102-owl", 2.0)
    launched("0102-owlet", 3.0)
    assert paths.find_run("0101-fox") == one
    assert paths.find_run("0101") == one
    assert paths.find_run("0102-owl") == other
    with pytest.raises(UsageError, match="beginning of 3 runs") as caught:
        paths.find_run("01")
    assert "0102-owlet" in caught.value.hint


def test_an_unknown_run_is_answered_with_the_nearest_names() -> None:
    with pytest.raises(UsageError, match="no run is known"):
        paths.find_run(None)
    launched("0101-fox", 1.0)
    with pytest.raises(UsageError, match="'0101-fax'") as caught:
        paths.find_run("0101-fax")
    assert "0101-fox" in caught.value.hint


def test_hosts_of_one_run_are_told_apart() -> None:
    launched("r", 1.0, "a")
    b = launched("r", 1.0, "b")
    assert paths.find_run("r/b") == b
    with pytest.raises(UsageError, match="2 hosts") as caught:
        paths.find_run("r")
    assert "r/a" in caught.value.hint


def test_a_state_root_that_cannot_be_written_is_said_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with pytest.raises(LocalStateError, match="cannot create") as caught:
        paths.make_mirror_dir("r", "local")
    assert "XDG_STATE_HOME" in caught.value.hint
