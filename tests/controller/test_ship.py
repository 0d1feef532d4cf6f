"""The payload's way into a place, on this machine, by real processes."""

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import threading
from io import BytesIO
from pathlib import Path

import pytest

from controller import receiver
from controller.errors import ConnectionLostError, PayloadEnvironmentError, ShipError
from controller.inventory import Host
from controller.place import Place, open_place
from controller.ship import Payload, Shipped, converse, pack, ship
from tests.waiting import until

MAIN = "import sys; print('ran', *sys.argv[1:]); sys.exit(5)"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "source" / "remote_payload"
    for name, content in {
        "__init__.py": "",
        "__main__.py": MAIN,
        "train/deep.py": "x = 1\n",
        "train/__pycache__/deep.cpython-311.pyc": "junk",
        "jobs/demo.toml": "steps = 1\n",
        "jobs/demo/prompts.arrow": "arrow",
        "jobs/.hidden": "no",
        ".env": "SECRET=1",
        ".git/config": "no",
        "notes.txt": "no",
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return local(tmp_path / "work space")


def local(workspace: Path, venv: str = "") -> Place:
    return open_place(Host(name="here", kind="local", workspace=str(workspace), venv=venv))


def tree(folder: Path) -> dict[str, str]:
    """sha256 of every file below `folder`, but what running it has compiled."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_only_what_is_listed_is_packed(package: Path) -> None:
    assert [name for name, _ in pack(package).files] == [
        "remote_payload/__init__.py",
        "remote_payload/__main__.py",
        "remote_payload/jobs/demo.toml",
        "remote_payload/jobs/demo/prompts.arrow",
        "remote_payload/train/deep.py",
    ]


def test_the_real_payload_is_packed_whole_and_small() -> None:
    payload = pack()
    names = {name for name, _ in payload.files}
    assert {"remote_payload/__main__.py", "remote_payload/rundir.py", "remote_payload/job.py"} <= names
    assert not [name for name in names if "pycache" in name or "/." in name]
    assert len(payload.tar) < 8 << 20


def test_the_digest_depends_on_contents_alone(package: Path, tmp_path: Path) -> None:
    first = pack(package)
    copy = tmp_path / "copy" / "remote_payload"
    shutil.copytree(package, copy)
    for path in copy.rglob("*"):
        os.utime(path, (1, 1))
        path.chmod(0o700)
    assert pack(copy) == first
    (copy / "train" / "deep.py").write_text("x = 2\n")
    assert pack(copy).digest != first.digest
    with tarfile.open(fileobj=BytesIO(first.tar)) as tar:
        assert {(m.mtime, m.uid, m.gid, m.uname, m.mode) for m in tar} == {(0, 0, 0, "", 0o644)}


def test_a_payload_arrives_whole_and_its_command_runs(package: Path, place: Place) -> None:
    payload = pack(package)
    told: list[tuple[int, int]] = []
    shipped = ship(place, payload, ["preflight", "a b"], progress=lambda *n: told.append(n))
    there = f"{place.workspace}/payloads/{payload.digest}"
    assert shipped == Shipped(there, True, True, 5, b"ran preflight a b\n", b"")
    with tarfile.open(fileobj=BytesIO(payload.tar)) as tar:
        sent = {m.name: hashlib.sha256(tar.extractfile(m).read()).hexdigest() for m in tar}  # type: ignore[union-attr]
    assert tree(Path(there)) == sent
    assert told[-1] == (len(payload.tar), len(payload.tar))
    assert os.listdir(f"{place.workspace}/payloads") == [payload.digest]  # noqa: PTH208


def test_an_unchanged_payload_is_not_sent_again(package: Path, place: Place) -> None:
    payload = pack(package)
    ship(place, payload, [])
    told: list[tuple[int, int]] = []
    again = ship(place, payload, [], progress=lambda *n: told.append(n))
    assert (again.sent, again.new_workspace, told) == (False, False, [])


def test_concurrent_ships_of_one_payload_all_succeed(package: Path, place: Place) -> None:
    payload = pack(package)
    done: list[Shipped] = []
    threads = [threading.Thread(target=lambda: done.append(ship(place, payload, []))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [shipped.status for shipped in done] == [5] * 4
    assert os.listdir(f"{place.workspace}/payloads") == [payload.digest]  # noqa: PTH208


def test_bytes_that_were_changed_on_the_way_are_refused(package: Path, place: Place) -> None:
    payload = pack(package)
    changed = Payload(payload.digest, payload.tar[:-1] + b"x", payload.files)
    with pytest.raises(ShipError, match="another sha256"):
        ship(place, changed, [])
    assert os.listdir(f"{place.workspace}/payloads") == []  # noqa: PTH208


def test_a_transfer_that_breaks_off_leaves_nothing_valid(package: Path, place: Place) -> None:
    payload = pack(package)
    argv = [place.python, "-I", "-c", Path(receiver.__file__).read_text(), place.workspace]
    done = place.run([*argv, payload.digest, str(len(payload.tar))], stdin=payload.tar[:5000], timeout=60)
    assert done.status == 1
    assert b"only 5000 of" in done.stdout
    assert ship(place, payload, []).sent
    with tarfile.open(fileobj=BytesIO(payload.tar)) as tar:
        assert len(tree(Path(place.workspace) / "payloads" / payload.digest)) == len(tar.getmembers())


def test_a_receiver_that_is_ended_while_it_unpacks_leaves_nothing_half_written(
    package: Path, place: Place
) -> None:
    payload, payloads = pack(package), Path(place.workspace) / "payloads"
    slow = "import os, time\nos.fsync = lambda descriptor: time.sleep(1000)\n"
    argv = [sys.executable, "-I", "-c", slow + Path(receiver.__file__).read_text(), place.workspace]
    with subprocess.Popen(
        [*argv, payload.digest, str(len(payload.tar))], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as process:
        assert process.stdin is not None
        process.stdin.write(payload.tar)
        process.stdin.flush()
        until(lambda: list(payloads.rglob("*.py")), "a file of the payload")
        process.terminate()
        assert process.wait(60) == 143
    assert list(payloads.iterdir()) == []


def test_old_half_transfers_are_swept(package: Path, place: Place) -> None:
    payloads = Path(place.workspace) / "payloads"
    for name, age in (("old", 2 * receiver.STALE_S), ("new", 0)):
        (payloads / f".incoming-{name}").mkdir(parents=True)
        then = (payloads / f".incoming-{name}").stat().st_mtime - age
        os.utime(payloads / f".incoming-{name}", (then, then))
    (payloads / ".incoming-gone").symlink_to("as one that another launch removes meanwhile")
    ship(place, pack(package), [])
    assert not (payloads / ".incoming-old").exists()
    assert (payloads / ".incoming-new").exists()


def test_a_workspace_that_cannot_be_made_is_named(package: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PayloadEnvironmentError, match=r"the workspace .*/file/x cannot be used"):
        ship(local(tmp_path / "file" / "x"), pack(package), [])


def test_an_absent_venv_and_one_without_python_are_told_apart(package: Path, tmp_path: Path) -> None:
    with pytest.raises(PayloadEnvironmentError) as absent:
        ship(local(tmp_path / "w", "/nonexistent/venv"), pack(package), [])
    assert absent.value.message == "here: there is no venv at /nonexistent/venv"
    assert "dflashctl setup --host here" in absent.value.hint
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    with pytest.raises(PayloadEnvironmentError, match=r"bin/python is absent or cannot run, although"):
        ship(local(tmp_path / "w", str(tmp_path / "venv")), pack(package), [])


def test_an_interpreter_that_is_too_old_is_refused_by_its_version(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "receiver.py"
    old.write_text(Path(receiver.__file__).read_text().replace("OLDEST = (3, 11)", "OLDEST = (9, 9)"))
    monkeypatch.setattr(receiver, "__file__", str(old))
    with pytest.raises(PayloadEnvironmentError, match=r"is Python 3\.\d+\.\d+; the payload needs 3\.11"):
        ship(local(tmp_path / "w"), pack(package), [])


def test_the_receiver_needs_the_standard_library_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", receiver.__file__, "/proc/nowhere", "0", "0"], capture_output=True
    )
    assert done.stderr == b""
    assert b'"error": "workspace"' in done.stdout


def test_a_session_answers_one_command_after_the_other_in_one_process(place: Place) -> None:
    with converse(place, pack()) as session:
        assert session.sent
        preflight = session.ask(["preflight", place.workspace])
        assert preflight.status == 0 and b'"python"' in preflight.stdout
        refused = session.ask(["start", place.workspace, "No Id"], b'{"run": {}, "job": ""}')
        assert refused.status == 1 and b"is no run id" in refused.stdout
        usage = session.ask(["lunch", "it's \u00fc"])
        assert usage.status == 64 and b"unknown command" in usage.stderr
        crashed = session.ask(["gpus", place.workspace, "soon"])
        assert crashed.status == 1 and b"ValueError" in crashed.stderr
    with converse(place, pack(), ["runs", place.workspace]) as session:
        assert not session.sent
        assert session.answer().status == 0
        assert session.ask(["runs", place.workspace]).status == 0


def test_a_session_that_ends_is_a_lost_connection(place: Place, package: Path) -> None:
    (package / "__main__.py").write_text("import sys; sys.exit('no such thing')")
    with converse(place, pack(package)) as session, pytest.raises(ConnectionLostError, match="no such thing"):
        session.ask(["preflight"])
