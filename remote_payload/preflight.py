"""What a place offers a run, asked before the launch: interpreter, packages, GPUs, room, and the time.

Packages are looked up by their metadata, never imported: importing torch takes seconds and can fail for
reasons that a trainer should report itself. Standard library only.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from remote_payload import checkup, identity
from remote_payload.gpu import COMMAND
from remote_payload.gpu_use import gpu_use
from remote_payload.nvidia_smi import PATIENCE_S

MODULES = ("torch", "transformers", "pyarrow", "safetensors")


def preflight(
    workspace: Path,
    question: Mapping[str, Any] | None = None,
    *,
    command: str = COMMAND,
    patience: float = PATIENCE_S,
) -> dict[str, Any]:
    """One object: `python`, `executable`, `modules`, `gpus`, `use`, `workspace`, `boot_id`, `t`.

    `modules`: version or null by name; `gpus`: a number, or the reason why there is none; `use`: see
    `gpu_use`; `workspace`: `path`, `free_gib` (null where it cannot be told), `writable`. Beside them
    `checkup.quick`, which has `question` from here, and with `deep` in it `checkup.deep`.
    """
    question = question or {}
    existing = checkup.nearest_folder(workspace)
    use = gpu_use(workspace, command=command, patience=patience)
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "modules": {name: _version(name) for name in MODULES},
        "gpus": len(use["gpus"]) or use["why"] or f"{command} listed nothing",
        "use": use,
        "workspace": {
            "path": str(workspace),
            "free_gib": checkup.free_gib(existing),
            "writable": existing.is_dir() and os.access(existing, os.W_OK | os.X_OK),
        },
        **checkup.quick(workspace, question),
        **(checkup.deep(workspace) if question.get("deep") else {}),
        "boot_id": identity.boot_id(),
        "t": round(time.time(), 3),
    }


def _version(name: str) -> str | None:
    """Of an installed package, by the name of its folder: reading its metadata would import email first."""
    for entry in sys.path:
        with suppress(OSError):
            for found in os.listdir(entry or "."):  # noqa: PTH208 - names are all that is needed
                if match := re.fullmatch(rf"{name}-([^-]+)\.(?:dist-info|egg-info)", found, re.IGNORECASE):
                    return match[1]
    import importlib.metadata

    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
