"""The checks of a place, as a function of what preflight answered."""

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import pytest

from controller.checkup import report_text
from controller.doctor import OLDEST, Check, examine, question, require
from controller.errors import PayloadEnvironmentError
from controller.inventory import Host
from remote_payload.job import Job
from remote_payload.preflight import MODULES, preflight

HOST = Host(
    name="box", kind="proxmox", address="10.1.2.6", user="root", container=200, venv="/v", workspace="/w"
)
VALUES = {"target": "t", "dataset": "d", "mask_token_id": 1}
JOB = Job.from_mapping(VALUES, "test")
GOOD: dict[str, Any] = {
    "python": "3.12.1",
    "modules": {
        "torch": "2.14.0+cu130",
        "transformers": "5.24.0",
        "pyarrow": "26.0.1",
        "safetensors": "0.8.0",
    },
    "gpus": 8,
    "workspace": {"path": "/w", "free_gib": 100.0, "writable": True},
}


def problems(answer: dict[str, Any], job: Job = JOB) -> list[tuple[str, str]]:
    return [(check.level, check.seen) for check in examine(answer, job, HOST) if check.level != "ok"]


def test_a_good_place_has_no_problem() -> None:
    assert problems(GOOD) == []


def test_the_oldest_versions_are_those_that_the_project_declares() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    declared = dict(text.split(">=") for text in project["optional-dependencies"]["payload"])
    assert declared == OLDEST
    assert set(OLDEST) >= set(MODULES)


def test_the_real_answer_of_preflight_can_be_judged(tmp_path: Path) -> None:
    assert {check.name for check in examine(preflight(tmp_path), JOB, HOST)} == {
        "Python", "torch", "transformers", "pyarrow", "safetensors", "GPUs", "workspace", "memory",
    }  # fmt: skip


def test_missing_and_old_packages_fail_in_one_sentence_with_one_command() -> None:
    answer = GOOD | {"modules": GOOD["modules"] | {"torch": None, "transformers": "5.9.0"}}
    with pytest.raises(PayloadEnvironmentError) as caught:
        require(examine(answer, JOB, HOST), HOST)
    assert caught.value.message == (
        "box: torch is not installed in /v/bin/python; transformers 5.9.0 is older than 5.17"
    )
    assert caught.value.hint == "Install what is missing: dflashctl setup --host box"


def test_the_release_of_torch_that_crashes_on_gpus_may_be_where_there_are_none() -> None:
    for version, gpus in (("2.13.0", "nvidia-smi is not installed here"), ("2.13.0+cpu", 8), ("2.13.1", 8)):
        answer = GOOD | {"modules": GOOD["modules"] | {"torch": version}, "gpus": gpus}
        assert problems(answer) == []


def test_a_job_that_names_gpus_needs_them() -> None:
    job = Job.from_mapping(VALUES | {"targets": ["cuda:0"], "drafters": ["cuda:7"]}, "test")
    assert problems(GOOD, job) == []
    assert problems(GOOD | {"gpus": 7}, job) == [
        ("failure", "the job names cuda:7, but nvidia-smi lists 7 GPUs")
    ]
    (problem,) = problems(GOOD | {"gpus": "nvidia-smi gave no answer for 20 s"}, job)
    assert problem == (
        "failure",
        "the job names cuda:0, cuda:7, but nvidia-smi gave no answer for 20 s",
    )
    assert problems(GOOD | {"gpus": "nvidia-smi is not installed here"}) == []
    assert problems(GOOD | {"gpus": "NVML: Driver/library version mismatch"})[0][0] == "warning"


def test_a_lost_gpu_stops_the_jobs_that_name_it_and_is_a_warning_to_all_others() -> None:
    gpus = [
        {"index": index, "uuid": uuid, "used_gib": 0.0, "processes": [], "lost": lost}
        for index, uuid, lost in ((0, "GPU-aa", None), (1, None, "GPU is lost"))
    ]
    answer = GOOD | {"gpus": 2, "use": {"gpus": gpus, "runs": [], "why": None}}
    named = {name: Job.from_mapping(VALUES | {"targets": [name], "drafters": [name]}, "test")
             for name in ("cuda:0", "cuda:1", "cpu")}  # fmt: skip
    for job in (named["cuda:0"], named["cpu"], JOB):
        assert problems(answer, job) == [("warning", "GPU 1 is not reached: GPU is lost")]
    assert problems(answer, named["cuda:1"]) == [
        ("failure", "GPU 1 is not reached, and the job names it: GPU is lost")
    ]


@pytest.mark.parametrize(("free", "level"), [(4.0, "warning"), (0.1, "failure")])
def test_a_full_disk_is_noticed(free: float, level: str) -> None:
    workspace = {"path": "/w", "free_gib": free, "writable": True}
    assert problems(GOOD | {"workspace": workspace}) == [(level, f"only {free} GiB are free in /w")]


def test_an_unwritable_workspace_fails() -> None:
    workspace = {"path": "/w", "free_gib": None, "writable": False}
    assert problems(GOOD | {"workspace": workspace}) == [("failure", "the workspace /w cannot be written")]


MEMORY = {"limit_gib": 64.0, "used_gib": 3.0, "machine_gib": 256.0}
NODES = [
    {"path": f"/dev/{name}", "major": major, "why": None}
    for name, major in (("nvidia0", 195), ("nvidiactl", 195), ("nvidia-uvm", 511))
]
MAJORS = {"nvidia": 195, "nvidia-uvm": 511}
DEEP: dict[str, Any] = GOOD | {
    "memory": MEMORY,
    "shm_gib": 32.0,
    "nodes": NODES,
    "majors": MAJORS,
    "driver": {"kernel": "570.1.2", "library": "570.1.2"},
    "paths": {"d": {"there": True, "seen": "7.0 MiB"}},
    "torch": {"version": "2.13.0+cu128", "cuda": "12.8", "devices": 8},
    "write_mib_s": 900.0,
    "ports": {"29400": True, "29500": True},
    "t": 1000.0,
}


def deep(changes: dict[str, Any], config: str = "", received: float = 1000.0) -> list[tuple[str, str, str]]:
    checks = examine(DEEP | changes, JOB, HOST, received=received, config=config)
    assert all(check.todo for check in checks if check.level != "ok")
    return [(check.name, check.level, check.seen) for check in checks if check.level != "ok"]


def test_a_place_without_any_trouble_has_a_good_line_for_everything() -> None:
    assert deep({}) == []
    names = [check.name for check in examine(DEEP, JOB, HOST, received=1000.0)]
    assert names[-9:] == [
        "driver", "device files", "torch's GPUs", "workspace", "write speed",
        "memory", "path d", "clock", "ports",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "name", "level", "text"),
    [
        (
            {"driver": {"kernel": "570.1.2", "library": "550.3"}},
            "driver",
            "failure",
            "the library in the place 550.3",
        ),
        ({"driver": {"kernel": "570.1.2", "library": None}}, "driver", "warning", "no libcuda was found"),
        (
            {"majors": MAJORS | {"nvidia-uvm": 509}},
            "device files",
            "failure",
            "has major 511, but the kernel gave",
        ),
        ({"nodes": NODES[:2]}, "device files", "failure", "/dev/nvidia-uvm is missing"),
        ({"nodes": []}, "device files", "failure", "/dev has no nvidia*"),
        (
            {"nodes": [NODES[0], NODES[2] | {"why": "Operation not permitted"}]},
            "device files",
            "failure",
            "/dev/nvidia-uvm cannot be opened (Operation not permitted)",
        ),
        (
            {"modules": GOOD["modules"] | {"torch": "2.13.0"}},
            "torch",
            "warning",
            "torch 2.13.0 crashes on GPUs in inductor's static launcher",
        ),
        ({"torch": {"error": "ImportError: libcudart"}}, "torch's GPUs", "failure", "ImportError: libcudart"),
        (
            {"torch": {"version": "2.13+cpu", "cuda": None, "devices": 0}},
            "torch's GPUs",
            "failure",
            "torch 2.13+cpu sees 0 GPUs, nvidia-smi lists 8; it is built without CUDA",
        ),
        (
            {"torch": {"version": "2.13", "cuda": "12.8", "devices": 7}},
            "torch's GPUs",
            "warning",
            "sees 7 GPUs",
        ),
        ({"write_mib_s": 20.0}, "write speed", "warning", "a checkpoint of 5 GiB takes 4 min"),
        ({"write_mib_s": None}, "write speed", "warning", "could not be measured"),
        ({"memory": MEMORY | {"limit_gib": 4.0}}, "memory", "warning", "4.0 GiB of the machine's 256"),
        ({"shm_gib": 0.06}, "/dev/shm", "warning", "only 0.06 GiB"),
        (
            {"paths": {"d": {"there": False, "seen": "/w/d is not there"}}},
            "path d",
            "failure",
            "/w/d is not there",
        ),
        (
            {"paths": {"t": {"there": None, "seen": "it would be downloaded"}}},
            "path t",
            "warning",
            "it would be downloaded",
        ),
        (  # a dataset is not fetched from anywhere, whatever its path looks like
            {"paths": {"a/b": {"there": None, "seen": "it would be downloaded"}}},
            "path a/b",
            "failure",
            "/a/b is not there",
        ),
        ({"t": 940.0}, "clock", "warning", "it is 60 s behind this machine's"),
        ({"ports": {"29400": False, "29500": True}}, "ports", "warning", "taken: 29400"),
    ],
)
def test_each_trouble_is_one_line_with_what_was_seen_and_what_to_do(
    changes: dict[str, Any], name: str, level: str, text: str
) -> None:
    ((found, grade, seen),) = deep(changes)
    assert (found, grade) == (name, level)
    assert text in seen


def test_a_torch_without_cuda_is_no_failure_for_a_job_that_names_the_cpu_alone() -> None:
    without = DEEP | {"torch": {"version": "2.13+cpu", "cuda": None, "devices": 0}}
    graded = {}
    for devices in (["cpu"], ["auto"]):
        job = dataclasses.replace(JOB, targets=devices, drafters=devices)
        (graded[devices[0]],) = (c.level for c in examine(without, job, HOST) if c.name == "torch's GPUs")
    assert graded == {"cpu": "warning", "auto": "failure"}


def test_a_containers_rule_for_another_major_of_nvidia_uvm_is_found_in_its_configuration() -> None:
    old = "lxc.cgroup2.devices.allow: c 195:* rwm\nlxc.cgroup2.devices.allow: c 509:* rwm\n"
    ((name, level, seen),) = deep({}, config=old)
    assert (name, level) == ("device files", "failure")
    assert "majors 195, 509, but nvidia-uvm is 511" in seen
    assert deep({}, config=old.replace("509", "511")) == []


def test_a_launch_leaves_a_missing_path_to_the_trainer_and_warns() -> None:
    quick = {key: value for key, value in DEEP.items() if key not in ("torch", "write_mib_s", "ports")}
    quick["paths"] = {"d": {"there": False, "seen": "/w/d is not there"}}
    assert problems(quick) == [("warning", "/w/d is not there")]


def test_a_question_carries_the_jobs_paths_and_no_secret() -> None:
    host = HOST.model_copy(update={"env": {"HF_HOME": "/hf", "HF_TOKEN": "hf_secret"}})
    assert question(JOB, host) == {"paths": ["t", "d"], "env": {"HF_HOME": "/hf"}, "deep": False}


def test_the_report_for_people_shows_what_a_host_said_without_its_escape_sequences() -> None:
    text = report_text([Check("pct", "failure", "no\x1b[2J pct", "Try\x1b[A it\nor not")])
    assert text == "FAILURE  pct  no pct\n              -> Try it\n              -> or not"


def test_what_to_do_about_several_packages_stands_once() -> None:
    missing = [Check(name, "failure", f"{name} is not installed", "Install them") for name in ("a", "b")]
    assert report_text([*missing, Check("disk", "warning", "slow", "Wait")]).splitlines() == [
        "FAILURE  a     a is not installed",
        "FAILURE  b     b is not installed",
        "               -> Install them",
        "warning  disk  slow",
        "               -> Wait",
    ]
