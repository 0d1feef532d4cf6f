from __future__ import annotations

from typing import Any

import pytest

from controller import gpu_table
from controller.gpu_state import GpuTable, GpuWord
from controller.run_records import Device

A, B = "GPU-00000000-0000-0000-0000-0000000000a0", "GPU-00000000-0000-0000-0000-0000000000a1"
CONSTANTS = {
    "kind": "gpu_constants",
    "gpus": [
        {"uuid": u, "index": i, "name": "NVIDIA H200", "memory_total_gib": 140.4, "power_limit_w": 700.0}
        for i, u in enumerate((A, B))
    ],
}
BUSY: dict[str, Any] = {
    "index": 0, "memory_used_gib": 70.0, "utilization_share": 0.95, "power_w": 686.8,
    "temperature_c": 57, "sm_clock_mhz": 1605, "throttle": "0x0000000000000004",
}  # fmt: skip


def device(name: str, uuid: str, role: str) -> Device:
    return Device(device=name, uuid=uuid, roles=(role,), allocated_gib=None, reserved_gib=None,
                  peak_gib=None, total_gib=None)  # fmt: skip


ROLES = (device("cuda:0", A[4:], "target"), device("cuda:1", "", "drafter"))


def table(*samples: dict[str, Any], training: bool = True) -> GpuTable:
    records = [CONSTANTS, *({"kind": "gpu", "t": 5.0, "gpus": s} for s in samples)]
    return GpuTable().updated(records).with_roles(ROLES, training=training)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({}, GpuWord.WORKING),
        ({"utilization_share": 0.1}, GpuWord.IDLE),
        ({"memory_used_gib": 139.9}, GpuWord.FULL),
        ({"temperature_c": 91}, GpuWord.HOT),
        ({"throttle": "0x0000000000000040"}, GpuWord.HOT),
        ({"throttle": "0x0000000000000080"}, GpuWord.THROTTLED),
        ({"throttle": "0x0000000000000008"}, GpuWord.THROTTLED),
        ({"throttle": "[N/A]"}, GpuWord.WORKING),
        ({"throttle": None}, GpuWord.WORKING),
        ({"throttle": float("inf")}, GpuWord.WORKING),
    ],
)
def test_a_gpu_gets_the_word_of_its_trouble(change: dict[str, Any], word: GpuWord) -> None:
    assert table({A: BUSY | change}).gpus[0].word is word


def test_the_power_cap_at_full_load_is_normal_work() -> None:
    assert table({A: BUSY}).gpus[0].word is GpuWord.WORKING
    assert table({A: BUSY}).gpus[0].throttle == 4


def test_a_gpu_that_no_thread_of_the_run_uses_is_not_called_idle() -> None:
    quiet = BUSY | {"utilization_share": 0.0}
    assert table({A: quiet}, training=False).gpus[0].word is GpuWord.WORKING
    unused = GpuTable().updated([CONSTANTS, {"kind": "gpu", "t": 1.0, "gpus": {A: quiet}}])
    assert unused.with_roles((), training=True).gpus[0].word is GpuWord.WORKING


def test_a_gpu_that_vanishes_keeps_its_row_and_is_lost() -> None:
    found = table({A: BUSY, B: BUSY | {"index": 1}}, {A: BUSY})
    assert [gpu.uuid for gpu in found.gpus] == [A, B]
    assert found.gpus[1].word is GpuWord.LOST
    assert found.gpus[1].utilization_share is None


def test_a_gpu_without_values_says_why() -> None:
    nothing = dict.fromkeys(BUSY)
    hidden = table({A: nothing | {"why": {"power_w": "[Insufficient Permissions]"}}}).gpus[0]
    assert (hidden.word, hidden.why) == (
        GpuWord.NO_DATA,
        (("power_w", "[Insufficient Permissions]"),),
    )
    gone = table({A: nothing | {"why": {"all": "GPU is lost.  Reboot the system"}}}).gpus[0]
    assert gone.word is GpuWord.LOST


def test_roles_are_found_by_uuid_and_else_by_number() -> None:
    found = table({A: BUSY, B: BUSY | {"index": 1}})
    assert [gpu.roles for gpu in found.gpus] == [("target",), ("drafter",)]


@pytest.mark.parametrize("name", ["cuda:²", "cuda:" + "9" * 5000, "cuda:", "cuda:-1"])
def test_a_device_whose_number_is_none_has_no_gpu(name: str) -> None:
    found = table({A: BUSY}).with_roles([device(name, "", "target")], training=True)
    assert [gpu.roles for gpu in found.gpus] == [(), ()]


def test_the_reason_for_no_gpu_is_kept_until_there_is_one() -> None:
    none = GpuTable().updated([{"kind": "gpu_none", "reason": "nvidia-smi is not installed", "t": 1.0}])
    assert none.none_reason == "nvidia-smi is not installed"
    assert none.updated([CONSTANTS]).none_reason == ""


def test_values_grow_old_when_nvidia_smi_stops_answering() -> None:
    seen = GpuTable().updated([CONSTANTS, {"kind": "gpu", "t": 5.0, "gpus": {A: BUSY}}])
    silent = seen.updated([{"kind": "gpu_none", "t": 90.0, "reason": "Failed to initialize NVML"}])
    assert (silent.t, silent.none_reason) == (5.0, "Failed to initialize NVML")
    assert silent.gpus[0].utilization_share == 0.95


def test_a_listing_of_gpus_says_when_it_is_of_and_goes_without_a_time_that_no_calendar_has() -> None:
    gpu = {"index": 0, "name": "NVIDIA H200", "memory_used_gib": 1.0, "memory_total_gib": 139.8, "runs": []}
    for t, first in ((0.0, "GPU"), (1e20, "--:--:--")):
        assert gpu_table.table({"gpus": [gpu], "why": None, "t": t}).startswith(first)


def test_a_listing_says_once_why_a_gpu_has_no_values() -> None:
    fell = "Unable to determine the device handle: GPU is lost"
    gone: dict[str, object] = {"index": 1, "name": None, "runs": [], "why": {"all": fell}}
    shown = gpu_table.table({"gpus": [gone], "why": fell, "t": None})
    assert shown.splitlines()[1:] == ["1    -     -       -     -      -", f"GPU 1: {fell}"]
    assert gpu_table.table({"gpus": [gone], "why": "NVML differs", "t": None}).endswith("\nNVML differs")
