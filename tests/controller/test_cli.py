"""The command line as a process: exit codes, and what stands on stdout and stderr."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.dflashctl import ROOT, command, dflashctl, environment

JOB = 'target = "/nonexistent/model"\ndataset = "none.arrow"\nmask_token_id = 1\n'


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    home = {f"XDG_{kind}_HOME": str(tmp_path / kind.lower()) for kind in ("STATE", "DATA", "CONFIG")}
    return {"HOME": str(tmp_path), **home}


@pytest.fixture
def job(tmp_path: Path) -> str:
    (tmp_path / "mine.toml").write_text(JOB)
    return str(tmp_path / "mine.toml")


def test_help_names_every_command_and_starts_without_heavy_imports(env: dict[str, str]) -> None:
    done = dflashctl("--help", env=env)
    assert done.returncode == 0
    for name in ("launch", "logs", "status", "stop", "tui", "runs"):
        assert f"  {name} " in done.stdout
        own = dflashctl(name, "-h", env=env)
        assert own.returncode == 0
        assert f"dflashctl {name}" in own.stdout.partition("Options:")[0].partition("\n")[2], name
    modules = subprocess.run(
        [sys.executable, "-X", "importtime", *command("--help")[1:]],
        env=environment(env),
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    for heavy in ("paramiko", "fabric", "textual", "pydantic", "torch", "rich"):
        assert f" {heavy}\n" not in modules, heavy


def test_without_a_command_it_explains_itself(env: dict[str, str]) -> None:
    assert dflashctl(env=env).stdout == dflashctl("--help", env=env).stdout
    assert dflashctl("--version", env=env).stdout.startswith("dflashctl 0.")


@pytest.mark.parametrize(
    ("arguments", "code", "texts"),
    [
        (["lunch"], 64, ["error: No such command 'lunch'", "hint: See: dflashctl --help"]),
        (["launch", "--hots", "x"], 64, ["No such option: --hots", "See: dflashctl launch --help"]),
        (["launch", "--port", "x"], 64, ["Invalid value for '--port'", "See: dflashctl launch --help"]),
        (["launch", "--host", "a", "--host", "b"], 64, ["--host was given 2 times; a run uses one host"]),
        (["launch", "--host", "lcal"], 65, ["has no place called or addressed 'lcal'; did you mean local?"]),
        (["launch", "--job", "dmeo"], 64, ["--job dmeo: there is no such job"]),
        (["launch", "--job", "absent.toml"], 64, ["absent.toml: cannot be read (No such file or directory)"]),
        (["launch", "--job", "JOB", "--set", "learning_rat=1"], 64, ["unknown key 'learning_rat'; did"]),
        (["launch", "--job", "JOB", "--set", "steps"], 64, ["--set 'steps': expected key=value"]),
        (["launch", "--job", "JOB", "--set", "steps=many"], 64, ["steps = 'many': expected a whole number"]),
        (["logs"], 64, ["no run is known on this machine"]),
        (["status", "demo"], 64, ["no run 'demo': none is known"]),
        (["stop"], 64, ["no run is known on this machine"]),
        (["logs", "--tail", "-1"], 64, ["Invalid value for '--tail'"]),
    ],
)
def test_a_users_mistake_is_one_sentence_and_a_documented_code(
    env: dict[str, str], job: str, arguments: list[str], code: int, texts: list[str]
) -> None:
    done = dflashctl(*[job if word == "JOB" else word for word in arguments], env=env)
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    for text in texts:
        assert text in done.stderr


def test_a_host_that_refuses_is_one_sentence_and_its_code(env: dict[str, str], job: str) -> None:
    where = ["--host", "127.0.0.1", "--kind", "ssh", "--port", "1"]
    done = dflashctl("launch", "--job", job, *where, env=env)
    assert done.returncode == 66
    error, hint = done.stderr.splitlines()
    assert error == "error: 127.0.0.1 port 1: refuses the connection"
    assert hint.startswith("hint: Does sshd run there")


def test_a_dry_run_prints_the_job_as_data_and_touches_nothing(
    env: dict[str, str], job: str, tmp_path: Path
) -> None:
    before = sorted(tmp_path.rglob("*"))
    done = dflashctl("launch", "--job", job, "--set", "steps=9", "--dry-run", env=env)
    assert done.returncode == 0
    (tmp_path / "again.toml").write_text(done.stdout)
    again = dflashctl("launch", "--job", str(tmp_path / "again.toml"), "--dry-run", env=env)
    assert again.stdout == done.stdout
    assert "\nsteps = 9\n" in done.stdout
    assert "remote_payload/__main__.py" in done.stderr
    assert sorted(tmp_path.rglob("*")) == sorted([*before, tmp_path / "again.toml"])


def test_an_unknown_host_contacts_nobody_in_a_dry_run(env: dict[str, str], job: str) -> None:
    done = dflashctl(
        "launch", "--job", job, "--host", "192.0.2.1", "--container", "200", "--dry-run", env=env, timeout=20
    )
    assert done.returncode == 0
    assert "ssh root@192.0.2.1 pct exec 200 -- /root/venv/bin/python" in done.stderr


def test_a_launch_prints_the_id_alone_and_the_run_is_then_known(env: dict[str, str], job: str) -> None:
    done = dflashctl("launch", "--job", job, env=env)
    assert done.returncode == 0, done.stderr
    run_id = done.stdout.rstrip("\n")
    assert run_id.startswith("mine-")
    assert done.stdout == f"{run_id}\n"
    listed = [json.loads(line) for line in dflashctl("runs", "--json", env=env).stdout.splitlines()]
    assert [(row["run"], row["host"], row["job"]) for row in listed] == [(run_id, "local", "mine")]
    assert run_id in dflashctl("runs", env=env).stdout
    followed = dflashctl("logs", "--follow", run_id[:6], env=env)
    assert followed.returncode == 2, followed.stderr  # the trainer refuses the job: no such model
    log = Path(env["XDG_DATA_HOME"]) / "dflashctl" / "runs" / run_id / "train.log"
    assert followed.stdout == log.read_text()
    stopped = dflashctl("stop", env=env)
    assert (stopped.returncode, stopped.stderr.split(":")[0]) == (0, run_id)


def test_a_reader_that_goes_ends_it_quietly(env: dict[str, str]) -> None:
    process = subprocess.Popen(
        command("runs"), env=environment(env), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert process.wait(20) == 141
    process.stderr.close()


def test_ctrl_c_ends_it_quietly_with_a_code_of_its_own(env: dict[str, str], tmp_path: Path) -> None:
    fifo = tmp_path / "mine.toml"
    os.mkfifo(fifo)
    process = subprocess.Popen(
        command("launch", "--job", str(fifo), "--dry-run"),
        env=environment(env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with fifo.open("w"):  # opens once the command reads the job
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert process.returncode == 80
    assert (out, err) == (b"", b"\ninterrupted; a run that was started goes on\n")


def test_an_unexpected_error_is_one_line_with_a_report(env: dict[str, str]) -> None:
    code = (
        "import sys, controller.cli as cli; import controller.listing as listing;"
        "listing.print_runs = lambda *a, **k: 1 // 0;"
        "sys.exit(cli.main(['runs']))"
    )
    argv = [*command()[:2], code]
    done = subprocess.run(argv, env=environment(env), capture_output=True, text=True)
    assert done.returncode == 99
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: unexpected ZeroDivisionError")
    report = Path(line.rpartition(" ")[2])
    assert report.is_relative_to(Path(env["XDG_STATE_HOME"]))
    assert "Traceback" in report.read_text()


def test_help_is_quick(env: dict[str, str]) -> None:
    seconds = []
    for _ in range(5):
        begun = time.monotonic()
        dflashctl("--help", env=env)
        seconds.append(time.monotonic() - begun)
    assert min(seconds) < 0.3


def test_the_entry_point_is_the_one_that_the_project_declares() -> None:
    assert 'dflashctl = "controller.cli:main"' in (ROOT / "pyproject.toml").read_text()
