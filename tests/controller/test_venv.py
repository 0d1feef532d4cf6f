"""`setup` on this machine: the payload's own command as a real process, a tiny package, a folder of wheels.

Most tests have an installer called uv that unpacks wheels and writes down how it was called, since a real one
takes seconds to make a venv; the slow ones have the real venv and pip.
"""

import base64
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest

from controller.errors import PayloadEnvironmentError, UsageError
from controller.inventory import Host
from controller.place import open_place
from controller.ship import PACKAGE, Payload, pack, start
from controller.venv import plan, set_up
from remote_payload import identity, lock, rundir, venv_setup
from tests.waiting import until

UV = """\
#!{python} -IS
import json, os, pathlib, subprocess, sys, time, zipfile
here = pathlib.Path({here!r})
words = sys.argv[1:]
with (here / "calls").open("a") as log:
    log.write(json.dumps([words, os.environ.get("UV_DEFAULT_INDEX")]) + "\\n")
if words[0] == "venv":
    sys.exit(subprocess.run([words[2], "-m", "venv", "--without-pip", words[3]]).returncode)
print("Looking in indexes:", os.environ.get("UV_DEFAULT_INDEX"), flush=True)
if (here / "slow").exists():
    print("Downloading", flush=True)
    time.sleep(600)
if (here / "fail").exists():
    sys.exit((here / "fail").read_text())
folder = pathlib.Path(words[words.index("--find-links") + 1])
(site,) = pathlib.Path(words[words.index("--python") + 1]).parents[1].glob("lib/*/site-packages")
for wheel in folder.glob("*.whl"):
    zipfile.ZipFile(wheel).extractall(site)
"""


def make_wheel(folder: Path, name: str = "tiny", version: str = "1.2") -> None:
    """A wheel of one module, as the packaging standard wants it."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = []
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
        rows.append(f"{path},sha256={digest},{len(text)}")
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,"]) + "\n"
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)


@pytest.fixture
def payload(tmp_path: Path) -> Payload:
    copy = tmp_path / "source" / "remote_payload"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("train", "tools", "jobs", "__pycache__"))
    (copy / "requirements.txt").write_text("# what a trainer of one module needs\ntiny>=1.1\n")
    return pack(copy)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    make_wheel(tmp_path / "wheels")
    return Host(
        name="here",
        kind="local",
        workspace=str(tmp_path / "w"),
        venv=str(tmp_path / "the venv"),
        wheels=str(tmp_path / "wheels"),
        base_python=sys.executable,
    )


@pytest.fixture
def uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an installer `uv` that is found first; `calls` is its log."""
    folder = tmp_path / "uv"
    folder.mkdir()
    program = folder / "uv"
    program.write_text(UV.format(python=sys.executable, here=str(folder)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def calls(uv: Path) -> list[list[Any]]:
    return [json.loads(line) for line in (uv / "calls").read_text().splitlines()]


def version(host: Host) -> str:
    code = "import tiny; print(tiny.VERSION)"
    return subprocess.run(
        [host.python, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def note(host: Host) -> Path:
    return Path(host.venv).with_name(".the venv.dflashctl-setup.json")


def test_a_venv_is_made_once_and_left_alone_when_it_is_whole(host: Host, payload: Payload, uv: Path) -> None:
    said: list[str] = []
    assert set_up(host, payload, said.append) == {"changed": True, "packages": {"tiny": "1.2"}}
    assert version(host) == "1.2"
    assert [words[:2] for words, _ in calls(uv)] == [["venv", "--python"], ["pip", "install"]]
    assert calls(uv)[1][0][-5:-2] == ["--find-links", host.wheels, "--no-index"]
    assert next(line for line in said if line.startswith("+ ")).endswith(host.venv)
    assert set_up(host, payload, said.append) == {"changed": False, "packages": {"tiny": "1.2"}}
    assert len(calls(uv)) == 2


def test_an_old_package_is_brought_up_and_what_else_is_there_stays(
    host: Host, payload: Payload, uv: Path, tmp_path: Path
) -> None:
    make_wheel(tmp_path / "wheels", version="1.2")
    set_up(host, payload, lambda text: None)
    (site,) = Path(host.venv).glob("lib/*/site-packages")
    (site / "mine.py").write_text("")
    shutil.rmtree(site / "tiny-1.2.dist-info")
    assert set_up(host, payload, lambda text: None)["changed"] is True
    assert (site / "mine.py").exists()
    assert not [words for words, _ in calls(uv)[2:] if words[0] == "venv"]


def test_a_package_that_lacks_files_is_installed_again(host: Host, payload: Payload, uv: Path) -> None:
    set_up(host, payload, lambda text: None)
    (module,) = Path(host.venv).glob("lib/*/site-packages/tiny.py")
    module.unlink()
    set_up(host, payload, lambda text: None)
    assert version(host) == "1.2"
    assert "--reinstall-package" in calls(uv)[2][0] and "tiny==1.2" in calls(uv)[2][0]


def test_a_setup_that_broke_off_leaves_nobody_at_work_and_is_mended_by_the_next(
    host: Host, payload: Payload, uv: Path
) -> None:
    (uv / "slow").touch()
    with open_place(host) as place:
        arrived = start(place, payload, ["setup"], python=host.base_python)
        order = {key: getattr(host, key) for key in ("workspace", "venv", "index", "wheels")}
        arrived.process.send(json.dumps(order).encode() + b"\n")
        while "Downloading" not in str(arrived.record(60)):
            pass
        assert "uv pip" in processes() or "uv/uv pip" in processes()
        arrived.process.close()
    until(lambda: f"{uv}/uv" not in processes(), "the installer to be gone")
    until(lambda: not is_locked(host), "whoever started it to be gone")
    assert json.loads(note(host).read_text())["state"] == "creating"
    (uv / "slow").unlink()
    (Path(host.venv) / "half").write_text("left by it")
    assert set_up(host, payload, lambda text: None)["changed"] is True
    assert version(host) == "1.2"
    assert not (Path(host.venv) / "half").exists()
    assert json.loads(note(host).read_text())["state"] == "complete"


def is_locked(host: Host) -> bool:
    venv = Path(host.venv)
    with venv.with_name(f".{venv.name}.dflashctl-lock").open("w") as alone:
        try:
            lock.hold(alone.fileno())
        except BlockingIOError:
            return True
    return False


def processes() -> str:
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return "\n".join(lines)


def test_two_setups_at_once_do_not_meet(host: Host, payload: Payload, uv: Path) -> None:
    (uv / "slow").touch()
    begun = threading.Event()
    failures: list[BaseException] = []

    def first() -> None:
        try:
            set_up(host, payload, lambda text: begun.set() if "Downloading" in text else None)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=first, daemon=True)
    thread.start()
    assert begun.wait(60)
    with pytest.raises(PayloadEnvironmentError, match=r"another setup of .* is at work"):
        set_up(host, payload, lambda text: None)
    for line in processes().splitlines():
        assert host.wheels not in line or "uv" in line
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if f"{uv}/uv".encode() in path.read_bytes():
                os.kill(int(path.parent.name), 9)
    thread.join(60)
    assert len(failures) == 1


def test_a_folder_that_is_no_venv_of_ours_is_never_removed(host: Host, payload: Payload, uv: Path) -> None:
    Path(host.venv).mkdir()
    (Path(host.venv) / "thesis.tex").write_text("")
    with pytest.raises(
        PayloadEnvironmentError, match="no virtual environment that works, and not one of ours"
    ):
        set_up(host, payload, lambda text: None)
    assert (Path(host.venv) / "thesis.tex").exists()


def test_a_venv_that_is_a_file_is_refused_by_name(host: Host, payload: Payload, uv: Path) -> None:
    Path(host.venv).write_text("")
    with pytest.raises(PayloadEnvironmentError, match=r"the venv cannot be used \(Not a directory\)"):
        set_up(host, payload, lambda text: None)


def test_a_venv_that_a_living_run_uses_is_not_touched(host: Host, payload: Payload, uv: Path) -> None:
    set_up(host, payload, lambda text: None)
    (site,) = Path(host.venv).glob("lib/*/site-packages")
    shutil.rmtree(site / "tiny-1.2.dist-info")
    run = Path(host.workspace) / "runs" / "demo-1"
    run.mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"python": host.python}))
    status = {"state": "running", "boot_id": identity.boot_id(), "supervisor": identity.identity(os.getpid())}
    rundir.write_whole(run / "status.json", json.dumps(status).encode())
    with pytest.raises(PayloadEnvironmentError, match="is used by demo-1, which run"):
        set_up(host, payload, lambda text: None)
    assert len(calls(uv)) == 2
    status["supervisor"] = {"pid": os.getpid(), "start_ticks": 1}
    rundir.write_whole(run / "status.json", json.dumps(status).encode())
    assert set_up(host, payload, lambda text: None)["changed"] is True


def test_a_password_of_the_index_is_in_no_argument_and_in_nothing_said(
    host: Host, payload: Payload, uv: Path
) -> None:
    secret = host.model_copy(update={"index": "https://me:hunter2@index.example/simple"})
    said: list[str] = []
    set_up(secret, payload, said.append)
    assert [index for _, index in calls(uv)] == [secret.index] * 2
    assert "hunter2" not in json.dumps([words for words, _ in calls(uv)]) + "".join(said)
    assert "  Looking in indexes: https://***@index.example/simple" in said
    assert "--no-index" not in calls(uv)[1][0]
    assert "hunter2" not in plan(secret)


@pytest.mark.parametrize(
    ("fail", "hint"),
    [
        ("error: No matching distribution found for tiny", "lacks it: fill it by `pip download"),
        ("ERROR: [Errno 28] No space left on device", "Make room where"),
        ("error: dns error: failed to lookup address", "no internet? Name `index`, or a folder `wheels`"),
    ],
)
def test_an_installer_that_fails_is_quoted_with_what_to_do(
    host: Host, payload: Payload, uv: Path, fail: str, hint: str
) -> None:
    (uv / "fail").write_text(fail)
    with pytest.raises(PayloadEnvironmentError) as caught:
        set_up(host, payload, lambda text: None)
    assert fail in caught.value.message
    assert hint in caught.value.hint


def test_a_place_without_a_venv_of_its_own_is_refused_and_a_base_python_that_is_absent(
    host: Host, payload: Payload
) -> None:
    with pytest.raises(UsageError, match="has no `venv` of its own"):
        plan(host.model_copy(update={"venv": ""}))
    with pytest.raises(PayloadEnvironmentError, match="there is no python9 to make the venv with"):
        set_up(host.model_copy(update={"base_python": "python9"}), payload, lambda text: None)


@pytest.mark.slow
def test_the_real_venv_and_pip_make_it_from_a_folder_of_wheels_and_mend_it(
    host: Host, payload: Payload
) -> None:
    assert set_up(host, payload, lambda text: None)["packages"] == {"tiny": "1.2"}
    assert version(host) == "1.2"
    (module,) = Path(host.venv).glob("lib/*/site-packages/tiny.py")
    module.unlink()
    assert set_up(host, payload, lambda text: None)["changed"] is True
    assert version(host) == "1.2"


def test_a_venv_that_answers_too_slowly_is_not_taken_for_a_broken_one(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be removed and downloaded again, because a network disk was busy."""
    python = Path(host.python)
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(0o755)
    (Path(host.venv) / "pyvenv.cfg").touch()
    note(host).write_text('{"state": "complete"}')
    monkeypatch.setattr(venv_setup, "_LOOK_S", 0.3)
    order = venv_setup.Order(Path(host.workspace), Path(host.venv), "", host.wheels)
    with pytest.raises(venv_setup.SetupError, match=r"gave no list of its packages for 0.3 s"):
        venv_setup.set_up(order, lambda _: None)
    assert python.exists()
