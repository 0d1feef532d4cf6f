"""`prune` and included files on this machine, by the payload's own commands as real processes."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from controller import paths
from controller.errors import ShipError, UsageError
from controller.figures import amount
from controller.includes import Included, collect, send
from controller.inventory import Host
from controller.place import Place, open_place
from controller.pruning import examine, remove, seconds, table
from controller.ship import PACKAGE, Payload, pack, ship
from remote_payload import identity, includes, pruning, rundir

DAY = 86400.0


@pytest.fixture
def payload(tmp_path: Path) -> Payload:
    copy = tmp_path / "source" / "remote_payload"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("train", "tools", "jobs", "__pycache__"))
    return pack(copy)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return open_place(Host(name="here", kind="local", workspace=str(tmp_path / "w")))


def age(path: Path, days: float) -> None:
    then = time.time() - days * DAY
    for each in [*path.rglob("*"), path]:
        os.utime(each, (then, then))


def make_run(
    workspace: Path,
    run_id: str,
    *,
    state: str | None,
    alive: bool = False,
    days: float = 0.0,
    digest: str = "",
) -> Path:
    run_dir = workspace / "runs" / run_id
    (run_dir / "checkpoints" / "step-1").mkdir(parents=True)
    (run_dir / "checkpoints" / "step-1" / "weights").write_bytes(b"x" * 100_000)
    (run_dir / "run.json").write_text(json.dumps({"payload": digest}))
    if state is not None:
        who = identity.identity(os.getpid()) if alive else {"pid": 4_000_000, "start_ticks": 1}
        status = {"state": state, "boot_id": identity.boot_id(), "supervisor": who, "trainer": None}
        (run_dir / "status.json").write_text(json.dumps(status))
    age(run_dir, days)
    return run_dir


def make_payload(workspace: Path, digest: str, *, days: float) -> Path:
    folder = workspace / "payloads" / digest
    (folder / "remote_payload").mkdir(parents=True)
    (folder / "remote_payload" / "x.py").write_text("x")
    age(folder, days)
    return folder


OLD, USED, RUNNING = "a" * 64, "b" * 64, "c" * 64


def furnish(place: Place) -> Path:
    workspace = Path(place.workspace)
    make_run(workspace, "old-1", state="finished", days=30, digest=OLD)
    make_run(workspace, "lost-1", state="running", days=30, digest=OLD)
    make_run(workspace, "new-1", state="failed", days=2, digest=USED)
    make_run(workspace, "live-1", state="running", alive=True, days=30, digest=RUNNING)
    make_run(workspace, "begins-1", state=None, days=0)
    for digest in (OLD, USED, RUNNING):
        make_payload(workspace, digest, days=60)
    (workspace / "runs" / "Not A Run").mkdir()
    return workspace


def test_what_may_go_is_told_from_what_stays_each_with_its_reason(place: Place, payload: Payload) -> None:
    furnish(place)
    items = {item["name"]: item for item in examine(place, payload, 14 * DAY)}
    assert {name: item["kept"] for name, item in items.items()} == {
        "old-1": None,
        "lost-1": None,
        "new-1": "last sign 2 d ago",
        "live-1": "its supervisor lives",
        "begins-1": "it may be starting",
        OLD: None,
        USED: "the run new-1 has it",
        RUNNING: "the run live-1 has it",
        payload.digest: "this dflashctl uses it",
    }
    assert items["lost-1"]["state"] == "lost"
    assert items["old-1"]["bytes"] >= 100_000
    shown = table(list(items.values())).splitlines()
    assert shown[0].split() == ["KIND", "NAME", "SIZE", "AGE", "STATE"]
    (old,) = (line for line in shown if line.startswith("GOES  run      old-1"))
    assert "KiB" in old and " 30d00h " in old


def test_only_what_was_named_and_may_go_is_removed_and_the_rest_stays_whole(
    place: Place, payload: Payload
) -> None:
    workspace = furnish(place)
    items = examine(place, payload, 14 * DAY)
    going = [item for item in items if item["kept"] is None and item["name"] != "lost-1"]
    forced = [item for item in items if item["name"] in ("live-1", RUNNING)]
    made_up = [{"kind": "run", "name": "../payloads"}, {"kind": "run", "name": "Not A Run"}]
    answers = remove(place, payload, 14 * DAY, [*going, *forced, *made_up])
    assert {answer.get("removed") for answer in answers} == {"old-1", OLD, None}
    kept = {answer["kept"]: answer["why"] for answer in answers if "kept" in answer}
    assert kept == {
        "live-1": "its supervisor lives",
        RUNNING: "the run live-1 has it",
        "../payloads": "it is not there any more",
        "Not A Run": "it is not there any more",
    }
    assert sorted(path.name for path in (workspace / "runs").iterdir()) == [
        "Not A Run", "begins-1", "live-1", "lost-1", "new-1",
    ]  # fmt: skip
    assert not (workspace / "payloads" / OLD).exists()
    assert not (workspace / ".removing").exists()


def test_a_run_that_came_to_life_in_between_is_kept(place: Place, payload: Payload) -> None:
    workspace = furnish(place)
    going = [item for item in examine(place, payload, 14 * DAY) if item["name"] == "old-1"]
    shutil.rmtree(workspace / "runs" / "old-1")
    make_run(workspace, "old-1", state="running", alive=True, days=30)
    (answer,) = remove(place, payload, 14 * DAY, going)
    assert answer == {"kept": "old-1", "why": "its supervisor lives"}


def test_a_payload_that_a_process_runs_from_stays(place: Place, payload: Payload) -> None:
    workspace = Path(place.workspace)
    folder = make_payload(workspace, OLD, days=60)
    program = folder / "remote_payload" / "x.py"
    program.write_text("import time; print(1, flush=True); time.sleep(60)")
    age(folder, 60)
    process = subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    kept = {item["name"]: item["kept"] for item in examine(place, payload, 0)}
    process.kill()
    process.wait()
    process.stdout.close()
    assert kept[OLD] == "a process runs from it"


def test_a_payload_whose_feed_follows_a_log_that_is_no_runs_stays(
    place: Place, payload: Payload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    workspace = Path(place.workspace)
    for digest in (OLD, USED):
        make_payload(workspace, digest, days=60)
    folder = paths.made(paths.log_mirror_dir("10.1.2.6", 200, "/workspace/train.log"))
    (folder / paths.PLACE).write_text(json.dumps({"digest": OLD}))
    (paths.made(folder.with_name("damaged")) / paths.PLACE).write_text("{half")
    items = examine(place, payload, 14 * DAY)
    kept = {item["name"]: item["kept"] for item in items}
    assert (kept[OLD], kept[USED]) == ("this dflashctl uses it", None)
    remove(place, payload, 14 * DAY, items)
    assert (workspace / "payloads" / OLD).exists() and not (workspace / "payloads" / USED).exists()


def test_a_removal_that_broke_off_is_finished_by_the_next(place: Place, payload: Payload) -> None:
    half = Path(place.workspace) / ".removing" / "run-x-1"
    half.mkdir(parents=True)
    (half / "file").write_text("")
    examine(place, payload, 0)
    assert not half.exists()


def test_a_payload_counts_as_used_whenever_it_is_launched_from(place: Place, payload: Payload) -> None:
    ship(place, payload, ["runs", place.workspace])
    folder = Path(place.workspace) / "payloads" / payload.digest
    age(folder, 60)
    before = folder.stat().st_mtime
    ship(place, payload, ["runs", place.workspace])
    assert folder.stat().st_mtime > before + 59 * DAY


@pytest.mark.parametrize(("text", "expected"), [("14d", 14 * DAY), ("12h", 43200), ("1.5m", 90), ("0", 0)])
def test_spans_are_read(text: str, expected: float) -> None:
    assert seconds(text) == expected


def test_a_span_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="expected a span such as 14d"):
        seconds("soon")


def test_sizes_are_for_people() -> None:
    assert [amount(n) for n in (0, 1, 2048, 3 << 20, 5 << 30)] == [
        "0 bytes", "1 byte", "2.0 KiB", "3.0 MiB", "5.0 GiB",
    ]  # fmt: skip


# Included files


def content(run_dir: Path) -> dict[str, bytes]:
    folder = run_dir / "include"
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def send_all(place: Place, payload: Payload, files: list[Included], **changes: Any) -> list[str]:
    said: list[str] = []
    send(place, payload, files, say=said.append, **changes)
    return said


def test_files_and_folders_are_collected_without_what_is_hidden_or_a_cache(tmp_path: Path) -> None:
    folder = tmp_path / "my data"
    for name in ("a.arrow", "sub/b.json", ".env", ".git/config", "sub/__pycache__/c.pyc", "sub/.hidden/d"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (tmp_path / "one.toml").write_text("1")
    found = collect([folder, tmp_path / "one.toml"])
    assert [file.name for file in found] == ["my data/a.arrow", "my data/sub/b.json", "one.toml"]
    assert found[2].sha256 == hashlib.sha256(b"1").hexdigest()
    with pytest.raises(UsageError, match="cannot be read"):
        collect([tmp_path / "absent"])
    with pytest.raises(UsageError, match="twice"):
        collect([tmp_path / "one.toml", folder / ".." / "one.toml"])


def test_included_files_arrive_whole_are_sent_once_and_lie_in_the_run(
    place: Place, payload: Payload, tmp_path: Path
) -> None:
    big = tmp_path / "big.arrow"
    big.write_bytes(os.urandom(3 << 20))
    (tmp_path / "empty").write_text("")
    files = collect([big, tmp_path / "empty"])
    told: list[tuple[int, int]] = []
    said = send_all(place, payload, files, progress=lambda *n: told.append(n))
    assert said == ["here: including big.arrow (3.0 MiB)", "here: including empty (0 bytes)"]
    assert told[-1] == (3 << 20, 3 << 20)
    run_dir = Path(place.workspace) / "runs" / "r"
    includes.put(Path(place.workspace), run_dir, [file.to_json() for file in files])
    assert content(run_dir) == {"big.arrow": big.read_bytes(), "empty": b""}
    again = send_all(place, payload, files)
    assert again == ["here: big.arrow is there already", "here: empty is there already"]


def test_a_file_that_changes_on_the_way_is_refused_and_leaves_nothing(
    place: Place, payload: Payload, tmp_path: Path
) -> None:
    (tmp_path / "f").write_text("before")
    files = collect([tmp_path / "f"])
    (tmp_path / "f").write_text("after!")
    with pytest.raises(ShipError, match="another sha256"):
        send_all(place, payload, files)
    assert list((Path(place.workspace) / "includes").iterdir()) == []


def test_a_file_that_goes_on_the_way_is_named(place: Place, payload: Payload, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("before")
    files = collect([tmp_path / "f"])
    (tmp_path / "f").unlink()
    with pytest.raises(ShipError, match=r"/f: cannot be read any more \(No such file or directory\)"):
        send_all(place, payload, files)


def test_a_name_that_leaves_the_folder_is_refused(tmp_path: Path) -> None:
    for name in ("../x", "/etc/passwd", "a/../../x", "", "a//b"):
        with pytest.raises(includes.IncludeError, match="is no name of an included file"):
            includes.put(tmp_path, tmp_path / "run", [{"name": name, "sha256": "0" * 64}])


def test_an_included_file_is_pruned_when_no_run_has_it(
    place: Place, payload: Payload, tmp_path: Path
) -> None:
    (tmp_path / "f").write_text("content")
    (file,) = collect([tmp_path / "f"])
    send_all(place, payload, [file])
    workspace = Path(place.workspace)
    run_dir = make_run(workspace, "live-1", state="running", alive=True)
    includes.put(workspace, run_dir, [file.to_json()])
    age(workspace / "includes", 60)
    assert next(item for item in pruning.examine(workspace, DAY, set()) if item.kind == "include").kept == (
        "a run has it"
    )
    rundir.write_whole(run_dir / "status.json", b'{"state": "finished"}')
    age(run_dir, 60)
    going = [item.name for item in pruning.examine(workspace, DAY, set()) if item.kept is None]
    assert going == ["live-1", file.sha256]
