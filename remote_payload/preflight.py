"""What a place offers a run, asked before the launch: interpreter, packages, GPUs, room, and the time.

Packages are looked up by their metadata, never imported: importing torch takes seconds and can fail for
reasons that a trainer should report itself. Standard library only.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from remote_payload import identity
from remote_payload.gpu import COMMAND

MODULES = ("torch", "transformers", "pyarrow", "safetensors")

_PATIENCE_S = 20.0


def preflight(workspace: Path) -> dict[str, Any]:
    """One object: `python`, `executable`, `modules`, `gpus`, `workspace`, `boot_id`, `t`.

    `modules`: version or null by name; `gpus`: a number, or the reason why there is none; `workspace`:
    `path`, `free_gib` (null where it cannot be told), `writable`.
    """
    existing = next(path for path in (workspace, *workspace.parents) if path.exists())
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "modules": {name: _version(name) for name in MODULES},
        "gpus": count_gpus(),
        "workspace": {
            "path": str(workspace),
            "free_gib": _free_gib(existing),
            "writable": existing.is_dir() and os.access(existing, os.W_OK | os.X_OK),
        },
        "boot_id": identity.boot_id(),
        "t": round(time.time(), 3),
    }


def count_gpus(command: str = COMMAND, patience: float = _PATIENCE_S) -> int | str:
    """How many GPUs `nvidia-smi -L` lists, or the reason why it lists none."""
    if shutil.which(command) is None:
        return f"{command} is not installed here"
    process = subprocess.Popen(
        [command, "-L"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output = process.communicate(timeout=patience)[0].decode("utf-8", "replace")
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        if process.stdout:
            process.stdout.close()
        process.returncode = -signal.SIGKILL  # in state D it does not die even so: nobody waits for it
        return f"{command} gave no answer for {patience:g} s"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    gpus = sum(line.startswith("GPU ") and "UUID" in line for line in lines)
    return gpus or (lines[0] if lines else f"{command} ended with exit status {process.returncode}")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _free_gib(path: Path) -> float | None:
    try:
        return round(shutil.disk_usage(path).free / 2**30, 3)
    except OSError:
        return None
