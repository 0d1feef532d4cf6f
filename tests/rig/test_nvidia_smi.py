"""The container's nvidia-smi against the recordings that it replays, and its ways to fail."""

import re
import shlex
import subprocess
import time
from pathlib import Path

import pytest

from tests.rig.container import NVIDIA_HOME
from tests.rig.nvidia_smi import Recording
from tests.rig.rig import Rig

RECORDING = Recording(Path(__file__).with_name("nvidia_smi_2xh200.txt")).part
TIMESTAMP = re.compile(r"^\d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d{3}", re.M)
CSV = "--format=csv,noheader,nounits"


def ask(rig: Rig, *args: str) -> tuple[str, int]:
    call = rig.container_run(["nvidia-smi", *args])
    assert call.stderr == b""
    return call.stdout.decode(), call.returncode


@pytest.mark.parametrize(
    "name",
    [
        "bad_field",
        "full_csv_nounits",
        "list",
        "missing_gpu",
        "old_throttle_name",
        "plain",
        "seeds_query",
    ],
)
def test_a_recorded_call_gets_its_recorded_answer_and_code(rig: Rig, name: str) -> None:
    code, _, command = RECORDING[f"{name}.rc"].strip().partition(" : ")
    text, returned = ask(rig, *shlex.split(command)[1:])
    assert (TIMESTAMP.sub("now", text), returned) == (
        TIMESTAMP.sub("now", RECORDING[f"{name}.out"]),
        int(code),
    )


@pytest.mark.parametrize("name", ["busy_csv_nounits", "busy_apps"])
def test_under_load_it_gives_the_answers_recorded_under_load(rig: Rig, name: str) -> None:
    rig.nvidia_smi("busy")
    command = RECORDING[f"{name}.rc"].strip().partition(" : ")[2]
    text, code = ask(rig, *shlex.split(command)[1:])
    assert TIMESTAMP.sub("now", text) == TIMESTAMP.sub("now", RECORDING[f"{name}.out"])
    assert code == 0


def test_header_and_units_stand_as_recorded(rig: Rig) -> None:
    command = RECORDING["full_csv_nounits.rc"].strip().partition(" : ")[2]
    query = shlex.split(command)[1]
    header, *rows = ask(rig, query, "--format=csv")[0].splitlines()
    recorded_header, *recorded_rows = RECORDING["full_csv.out"].splitlines()
    assert header == recorded_header

    def units(row: str) -> list[str]:
        return [re.sub(r"^[\d.]+", "", value) for value in row.split(", ")[7:17]]

    assert [units(row) for row in rows] == [units(row) for row in recorded_rows]


def test_a_subset_of_fields_in_any_order_of_one_gpu(rig: Rig) -> None:
    query = "--query-gpu=utilization.gpu,uuid,index"
    uuid = "GPU-00000000-0000-0000-0000-0000000000a1"
    for name in ("1", uuid, "00000000:00:07.0"):
        assert ask(rig, "-i", name, query, CSV) == (f"0, {uuid}, 1\n", 0)


def test_a_loop_prints_at_every_tick_into_a_pipe_and_follows_the_mode(rig: Rig) -> None:
    query = "--query-gpu=index,utilization.gpu"
    loop = subprocess.Popen(
        rig.container_argv(["nvidia-smi", query, CSV, "-lms", "100"]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    assert loop.stdout is not None
    try:
        began = time.monotonic()
        assert [loop.stdout.readline() for _ in range(4)] == [b"0, 0\n", b"1, 0\n"] * 2
        assert time.monotonic() - began < 60
        rig.nvidia_smi("busy")
        while (line := loop.stdout.readline()) in (b"0, 0\n", b"1, 0\n"):  # printed before
            pass
        assert [line, loop.stdout.readline()] == [b"0, 95\n", b"1, 97\n"]
        rig.nvidia_smi("fail")
        assert loop.wait(60) == 18
        assert loop.stdout.read().endswith(b"Failed to initialize NVML: Driver/library version mismatch\n")
    finally:
        loop.kill()
        loop.communicate()


def test_a_driver_mismatch_replaces_the_whole_listing_on_stdout(rig: Rig) -> None:
    rig.nvidia_smi("fail")
    for args in (["-L"], [], ["--query-gpu=index", CSV]):
        text, code = ask(rig, *args)
        assert text == "Failed to initialize NVML: Driver/library version mismatch\n"
        assert code == 18


def test_a_lost_gpu_aborts_the_listing_and_the_other_one_answers_when_asked_alone(
    rig: Rig,
) -> None:
    rig.nvidia_smi("lost", gpu=1)
    lost = (
        "Unable to determine the device handle for GPU0000:00:07.0: GPU is lost.  "
        "Reboot the system to recover this GPU\n"
    )
    assert ask(rig, "--query-gpu=index", CSV) == (lost, 15)
    assert ask(rig, "-i", "1", "--query-gpu=index", CSV) == (lost, 15)
    assert ask(rig, "-i", "0", "--query-gpu=index", CSV) == ("0\n", 0)


def test_a_hanging_one_ignores_everything_but_a_kill(rig: Rig) -> None:
    rig.nvidia_smi("hang")
    begun = time.monotonic()
    call = rig.container_run(["timeout", "-k", "0.3", "0.3", "nvidia-smi", "-L"])
    assert call.returncode == 137
    assert call.stdout == b""
    assert time.monotonic() - begun >= 0.6


def test_it_can_be_absent_and_come_back(rig: Rig) -> None:
    rig.nvidia_smi("absent")
    assert rig.container_run(["nvidia-smi", "-L"]).returncode == 127
    rig.nvidia_smi("ok")
    assert ask(rig, "-L") == (RECORDING["list.out"], 0)


def test_by_pct_it_is_found_only_with_the_containers_own_path(rig: Rig) -> None:
    assert rig.pct("exec", "200", "--keep-env", "0", "--", "nvidia-smi", "-L").returncode == 0
    assert rig.pct("exec", "200", "--", "nvidia-smi", "-L").returncode == 127


def test_it_is_in_the_container_only(rig: Rig) -> None:
    assert rig.container_path(NVIDIA_HOME).is_dir()
    assert not Path(NVIDIA_HOME).exists()
