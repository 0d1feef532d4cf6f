"""The checks of a place, as a function of what preflight answered."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from controller.doctor import OLDEST, examine, require
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
        "torch": "2.13.0+cu128",
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
    assert {name: declared[name] for name in OLDEST} == OLDEST
    assert set(OLDEST) == set(MODULES)


def test_the_real_answer_of_preflight_can_be_judged(tmp_path: Path) -> None:
    assert {check.name for check in examine(preflight(tmp_path), JOB, HOST)} == {
        "Python", "torch", "transformers", "pyarrow", "safetensors", "GPUs", "workspace",
    }  # fmt: skip


def test_missing_and_old_packages_fail_in_one_sentence_with_one_command() -> None:
    answer = GOOD | {"modules": GOOD["modules"] | {"torch": None, "transformers": "5.9.0"}}
    with pytest.raises(PayloadEnvironmentError) as caught:
        require(examine(answer, JOB, HOST), HOST)
    assert caught.value.message == (
        "box: torch is not installed in /v/bin/python; transformers 5.9.0 is older than 5.17"
    )
    assert caught.value.hint.startswith(
        "Install what is missing: ssh root@10.1.2.6 'pct exec 200 -- /v/bin/python -m pip install"
    )
    assert len(caught.value.hint.splitlines()) == 1


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


@pytest.mark.parametrize(("free", "level"), [(4.0, "warning"), (0.1, "failure")])
def test_a_full_disk_is_noticed(free: float, level: str) -> None:
    workspace = {"path": "/w", "free_gib": free, "writable": True}
    assert problems(GOOD | {"workspace": workspace}) == [(level, f"only {free} GiB are free in /w")]


def test_an_unwritable_workspace_fails() -> None:
    workspace = {"path": "/w", "free_gib": None, "writable": False}
    assert problems(GOOD | {"workspace": workspace}) == [("failure", "the workspace /w cannot be written")]
