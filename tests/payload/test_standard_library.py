"""The supervising half runs on a bare interpreter: no site-packages, and nothing of the trainer."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUPERVISING = sorted(path.stem for path in (ROOT / "remote_payload").glob("*.py") if path.stem != "__init__")


def imported(code: str) -> set[str]:
    """Top-level names and payload modules that `code` brings into a bare interpreter."""
    report = "\nimport sys, json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code + report], cwd=ROOT, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    return set(json.loads(done.stdout))


@pytest.mark.parametrize("module", SUPERVISING)
def test_every_module_beside_the_trainer_needs_only_the_standard_library(module: str) -> None:
    names = imported(f"import remote_payload.{module}")
    own = {name for name in names if name.split(".")[0] == "remote_payload"}
    foreign = {name.split(".")[0] for name in names - own} - set(sys.stdlib_module_names)
    assert foreign <= {"__main__"}
    assert not {name for name in own if name.split(".")[1:2] in (["train"], ["tools"])}
    assert "controller" not in names


def test_the_list_above_is_not_empty() -> None:
    assert {"supervisor", "feed", "gpu", "rundir", "job", "crash", "preflight"} <= set(SUPERVISING)


def test_the_import_rules_name_every_module_of_the_supervising_half() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = {each["name"]: each for each in project["tool"]["importlinter"]["contracts"]}
    named = contracts["The supervising half knows nothing of the trainer"]["source_modules"]
    assert sorted(named) == [f"remote_payload.{name}" for name in SUPERVISING if name != "__main__"]


def test_the_payload_works_as_a_folder_and_finds_itself_there(tmp_path: Path) -> None:
    for how in ([str(ROOT / "remote_payload")], ["-m", "remote_payload"]):
        done = subprocess.run(
            [sys.executable, "-S", *how, "runs", str(tmp_path)],
            cwd=ROOT if "-m" in how else tmp_path,
            capture_output=True,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
