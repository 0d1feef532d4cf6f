"""The life of a run through a real sshd, pct and container: restart, resume, pull, and quitting."""

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from remote_payload import rundir
from tests.dflashctl import command, dflashctl, environment
from tests.rig.rig import Rig
from tests.rig.test_launch import job, mirror
from tests.waiting import until

__all__ = ["job"]  # the fixture

FOREVER = "steps=100000"


def run_dir(rig: Rig, run_id: str) -> Path:
    return rig.container_path(f"{rig.workspace}/runs/{run_id}")


def status(rig: Rig, run_id: str) -> dict[str, object]:
    return rundir.read_whole(run_dir(rig, run_id) / rundir.STATUS) or {}


def step(rig: Rig, run_id: str) -> int:
    progress = rundir.read_whole(run_dir(rig, run_id) / rundir.PROGRESS) or {}
    return int(progress.get("step") or 0)


def launch(rig: Rig, job: str, *changes: str) -> str:
    options = [word for change in changes for word in ("--set", change)]
    done = dflashctl("launch", "--host", "rig", "--job", job, *options, env=rig.laptop_env())
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def stopped(rig: Rig, run_id: str) -> None:
    done = dflashctl("stop", run_id, env=rig.laptop_env())
    assert done.returncode == 0, done.stderr


def kill_trainer(rig: Rig, run_id: str) -> None:
    trainer = status(rig, run_id)["trainer"]
    assert isinstance(trainer, dict)
    rig.container_run(["kill", "-9", str(trainer["pid"])], check=True)


def test_a_killed_trainer_is_restarted_from_its_checkpoint_and_then_resumed_by_hand(
    rig: Rig, job: str
) -> None:
    env, idle = rig.laptop_env(), rig.container_processes()
    often = ("checkpoint_every=5", "checkpoint_keep=10000")
    run_id = launch(rig, job, FOREVER, "restart=on-crash", "restart_wait=2.0", *often)
    until(lambda: step(rig, run_id) >= 12, "step 12")
    kill_trainer(rig, run_id)
    until(
        lambda: status(rig, run_id)["state"] == "restarting" or status(rig, run_id)["attempt"] == 2,
        "the wait between attempts",
    )
    said = json.loads(dflashctl("status", "--json", run_id, env=env).stdout)
    assert (said["state"], said["attempt"]) in (("RESTARTING", 1), ("LAUNCHING", 2), ("LIVE", 2))
    until(lambda: status(rig, run_id)["attempt"] == 2, "attempt 2")
    until(lambda: status(rig, run_id)["state"] == "running", "attempt 2 to run")
    written = json.loads(dflashctl("checkpoint", run_id, "--json", env=env).stdout)
    assert rig.container_path(written["path"]).is_dir()
    assert written["step"] >= 10  # it went on from a checkpoint, not from step 0
    shown = json.loads(dflashctl("stacks", run_id, "--json", env=env).stdout)
    assert shown["stacks"].count("most recent call first") >= 4  # reader, target, drafter and the main thread
    assert rig.container_path(shown["path"]).read_text().endswith(shown["stacks"])
    assert status(rig, run_id)["state"] == "running"
    stopped(rig, run_id)
    at = step(rig, run_id)
    refused = dflashctl("resume", run_id, "--set", "seed=9", env=env)
    assert refused.returncode == 64
    assert "seed cannot change" in refused.stderr
    done = dflashctl("resume", run_id, "--set", f"steps={at + 3}", "--follow", env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"attempt 3, from the checkpoint of step {at}, with " in done.stderr
    said = json.loads(dflashctl("status", "--json", run_id, env=env).stdout)
    assert (said["state"], said["attempt"], said["progress"]["step"]) == ("FINISHED", 3, at + 3)
    begun = [(attempt["number"], attempt["begun_by"]) for attempt in said["attempts"]]
    assert begun == [(1, "launch"), (2, "restart"), (3, "resume")]
    again = dflashctl("resume", run_id, env=env)
    assert again.returncode == 73
    assert "the run has finished; to train it longer" in again.stderr
    until(lambda: rig.container_processes() <= idle, "the container to be left alone")


def test_a_pull_across_cuts_brings_every_byte_and_leaves_nothing_behind(
    rig: Rig, job: str, tmp_path: Path
) -> None:
    env, idle = rig.laptop_env(), rig.container_processes()
    run_id = launch(rig, job, "steps=2")
    assert dflashctl("logs", "--follow", run_id, env=env).returncode == 0
    export = run_dir(rig, run_id) / "exports" / "big"
    export.mkdir(parents=True)
    with (export / "model.gguf").open("wb") as file:
        for _ in range(300):
            file.write(os.urandom(1 << 20))
    process = subprocess.Popen(
        command("pull", run_id, "all", "--to", str(tmp_path / "here"), "--json"),
        env=environment(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    part = tmp_path / "here" / "exports" / ".big.part" / "model.gguf"

    def arrived() -> int:
        return part.stat().st_size if part.exists() else 0

    cuts = 0
    for size in (20 << 20, 100 << 20):
        until(lambda size=size: arrived() >= size or process.poll() is not None, "bytes")  # type: ignore[misc]
        until(lambda: rig.sshd_children() or process.poll() is not None, "a connection to break")
        cuts += rig.kill_connections()
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert cuts == 2, err
    assert err.decode().count("going on in") == 2
    pulled = {record["file"]: record["sha256"] for record in map(json.loads, out.splitlines())}
    for name, digest in pulled.items():
        assert rig.container_sha256(f"{rig.workspace}/runs/{run_id}/{name}") == digest
        here = subprocess.run(["sha256sum", tmp_path / "here" / name], capture_output=True, check=True)
        assert here.stdout.decode().split()[0] == digest
    assert {"train.log", "events.jsonl", "exports/big/model.gguf"} <= set(pulled)
    assert any(name.startswith("checkpoints/step-2/") for name in pulled)
    assert not list((tmp_path / "here").rglob(".*"))
    until(lambda: rig.container_processes() <= idle, "the senders to end")


def view(arguments: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
    """A view on a terminal of its own, which it loses when that is closed."""
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    take = "import fcntl, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    take += "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # which nohup before the tests would ignore
    argv = command(*arguments)
    argv[2] = take + argv[2]
    process = subprocess.Popen(
        argv,
        env=environment(env | {"TERM": "xterm-256color"}),
        stdin=side,
        stdout=side,
        stderr=side,
        start_new_session=True,
    )
    os.close(side)
    os.set_blocking(main, False)
    process.terminal = main  # type: ignore[attr-defined]
    return process


def drain(process: subprocess.Popen[bytes]) -> bytes:
    try:
        return os.read(process.terminal, 1 << 20)  # type: ignore[attr-defined]
    except OSError:
        return b""


@pytest.mark.parametrize("end", ["keys", "hang up", signal.SIGTERM, signal.SIGKILL])
def test_no_way_to_quit_a_view_stops_training(rig: Rig, job: str, end: signal.Signals | str) -> None:
    env = rig.laptop_env()
    run_id = launch(rig, job, FOREVER)
    views = [view(words, env) for words in (["logs", "--follow", run_id], ["tui", run_id], ["watch", run_id])]
    until(lambda: step(rig, run_id) >= 2, "two steps")
    seen = dict.fromkeys(range(len(views)), b"")

    def all_show() -> bool:
        for number, process in enumerate(views):
            seen[number] += drain(process)
        return all(len(text) > 20 for text in seen.values()) and b"LIVE" in seen[1]

    until(all_show, "every view to show something, and the TUI a living run")
    for process in views:
        if end == "hang up":
            os.close(process.terminal)  # type: ignore[attr-defined]
        elif isinstance(end, signal.Signals):
            process.send_signal(end)
    deadline, pressed = time.monotonic() + 60, 0.0
    while any(process.poll() is None for process in views) and time.monotonic() < deadline:
        press = end == "keys" and time.monotonic() > pressed + 3  # a screen that is being made loses keys
        pressed = time.monotonic() if press else pressed
        for process, key in zip(views, (b"\x03", b"q", b"\x03"), strict=True):
            if press and process.poll() is None:
                os.write(process.terminal, key)  # type: ignore[attr-defined]
            if end != "hang up":
                drain(process)
        time.sleep(0.02)
    left = [process.args for process in views if process.poll() is None]
    for process in views:
        process.kill()
        process.wait()
        if end != "hang up":
            os.close(process.terminal)  # type: ignore[attr-defined]
    assert not left, "a view that was told to quit goes on"
    before = step(rig, run_id)
    until(lambda: step(rig, run_id) >= before + 3, "training to go on")
    assert status(rig, run_id)["state"] == "running"
    assert mirror(rig, run_id).is_dir()
    stopped(rig, run_id)


def test_ctrl_c_during_a_launch_that_follows_leaves_the_run_alone(rig: Rig, job: str) -> None:
    env = rig.laptop_env()
    process = subprocess.Popen(
        command("launch", "--host", "rig", "--job", job, "--set", FOREVER, "--follow"),
        env=environment(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    run_id = process.stdout.readline().decode().strip()
    until(lambda: step(rig, run_id) >= 1, "a step")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 80
    assert err.decode().splitlines()[-1] == "interrupted; a run that was started goes on"
    before = step(rig, run_id)
    until(lambda: step(rig, run_id) > before, "training to go on")
    stopped(rig, run_id)


def test_gpus_in_use_are_named_and_a_forced_launch_goes_on(rig: Rig, job: str) -> None:
    env = rig.laptop_env()
    rig.nvidia_smi("busy")
    gpus = ["--set", 'targets=["cuda:0"]', "--set", 'drafters=["cuda:1"]']
    refused = dflashctl("launch", "--host", "rig", "--job", job, *gpus, env=env)
    assert refused.returncode == 78, refused.stderr
    assert "GPU 0: pid " in refused.stderr and "GPU 1: pid " in refused.stderr
    forced = dflashctl("launch", "--host", "rig", "--job", job, "--set", "steps=1", *gpus, "--force", env=env)
    assert forced.returncode == 0, forced.stderr
    assert "shared because of --force: GPU 0: pid " in forced.stderr
    run_id = forced.stdout.strip()
    ends: Callable[[], bool] = lambda: status(rig, run_id)["state"] in rundir.ENDED  # noqa: E731
    until(ends, "the end of a run whose GPUs nobody has")
