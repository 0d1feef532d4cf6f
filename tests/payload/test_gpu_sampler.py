"""The sampler against the rig's replay of a recorded nvidia-smi, and against scripts that misbehave."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from remote_payload import gpu_rows
from remote_payload.gpu import GpuSampler, Timing
from remote_payload.rundir import RecordWriter
from tests.waiting import until

RIG = Path(__file__).parents[1] / "rig"
A0, A1 = (f"GPU-00000000-0000-0000-0000-0000000000a{n}" for n in range(2))
QUICK = Timing(interval=0.06, quiet=5, first_answer=60, silence=60, pauses=(0.02, 0.05), one_by_one=0.5)
IMPATIENT = Timing(
    interval=0.06, quiet=0.1, first_answer=0.4, silence=0.4, pauses=(0.02, 0.05), one_by_one=0.5
)

REPLAY = f"""#!{sys.executable} -S
import json, os, sys
sys.path.insert(0, {str(RIG)!r})
import nvidia_smi
from pathlib import Path
nvidia_smi.HERE = Path(__file__).parent
argv = sys.argv[1:]
with open(nvidia_smi.HERE / "calls", "a") as calls:
    calls.write(json.dumps([os.getpid(), argv]) + "\\n")
if "-l" in argv:
    at = argv.index("-l")
    argv[at:at + 2] = ["-lms", "60"]
sys.exit(nvidia_smi.main(argv))
"""


class Smi:
    """An nvidia-smi in a folder of its own, and the records of a sampler that asks it."""

    def __init__(self, path: Path) -> None:
        self.path = path / "smi"
        self.path.mkdir()
        self.command = self.path / "nvidia-smi"
        shutil.copy(RIG / "nvidia_smi_2xh200.txt", self.path)
        self.problems: list[str] = []
        self.file = path / "gpu.jsonl"
        self.sampler: GpuSampler | None = None
        self.script(REPLAY)
        self.replay("ok")

    def replay(self, mode: str) -> None:
        new = self.path / ".mode"
        new.write_text(mode)
        new.rename(self.path / "mode")

    def script(self, text: str) -> None:
        new = self.path / ".script"
        new.write_text(text)
        new.chmod(0o755)
        new.rename(self.command)

    def sample(self, timing: Timing = QUICK) -> None:
        self.sampler = GpuSampler(
            RecordWriter(self.file, attempt=1),
            on_problem=self.problems.append,
            timing=timing,
            command=str(self.command),
        )
        self.sampler.start()

    def records(self, kind: str) -> list[dict[str, Any]]:
        lines = self.file.read_bytes().splitlines() if self.file.exists() else []
        return [record for line in lines if (record := json.loads(line))["kind"] == kind]

    def newest(self) -> dict[str, Any]:
        records = self.records("gpu")
        gpus: dict[str, Any] = records[-1]["gpus"] if records else {}
        return gpus

    def calls(self) -> list[tuple[int, list[str]]]:
        try:
            lines = (self.path / "calls").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines]

    def until(self, condition: Callable[[], Any]) -> None:
        until(condition, seen=lambda: (self.problems, self.newest()))

    def more_samples(self, count: int) -> None:
        before = len(self.records("gpu"))
        self.until(lambda: len(self.records("gpu")) >= before + count)


@pytest.fixture
def smi(tmp_path: Path) -> Iterator[Smi]:
    smi = Smi(tmp_path)
    yield smi
    if smi.sampler:
        smi.sampler.stop(60.0)
        assert not smi.sampler._thread.is_alive(), "the sampler ends when it is told to"
        assert smi.sampler.pids() == []


def running(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"


def recorded_row(gpu: int) -> str:
    """A row as it was recorded, in the fields that the sampler asks for."""
    recording = (RIG / "nvidia_smi_2xh200.txt").read_text()
    names = re.findall(r"--query-gpu=(\S+)", recording.partition("##### full_csv.rc")[2])[0].split(",")
    lines = recording.partition("##### full_csv_nounits.out\n")[2].splitlines()
    cells = dict(zip(names, lines[gpu].split(", "), strict=True))
    return ", ".join(cells[name] for name in gpu_rows.Query().text().split(","))


# All is well


def test_two_gpus_give_constants_once_and_a_sample_a_tick(smi: Smi) -> None:
    smi.sample()
    smi.until(lambda: len(smi.records("gpu")) >= 3)
    (constants,) = smi.records("gpu_constants")
    common = {"name": "NVIDIA H200", "driver": "580.159.04", "memory_total_gib": 140.4014}
    common |= {"power_limit_w": 700.0, "mig": "Disabled"}
    assert constants["gpus"] == [
        {"uuid": uuid, "index": index, **common} for index, uuid in enumerate((A0, A1))
    ]
    nothing = {"memory_used_gib": 0.0, "utilization_share": 0.0, "throttle": "0x1"}
    for sample in smi.records("gpu"):
        assert sample["gpus"] == {
            A0: {"index": 0, "power_w": 118.79, "temperature_c": 35, "sm_clock_mhz": 405, **nothing},
            A1: {"index": 1, "power_w": 124.72, "temperature_c": 37, "sm_clock_mhz": 1980, **nothing},
        }
    assert smi.problems == []
    ((_, argv),) = smi.calls()  # one looping process, however many samples
    assert argv[-2:] == ["-l", "1"] and "--format=csv,noheader,nounits" in argv


def test_the_loop_asks_every_five_seconds_by_default(smi: Smi) -> None:
    smi.sample(Timing())
    smi.until(lambda: smi.records("gpu"))
    assert smi.calls()[0][1][-2:] == ["-l", "5"]


def test_full_load_is_shown_as_it_was_recorded(smi: Smi) -> None:
    smi.replay("busy")
    smi.sample()
    smi.until(lambda: len(smi.newest()) == 2)
    assert smi.newest()[A0] == {
        "index": 0,
        "memory_used_gib": 0.8623,
        "utilization_share": 0.95,
        "power_w": 686.82,
        "temperature_c": 57.0,
        "sm_clock_mhz": 1605.0,
        "throttle": "0x4",
    }
    assert smi.problems == []


def test_a_stopped_sampler_leaves_no_process(smi: Smi) -> None:
    smi.sample()
    smi.until(lambda: smi.records("gpu"))
    assert smi.sampler is not None
    (pid,) = smi.sampler.pids()
    smi.sampler.stop(60.0)
    assert not running(pid)


# The driver is in trouble


def test_a_driver_that_does_not_come_up_is_told_once_and_tried_again(smi: Smi) -> None:
    smi.replay("fail")
    smi.sample()
    smi.until(lambda: len(smi.calls()) >= 4)
    assert smi.problems == ["Failed to initialize NVML: Driver/library version mismatch"]
    assert not smi.records("gpu") and not smi.records("gpu_none")
    smi.replay("ok")
    smi.until(lambda: len(smi.newest()) == 2)
    smi.more_samples(3)
    smi.replay("fail")  # after all was well, the same problem is news again
    smi.until(lambda: len(smi.problems) == 2)


def test_a_lost_gpu_is_null_with_the_reason_while_the_others_go_on(smi: Smi) -> None:
    smi.sample()
    smi.until(lambda: len(smi.newest()) == 2)
    smi.replay("lost 1")
    smi.until(lambda: smi.newest()[A1]["power_w"] is None)
    lost = smi.newest()[A1]
    assert lost["index"] == 1 and lost["utilization_share"] is None
    assert "GPU is lost" in lost["why"]["power_w"]
    assert smi.newest()[A0]["power_w"] == 118.79
    smi.more_samples(3)
    assert len(smi.problems) == 1 and "GPU is lost" in smi.problems[0]
    smi.replay("ok")  # the loop is tried again after a while
    smi.until(lambda: smi.newest()[A1]["power_w"] == 124.72)
    smi.until(lambda: len([argv for _, argv in smi.calls() if "-l" in argv]) >= 2)
    assert len(smi.records("gpu_constants")) == 1


def test_an_nvidia_smi_that_cannot_be_started_while_gpus_are_asked_one_by_one_does_not_end_the_samples(
    smi: Smi,
) -> None:
    smi.sample()
    smi.until(lambda: len(smi.newest()) == 2)
    smi.replay("lost 1")
    smi.until(lambda: smi.newest()[A1]["power_w"] is None)
    smi.command.rename(smi.path / "away")
    smi.until(lambda: any("cannot be run" in problem for problem in smi.problems))
    smi.replay("ok")
    (smi.path / "away").rename(smi.command)
    smi.until(lambda: smi.newest()[A1]["power_w"] == 124.72)


def test_a_gpu_lost_from_the_start_is_found_by_counting_up_and_keeps_no_second_name(
    smi: Smi,
) -> None:
    smi.replay("lost 0")
    smi.sample()
    smi.until(lambda: len(smi.newest()) == 2)
    newest = smi.newest()
    assert newest["index-0"]["power_w"] is None and "lost" in newest["index-0"]["why"]["power_w"]
    assert newest[A1]["power_w"] == 124.72
    assert [gpu["uuid"] for gpu in smi.records("gpu_constants")[0]["gpus"]] == [A1]
    smi.replay("ok")
    smi.until(lambda: set(smi.newest()) == {A0, A1})
    assert smi.newest()[A0]["power_w"] == 118.79
    assert [gpu["uuid"] for gpu in smi.records("gpu_constants")[-1]["gpus"]] == [A0, A1]


def test_a_hung_nvidia_smi_is_killed_and_tried_again_one_at_a_time(smi: Smi) -> None:
    # A shell, which says its pid within the 0.4 s also where an interpreter takes longer to come up.
    smi.script(f"#!/bin/sh\ntrap '' TERM\necho \"[$$, []]\" >> {smi.path}/calls\nexec sleep 600\n")
    smi.sample(IMPATIENT)
    smi.until(lambda: len(smi.calls()) >= 3)
    pids = [pid for pid, _ in smi.calls()]
    assert not any(running(pid) for pid in pids[:-1])
    assert len(smi.problems) == 1 and "no answer for 0.4 s" in smi.problems[0]
    assert smi.sampler is not None
    smi.sampler.stop(60.0)
    assert not any(running(pid) for pid, _ in smi.calls())


def test_a_loop_that_falls_silent_is_noticed_and_started_again(smi: Smi) -> None:
    smi.sample(Timing(interval=0.06, quiet=0.1, silence=0.6, pauses=(0.02,)))
    smi.until(lambda: len(smi.records("gpu")) > 2)
    smi.replay("hang")
    smi.until(lambda: smi.problems)
    assert "no answer for 0.6 s" in smi.problems[0]
    smi.replay("ok")
    smi.until(lambda: len(smi.calls()) >= 2)


def test_children_of_a_hung_nvidia_smi_are_killed_with_it(smi: Smi) -> None:
    smi.script(f"#!/bin/sh\nsleep 600 & echo $! >> {smi.path}/children\nwait\n")
    smi.sample(IMPATIENT)
    smi.until(lambda: smi.problems and (smi.path / "children").exists())
    first = int((smi.path / "children").read_text().split()[0])
    smi.until(lambda: not running(first))


def test_a_missing_nvidia_smi_is_one_record(smi: Smi) -> None:
    smi.command.unlink()
    smi.sample()
    smi.until(lambda: smi.records("gpu_none"))
    time.sleep(0.1)
    (none,) = smi.records("gpu_none")
    assert "not installed" in none["reason"] and smi.problems == []


def test_no_devices_is_one_record(smi: Smi) -> None:
    smi.script("#!/bin/sh\necho 'No devices were found'; exit 6\n")
    smi.sample()
    smi.until(lambda: smi.records("gpu_none"))
    assert smi.records("gpu_none")[0]["reason"] == "No devices were found"
    assert smi.problems == []


def test_an_nvidia_smi_that_cannot_be_executed_is_a_problem(smi: Smi) -> None:
    smi.script("#!/nonexistent/interpreter\n")
    smi.sample()
    smi.until(lambda: smi.problems)
    assert "cannot be run" in smi.problems[0]


def test_a_death_without_a_word_names_its_exit_status(smi: Smi) -> None:
    smi.script("#!/bin/sh\nexit 9\n")
    smi.sample()
    smi.until(lambda: smi.problems)
    assert "exit status 9" in smi.problems[0]


@pytest.mark.parametrize("refused", ["mig.mode.current", "power.draw"])
def test_a_field_the_driver_does_not_know_is_dropped_and_the_rest_goes_on(smi: Smi, refused: str) -> None:
    recording = smi.path / "nvidia_smi_2xh200.txt"
    recording.write_text(recording.read_text().replace(refused, "renamed.field"))
    smi.sample()
    smi.until(lambda: len(smi.newest()) == 2)
    key = {"mig.mode.current": "mig", "power.draw": "power_w"}[refused]
    part = smi.records("gpu_constants")[0]["gpus"][0] if key == "mig" else smi.newest()[A0]
    assert part[key] is None
    assert part["why"] == {key: "not a field of this nvidia-smi"}
    assert smi.newest()[A0]["sm_clock_mhz"] == 405.0
    assert smi.problems == []


def test_an_old_driver_is_asked_by_the_old_name_of_the_throttle_reasons(smi: Smi) -> None:
    recording = smi.path / "nvidia_smi_2xh200.txt"
    recording.write_text(recording.read_text().replace("clocks_event_reasons.active", "old"))
    smi.script(
        REPLAY.replace(
            "argv = sys.argv[1:]",
            "argv = sys.argv[1:]; nvidia_smi.OTHER_NAMES['clocks_throttle_reasons.active'] = 'old'",
        )
    )
    smi.sample()
    smi.until(lambda: len(smi.newest()) == 2)
    assert smi.newest()[A0]["throttle"] == "0x1" and "why" not in smi.newest()[A0]


@pytest.mark.slow
def test_a_gpu_that_is_no_longer_listed_stays_with_the_reason(smi: Smi) -> None:
    both = f"echo '{recorded_row(0)}'; echo '{recorded_row(1)}'; sleep 0.3"
    one = f"echo '{recorded_row(0)}'; sleep 0.3"
    smi.script(f"#!/bin/sh\n{both}\nwhile :; do {one}; done\n")
    smi.sample()
    smi.until(lambda: smi.newest().get(A1, {"power_w": 1})["power_w"] is None)
    assert "not list it any more" in smi.newest()[A1]["why"]["power_w"]
    assert smi.newest()[A0]["power_w"] == 118.79
    smi.more_samples(2)
    assert len(smi.problems) == 1 and A1 in smi.problems[0]


def test_rows_before_a_failing_line_are_kept(smi: Smi) -> None:
    smi.script(
        f"#!/bin/sh\necho '{recorded_row(0)}'; echo 'Failed to initialize NVML: Unknown Error'; exit 9\n"
    )
    smi.sample()
    smi.until(lambda: smi.records("gpu") and smi.problems)
    assert smi.newest()[A0]["power_w"] == 118.79
    assert smi.problems == ["Failed to initialize NVML: Unknown Error"]


def test_a_warning_about_a_gpu_that_still_answers_is_told_once(smi: Smi) -> None:
    warning = "WARNING: infoROM is corrupted at gpu 0000:06:00.0"
    once = f"echo '{recorded_row(0)}'; echo '{warning}'; sleep 0.2"
    smi.script(f"#!/bin/sh\nwhile :; do {once}; done\n")
    smi.sample()
    smi.until(lambda: len(smi.records("gpu")) > 3)
    assert smi.problems == [warning]


def test_a_row_whose_uuid_is_unknown_goes_by_its_known_index(smi: Smi) -> None:
    unnamed = recorded_row(1).replace(A1, "[Unknown Error]")
    both = f"echo '{recorded_row(0)}'; echo '{recorded_row(1)}'; sleep 0.2"
    later = f"echo '{recorded_row(0)}'; echo '{unnamed}'; sleep 0.2"
    smi.script(f"#!/bin/sh\n{both}\nwhile :; do {later}; done\n")
    smi.sample()
    smi.until(lambda: len(smi.records("gpu")) > 3)
    assert all(set(record["gpus"]) == {A0, A1} for record in smi.records("gpu"))


def test_samples_that_cannot_be_written_do_not_end_the_sampler(smi: Smi) -> None:
    class FullDisk(RecordWriter):
        asked = itertools.count()

        def write(self, kind: str, **fields: Any) -> None:
            if next(self.asked) < 2:
                raise OSError(28, "No space left on device")
            super().write(kind, **fields)

    smi.sampler = GpuSampler(
        FullDisk(smi.file, attempt=1),
        on_problem=smi.problems.append,
        timing=QUICK,
        command=str(smi.command),
    )
    smi.sampler.start()
    smi.until(lambda: smi.records("gpu"))


# Cells and sentences


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        ("[N/A]", "N/A"),
        ("N/A", "N/A"),
        ("[Not Supported]", "Not Supported"),
        ("[Unknown Error]", "Unknown Error"),
        ("[Insufficient Permissions]", "Insufficient Permissions"),
        ("[GPU is lost]", "GPU is lost"),
        ("ERR!", "ERR!"),
        ("", "empty"),
        ("12 W", "unexpected text '12 W'"),
        ("nan", "unexpected text 'nan'"),
        ("inf", "unexpected text 'inf'"),
    ],
)
def test_a_cell_without_a_value_is_null_with_its_reason_and_spares_its_neighbours(
    cell: str, reason: str
) -> None:
    query = gpu_rows.Query()
    cells = recorded_row(0).split(", ")
    cells[query.text().split(",").index("power.draw")] = cell
    row = query.row(", ".join(cells))
    assert row is not None
    sample = row.sample()
    assert sample["power_w"] is None and sample["why"] == {"power_w": reason}
    assert sample["temperature_c"] == 35.0 and row.uuid == A0


@pytest.mark.parametrize(
    "line",
    [
        "",
        "No devices were found",
        "Failed to initialize NVML: Unknown Error",
        "Unable to determine the device handle for GPU0000:07:00.0: Unknown Error",
        ", ".join("text" for _ in range(13)),
        "0, GPU-1",
        "0" + ", 1" * 40,
    ],
)
def test_a_sentence_is_no_row(line: str) -> None:
    assert gpu_rows.Query().row(line) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Unable to determine the device handle for GPU0000:07:00.0: Unknown Error", True),
        ("Unable to determine the device handle for GPU 0000:07:00.0: GPU is lost.", True),
        ("Unable to determine the device handle for GPU00000000:07:00.0: Not Found", True),
        ("Failed to initialize NVML: Driver/library version mismatch", False),
        ("No devices were found", False),
    ],
)
def test_a_sentence_about_one_gpu_is_told_from_one_about_all(text: str, expected: bool) -> None:
    assert gpu_rows.names_one_gpu(text) is expected
