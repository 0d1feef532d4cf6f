"""The command line as a process of its own, as a user starts it."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def command(*arguments: str) -> list[str]:
    """argv of `dflashctl ARGUMENTS`, by the code of this tree."""
    code = "import sys; from controller.cli import main; sys.exit(main())"
    return [sys.executable, "-c", code, *arguments]


def environment(changes: Mapping[str, str]) -> dict[str, str]:
    """Nothing of the tester's own settings, and `changes`."""
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        **changes,
    }


def dflashctl(
    *arguments: str, env: Mapping[str, str], timeout: float = 100
) -> subprocess.CompletedProcess[str]:
    """Run `dflashctl ARGUMENTS` to its end."""
    return subprocess.run(
        command(*arguments),
        env=environment(env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
