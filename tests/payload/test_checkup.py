"""What a doctor is told of a place: facts, from files that a test can put there."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from remote_payload import checkup, memory_events
from tests.ports import free_port
from tests.waiting import until


def test_paths_of_a_job_are_found_where_the_trainer_would_look(tmp_path: Path) -> None:
    (tmp_path / "data.arrow").write_bytes(b"x" * (1 << 20))
    (tmp_path / "model").mkdir()
    (tmp_path / "hf" / "hub" / "models--org--name").mkdir(parents=True)
    env = {"HF_HOME": str(tmp_path / "hf")}
    names = [
        "data.arrow", str(tmp_path / "model"), "absent.arrow", "org/name", "org/other",
        "payload:jobs/demo.toml", "package:pytest", "package:no-such-package",
    ]  # fmt: skip
    found = checkup.quick(tmp_path, {"paths": names, "env": env})["paths"]
    assert [found[name]["there"] for name in names] == [True, True, False, True, None, True, True, False]
    assert found["data.arrow"]["seen"] == "1.0 MiB"
    assert "would be downloaded" in found["org/other"]["seen"]


def test_the_kernels_driver_and_its_numbers_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices, driver = tmp_path / "devices", tmp_path / "version"
    devices.write_text("Character devices:\n  1 mem\n195 nvidia\n511 nvidia-uvm\n\nBlock devices:\n  8 sd\n")
    driver.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.133.20  Release\nGCC version: 12\n"
    )
    (tmp_path / "libcuda.so.1").touch()
    (tmp_path / "libcuda.so.550.54.15").touch()
    monkeypatch.setattr(checkup, "_KERNEL_DEVICES", devices)
    monkeypatch.setattr(checkup, "_KERNEL_DRIVER", driver)
    monkeypatch.setattr(checkup, "_LIBRARIES", (str(tmp_path),))
    told = checkup.quick(tmp_path, {})
    assert told["majors"] == {"nvidia": 195, "nvidia-uvm": 511}
    assert told["driver"] == {"kernel": "570.133.20", "library": "550.54.15"}


@pytest.mark.parametrize(
    ("script", "patience", "text"),
    [
        ("raise ImportError", 60.0, "ended with exit status 1"),
        ("import time; time.sleep(600)", 0.5, "took more than 0.5 s"),
        ("import os; os.abort()", 60.0, "ended with exit status -6"),
    ],
)
def test_a_torch_that_fails_or_hangs_is_one_sentence(script: str, patience: float, text: str) -> None:
    said = checkup.ask_torch([sys.executable, "-S", "-c", script], patience=patience)
    assert text in said["error"]


def test_a_broken_torch_is_told_by_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert checkup.ask_torch() == {"error": "OSError: libcudart.so.12: cannot open shared object file"}


def test_writing_is_measured_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "_WRITE_S", 0.05)
    speed = checkup._write_speed(tmp_path / "not yet")
    assert speed is not None and speed > 0
    assert os.listdir(tmp_path) == []  # noqa: PTH208


def test_a_taken_port_is_not_free() -> None:
    port = free_port()
    with socket.create_server(("", port)):
        assert checkup._free_port(port) is False
    assert checkup._free_port(port) is True


@pytest.mark.parametrize(
    ("group", "limit", "used"),
    [
        ("0::/ct", "memory.max", "memory.current"),
        ("4:memory:/ct", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ],
)
def test_a_containers_memory_is_read_from_both_kinds_of_groups(
    tmp_path: Path, group: str, limit: str, used: str
) -> None:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(f"{group}\n")
    folder = tmp_path / "groups" / ("ct" if group.startswith("0::") else "memory/ct")
    folder.mkdir(parents=True)
    (folder / limit).write_text(f"{4 << 30}\n")
    (folder / used).write_text(f"{1 << 30}\n")
    where = (tmp_path / "groups", tmp_path / "proc")
    assert memory_events.read(*where).limit_gib == 4.0
    assert memory_events.used_gib(*where) == 1.0


def test_packages_and_the_drivers_library_are_looked_for_where_the_trainer_finds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = tmp_path / "site" / "made_up_model-1.2.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: made-up-model\nVersion: 1.2\n")
    (tmp_path / "nvidia").mkdir()
    (tmp_path / "nvidia" / "libcuda.so.550.54.15").touch()
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX Kernel Module  550.54.15  today")
    monkeypatch.setattr(checkup, "_KERNEL_DRIVER", tmp_path / "version")
    monkeypatch.setattr(checkup, "_LIBRARIES", ())
    question = {"paths": ["package:made-up-model"]}
    bare = checkup.quick(tmp_path, question)
    assert bare["driver"] == {"kernel": "550.54.15", "library": None}
    assert bare["paths"]["package:made-up-model"]["there"] is False
    env = {"PYTHONPATH": f"/none:{tmp_path / 'site'}", "LD_LIBRARY_PATH": str(tmp_path / "nvidia")}
    given = checkup.quick(tmp_path, {**question, "env": env})
    assert given["driver"] == {"kernel": "550.54.15", "library": "550.54.15"}
    assert given["paths"]["package:made-up-model"] == {"there": True, "seen": "version 1.2"}


@pytest.mark.slow
def test_a_command_that_cannot_even_be_killed_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that waits for a GPU which fell off the bus."""
    with monkeypatch.context() as hung:
        hung.setattr(os, "killpg", lambda *_: None)
        hung.setattr(os, "kill", lambda *_: None)
        script = (
            f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
        )
        began = time.monotonic()
        said = checkup.ask_torch([sys.executable, "-S", "-c", script], patience=1.0)
        assert "took more than 1 s" in said["error"] and time.monotonic() - began < 60
    pid = until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    os.kill(int(pid), signal.SIGKILL)
