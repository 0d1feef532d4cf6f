"""Launching on this machine: real processes, the real supervisor, and a trainer of three lines."""

import contextlib
import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from controller import local, paths, run_place
from controller.errors import (
    ConnectionLostError,
    LaunchError,
    LocalStateError,
    PayloadEnvironmentError,
    RunLostError,
    UsageError,
)
from controller.includes import collect
from controller.inventory import Host
from controller.launch import LaunchedRun, launch, new_run_id
from controller.run_control import stop
from controller.run_place import RunPlace
from remote_payload import rundir
from remote_payload.job import Job
from tests.controller.trainer import use_trainer, wait_for_state
from tests.waiting import until

TRAINER = """\
import os, sys, time
def main(run_dir, attempt):
    print("trained", os.environ.get("COLOR"), os.environ.get("SECRET"), flush=True)
    time.sleep(float(os.environ.get("SLEEP", "0")))
    return 0
"""
JOB = Job.from_mapping({"target": "t", "dataset": "d", "mask_token_id": 1, "seed": 7}, "test")


@pytest.fixture(autouse=True)
def _light_payload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_trainer(TRAINER, tmp_path, monkeypatch)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(name="here", kind="local", workspace=str(tmp_path / "w"), env={"COLOR": "blue"})


@pytest.fixture
def sleeping(host: Host) -> Iterator[LaunchedRun]:
    run = launch(host.model_copy(update={"env": {"SLEEP": "600"}}), JOB, "sleeper")
    until((Path(run.run_dir) / rundir.TRAIN_LOG).read_bytes)
    yield run
    with contextlib.suppress(RunLostError):  # it has ended
        stop(RunPlace.read(run.local_dir), grace_s=0.1)


def test_a_run_id_is_one_whatever_the_job_is_called() -> None:
    for name in ("demo", "Mine & Yours", "ünï", "", "x" * 99, "-"):
        assert rundir.is_run_id(new_run_id(name, time.time())), name
    then = time.mktime((2025, 11, 30, 2, 31, 0, 0, 0, -1))
    assert new_run_id("demo", then)[:-4] == "demo-1130-0231-"
    assert new_run_id("demo", then) != new_run_id("demo", then)


def test_a_launch_starts_the_job_detached_with_everything_it_needs(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    said: list[str] = []
    run = launch(host, JOB, "tiny", say=said.append)
    wait_for_state(run, "finished")
    folder = Path(run.run_dir)
    record = rundir.read_whole(folder / rundir.RUN)
    assert record is not None
    assert {key: record[key] for key in ("kind", "id", "payload", "place", "host", "hosts", "job")} == {
        "kind": "run",
        "id": run.run_id,
        "payload": run.digest,
        "place": "here",
        "host": "local",
        "hosts": ["local"],
        "job": "tiny",
    }
    assert record["env"] == {"COLOR": "blue"}
    assert (folder / rundir.JOB).read_text() == JOB.to_toml()
    assert (folder / rundir.TRAIN_LOG).read_text() == "trained blue None\n"
    assert "sent" in " ".join(said)


def test_the_run_can_be_reached_again_by_its_local_folder(host: Host) -> None:
    run = launch(host, JOB, "tiny")
    assert paths.find_run(None) == run.local_dir == paths.mirror_dir(run.run_id, "local")
    place = RunPlace.read(run.local_dir)
    assert (place.host, place.run_id, place.run_dir) == (host, run.run_id, run.run_dir)
    assert (place.payload_dir, place.digest, place.job_name) == (run.payload_dir, run.digest, "tiny")
    wait_for_state(run, "finished")


def test_a_relaunch_takes_one_command_and_sends_nothing(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_state(launch(host, JOB, "tiny"), "finished")
    commands = []

    class Counted(local.LocalProcess):
        def __init__(self, argv: list[str]) -> None:
            commands.append(argv)
            super().__init__(argv)

    monkeypatch.setattr(local, "LocalProcess", Counted)
    said: list[str] = []
    run = launch(host, JOB, "tiny", say=said.append, progress=lambda *_: pytest.fail("sent again"))
    assert len(commands) == 1
    assert "is there already" in said[0]
    wait_for_state(run, "finished")


def test_included_files_lie_in_the_run_and_the_job_names_them_there(host: Host, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "data.arrow").write_bytes(b"arrow")
    values = {"target": "t", "dataset": "include:mine/data.arrow", "mask_token_id": 1}
    job = Job.from_mapping(values, "test")
    with pytest.raises(UsageError, match="is not among the included files"):
        launch(host, job, "tiny")
    said: list[str] = []
    run = launch(host, job, "tiny", include=[tmp_path / "mine"], say=said.append)
    assert "here: including mine/data.arrow (5 bytes)" in said
    folder = Path(run.run_dir)
    assert (folder / "include" / "mine" / "data.arrow").read_bytes() == b"arrow"
    assert f'dataset = "{folder}/include/mine/data.arrow"' in (folder / rundir.JOB).read_text()
    wait_for_state(run, "finished")


def test_an_included_folder_that_cannot_be_walked_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, pattern: str) -> list[Path]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path / "locked"))

    monkeypatch.setattr(Path, "rglob", refused)
    with pytest.raises(UsageError, match=r"--include /: /locked cannot be read \(Permission denied\)"):
        collect([Path("/")])


def test_no_argument_of_any_command_holds_a_variable_of_the_trainer(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[str] = []
    original = local.LocalProcess.__init__

    def noted(self: local.LocalProcess, argv: list[str]) -> None:
        commands.append(" ".join(argv))
        original(self, argv)

    monkeypatch.setattr(local.LocalProcess, "__init__", noted)
    run = launch(host.model_copy(update={"env": {"HF_TOKEN": "hf_secret"}}), JOB, "tiny")
    assert commands
    assert not [command for command in commands if "hf_secret" in command]
    wait_for_state(run, "finished")


def test_missing_packages_are_named_with_the_command_that_installs_them(host: Host, tmp_path: Path) -> None:
    venv = tmp_path / "bare venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    with pytest.raises(PayloadEnvironmentError) as caught:
        launch(host.model_copy(update={"venv": str(venv)}), JOB, "tiny")
    assert f"torch is not installed in {venv}/bin/python" in caught.value.message
    assert caught.value.hint == "Install what is missing: dflashctl setup --host here"
    assert paths.known_runs() == []


def test_a_job_for_gpus_that_are_not_there_is_refused_before_anything_starts(host: Host) -> None:
    values = {"target": "t", "dataset": "d", "mask_token_id": 1, "targets": ["cuda:0"]}
    with pytest.raises(PayloadEnvironmentError, match="the job names cuda:0, but"):
        launch(host, Job.from_mapping(values, "test"), "gpu")
    assert not (Path(host.workspace) / "runs").exists()


def test_a_start_that_is_refused_leaves_no_run_behind(host: Host) -> None:
    Path(host.workspace).mkdir()
    (Path(host.workspace) / "runs").write_text("in the way")
    with pytest.raises(LaunchError, match=r"the run was not started: .*runs/tiny-"):
        launch(host, JOB, "tiny")
    assert paths.known_runs() == []


def test_a_launch_whose_note_cannot_be_written_starts_nothing_and_leaves_no_folder(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(rundir, "write_whole", full)
    with pytest.raises(LocalStateError, match="cannot be written"):
        launch(host, JOB, "tiny")
    assert paths.known_runs() == []
    assert not (Path(host.workspace) / "runs").exists()


def test_a_connection_that_breaks_during_the_start_leaves_a_run_to_ask_about(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controller.launch.COMMAND_S", 0.0)
    with pytest.raises(ConnectionLostError) as caught:
        launch(host, JOB, "tiny")
    (known,) = paths.known_runs()
    assert caught.value.hint == f"Whether it started says: dflashctl status {known.run_id}"


def test_a_stop_reaches_the_trainer_and_says_who_asked(host: Host, sleeping: LaunchedRun) -> None:
    stop(RunPlace.read(sleeping.local_dir), grace_s=5)
    wait_for_state(sleeping, "killed")  # this trainer does not mind SIGTERM
    lines = (Path(sleeping.run_dir) / rundir.SUPERVISOR_LOG).read_bytes().splitlines()
    requests = [record for record in map(json.loads, lines) if record["kind"] == "request"]
    assert [(record["name"], record["by"]) for record in requests] == [("stop", run_place.by())]


def test_stopping_a_run_that_has_ended_says_so(host: Host) -> None:
    run = launch(host, JOB, "tiny")
    wait_for_state(run, "finished")

    def refusal() -> str:
        try:
            stop(RunPlace.read(run.local_dir), grace_s=60)
        except RunLostError as error:
            return error.message
        return ""

    said = until(refusal, "a refusal: the supervisor writes its last status before it leaves")
    assert "the run has ended (finished)" in said


def test_a_place_json_of_another_version_is_read_as_far_as_it_is_known(tmp_path: Path) -> None:
    host = {"name": "gpu1", "kind": "local", "workspace": "/w", "of_a_later_version": {"a": 1}}
    place = {"run_id": "r", "run_dir": "/w/runs/r", "payload_dir": "/w/p", "digest": "0", "python": "python3"}
    record = place | {"host": host, "created": 1, "job_name": "demo", "also_later": True}
    (tmp_path / "place.json").write_text(json.dumps(record))
    read = RunPlace.read(tmp_path)
    assert (read.host.name, read.host.workspace, read.run_dir) == ("gpu1", "/w", "/w/runs/r")


def test_a_damaged_place_json_is_named(tmp_path: Path) -> None:
    (tmp_path / paths.PLACE).write_text("{}")
    with pytest.raises(LocalStateError, match=r"place\.json: is damaged \(host: Field required\)") as caught:
        RunPlace.read(tmp_path)
    assert f"rm -r {tmp_path}" in caught.value.hint
    with pytest.raises(LocalStateError, match="cannot be read"):
        RunPlace.read(tmp_path / "absent")
