"""exec, python and gpus through a real sshd, pct and container, as processes of their own."""

import hashlib
import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.dflashctl import command, dflashctl, environment
from tests.rig.rig import Rig
from tests.waiting import until


def run(rig: Rig, *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    env = environment(rig.laptop_env())
    return subprocess.run(command(*arguments), env=env, input=stdin, capture_output=True, timeout=250)


def test_a_command_has_its_streams_its_folder_its_programs_and_its_code(rig: Rig) -> None:
    script = 'pwd; command -v python; echo "$1" >&2; cat; exit 7'
    done = run(rig, "exec", "--host", "rig", "--", "sh", "-c", script, "sh", "--help it's", stdin=b"\0in\xff")
    assert done.returncode == 7
    assert done.stdout == f"{rig.workspace}\n{rig.venv}/bin/python\n".encode() + b"\0in\xff"
    assert done.stderr == b"--help it's\n"
    absent = run(rig, "exec", "--", "no-such-program")
    assert (absent.returncode, b"no-such-program" in absent.stderr) == (127, True)


def test_megabytes_pass_through_unharmed(rig: Rig) -> None:
    data = bytes(range(256)) * (4 << 12)
    done = run(rig, "exec", "--", "tee", "/dev/stderr", stdin=data)
    digests = [hashlib.sha256(stream).hexdigest() for stream in (data, done.stdout, done.stderr)]
    assert len(set(digests)) == 1


def test_a_program_runs_in_the_venv_with_variables_and_arguments_that_nobody_sees(
    rig: Rig, tmp_path: Path
) -> None:
    program = tmp_path / "look.py"
    program.write_text(
        "import os, sys, torch\n"
        "print(sys.argv[1:], sys.prefix, os.getcwd(), os.environ['HF_TOKEN'], len(sys.stdin.read()))\n"
        "words = open('/proc/self/cmdline').read()\n"
        "assert 'hf_' + 'secret' not in words, words\n"
        "raise SystemExit(5)\n"
    )
    hosts = Path(rig.laptop_env()["DFLASHCTL_HOSTS"])
    before = hosts.read_text()
    hosts.write_text(before + '[env]\nHF_TOKEN = "hf_secret"\n')
    try:
        done = run(rig, "python", str(program), "--deep", "x y", stdin=b"four")
        assert done.returncode == 5, done.stderr
        assert done.stdout == f"['--deep', 'x y'] {rig.venv} {rig.workspace} hf_secret 4\n".encode()
        piped = run(rig, "python", "-", "a", stdin=b"import sys; print(sys.argv); 1 / 0")
    finally:
        hosts.write_text(before)
    assert (piped.returncode, piped.stdout) == (1, b"['-', 'a']\n")
    assert b'File "-", line 1' in piped.stderr and b"ZeroDivisionError" in piped.stderr
    assert not [call for call in rig.pct_calls() if "hf_secret" in " ".join(call)]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_ends_what_runs_in_the_container(rig: Rig, number: int, code: int) -> None:
    idle = rig.container_processes()
    process = subprocess.Popen(
        command("exec", "--", "sh", "-c", "echo begun; exec sleep 301"),
        env=environment(rig.laptop_env()),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"begun\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=250)
    assert (process.returncode, out, err) == (code, b"", b"")
    until(lambda: rig.container_processes() <= idle)


def test_what_a_command_leaves_behind_does_not_hold_up_the_end_by_ctrl_c(rig: Rig) -> None:
    process = subprocess.Popen(
        command("exec", "--", "sh", "-c", "sleep 90 & echo begun; exec sleep 301"),
        env=environment(rig.laptop_env()),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"begun\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    process.stdout.close()


def test_a_command_that_minds_no_ctrl_c_ends_at_the_third(rig: Rig) -> None:
    idle = rig.container_processes()
    stubborn = "import signal, time\nfor n in (2, 15): signal.signal(n, print)\nprint('begun', flush=True)\n"
    process = subprocess.Popen(
        command("python", "/dev/fd/0"),
        env=environment(rig.laptop_env()),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write((stubborn + "while True: time.sleep(1)\n").encode())
    process.stdin.close()
    assert process.stdout.readline() == b"begun\n"
    pressed, deadline = 0, time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:  # two that come at once are one
        process.send_signal(signal.SIGINT)
        pressed += 1
        time.sleep(0.5)
    assert process.wait(1) == 137
    assert pressed >= 3
    process.stdout.close()
    until(lambda: rig.container_processes() <= idle)


def test_a_reader_that_goes_ends_what_runs_there(rig: Rig) -> None:
    idle = rig.container_processes()
    process = subprocess.Popen(
        command("exec", "--", "sh", "-c", "while :; do echo line; sleep 0.01; done"),
        env=environment(rig.laptop_env()),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == b"line\n"
    process.stdout.close()
    assert process.wait(60) == 141
    assert process.stderr.read() == b""
    process.stderr.close()
    until(lambda: rig.container_processes() <= idle)


def test_gpus_are_listed_with_every_unknown_value_and_its_reason(rig: Rig) -> None:
    env = rig.laptop_env()
    rig.nvidia_smi("busy")
    listed = json.loads(dflashctl("gpus", "--json", env=env).stdout)
    assert [(gpu["index"], gpu["name"]) for gpu in listed["gpus"]] == [(0, "NVIDIA H200"), (1, "NVIDIA H200")]
    assert all(gpu["memory_used_gib"] > 0 and gpu["runs"] == [] for gpu in listed["gpus"])
    assert listed["why"] is None
    shown = dflashctl("gpus", env=env).stdout.splitlines()
    assert shown[1].split() == ["GPU", "NAME", "MEMORY", "BUSY", "POWER", "HEAT", "RUNS"]
    assert "NVIDIA H200" in shown[2] and " W" in shown[2]
    rig.nvidia_smi("lost")
    lost = json.loads(dflashctl("gpus", "--json", env=env).stdout)
    assert [gpu["memory_used_gib"] is None for gpu in lost["gpus"]] == [False, True]
    assert lost["why"]
    rig.nvidia_smi("fail")
    failed = dflashctl("gpus", env=env)
    assert "Driver/library version mismatch" in failed.stdout + failed.stderr


def test_watching_gpus_ends_with_ctrl_c_and_leaves_nobody(rig: Rig) -> None:
    idle = rig.container_processes()
    process = subprocess.Popen(
        command("gpus", "--watch", "--interval", "1", "--json"),
        env=environment(rig.laptop_env()),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    times = [json.loads(process.stdout.readline())["t"] for _ in range(3)]
    assert times[0] < times[1] < times[2]
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=250)
    assert process.returncode == 80
    until(lambda: rig.container_processes() <= idle)


def test_no_variable_of_a_launch_is_in_any_argument_or_log_of_the_host(rig: Rig, tmp_path: Path) -> None:
    job = tmp_path / "mine.toml"
    job.write_text('target = "/nonexistent/model"\ndataset = "none.arrow"\nmask_token_id = 1\n')
    hosts = Path(rig.laptop_env()["DFLASHCTL_HOSTS"])
    before = hosts.read_text()
    hosts.write_text(before + '[env]\nHF_TOKEN = "hf_secret"\n')
    try:
        done = dflashctl("--verbose", "launch", "--job", str(job), env=rig.laptop_env())
        words = rig.container_run(["sh", "-c", "cat /proc/[0-9]*/cmdline"]).stdout
    finally:
        hosts.write_text(before)
    assert done.returncode == 0, done.stderr
    run = rig.container_path(f"{rig.workspace}/runs/{done.stdout.strip()}/run.json")
    assert json.loads(run.read_text())["env"] == {"HF_TOKEN": "hf_secret"}
    assert run.parent.stat().st_mode & 0o077 == 0
    logs = [path.read_text(errors="replace") for path in (rig.state / "log").iterdir() if path.is_file()]
    for text in (done.stdout, done.stderr, words.decode(errors="replace"), *logs):
        assert "hf_secret" not in text
    mirror = Path(rig.laptop_env()["XDG_STATE_HOME"]) / "dflashctl" / "runs" / done.stdout.strip() / rig.host
    assert "hf_secret" in (mirror / "place.json").read_text()
    assert mirror.stat().st_mode & 0o077 == 0
