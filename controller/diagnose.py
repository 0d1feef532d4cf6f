"""Failure signatures: what a traceback or a log's end is known to mean, and what to do about it.

A table of data, searched in order: the first signature whose pattern is found wins, so special ones stand
before general ones. Each was seen: in this project's probes, in its seeds, or in the public reports that
its `seen` names. `alarms` are for runs that have not failed but go wrong: a loss that is not a number, an
acceptance that training promises and decoding does not keep.
"""

from __future__ import annotations

import dataclasses
import functools
import re

from controller.run_records import Progress


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What it is (one line), why it happens, and what to do; `name` is the signature's."""

    name: str
    what: str
    why: str
    do: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """A pattern (a regular expression, case matters not) and the diagnosis of what it is found in."""

    pattern: str
    seen: str
    diagnosis: Diagnosis


def _signature(name: str, pattern: str, *, what: str, why: str, do: str, seen: str) -> Signature:
    return Signature(pattern=pattern, seen=seen, diagnosis=Diagnosis(name=name, what=what, why=why, do=do))


SIGNATURES: tuple[Signature, ...] = (
    _signature(
        "cudagraph-trees-thread",
        r"torch\._C\._is_key_in_tls|_get_obj_in_tls|tree_manager_containers|local\.tree_manager",
        what="CUDA graph trees were used from a thread that torch did not start.",
        why="mode='reduce-overhead' keeps its graphs in thread-local storage that only the main thread"
        " and autograd's own have; before torch 2.13 any other thread fails this assertion.",
        do="Set execution = 'graph' (captured by hand in thread-local mode, which works in threads),"
        " 'compiled' or 'eager'; `dflashctl probe` says which work there.",
        seen="measured, torch 2.11; pytorch #123177",
    ),
    _signature(
        "cudagraph-static-input",
        r"dst\.data_ptr\(\)\s*==\s*src\.data_ptr\(\)",
        what="A CUDA graph was replayed with an input that had moved in memory.",
        why="With cudagraph_trees = False inductor's older path takes parameters and buffers as static"
        " inputs, and several threads or replicas give it others than those it captured.",
        do="Use none of inductor's CUDA graphs here: set execution = 'graph' (captured by hand) or"
        " 'compiled'.",
        seen="measured, torch 2.11",
    ),
    _signature(
        "graph-capture-generator",
        r"offset increment outside graph capture",
        what="Random numbers were drawn from a GPU's default generator while a graph was captured there.",
        why="A capture takes the device's default generator over; any other thread that draws from it"
        " meanwhile (dropout, randn, multinomial without a generator) fails.",
        do="Give every thread its own torch.Generator, draw on the CPU, or serialise captures.",
        seen="measured, torch 2.11",
    ),
    _signature(
        "capture-invalidated",
        r"operation (not permitted|failed due to a previous error).{0,40}captur"
        r"|cudaErrorStreamCapture",
        what="A CUDA call that a graph capture forbids came while one was under way.",
        why="In global capture mode every thread's allocation or synchronisation breaks a capture.",
        do="Capture with capture_error_mode='thread_local' under one lock, after warm-up.",
        seen="pytorch #159594",
    ),
    _signature(
        "cuda-oom",
        r"CUDA out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED",
        what="A GPU's memory is full.",
        why="The row's tokens, the target copy and the drafter's activations together need more than"
        " is free; another process on the same GPU counts as well.",
        do="Lower token_budget or anchors, put target and drafter on different GPUs, or free the GPU"
        " (nvidia-smi shows who holds it).",
        seen="SpecForge, late OOM",
    ),
    _signature(
        "host-oom",
        r"DefaultCPUAllocator: (can't|not enough)|\bMemoryError\b|cannot allocate memory",
        what="The container's main memory is full.",
        why="Target weights, the feature cache and one compile worker a core add up.",
        do="Lower token_budget, use features = 'online', or raise the container's memory.",
        seen="pct containers with a memory limit",
    ),
    _signature(
        "nvml-mismatch",
        r"Driver/library version mismatch",
        what="The container's NVIDIA libraries are of another version than the host's driver.",
        why="The host's driver was upgraded and the container still has the old user-space libraries"
        " (or the module was not reloaded).",
        do="Install the host's driver version in the container without its kernel module, then restart"
        " the container; if the host itself reports it, reload the module or reboot.",
        seen="nvidia-smi, NVML error 18",
    ),
    _signature(
        "nvml-unknown",
        r"Failed to initialize NVML: Unknown Error|no CUDA-capable device|CUDA unknown error"
        r"|Found no NVIDIA driver",
        what="CUDA finds no usable GPU in the container.",
        why="The device nodes are missing or have stale numbers (nvidia-uvm's changes with the"
        " kernel), or the container has no GPU at all.",
        do="On the Proxmox host look at `pct config VMID` (dev0: /dev/nvidia0, nvidia-uvm,"
        " nvidiactl), then restart the container.",
        seen="Proxmox containers after a kernel upgrade",
    ),
    _signature(
        "gpu-lost",
        r"GPU is lost|Unable to determine the device handle|uncorrectable (ECC|NVLink)"
        r"|device-side hardware|fallen off the bus",
        what="A GPU is lost: the driver cannot reach it any more.",
        why="Hardware or power failed, or the driver reset it (look for Xid in the host's kernel log).",
        do="`dmesg | grep -i xid` on the host; reboot it. Training resumes from the last checkpoint.",
        seen="nvidia-smi",
    ),
    _signature(
        "cuda-assert",
        r"device-side assert triggered|CUDA error: an illegal memory access",
        what="A kernel read or wrote where it must not.",
        why="Mostly an index out of range: a token id above the embedding, an anchor outside its row."
        " The line shown is where it was noticed, not where it happened.",
        do="Run once with CUDA_LAUNCH_BLOCKING=1 in the place's [env] and execution = 'eager'.",
        seen="pytorch",
    ),
    _signature(
        "no-compiler",
        r"InvalidCxxCompiler|No working C\+\+ compiler|Failed to find C compiler|g\+\+: not found"
        r"|Python\.h: No such file",
        what="There is no working C or C++ compiler in the container.",
        why="Inductor and Triton build their kernels with one, and need Python's headers too.",
        do="Install it there (Debian: apt-get install g++ python3-dev), or set execution = 'eager'.",
        seen="torch._inductor.exc.InvalidCxxCompiler",
    ),
    _signature(
        "recompile-limit",
        r"recompile_limit|FailOnRecompileLimitHit|cache_size_limit",
        what="A compiled function was compiled too often.",
        why="Something that should be a tensor of fixed shape changes as a Python value, or replicas"
        " share one code object's cache (eight entries).",
        do="Look at the recompile events for the guard that failed; run with execution = 'eager' meanwhile.",
        seen="torch._dynamo",
    ),
    _signature(
        "missing-package",
        r"(ModuleNotFoundError|ImportError): (No module named|cannot import name)"
        r"|PackageNotFoundError",
        what="A Python package is missing in the container's environment, or too old.",
        why="The run uses the interpreter of the place's venv, and only what is installed there.",
        do="Install it with that interpreter: <venv>/bin/python -m pip install 'dflashctl[payload]'"
        " (torch, transformers, pyarrow, safetensors, numpy).",
        seen="fresh containers",
    ),
    _signature(
        "no-shm",
        r"unable to \w+ shared memory|/dev/shm|bus error",
        what="Shared memory (/dev/shm) is missing or too small.",
        why="The container was given no tmpfs there.",
        do="Mount a tmpfs on /dev/shm in the container, at least 1 GiB.",
        seen="LXC containers",
    ),
    _signature(
        "disk-full",
        r"No space left on device|Errno 28\b|Disk quota exceeded",
        what="The container's disk is full.",
        why="Checkpoints, the feature cache and the compile caches grow in the workspace.",
        do="Free space in the workspace (old runs/, caches/) or lower checkpoint_keep.",
        seen="long runs",
    ),
    _signature(
        "hub-unreachable",
        r"couldn't connect to 'https://huggingface|LocalEntryNotFoundError|OfflineModeIsEnabled"
        r"|is not a local folder and is not a valid model identifier",
        what="A model could not be found or fetched.",
        why="`target` is no folder in the container, and the hub could not be reached or has no such name.",
        do="Give the path of a folder in the container, or set HF_HOME and proxies in the place's [env].",
        seen="transformers",
    ),
    _signature(
        "nccl",
        r"NCCL (error|WARN)|ncclSystemError|ncclUnhandledCudaError|DistBackendError",
        what="Communication between GPUs failed.",
        why="Mostly the echo of another thread's or host's failure; otherwise /dev/shm, the network"
        " interface or peer access.",
        do="Look for the thread that failed first; set NCCL_DEBUG=INFO in the place's [env].",
        seen="pytorch #109074",
    ),
    _signature(
        "nonfinite-limit",
        r"NonFiniteGradients",
        what="No step had a finite gradient for so long that training had ended without saying so.",
        why="Weights that were driven out of range by too high a learning rate, a target whose features are"
        " not finite (a broken or overflowing model: float16 instead of bfloat16), or bad samples. A resumed"
        " run meets the same again unless something is changed.",
        do="If loss or gradient norm rose before the first of these steps: launch anew with half the"
        " learning_rate or a longer warmup. If it came from nowhere: look at the samples named, and set"
        " target_dtype = 'float32' or 'bfloat16'. nonfinite_limit sets how many such steps are borne.",
        seen="z-lab #115",
    ),
    _signature(
        "nan-loss",
        r"(loss|gradient)( norm)? (is|became|was) (not finite|nan)|FloatingPointError",
        what="The loss or its gradient is not a number.",
        why="Too high a learning rate, a fully masked row, pure-bf16 optimizer state, or bad samples"
        " (the event names them).",
        do="Look at the samples named; halve learning_rate; keep fp32 masters.",
        seen="z-lab #115, NeMo #2826",
    ),
    _signature(
        "stop-grace",
        r"did not end in time",
        what="It was killed because it did not end in time after it was asked to stop.",
        why="A step, an evaluation or a checkpoint took longer than the grace of the stop (--grace, 60 s).",
        do="Nothing is lost before the last checkpoint; crash/ may hold where each thread was.",
        seen="a demo on two busy cores",
    ),
    _signature(
        "killed-by-somebody",
        r"not by the kernel for lack of memory",
        what="Somebody or something killed the trainer with SIGKILL; memory was not short.",
        why="The kernel counts whom it kills for lack of memory in the container; that count did not rise."
        " A person's `kill -9`, a task manager or a shutdown of the container leave no other trace.",
        do="Ask who works on that machine, and look at its journal of that moment. Nothing of the run itself"
        " needs to be changed.",
        seen="kill -9 by hand",
    ),
    _signature(
        "killed-memory",
        r"SIGKILL|(exit code|status|rc=?) ?137\b|oom-kill|Out of memory: Killed process",
        what="The trainer was killed with SIGKILL (137), most often for memory.",
        why="The container's memory limit, or the host's, was reached; the kernel kills without a"
        " word. A person's `kill -9` and a stop after its grace look the same.",
        do="`dmesg | grep -i oom` on the host; raise the container's memory, lower token_budget or use"
        " features = 'online'.",
        seen="LXC memory limit, measured: exit 137",
    ),
    _signature(
        "segfault",
        r"SIGSEGV|SIGBUS|SIGABRT|Segmentation fault|Fatal Python error",
        what="Native code crashed in the trainer.",
        why="A fault in an extension, a driver or memory; no Python traceback can come of it.",
        do="crash/stacks-fatal.txt has where each thread was; try execution = 'eager'.",
        seen="pytorch #190502 (2.13.0)",
    ),
    _signature(
        "place-restarted",
        r"the container was restarted under the run",
        what="The container or its host was started anew while the run trained.",
        why="A reboot, a power cut, an update, or somebody's `pct reboot`: nobody was left to write an end.",
        do="`last -x` on the host says when. What is on the disk is whole, and the run resumes from it.",
        seen="the rig's container, stopped and started",
    ),
    _signature(
        "vanished",
        r"neither supervisor nor trainer exists any more",
        what="Supervisor and trainer were both killed, so that neither could write an end.",
        why="Mostly memory: a container or host that has none left may lose all its processes at once. Or"
        " somebody killed both.",
        do="`dmesg | grep -i oom` on the host; `dflashctl doctor` shows how much memory may be used.",
        seen="kill -9 of both",
    ),
    _signature(
        "terminated",
        r"SIGTERM|SIGHUP",
        what="The trainer was told to end from outside.",
        why="A stop request, a shutdown of the container, or its supervisor's death.",
        do="supervisor.jsonl (events) says who asked. It resumes from its last checkpoint.",
        seen="supervisor",
    ),
)


@functools.lru_cache(maxsize=8)  # a view asks again and again of the same end: 0.1 s for a long traceback
def diagnose_text(text: str) -> Diagnosis | None:
    """The diagnosis of the first signature found in `text` (its last 64 KiB), or None."""
    text = text[-65536:]
    for signature in SIGNATURES:
        if re.search(signature.pattern, text, re.IGNORECASE):
            return signature.diagnosis
    return None


NAN_LOSS = next(s.diagnosis for s in SIGNATURES if s.diagnosis.name == "nan-loss")

TAU_GAP = Diagnosis(
    name="tau-gap",
    what="Training promises a longer acceptance than decoding keeps.",
    why="Either the training mask leaks (the drafter sees what does not exist yet when serving),"
    " features are shifted against their tokens, or it learned its training set by heart.",
    do="Trust the decoded tau. Check mask and alignment first; then more and more varied data.",
)

NOT_LOSSLESS = Diagnosis(
    name="not-lossless",
    what="Decoding with the drafter does not give the target's own text.",
    why="The target's cache is not rolled back rightly after a refused block, or its kernels read a block"
    " otherwise than one token at a time, by more than rounding explains.",
    do="Do not trust tau. Try target_dtype = 'float32'; if texts still differ, report the target's family.",
)

CHECKPOINT_FAILED = Diagnosis(
    name="checkpoint-failed",
    what="The newest checkpoint could not be written.",
    why="Mostly the disk of the workspace is full; the event says what the system said.",
    do="Free space there or lower checkpoint_keep; the run tries again at its next checkpoint, and older"
    " ones are whole.",
)

EVALUATION_OUT_OF_MEMORY = Diagnosis(
    name="evaluation-out-of-memory",
    what="The newest evaluation is missing: its GPU had no memory for it.",
    why="It decodes on the first target's GPU, beside all that trains there; so may another process.",
    do="Training goes on, and the next one is tried. Where it stays so, resume with --set: a lower"
    " eval_max_new_tokens, shorter or fewer held-out prompts, or another GPU first in targets.",
)

_BY_REASON = {
    "leak_or_misalignment": TAU_GAP,
    "not_lossless": NOT_LOSSLESS,
    "evaluation_out_of_memory": EVALUATION_OUT_OF_MEMORY,
}
"""Alarms that the trainer itself raises, by their reason."""

SILENT_TRAINER = Diagnosis(
    name="silent-trainer",
    what="The trainer's process is there, and makes no progress.",
    why="A thread waits for what does not come (a device, a disk, another thread), or its machine does.",
    do="`dflashctl stacks RUN` shows where each of its threads is. If it does not come back: `dflashctl stop"
    " RUN`, then `dflashctl resume RUN` goes on from the newest checkpoint.",
)

SILENT_SUPERVISOR = Diagnosis(
    name="silent-supervisor",
    what="The run's supervisor is there, and writes nothing.",
    why="Mostly the disk of the workspace is full, or does not answer; the trainer may train on meanwhile.",
    do="Is its disk full? `dflashctl exec --host PLACE -- df -h .` shows it. Make room there, and the run"
    " goes on by itself; a stop needs room for its checkpoint too.",
)

SILENT = {"trainer": SILENT_TRAINER, "supervisor": SILENT_SUPERVISOR}
"""What is known of a run that lives, by who of it is silent."""

RECOMPILING = Diagnosis(
    name="recompiling",
    what="The drafter is compiled again after its warm-up.",
    why="A shape or a Python value that should be fixed changes from step to step.",
    do="The recompile events name the guard; each costs seconds.",
)


def alarms(progress: Progress | None) -> tuple[Diagnosis, ...]:
    """What goes wrong in a run that has not failed, worst first."""
    if progress is None:
        return ()
    found = []
    if progress.loss_is_nan or progress.nonfinite_steps:
        found.append(NAN_LOSS)
    if progress.checkpoint_error:
        found.append(CHECKPOINT_FAILED)
    if progress.alarm in _BY_REASON:
        found.append(_BY_REASON[progress.alarm])
    if progress.recompiles:
        found.append(RECOMPILING)
    return tuple(found)
