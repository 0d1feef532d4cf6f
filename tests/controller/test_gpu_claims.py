from __future__ import annotations

from typing import Any

import pytest

from controller.gpu_claims import conflicts, living, still_held, wants_gpus
from remote_payload.job import Job

LEAST: dict[str, Any] = {"target": "t", "dataset": "d", "mask_token_id": 1}


def job(targets: list[str], drafters: list[str]) -> Job:
    return Job.from_mapping(LEAST | {"targets": targets, "drafters": drafters}, "test")


def gpu(index: int, used: float | None = 0.4, **process: Any) -> dict[str, Any]:
    processes = [process] if process else []
    return {"index": index, "uuid": f"GPU-{index}{index}", "used_gib": used, "processes": processes}


def run(devices: list[str], *uuids: str) -> dict[str, Any]:
    return {"id": "other-run", "state": "running", "devices": devices, "uuids": list(uuids)}


ONE_AND_TWO = job(["cuda:1"], ["cuda:2"])
IDLE = [gpu(n) for n in range(4)]


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ([], []),
        ([run(["cuda:0", "cuda:3"])], []),
        ([run(["cuda:2"])], ["GPU 2: run other-run (running)"]),
        ([run(["auto"])], ["GPUs 1, 2: run other-run (running)"]),
        ([run(["auto"], "GPU-33")], []),  # it has told which it took
        ([run(["cpu"])], []),
    ],
)
def test_a_living_run_on_a_gpu_of_the_job_is_in_its_way(runs: list[Any], said: list[str]) -> None:
    assert conflicts({"runs": runs, "gpus": IDLE}, ONE_AND_TWO, {}) == said


def test_a_process_on_a_gpu_of_the_job_is_named_as_nvidia_smi_names_it() -> None:
    gpus = [
        gpu(0, 70.0, pid=1, name="vllm", used_gib=69.5),
        gpu(1, 70.0, pid=4711, name="python", used_gib=7.81),
        gpu(2, 12.34),
        gpu(3, None),
    ]
    use = {"runs": [run(["cuda:1"])], "gpus": gpus}
    assert conflicts(use, ONE_AND_TWO, {}) == [
        "GPU 1: run other-run (running)",
        "GPU 1: pid 4711 (python) 7.8 GiB",
        "GPU 2: 12.3 GiB held by what nvidia-smi does not show",
    ]
    assert conflicts(use, job(["cpu"], ["cpu"]), {}) == []
    assert conflicts(use, job(["cuda:3"], ["cuda:3"]), {}) == []


def test_cuda_visible_devices_shifts_what_a_device_means() -> None:
    use = {"runs": [], "gpus": [gpu(0), gpu(1), gpu(2, 9.0, pid=5, name="x", used_gib=None), gpu(3)]}
    zero = job(["cuda:0"], ["cuda:0"])
    assert conflicts(use, zero, {"CUDA_VISIBLE_DEVICES": "2,3"}) == ["GPU 2: pid 5 (x)"]
    assert conflicts(use, zero, {"CUDA_VISIBLE_DEVICES": "GPU-22"}) == ["GPU 2: pid 5 (x)"]
    assert conflicts(use, zero, {"CUDA_VISIBLE_DEVICES": "1"}) == []
    assert conflicts(use, job(["auto"], ["auto"]), {"CUDA_VISIBLE_DEVICES": ""}) == []


def test_the_run_that_is_resumed_is_not_in_its_own_way() -> None:
    use = {"runs": [run(["auto"])], "gpus": IDLE}
    assert conflicts(use, ONE_AND_TWO, {}, own="other-run") == []


def test_memory_that_is_held_after_a_run_is_told_for_its_gpus_alone() -> None:
    use = {"gpus": [gpu(0, 9.0), gpu(1, 9.0, pid=7, name="python", used_gib=8.5), gpu(2)]}
    assert still_held(use, {"GPU-11", "GPU-22"}) == ["GPU 1: pid 7 (python) 8.5 GiB"]


@pytest.mark.parametrize("use", [{}, {"gpus": 3, "runs": [1]}, {"gpus": [{"index": "x"}], "runs": [{}]}])
def test_an_answer_of_another_version_claims_nothing(use: dict[str, Any]) -> None:
    assert conflicts(use, ONE_AND_TWO, {}) == []


def test_only_a_job_for_gpus_that_are_there_minds_who_else_lives() -> None:
    use = {"runs": [run(["cpu"])], "gpus": IDLE}
    assert living(use) == ["other-run"]
    assert wants_gpus(use, ONE_AND_TWO, {})
    assert wants_gpus(use, job(["auto"], ["auto"]), {})
    assert not wants_gpus(use, job(["cpu"], ["cpu"]), {})
    assert not wants_gpus({"runs": []}, job(["auto"], ["auto"]), {})
