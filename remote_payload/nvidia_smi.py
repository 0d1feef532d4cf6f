"""One question to nvidia-smi, which may hang so that not even SIGKILL ends it. Standard library only."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress

from remote_payload.gpu import COMMAND

PATIENCE_S = 20.0


class NvidiaSmiError(Exception):
    """There is no answer; the text says why in one sentence."""


def ask(arguments: Sequence[str], *, command: str = COMMAND, patience: float = PATIENCE_S) -> list[str]:
    """The lines that `nvidia-smi ARGUMENTS` prints, without empty ones.

    Raises NvidiaSmiError when there is no nvidia-smi, it gives no answer, or it fails.
    """
    if shutil.which(command) is None:
        raise NvidiaSmiError(f"{command} is not installed here")
    process = subprocess.Popen(
        [command, *arguments],
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
        raise NvidiaSmiError(f"{command} gave no answer for {patience:g} s") from None
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if process.returncode:
        said = lines[0] if lines else f"{command} ended with exit status {process.returncode}"
        raise NvidiaSmiError(said)
    return lines
