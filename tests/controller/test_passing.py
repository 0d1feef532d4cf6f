"""In which folder a command of `exec` runs; the streams and signals are in `tests/rig/test_passing.py`."""

from __future__ import annotations

import subprocess
from pathlib import Path

from controller.errors import PayloadEnvironmentError
from controller.passing import ENTER


def enter(workspace: Path) -> subprocess.CompletedProcess[str]:
    argv = ["sh", "-c", ENTER, "sh", str(workspace), "/venv/bin", "pwd"]
    return subprocess.run(argv, cwd="/", capture_output=True, text=True, timeout=60, check=False)


def test_a_workspace_that_is_not_there_yet_is_made(tmp_path: Path) -> None:
    done = enter(tmp_path / "new/-workspace")
    assert (done.stdout, done.stderr, done.returncode) == (f"{tmp_path}/new/-workspace\n", "", 0)


def test_a_workspace_that_cannot_be_is_refused_and_nothing_runs_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = enter(tmp_path / "file/workspace")
    assert (done.stdout, done.returncode) == ("", PayloadEnvironmentError.exit_code)
    assert done.stderr.endswith(
        f"error: the workspace {tmp_path}/file/workspace cannot be entered; hosts.toml names it\n"
    )
