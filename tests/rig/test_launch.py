"""The main job, end to end: `dflashctl launch` through a real sshd, pct and container, to the last byte."""

import hashlib
import json
import subprocess
from pathlib import Path

import pytest
import tomli_w

from controller.ship import pack
from remote_payload import rundir
from tests.dflashctl import command, dflashctl, environment
from tests.payload.tiny import job_values
from tests.rig.rig import Rig
from tests.waiting import until


@pytest.fixture
def job(rig: Rig, tmp_path: Path) -> str:
    """A job file on the laptop; its model and data lie in the container's workspace."""
    there = f"{rig.workspace}/tiny"
    folder = rig.container_path(there)
    folder.mkdir(exist_ok=True)
    values = job_values(folder, steps=300, eval_prompts=2)
    paths = {key: values[key].replace(str(folder), there) for key in ("target", "dataset", "held_out")}
    (tmp_path / "tiny.toml").write_text(tomli_w.dumps(values | paths))
    return str(tmp_path / "tiny.toml")


def mirror(rig: Rig, run_id: str) -> Path:
    return Path(rig.laptop_env()["XDG_STATE_HOME"]) / "dflashctl" / "runs" / run_id / rig.host


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def mirrored_files(rig: Rig, run_id: str) -> dict[str, str]:
    """sha256 by name of what a mirror has to have of the container's run directory."""
    run_dir = rig.container_path(f"{rig.workspace}/runs/{run_id}")
    files = [path for path in run_dir.rglob("*") if path.is_file() and path.stat().st_size]
    names = [path.relative_to(run_dir).as_posix() for path in files]
    return {
        name: rig.container_sha256(f"{rig.workspace}/runs/{run_id}/{name}")
        for name in names
        if rundir.is_mirrored(name)
    }


def test_a_run_is_launched_followed_through_three_breaks_and_mirrored_to_the_last_byte(
    rig: Rig, job: str, tmp_path: Path
) -> None:
    idle = rig.container_processes()
    with (tmp_path / "stderr").open("wb") as stderr_file:
        process = subprocess.Popen(
            command("launch", "--host", rig.host, "--job", job, "--follow"),
            env=environment(rig.laptop_env()),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr_file,
        )
    assert process.stdout is not None
    run_id = process.stdout.readline().decode().strip()
    folder = mirror(rig, run_id)

    def record() -> dict[str, object]:
        return rundir.read_whole(folder / "mirror.json") or {}

    for _ in range(3):
        until(lambda: record().get("state") == "connected", "a connection")
        heard, since = record()["last_heard"], record()["since"]
        until(lambda heard=heard: record()["last_heard"] != heard, "news")  # type: ignore[misc]
        assert until(rig.kill_connections, "a connection to break") == 1
        until(lambda since=since: record()["since"] != since, "the break to be noticed")  # type: ignore[misc]
    rest = process.stdout.read()
    process.stdout.close()
    stderr = (tmp_path / "stderr").read_text()
    assert process.wait(60) == 0, stderr
    log = rig.container_path(f"{rig.workspace}/runs/{run_id}/train.log").read_bytes()
    assert rest == log
    there = mirrored_files(rig, run_id)
    assert set(there) >= {"run.json", "job.toml", "status.json", "events.jsonl", "train.log", "exit.json"}
    assert {name: sha256(folder / name) for name in there} == there
    assert f"{rig.workspace}/runs/{run_id}" in stderr
    assert f"dflashctl status {run_id}" in stderr
    said = json.loads(dflashctl("status", "--json", run_id, env=rig.laptop_env()).stdout)
    assert said["state"] == "FINISHED"
    until(lambda: rig.container_processes() <= idle, "the container to be left alone")


def test_a_relaunch_makes_one_call_and_a_stop_ends_the_run_with_a_checkpoint(rig: Rig, job: str) -> None:
    env, idle = rig.laptop_env(), rig.container_processes()
    dflashctl("launch", "--host", "rig", "--job", job, "--set", "steps=1", env=env)
    before = len(rig.pct_calls())
    done = dflashctl("launch", "--host", "rig", "--job", job, "--set", "steps=100000", env=env)
    assert done.returncode == 0, done.stderr
    assert "is there already" in done.stderr
    assert [call[:2] for call in rig.pct_calls()[before:]] == [["exec", str(rig.vmid)]]
    run_id = done.stdout.strip()
    log = rig.container_path(f"{rig.workspace}/runs/{run_id}/train.log")
    until(lambda: b"step " in log.read_bytes(), "the first step")
    stopped = dflashctl("stop", run_id, env=env)
    assert stopped.returncode == 0, stopped.stderr
    assert stopped.stderr.splitlines()[-1].startswith(f"{run_id}: STOPPED")
    assert dflashctl("logs", "--follow", run_id, env=env).returncode == rundir.TrainerExit.STOPPED
    assert list(rig.container_path(f"{rig.workspace}/runs/{run_id}/checkpoints").iterdir())
    until(lambda: rig.container_processes() <= idle, "the container to be left alone")


def test_what_is_in_the_way_is_said_before_anything_is_started(rig: Rig, job: str) -> None:
    env = rig.laptop_env()
    hosts = Path(env["DFLASHCTL_HOSTS"])
    place = rig.hosts_toml()
    venv, container = f'venv = "{rig.venv}"', f"container = {rig.vmid}"
    cases = [
        (place.replace(venv, 'venv = "/root/absent"'), 71, "there is no venv at /root/absent"),
        (place.replace(container, f"container = {rig.stopped_vmid}"), 70, "is stopped"),
        (place.replace(container, f"container = {rig.absent_vmid}"), 70, "does not exist"),
        (place.replace(f'"{rig.workspace}"', '"/proc/w"'), 71, "the workspace /proc/w cannot be used"),
    ]
    try:
        for text, code, sentence in cases:
            hosts.write_text(text)
            done = dflashctl("launch", "--job", job, env=env)
            assert (done.returncode, done.stdout) == (code, ""), done.stderr
            error, hint, *_ = done.stderr.splitlines()
            assert error.startswith("error: ")
            assert sentence in error
            assert hint.startswith("hint: ")
    finally:
        hosts.write_text(place)
    rig.rotate_host_key()
    assert dflashctl("launch", "--job", job, env=env).returncode == 67


def test_a_payload_in_the_container_equals_the_one_packed_here(rig: Rig, job: str) -> None:
    dflashctl("launch", "--host", "rig", "--job", job, "--set", "steps=1", env=rig.laptop_env())
    payload = pack()
    there = rig.container_path(f"{rig.workspace}/payloads/{payload.digest}")
    assert {
        path.relative_to(there).as_posix(): path.stat().st_size
        for path in there.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    } == dict(payload.files)
