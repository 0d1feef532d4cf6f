from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from remote_payload import identity
from remote_payload.preflight import preflight

ROOT = Path(__file__).parents[2]


def ask(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(ROOT / "remote_payload"), "preflight", *arguments],
        capture_output=True,
        check=True,
    )
    answer = json.loads(done.stdout)
    assert isinstance(answer, dict)
    return answer


def test_the_command_prints_one_object_about_interpreter_packages_and_workspace(
    tmp_path: Path,
) -> None:
    answer = ask(str(tmp_path))
    assert answer["python"] == ".".join(map(str, sys.version_info[:3]))
    assert answer["executable"] == sys.executable
    assert set(answer["modules"]) == {"torch", "transformers", "pyarrow", "safetensors"}
    assert all(value is None or value[0].isdigit() for value in answer["modules"].values())
    assert answer["workspace"]["path"] == str(tmp_path)
    assert answer["workspace"]["free_gib"] > 0 and answer["workspace"]["writable"] is True
    assert answer["boot_id"] == identity.boot_id()
    assert abs(answer["t"] - time.time()) < 60


def test_packages_are_looked_up_without_importing_them(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from remote_payload.preflight import preflight;"
        f"print(preflight(Path({str(tmp_path)!r}))['modules']['pyarrow']);"
        "print('pyarrow' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)
    version, imported = done.stdout.decode().splitlines()
    assert version[0].isdigit() and imported == "False False"


def test_a_package_that_is_not_there_is_null(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from remote_payload.preflight import preflight;"
        f"print(preflight(Path({str(tmp_path)!r}))['modules'])"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True)
    assert set(eval(done.stdout).values()) == {None}


def test_a_workspace_that_does_not_exist_yet_is_judged_by_the_folder_above(tmp_path: Path) -> None:
    workspace = preflight(tmp_path / "not" / "yet")["workspace"]
    assert workspace["writable"] is True and workspace["free_gib"] > 0


def test_a_workspace_below_a_plain_file_is_not_writable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert preflight(tmp_path / "file" / "x")["workspace"]["writable"] is False


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo '0, GPU-a, NVIDIA H200, 1, 143771'; echo '1, GPU-b, NVIDIA H200, 1, 143771'", 2),
        ("echo 'No devices were found'; exit 6", "No devices were found"),
        (
            "echo 'Failed to initialize NVML: Unknown Error'; exit 255",
            "Failed to initialize NVML: Unknown Error",
        ),
        ("echo broken >&2; exit 1", "broken"),
        ("exit 9", "{} ended with exit status 9"),
        ("sleep 600 & wait", "{} gave no answer for 0.5 s"),
    ],
)
def test_gpus_are_a_number_or_the_reason_why_there_are_none(
    tmp_path: Path, script: str, expected: int | str
) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    began = time.monotonic()
    patience = 0.5 if "sleep" in script else 60.0
    count = preflight(tmp_path, command=str(command), patience=patience)["gpus"]
    assert count == (expected.format(command) if isinstance(expected, str) else expected)
    assert time.monotonic() - began < 60


def test_no_nvidia_smi_is_a_reason(tmp_path: Path) -> None:
    count = preflight(tmp_path, command=str(tmp_path / "none"))["gpus"]
    assert count == f"{tmp_path / 'none'} is not installed here"


def test_what_may_not_even_be_looked_for_is_no_error(tmp_path: Path) -> None:
    """As below a folder that the user may not enter; of a name that no disk takes, root is told the same."""
    answer = preflight(tmp_path / ("n" * 300) / "x", {"paths": ["p" * 300]})
    assert answer["workspace"]["free_gib"] > 0
    (path,) = answer["paths"].values()
    assert path["there"] is False and "File name too long" in path["seen"]
