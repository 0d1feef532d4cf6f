"""Who uses which GPU: nvidia-smi as a script, and runs as their files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from remote_payload import identity
from remote_payload.gpu_use import gpu_use

GPUS = """0, GPU-aa, NVIDIA H200, 8021, 143771
1, GPU-bb, NVIDIA H200, [N/A], 143771
"""
APPS = """GPU-aa, 4711, /opt/venv/bin/python, with a comma, 8010
GPU-aa, 4712, python, [N/A]
GPU-zz, 1, of a GPU that is not ours, 5
"""


def nvidia_smi(folder: Path, body: str) -> str:
    path = folder / "fake-nvidia-smi"
    path.write_text("#!/bin/sh\n" + body)
    path.chmod(0o755)
    return str(path)


def answering(folder: Path) -> str:
    (folder / "gpus").write_text(GPUS)
    (folder / "apps").write_text(APPS)
    return nvidia_smi(
        folder, f'case "$1" in --query-gpu*) cat {folder}/gpus;; --query-compute*) cat {folder}/apps;; esac\n'
    )


def run(workspace: Path, name: str, *, alive: bool, **progress: Any) -> None:
    folder = workspace / "runs" / name
    folder.mkdir(parents=True)
    me = identity.identity(os.getpid())
    assert me is not None
    who = me if alive else {**me, "start_ticks": me["start_ticks"] - 1}
    status = {"state": "running", "boot_id": identity.boot_id(), "supervisor": who, "trainer": None}
    (folder / "status.json").write_text(json.dumps(status))
    (folder / "run.json").write_text(json.dumps({"job": "demo"}))
    (folder / "job.toml").write_text('targets = ["cuda:0"]\ndrafters = ["cuda:1", "cuda:0"]\n')
    if progress:
        (folder / "progress.json").write_text(json.dumps(progress))


def test_memory_and_processes_are_told_by_gpu_and_odd_cells_are_null(tmp_path: Path) -> None:
    found = gpu_use(tmp_path, command=answering(tmp_path))
    first, second = found["gpus"]
    assert (first["index"], first["used_gib"], first["total_gib"]) == (0, 7.833, 140.401)
    assert first["processes"] == [
        {"pid": 4711, "name": "/opt/venv/bin/python, with a comma", "used_gib": 7.822},
        {"pid": 4712, "name": "python", "used_gib": None},
    ]
    assert (second["used_gib"], second["processes"]) == (None, [])
    assert found["why"] is None


ONE_LOST = """
case "$*" in
*compute-apps*) echo "{said}"; exit 15;;
*"-i 0"*) echo "0, GPU-aa, NVIDIA H200, 8021, 143771";;
*"-i 1"*) echo "{said}"; exit 15;;
*"-i 2"*) echo "2, GPU-cc, NVIDIA H200, 1, 143771";;
*"-i "*) echo "No devices were found"; exit 6;;
*) {listing} echo "{said}"; exit 15;;
esac
"""


@pytest.mark.parametrize(
    "said",
    [
        "Unable to determine the device handle for GPU0000:07:00.0: Unknown Error",
        "Unable to determine the device handle for GPU 0000:07:00.0: GPU is lost.  Reboot the system",
    ],
)
@pytest.mark.parametrize("listing", ["", 'echo "0, GPU-aa, NVIDIA H200, 8021, 143771";'])
def test_one_lost_gpu_that_ends_the_listing_is_named_and_the_others_are_asked_one_by_one(
    tmp_path: Path, said: str, listing: str
) -> None:
    found = gpu_use(tmp_path, command=nvidia_smi(tmp_path, ONE_LOST.format(said=said, listing=listing)))
    assert found["why"] is None
    assert [(gpu["index"], gpu["uuid"], gpu["used_gib"], gpu["lost"]) for gpu in found["gpus"]] == [
        (0, "GPU-aa", 7.833, None), (1, None, None, said), (2, "GPU-cc", 0.001, None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("row", "lost"),
    [
        ("1, GPU-bb, NVIDIA H200, [GPU is lost], [GPU is lost]", "GPU is lost"),
        ("1, [Unknown Error], [Unknown Error], [Unknown Error], [Unknown Error]", "Unknown Error"),
        ("1, GPU-bb, NVIDIA H200, ERR!, 143771", "ERR!"),
        ("1, GPU-bb, NVIDIA GB10, [N/A], [N/A]", None),
        ("1, GPU-bb, NVIDIA H200, [Not Supported], [Insufficient Permissions]", None),
    ],
)
def test_a_row_tells_by_its_cells_whether_its_gpu_is_lost(tmp_path: Path, row: str, lost: str | None) -> None:
    body = f"echo '0, GPU-aa, NVIDIA H200, 8021, 143771'; echo '{row}'"
    first, second = gpu_use(tmp_path, command=nvidia_smi(tmp_path, body))["gpus"]
    assert (first["lost"], second["lost"], second["used_gib"]) == (None, lost, None)
    assert second["uuid"] == (None if "1, [Unknown" in row else "GPU-bb")


def test_where_gpus_do_not_answer_one_by_one_either_the_listings_reason_stands(tmp_path: Path) -> None:
    body = "case \"$*\" in *'-i '*) echo odd; exit 9;; *) echo '0: GPU is lost'; exit 15;; esac"
    found = gpu_use(tmp_path, command=nvidia_smi(tmp_path, body))
    assert (found["gpus"], found["why"]) == ([], "0: GPU is lost")


def test_only_runs_whose_processes_live_are_named_with_their_devices(tmp_path: Path) -> None:
    run(tmp_path, "alive", alive=True, devices=[{"uuid": "GPU-aa"}, {"uuid": None}, {"device": "cpu"}])
    run(tmp_path, "loading", alive=True)
    run(tmp_path, "dead", alive=False)
    (tmp_path / "runs" / "empty").mkdir()
    found = gpu_use(tmp_path, command="/nonexistent")["runs"]
    common = {"state": "running", "job": "demo", "devices": ["cuda:0", "cuda:1"]}
    assert found == [
        {"id": "alive", **common, "uuids": ["GPU-aa"]},
        {"id": "loading", **common, "uuids": []},
    ]


@pytest.mark.parametrize(
    ("body", "patience", "why"),
    [
        ("echo 'Failed to initialize NVML'; exit 18", 60.0, "Failed to initialize NVML"),
        ("exec sleep 60", 0.2, "gave no answer for 0.2 s"),
    ],
)
def test_an_nvidia_smi_in_trouble_is_a_reason_and_no_error(
    tmp_path: Path, body: str, patience: float, why: str
) -> None:
    found = gpu_use(tmp_path, command=nvidia_smi(tmp_path, body), patience=patience)
    assert (found["gpus"], found["runs"]) == ([], [])
    assert why in found["why"]


def test_a_workspace_that_is_not_there_has_no_runs(tmp_path: Path) -> None:
    assert gpu_use(tmp_path / "absent", command="/nonexistent")["runs"] == []


def test_an_nvidia_smi_that_cannot_be_run_here_is_a_reason(tmp_path: Path) -> None:
    """Of another C library than the container's: the file is there, what it is to be loaded by is not."""
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/no/such/loader\n")
    command.chmod(0o755)
    found = gpu_use(tmp_path, command=str(command))
    assert found["gpus"] == [] and found["why"] == f"{command} cannot be run (No such file or directory)"
