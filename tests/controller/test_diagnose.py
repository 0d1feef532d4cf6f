"""Each signature is tested on text as it was really seen (or printed by the library), in its surroundings."""

from __future__ import annotations

import dataclasses

import pytest

from controller.diagnose import SIGNATURES, alarms, diagnose_text
from controller.run_state import News, RunState
from controller.run_state import reduce as reduce_state
from tests.tui.golden import NOW, TRACEBACK

SEEN = {
    "cudagraph-trees-thread": TRACEBACK,
    "cudagraph-static-input": "  File \".../torch/_inductor/compile_fx.py\", line 1764, in run\n"
    "    assert dst.data_ptr() == src.data_ptr()\nAssertionError",
    "graph-capture-generator": "RuntimeError: Offset increment outside graph capture encountered"
    " unexpectedly.",
    "capture-invalidated": "torch.AcceleratorError: CUDA error: operation not permitted when stream is"
    " capturing",
    "cuda-oom": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB. GPU 5 has a total"
    " capacity of 139.81 GiB of which 3.20 GiB is free.",
    "host-oom": "RuntimeError: [enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't"
    " allocate memory: you tried to allocate 99999 bytes.",
    "nvml-mismatch": "Failed to initialize NVML: Driver/library version mismatch",
    "nvml-unknown": "RuntimeError: Found no NVIDIA driver on your system.",
    "gpu-lost": "Unable to determine the device handle for GPU0000:07:00.0: GPU is lost.  Reboot the system"
    " to recover this GPU",
    "cuda-assert": "torch.AcceleratorError: CUDA error: device-side assert triggered",
    "no-compiler": "torch._inductor.exc.InvalidCxxCompiler: No working C++ compiler found in"
    " torch._inductor.config.cpp.cxx: (None, 'g++')",
    "recompile-limit": "torch._dynamo.exc.FailOnRecompileLimitHit: recompile_limit reached with"
    " fullgraph=True.",
    "missing-package": "ModuleNotFoundError: No module named 'pyarrow'",
    "disk-full": "OSError: [Errno 28] No space left on device: '/workspace/runs/1/checkpoints/.tmp'",
    "no-shm": "RuntimeError: unable to allocate shared memory(shm) for file </torch_1_2>:"
    " No space left on device",
    "hub-unreachable": "OSError: We couldn't connect to 'https://huggingface.co' to load the files, and"
    " couldn't find them in the cached files.",
    "nccl": "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled"
    " cuda error",
    "nonfinite-limit": "drafter-0 failed in 'stopping for want of finite gradients':"
    " remote_payload.train.nonfinite.NonFiniteGradients: 20 steps in a row without a finite gradient"
    " (nonfinite_limit = 20); the newest is step 137, bucket 2, samples 4, 8"
    " (see crash/thread-drafter-0.json)",
    "nan-loss": "FloatingPointError: loss is nan at step 300",
    "stop-grace": "killed by SIGKILL killed by SIGKILL: it did not end in time after it was asked to stop",
    "killed-by-somebody": "killed by SIGKILL killed by SIGKILL: not by the kernel for lack of memory, so by"
    " somebody or something else\nstep 5 loss 2.1",
    "killed-memory": "killed by SIGKILL the trainer was killed by SIGKILL\nstep 5 loss 2.1",
    "segfault": "killed by SIGSEGV the trainer was killed by SIGSEGV",
    "place-restarted": "the container was restarted under the run\nstep 5 loss 2.1",
    "vanished": "neither supervisor nor trainer exists any more, and neither wrote an end\nstep 5 loss 2.1",
    "terminated": "killed by SIGTERM the trainer was killed by SIGTERM",
}  # fmt: skip


def test_every_signature_has_a_case() -> None:
    assert set(SEEN) == {signature.diagnosis.name for signature in SIGNATURES}


@pytest.mark.parametrize("name", SEEN)
def test_a_failure_is_recognised_where_it_was_seen(name: str) -> None:
    surroundings = f"step 136 loss 2.31\nstep 137 loss 2.30\n{SEEN[name]}\n"
    found = diagnose_text(surroundings)
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize("signature", SIGNATURES, ids=lambda s: s.diagnosis.name)
def test_a_diagnosis_says_what_why_and_what_to_do(signature: object) -> None:
    diagnosis = signature.diagnosis  # type: ignore[attr-defined]
    for text in dataclasses.astuple(diagnosis)[1:]:
        assert text.endswith(".")
        assert 20 < len(text) < 300


@pytest.mark.parametrize(
    "text",
    ["", "step 137 loss 2.137 tau 1.37", "ValueError: bucket_edges must rise", "137 batches, 137 tokens"],
)
def test_ordinary_text_is_not_diagnosed(text: str) -> None:
    assert diagnose_text(text) is None


def test_only_the_end_of_a_huge_text_is_searched_and_in_little_time() -> None:
    assert diagnose_text("CUDA out of memory\n" + "a" * 1_000_000) is None


def state(**progress: object) -> RunState:
    record = {"kind": "progress", "t": NOW, "attempt": 1, "phase": "training", **progress}
    return reduce_state(RunState(), News(progress=record), NOW)


@pytest.mark.parametrize(
    ("progress", "names"),
    [
        ({"alarm": {"reason": "leak_or_misalignment", "step": 500, "ratio": 3.0}}, ["tau-gap"]),
        ({"alarm": {"reason": "not_lossless"}}, ["not-lossless"]),
        ({"alarm": {"reason": "evaluation_out_of_memory", "step": 9}}, ["evaluation-out-of-memory"]),
        ({"alarm": None, "tau_estimate": 3.3, "tau": 1.08, "tau_step": 500}, []),
        ({"alarm": {"reason": "of another version"}}, []),
        ({"checkpoint_error": "step 40: No space left on device"}, ["checkpoint-failed"]),
        ({"checkpoint_error": None, "best": {"step": 40, "tau": 2.5}}, []),
        ({"loss": None, "nonfinite": ["loss"]}, ["nan-loss"]),
        ({"nonfinite_steps": 2, "recompiles": 3}, ["nan-loss", "recompiling"]),
    ],
)
def test_a_run_that_goes_wrong_raises_its_alarm(progress: dict[str, object], names: list[str]) -> None:
    assert [alarm.name for alarm in alarms(state(**progress).progress)] == names


def test_a_run_without_figures_raises_none() -> None:
    assert alarms(None) == ()


def test_an_end_is_searched_once_however_often_a_view_asks() -> None:
    status = {"state": "failed", "attempt": 1, "exit_code": 1, "reason": "an end of this test alone"}
    before = diagnose_text.cache_info().misses
    state = RunState()
    for second in range(5):
        mirror = {"last_heard": NOW}
        state = reduce_state(state, News(status=status, mirror=mirror, last_words=("boom",)), NOW + second)
    assert diagnose_text.cache_info().misses == before + 1
