"""One question to nvidia-smi, which may hang so that not even SIGKILL ends it. Standard library only."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

from remote_payload.gpu import COMMAND
from remote_payload.limited_command import run_within

PATIENCE_S = 20.0


class NvidiaSmiError(Exception):
    """There is no answer; the text says why in one sentence, `said` is all that nvidia-smi printed."""

    def __init__(self, why: str, said: str = "") -> None:
        super().__init__(why)
        self.said = said


def ask(arguments: Sequence[str], *, command: str = COMMAND, patience: float = PATIENCE_S) -> list[str]:
    """The lines that `nvidia-smi ARGUMENTS` prints, without empty ones.

    Raises NvidiaSmiError when there is no nvidia-smi, it cannot be run, gives no answer, or fails.
    """
    if shutil.which(command) is None:
        raise NvidiaSmiError(f"{command} is not installed here")
    try:
        done = run_within(patience, [command, *arguments])
    except subprocess.TimeoutExpired:
        raise NvidiaSmiError(f"{command} gave no answer for {patience:g} s") from None
    except OSError as error:  # of another C library than the container's, for one
        raise NvidiaSmiError(f"{command} cannot be run ({error.strerror})") from error
    lines = [line.strip() for line in done.stdout.decode("utf-8", "replace").splitlines() if line.strip()]
    if done.returncode:
        why = lines[0] if lines else f"{command} ended with exit status {done.returncode}"
        raise NvidiaSmiError(why, "\n".join(lines))
    return lines
