"""Pulling files of a run on this machine: the real sender, cut wherever a test wants."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from controller import paths
from controller.errors import ConnectionLostError, LocalStateError, PullError
from controller.inventory import Host
from controller.local import Local
from controller.place import Place
from controller.pull import Pull, Pulled, listing, pull
from controller.pull_stream import PullStream
from controller.run_place import RunPlace
from controller.ship import PACKAGE
from controller.timing import Timing

TIMING = dataclasses.replace(Timing.scaled(0.01), silence_s=20.0)  # a busy machine is no lost connection


class Remote:
    """A run directory, and pulls of it through this machine's own pipes."""

    def __init__(self, tmp_path: Path) -> None:
        self.run_dir = tmp_path / "w" / "runs" / "a-run"
        self.to = tmp_path / "here"
        self.host = Host.model_validate({"name": "here", "kind": "local", "workspace": str(tmp_path / "w")})
        self.cuts: list[int] = []
        self.damage: Callable[[bytes], bytes] = lambda data: data
        self.said: list[str] = []
        for name, content in {
            "train.log": b"line\n" * 1000,
            "events.jsonl": b"{}\n",
            "run.json": b"{}\n",
            "control/stop": b"{}",
            "crash/thread-x.json": b"{}\n",
            "checkpoints/step-40/model.safetensors": os.urandom(3 << 20),
            "checkpoints/step-40/config.json": b"{}",
            "checkpoints/step-80/model.safetensors": b"b" * 100,
            "checkpoints/.step-90.part/model.safetensors": b"half",
            "checkpoints/index.json": json.dumps({"best": {"step": 40, "tau": 2.0}, "newest": 80}).encode(),
            "exports/q8/model.gguf": b"gguf",
        }.items():
            self.write(name, content)

    def write(self, name: str, content: bytes) -> None:
        (self.run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (self.run_dir / name).write_bytes(content)

    def stream(self, what: Sequence[str]) -> Callable[[Place], PullStream]:
        def start(place: Place) -> PullStream:
            argv = [sys.executable, "-S", str(PACKAGE), "send", str(self.run_dir)]
            cut = self.cuts.pop(0) if self.cuts else None
            return PullStream(Cut(place.start(argv), cut, self.damage), {"what": list(what)}, TIMING)

        return start

    def pull(self, *what: str) -> dict[str, Pulled]:
        pulling = Pull(
            self.stream(what), lambda: Local(self.host), self.to, say=self.said.append, timing=TIMING
        )
        return {pulled.file: pulled for pulled in pulling.run()}

    def files(self) -> dict[str, bytes]:
        """What lies in the folder, partial files as well."""
        paths = [path for path in self.to.rglob("*") if path.is_file()]
        return {path.relative_to(self.to).as_posix(): path.read_bytes() for path in paths}


class Cut:
    """A process whose connection is lost after `cut` bytes of its output."""

    def __init__(self, inner: Any, cut: int | None, damage: Callable[[bytes], bytes]) -> None:
        self._inner, self._left, self._damage = inner, cut, damage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def receive(self, timeout: float) -> bytes | None:
        data: bytes | None = self._inner.receive(timeout)
        if not data:
            return data
        if self._left is not None:
            if self._left <= 0:
                raise ConnectionLostError("cut")
            data = data[: self._left]
            self._left -= len(data)
        return self._damage(data)


@pytest.fixture
def remote(tmp_path: Path) -> Remote:
    return Remote(tmp_path)


def test_everything_but_requests_and_what_is_being_written_arrives_byte_for_byte(remote: Remote) -> None:
    pulled = remote.pull("all")
    expected = {
        path.relative_to(remote.run_dir).as_posix(): path.read_bytes()
        for path in remote.run_dir.rglob("*")
        if path.is_file() and "control" not in path.parts and ".step-90.part" not in path.parts
    }
    assert remote.files() == expected
    assert {name: p.sha256 for name, p in pulled.items()} == {
        name: hashlib.sha256(content).hexdigest() for name, content in expected.items()
    }
    assert all(p.new for p in pulled.values())


@pytest.mark.parametrize(
    ("what", "files"),
    [
        (["log"], ["train.log"]),
        (["log", "events", "log"], ["events.jsonl", "train.log"]),
        (["crash"], ["crash/thread-x.json"]),
        (["checkpoints/best"], ["checkpoints/step-40/config.json", "checkpoints/step-40/model.safetensors"]),
        (["checkpoints/last"], ["checkpoints/step-80/model.safetensors"]),
        (["checkpoints/step-80"], ["checkpoints/step-80/model.safetensors"]),
        (["exports/q8"], ["exports/q8/model.gguf"]),
    ],
)
def test_what_is_named_is_pulled_and_nothing_else(remote: Remote, what: list[str], files: list[str]) -> None:
    assert sorted(remote.pull(*what)) == files
    assert sorted(remote.files()) == files


def test_a_transfer_that_is_cut_goes_on_where_it_was_and_is_never_seen_half(remote: Remote) -> None:
    remote.cuts = [1 << 20, 500_000, 1_000_000, 300]
    seen: list[list[str]] = []
    original = Cut.receive

    def watched(self: Cut, timeout: float) -> bytes | None:
        seen.append([name for name in remote.files() if "/.step" not in name])
        return original(self, timeout)

    Cut.receive = watched  # type: ignore[method-assign]
    try:
        remote.pull("checkpoints/step-40")
    finally:
        Cut.receive = original  # type: ignore[method-assign]
    assert remote.files() == {
        f"checkpoints/step-40/{name}": (remote.run_dir / "checkpoints/step-40" / name).read_bytes()
        for name in ("model.safetensors", "config.json")
    }
    assert not any(seen)
    assert len(remote.said) == 4 and all("going on in" in line for line in remote.said)


def test_a_sender_that_is_done_before_all_is_read_is_no_lost_connection(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send(self: Cut, data: bytes) -> None:
        if data == b"{}\n":
            raise ConnectionLostError("Socket is closed")
        self._inner.send(data)

    monkeypatch.setattr(Cut, "send", send, raising=False)
    assert len(remote.pull("all")) > 5
    assert remote.said == []


def test_what_arrived_before_a_cut_is_not_sent_again_by_the_next_call(remote: Remote) -> None:
    remote.cuts = [2 << 20] + [0] * 9
    with pytest.raises(ConnectionLostError) as caught:
        remote.pull("checkpoints/step-40")
    assert "goes on from there" in caught.value.hint
    (part,) = [content for name, content in remote.files().items() if name.endswith("model.safetensors")]
    assert 1 << 20 < len(part) < 3 << 20
    got = 0
    original = Cut.receive

    def counted(self: Cut, timeout: float) -> bytes | None:
        nonlocal got
        data = original(self, timeout)
        got += len(data or b"")
        return data

    remote.cuts = []
    Cut.receive = counted  # type: ignore[method-assign]
    try:
        remote.pull("checkpoints/step-40")
    finally:
        Cut.receive = original  # type: ignore[method-assign]
    assert got < (3 << 20) - len(part) + 20_000


def test_a_partial_file_that_is_not_the_remotes_beginning_is_sent_anew(remote: Remote) -> None:
    work = remote.to / "checkpoints" / ".step-40.part" / "model.safetensors"
    work.parent.mkdir(parents=True)
    work.write_bytes(b"of another run" * 1000)
    remote.pull("checkpoints/step-40")
    name = "checkpoints/step-40/model.safetensors"
    assert remote.files()[name] == (remote.run_dir / name).read_bytes()


def test_what_is_here_already_is_not_sent_and_a_log_that_grew_is_continued(remote: Remote) -> None:
    remote.pull("all")
    inode = (remote.to / "checkpoints/step-40/model.safetensors").stat().st_ino
    with (remote.run_dir / "train.log").open("ab") as file:
        file.write(b"more\n")
    pulled = remote.pull("all")
    assert [name for name, p in pulled.items() if p.new] == ["train.log"]
    assert remote.files()["train.log"].endswith(b"line\nmore\n")
    assert (remote.to / "checkpoints/step-40/model.safetensors").stat().st_ino == inode


def test_a_checkpoint_that_became_another_one_replaces_the_old_one_as_a_whole(remote: Remote) -> None:
    remote.pull("checkpoints")
    remote.write("checkpoints/step-40/config.json", b'{"new": 1}')
    remote.write("checkpoints/step-40/extra.json", b"{}")
    (remote.run_dir / "checkpoints/step-80/model.safetensors").unlink()
    remote.write("checkpoints/step-80/weights.safetensors", b"w")
    remote.pull("checkpoints")
    assert sorted(remote.files()) == [
        "checkpoints/index.json",
        "checkpoints/step-40/config.json",
        "checkpoints/step-40/extra.json",
        "checkpoints/step-40/model.safetensors",
        "checkpoints/step-80/weights.safetensors",
    ]
    assert remote.files()["checkpoints/step-40/config.json"] == b'{"new": 1}'


def test_bytes_that_change_on_the_way_are_thrown_away_and_twice_is_an_error(remote: Remote) -> None:
    remote.damage = lambda data: data.replace(b"line", b"lime", 1)
    with pytest.raises(PullError, match="not what was sent, and was thrown away; for the second time"):
        remote.pull("log")
    assert remote.files() == {}


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("checkpoints/step-7", "there is nothing of that name"),
        ("checkpoints/first", "expected log, events, crash"),
        ("../secret", "expected log, events, crash"),
        ("exports/..", "expected log, events, crash"),
        ("weights", "'weights' is nothing that can be pulled"),
    ],
)
def test_what_is_not_there_is_one_sentence(remote: Remote, what: str, said: str) -> None:
    with pytest.raises(PullError, match=said):
        remote.pull(what)
    assert remote.files() == {}


def test_best_needs_an_evaluation_and_last_only_a_checkpoint(remote: Remote) -> None:
    remote.write("checkpoints/index.json", b'{"best": null}')
    with pytest.raises(PullError, match="no checkpoint of this run was evaluated yet"):
        remote.pull("checkpoints/best")
    assert list(remote.pull("checkpoints/last")) == ["checkpoints/step-80/model.safetensors"]


def test_no_link_leads_out_of_the_run_directory(remote: Remote, tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_text("private")
    (remote.run_dir / "exports" / "evil").symlink_to(tmp_path / "secret")
    (remote.run_dir / "crash" / "key").symlink_to(tmp_path / "secret" / "key")
    os.mkfifo(remote.run_dir / "crash" / "pipe")
    assert not [name for name in remote.pull("all") if "evil" in name or "key" in name or "pipe" in name]
    (remote.run_dir / "exports").rename(remote.run_dir / "elsewhere")
    (remote.run_dir / "exports").symlink_to(tmp_path / "secret")
    with pytest.raises(PullError, match="nothing of that name"):
        remote.pull("exports/key")


def test_a_second_pull_into_the_same_folder_is_refused_and_harms_the_first_in_nothing(
    remote: Remote, tmp_path: Path
) -> None:
    refused: list[LocalStateError] = []

    def second(*_: object) -> None:
        if not refused:
            with pytest.raises(LocalStateError, match="another pull is writing there") as caught:
                remote.pull("log")
            refused.append(caught.value)

    Pull(
        remote.stream(["checkpoints/best", "log"]),
        lambda: Local(remote.host),
        remote.to,
        say=remote.said.append,
        progress=second,
        timing=TIMING,
    ).run()
    assert "--to" in refused[0].hint
    assert sorted(remote.files()) == [
        "checkpoints/step-40/config.json",
        "checkpoints/step-40/model.safetensors",
        "train.log",
    ]
    assert [pulled.new for pulled in remote.pull("log", "exports").values()] == [True, False]


def test_a_folder_that_cannot_be_written_is_named(remote: Remote) -> None:
    remote.to.write_text("a file in the way")
    with pytest.raises(LocalStateError, match="here"):
        remote.pull("log")


def test_a_folder_whose_name_no_disk_takes_is_named(remote: Remote) -> None:
    remote.to = remote.to.with_name("n" * 300)
    with pytest.raises(LocalStateError, match=r"nnn: cannot be used \(File name too long\)"):
        remote.pull("log")


def test_a_run_is_pulled_and_listed_by_its_mirror_folder(
    remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    directory = paths.make_mirror_dir("a-run", "local")
    place = RunPlace(
        host=remote.host,
        run_id="a-run",
        run_dir=str(remote.run_dir),
        payload_dir=str(PACKAGE.parent),
        digest="",
        python=sys.executable,
        created=1.0,
        job_name="tiny",
    )
    place.write(directory)
    assert ("train.log", 5000) in listing(directory, say=remote.said.append)
    (pulled,) = pull(directory, ["log"], remote.to, say=remote.said.append)
    assert (pulled.file, pulled.size, pulled.new) == ("train.log", 5000, True)
    older = tmp_path / "older" / "remote_payload"
    older.mkdir(parents=True)
    (older / "__main__.py").write_text("import sys; sys.exit(64)")
    place.model_copy(update={"payload_dir": str(older.parent)}).write(directory)
    assert [p.new for p in pull(directory, ["log", "events"], remote.to, say=remote.said.append)] == [
        True,
        False,
    ]
    assert "ours was shipped" in remote.said[-1]
    place.model_copy(update={"payload_dir": str(tmp_path / "pruned")}).write(directory)
    remote.said.clear()
    assert [p.new for p in pull(directory, ["log"], remote.to, say=remote.said.append)] == [False]
    assert ["was removed; ours was shipped" in said for said in remote.said] == [True]
