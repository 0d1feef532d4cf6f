"""What a doctor looks at in a place beyond a preflight: devices, driver, memory, files, and what takes time.

Facts only; the laptop judges them. Nothing is imported that a trainer would need, so that a broken torch is
seen from outside, by a process of its own with a limit. Standard library only.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from remote_payload import memory_events
from remote_payload.job_paths import locate
from remote_payload.limited_command import run_within

PORTS: Final = (29400, 29500)
"""torchrun's rendezvous, and torch.distributed's own."""

_TORCH_S: Final = 120.0
_WRITE_S: Final = 2.0
_WRITE_BYTES: Final = 1 << 30
_CHUNK: Final = 16 << 20
_KERNEL_DEVICES = Path("/proc/devices")
_KERNEL_DRIVER = Path("/proc/driver/nvidia/version")
_NODES = Path("/dev")
_LIBRARIES = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
    "/lib/x86_64-linux-gnu",
    "/usr/local/nvidia/lib64",  # where container runtimes mount it
)
_ASK_TORCH = """\
import json, sys
try:
    import torch
    said = {"version": torch.__version__, "cuda": torch.version.cuda, "devices": torch.cuda.device_count()}
    if torch.version.cuda and torch.cuda.device_count():
        torch.zeros(1, device="cuda:0")
except BaseException as error:
    said = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
print(json.dumps(said))
"""


def quick(workspace: Path, question: Mapping[str, Any]) -> dict[str, Any]:
    """`memory`, `shm_gib`, `nodes`, `majors`, `driver`, `paths`: what costs no time.

    `question`: `paths` (of the job: texts as it has them), `env` (the trainer's variables).
    """
    env = question.get("env", {})
    return {
        "memory": _memory(),
        "shm_gib": free_gib(Path("/dev/shm")),
        "nodes": list(_device_nodes()),
        "majors": _majors(),
        "driver": _driver(env),
        "paths": {name: _look(name, workspace, env) for name in question.get("paths", [])},
    }


def deep(workspace: Path) -> dict[str, Any]:
    """`torch` (asked in a process of its own), `write_mib_s`, `ports` (free or not): takes seconds."""
    return {
        "torch": ask_torch(),
        "write_mib_s": _write_speed(workspace),
        "ports": {str(port): _free_port(port) for port in PORTS},
    }


def nearest_folder(path: Path) -> Path:
    """`path`, or where it is not there the nearest folder above it."""
    # os.path, since Path.exists raises where a folder above may not be entered.
    return next(folder for folder in (path, *path.parents) if os.path.exists(folder))  # noqa: PTH110


def ask_torch(python: Sequence[str] = (sys.executable,), patience: float = _TORCH_S) -> dict[str, Any]:
    """`version`, `cuda`, `devices` as torch itself says, or `error`, in one sentence."""
    try:
        ask = [*python, "-c", _ASK_TORCH]
        done = run_within(patience, ask, stderr=subprocess.DEVNULL, cwd="/")
    except subprocess.TimeoutExpired:
        return {"error": f"`import torch` and a first tensor took more than {patience:g} s"}
    with suppress(ValueError, IndexError):
        said = json.loads(done.stdout.splitlines()[-1])
        if isinstance(said, dict):
            return said
    return {"error": f"`import torch` ended with exit status {done.returncode}"}


def _memory() -> dict[str, Any]:
    """`limit_gib` of the container's group (null: none), `used_gib` (null: not known), `machine_gib`."""
    machine = re.search(r"MemTotal:\s+(\d+) kB", _text(Path("/proc/meminfo")))
    return {
        "limit_gib": memory_events.read().limit_gib,
        "used_gib": memory_events.used_gib(),
        "machine_gib": round(int(machine[1]) / 2**20, 3) if machine else None,
    }


def _device_nodes() -> list[dict[str, Any]]:
    """The device files of NVIDIA: `path`, `major`, and `why` they cannot be opened (null: they can)."""
    nodes = []
    for path in sorted(_NODES.glob("nvidia*")):
        try:
            info = path.stat()
        except OSError:
            continue
        if not stat.S_ISCHR(info.st_mode):
            continue
        why = None
        try:
            os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
        except OSError as error:
            why = error.strerror
        nodes.append({"path": str(path), "major": os.major(info.st_rdev), "why": why})
    return nodes


def _majors() -> dict[str, int]:
    """The major numbers that this kernel gave to NVIDIA's drivers, by name."""
    found = re.findall(r"^\s*(\d+) (nvidia\S*)$", _text(_KERNEL_DEVICES), re.MULTILINE)
    return {name: int(number) for number, name in found}


def _driver(env: Mapping[str, str]) -> dict[str, str | None]:
    kernel = _kernel_driver()
    return {"kernel": kernel, "library": _library_driver(env) if kernel else None}


def _kernel_driver() -> str | None:
    """The version of the loaded kernel module."""
    match = re.search(r"Kernel Module\s.*?(\d+\.\d+(?:\.\d+)?)", _text(_KERNEL_DRIVER))
    return match[1] if match else None


def _library_driver(env: Mapping[str, str]) -> str | None:
    """The version of libcuda, by the name of its file, where a trainer with the variables `env` looks."""
    own = [folder for folder in env.get("LD_LIBRARY_PATH", "").split(":") if folder]
    for folder in (*own, *_LIBRARIES):
        for path in sorted(Path(folder).glob("libcuda.so.*.*")):
            if match := re.fullmatch(r"libcuda\.so\.(\d+\.\d+(?:\.\d+)?)", path.name):
                return match[1]
    return None


def _look(name: str, workspace: Path, env: Mapping[str, str]) -> dict[str, Any]:
    """`there` (true, false, or null: it would be fetched), and `seen` in words, for a path of a job."""
    if name.startswith("package:"):
        import importlib.metadata

        folders = [folder for folder in env.get("PYTHONPATH", "").split(":") if folder]
        found = importlib.metadata.distributions(
            name=name.removeprefix("package:"), path=[*folders, *sys.path]
        )
        package = next(iter(found), None)
        if package is None:
            return {"there": False, "seen": "the package is not installed"}
        return {"there": True, "seen": f"version {package.version}"}
    path = locate(name, workspace)
    try:
        if path.is_dir():
            return {"there": True, "seen": f"a folder of {sum(1 for _ in path.iterdir())} entries"}
        if path.is_file():
            size = path.stat().st_size
            return {"there": True, "seen": f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size} bytes"}
    except OSError as error:
        return {"there": False, "seen": f"{path} cannot be read ({error.strerror})"}
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        home = (
            env.get("HF_HOME") or os.environ.get("HF_HOME") or str(Path("~/.cache/huggingface").expanduser())
        )
        cached = Path(env.get("HF_HUB_CACHE", f"{home}/hub")) / f"models--{name.replace('/', '--')}"
        if cached.is_dir():
            return {"there": True, "seen": f"in {cached}"}
        return {"there": None, "seen": f"neither {path} nor {cached} is there; it would be downloaded"}
    return {"there": False, "seen": f"{path} is not there"}


def _write_speed(workspace: Path) -> float | None:
    """MiB/s of writing to the workspace, synced; null where it cannot be written. At most 1 GiB or 2 s."""
    import tempfile

    folder = nearest_folder(workspace)
    free = shutil.disk_usage(folder).free
    chunk = os.urandom(1 << 20) * (_CHUNK >> 20)
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".dflashctl-doctor-") as file:
            written, begun = 0, time.monotonic()
            while written < min(_WRITE_BYTES, free // 4) and time.monotonic() - begun < _WRITE_S:
                file.write(chunk)
                file.flush()
                os.fdatasync(file.fileno())
                written += len(chunk)
            seconds = time.monotonic() - begun
    except OSError:
        return None
    return round(written / 2**20 / seconds, 1) if written else None


def _free_port(port: int) -> bool:
    import socket

    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


def free_gib(path: Path) -> float | None:
    """Room on the disk of `path`, or None where it cannot be told."""
    try:
        return round(shutil.disk_usage(path).free / 2**30, 3)
    except OSError:
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
