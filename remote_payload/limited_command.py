"""A command that is waited for no longer than a limit, also where not even SIGKILL ends it.

What waits for a driver in trouble (state D) takes no signal, and `subprocess.run` would wait for its end
whatever the limit. Standard library only.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress


def run_within(
    patience: float,
    argv: Sequence[str],
    *,
    stderr: int = subprocess.STDOUT,
    cwd: str | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Run `argv`; stderr goes where stdout goes, if not told otherwise.

    After `patience` seconds it is killed, with all of its session, and left to itself. Raises
    subprocess.TimeoutExpired then, and OSError when it cannot be run.
    """
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        start_new_session=True,
        cwd=cwd,
    )
    try:
        output, errors = process.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        for pipe in filter(None, (process.stdout, process.stderr)):
            pipe.close()
        process.returncode = -signal.SIGKILL  # nobody waits for it, and Popen would warn of that
        raise
    return subprocess.CompletedProcess(argv, process.returncode, output, errors)
