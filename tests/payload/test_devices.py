"""Devices by name, and turns on a CPU."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from remote_payload.job import JobError
from remote_payload.train import devices
from remote_payload.train.devices import (
    aside,
    compute_dtype,
    keep_guard,
    on_cores,
    on_device,
    resolve_devices,
    turn,
)
from tests.waiting import until

CPU = torch.device("cpu")


def test_auto_is_the_first_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert resolve_devices(["auto", "cpu"]) == ["cpu", "cpu"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_devices(["auto", "cuda:1", "cpu"]) == ["cuda:0", "cuda:1", "cpu"]


def test_a_gpu_that_is_not_there_is_refused_saying_which_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(JobError, match=r"'cuda:2' is not there: torch .* sees GPUs cuda:0 to cuda:1"):
        resolve_devices(["cuda:2"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(JobError, match=r"'cuda:0' is not there: torch .* sees no GPU"):
        resolve_devices(["cuda:0"])


@pytest.mark.parametrize(("build", "gpus", "made"), [("13.0", 0, 1), ("13.0", 2, 0), (None, 0, 0)])
def test_a_build_for_cuda_that_sees_no_gpu_has_the_main_threads_guard(
    monkeypatch: pytest.MonkeyPatch, build: str | None, gpus: int, made: int
) -> None:
    """Where there is a GPU the question alone would start CUDA, which nobody may fork after."""
    calls: list[str] = []
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch._C, "_ensureCUDADeviceGuardSet", lambda: calls.append("made"))
    keep_guard()
    assert len(calls) == made
    monkeypatch.delattr(torch._C, "_ensureCUDADeviceGuardSet")
    keep_guard()  # a torch that has no such thing


def test_the_automatic_type_is_float32_on_a_cpu_and_bfloat16_on_a_gpu() -> None:
    assert compute_dtype("auto", CPU) == torch.float32
    assert compute_dtype("auto", torch.device("cuda:0")) == torch.bfloat16
    assert compute_dtype("bfloat16", CPU) == torch.bfloat16


def test_only_one_thread_has_its_turn_on_the_cpu_and_who_asked_first_comes_first() -> None:
    order: list[int] = []
    inside = 0

    def work(number: int) -> None:
        nonlocal inside
        with turn(CPU):
            inside += 1
            assert inside == 1
            order.append(number)
            time.sleep(0.005)
            inside -= 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    with turn(CPU):
        for asked, thread in enumerate(threads, start=1):
            thread.start()
            until(lambda n=asked: len(devices._CPU._waiting) >= n)  # so that the order of asking is known
        assert order == []
    for thread in threads:
        thread.join(60)
    assert order == list(range(6))


def test_a_turn_ends_also_when_its_work_fails() -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError), turn(CPU):
            raise RuntimeError
    with turn(CPU):
        pass


def test_a_worker_may_keep_to_other_cores_of_a_cpu_and_gives_them_back() -> None:
    job = torch.get_num_threads()
    with on_cores(CPU, job + 1):
        assert torch.get_num_threads() == job + 1
    for device, cores in ((CPU, None), (torch.device("cuda:0"), job + 1)):
        with on_cores(device, cores):
            assert torch.get_num_threads() == job
    assert torch.get_num_threads() == job


def test_a_worker_runs_backward_in_its_own_thread() -> None:
    seen: list[str] = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, *gradients: torch.Tensor) -> torch.Tensor:
            seen.append(threading.current_thread().name)
            return gradients[0]

    def work() -> None:
        with on_device(CPU):
            Watched.apply(torch.ones(2, requires_grad=True)).sum().backward()  # type: ignore[no-untyped-call]

    thread = threading.Thread(target=work, name="worker")
    thread.start()
    thread.join()
    assert seen == ["worker"]


def test_work_aside_runs_in_a_thread_of_its_own_and_hands_over_what_it_gives_or_raises() -> None:
    assert aside(lambda: threading.current_thread() is threading.main_thread()) is False
    with pytest.raises(ValueError, match="no"):
        aside(lambda: int("no"))
