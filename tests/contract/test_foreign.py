"""A log that dflashctl did not start, in the place `local`: from the attachment to the state in a view."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from controller import foreign
from controller.errors import UnreachableError, UsageError
from controller.inventory import Host
from controller.mirror import LOG_HEAD_BYTES, LOG_TAIL_BYTES, Mirror, ask_for_whole_log
from controller.mirror_reader import MirrorReader
from controller.place import open_place
from controller.run_reader import RunReader
from controller.run_state import RunState
from remote_payload import rundir
from tests.contract.test_feed_and_mirror import TIMING
from tests.waiting import until

HEAD = b"""\
1095082 samples loaded (Arrow-backed, lazy access)
Batches per epoch: 59823 (min=4 max=64 avg=18.3)
Bucket 0 [   0,  770):   2283 batches (  3.8%)
Bucket 1 [ 770, 1216):   8311 batches ( 13.9%)
Loading 2 target models...
Target 0 on cuda:0...
Target 1 on cuda:1...
"""


class Scene:
    """A log below a folder, and the place that has it."""

    def __init__(self, base: Path) -> None:
        self.log = base / "there" / "train.log"
        self.log.parent.mkdir()
        self.host = Host(name="local", kind="local", workspace=str(base / "workspace"))
        self.mirrors: list[Mirror] = []

    def mirror(self, directory: Path) -> Mirror:
        mirror = Mirror(directory, place_opener=lambda: open_place(self.host), timing=TIMING)
        self.mirrors.append(mirror)
        mirror.start()
        return mirror

    def append(self, data: bytes) -> None:
        with self.log.open("ab") as file:
            file.write(data)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made = Scene(tmp_path)
    yield made
    for mirror in made.mirrors:
        mirror.stop(60.0)


def extents(directory: Path) -> list[list[int]]:
    record = rundir.read_whole(directory / "mirror.json") or {}
    found: list[list[int]] = record.get("files", {}).get("train.log", {}).get("extents", [])
    return found


def state_of(reader: RunReader) -> RunState:
    state = reader.poll(time.time())
    while state.unread_bytes:
        state = reader.poll(time.time())
    return state


@pytest.mark.slow
def test_a_long_log_is_a_run_with_buckets_targets_steps_and_a_health(scene: Scene) -> None:
    steps = b"".join(b"step %d/900000 loss %.3f\n" % (n, 3 - n / 1e6) for n in range(1, 70_001))
    scene.append(HEAD + steps)
    size = scene.log.stat().st_size
    directory = foreign.attach(scene.host, str(scene.log))
    scene.mirror(directory)
    until(lambda: [stop for _, stop in extents(directory)] == [LOG_HEAD_BYTES, size])
    (head, tail) = extents(directory)
    assert head[0] == 0
    assert tail[1] - tail[0] <= LOG_TAIL_BYTES
    reader = RunReader(directory, scale=1.0)
    until(lambda: state_of(reader).state == "LIVE")
    state = reader.state
    assert state.progress is not None
    assert [(b.low, b.high, b.planned) for b in state.progress.buckets] == [(0, 770, 2283), (770, 1216, 8311)]
    assert [(d.device, d.roles) for d in state.progress.devices] == [
        ("cuda:0", ("target",)), ("cuda:1", ("target",)),
    ]  # fmt: skip
    assert state.progress.step == 70_000
    assert (state.state, state.job_name, state.ended) == ("LIVE", str(scene.log), False)
    assert state.gpu_table.none_reason or state.gpus
    newest = state.curves["loss"].all_points[-1]
    assert newest[0] == 70_000
    scene.append(b"step 70001/900000 loss 1.5\n")
    until(lambda: (p := state_of(reader).progress) is not None and p.step == 70_001)
    old = time.time() - 300
    os.utime(scene.log, (old, old))
    until(lambda: state_of(reader).state == "STALLED")
    assert "nothing is written to the log" in reader.state.health.detail
    ask_for_whole_log(directory)
    size = scene.log.stat().st_size
    until(lambda: extents(directory) == [[0, size]])
    assert (directory / "train.log").read_bytes() == scene.log.read_bytes()


@pytest.mark.slow
def test_rotation_is_followed_and_begins_the_state_anew(scene: Scene) -> None:
    scene.append(HEAD + b"step 7/10 loss 1.0\n")
    directory = foreign.attach(scene.host, str(scene.log))
    scene.mirror(directory)
    reader = RunReader(directory, scale=1.0)
    until(lambda: (p := state_of(reader).progress) is not None and p.step == 7 and len(p.buckets) == 2)
    scene.log.rename(scene.log.with_name("train.log.1"))
    until(lambda: state_of(reader).state == "STALLED")
    assert "not there" in reader.state.health.detail
    scene.append(b"Bucket 0 [   0,  100):   5 batches (100.0%)\nstep 1/10 loss 9.0\n")
    until(lambda: (p := state_of(reader).progress) is not None and p.step == 1)
    assert [b.high for b in reader.state.progress.buckets] == [100]  # type: ignore[union-attr]
    assert [point[0] for point in reader.state.curves["loss"].all_points] == [1]
    until(lambda: state_of(reader).state == "LIVE")


def test_a_second_attachment_finds_the_same_folder_and_does_without_the_place(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.append(b"line\n")
    told: list[str] = []
    directory = foreign.attach(scene.host, str(scene.log), say=told.append)
    assert "sent" in told[0]
    assert foreign.attach(scene.host, f"{scene.log.parent}//train.log") == directory
    other = foreign.attach(scene.host, str(scene.log.parent / "train.log"))
    assert other == directory

    def unreachable(*_: object, **__: object) -> None:
        raise UnreachableError("no route")

    monkeypatch.setattr(foreign, "open_place", unreachable)
    assert foreign.attach(scene.host, str(scene.log), say=told.append) == directory
    assert "no route; showing what was copied" in told[-1]
    with pytest.raises(UnreachableError):
        foreign.attach(scene.host, "/another.log")


@pytest.mark.parametrize(
    ("path", "said", "hint"),
    [
        ("train.log", "is relative", "absolute"),
        ("{folder}/tarin.log", "No such file", "train.log"),
        ("{folder}", "no plain file", "train.log"),
    ],
)
def test_a_file_that_is_not_there_is_said_with_what_is(scene: Scene, path: str, said: str, hint: str) -> None:
    scene.append(b"line\n")
    with pytest.raises(UsageError) as error:
        foreign.attach(scene.host, path.format(folder=scene.log.parent))
    assert said in error.value.message
    assert hint in error.value.hint


def test_half_a_character_at_the_seams_never_reaches_a_reader_of_lines(scene: Scene) -> None:
    scene.append("größe é ".encode() * 300_000 + b"\n" + HEAD)
    directory = foreign.attach(scene.host, str(scene.log))
    scene.mirror(directory)
    size = scene.log.stat().st_size
    until(lambda: [stop for _, stop in extents(directory)] == [LOG_HEAD_BYTES, size])
    state = state_of(RunReader(directory))
    assert state.progress is not None
    assert len(state.progress.buckets) == 2
    piece = MirrorReader(directory).read()
    assert piece is not None
    assert scene.log.read_bytes().startswith(piece.data)
