import dataclasses
import io
import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller import logs, trouble
from controller.diagnose import diagnose_text
from controller.errors import ProtocolError, UnreachableError
from controller.logs import follow_log, whole_characters
from controller.mirror import LOG_TAIL_BYTES, NO_OLDER, Mirror, ask_for_whole_log
from controller.mirror_files import LOCK, MIRROR
from controller.mirror_reader import MirrorReader
from controller.timing import Timing
from remote_payload import rundir
from tests.controller.fake_feed import TIMING, HandClock, Line, Remote, mirror_folder
from tests.waiting import until


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Out(io.BytesIO):
    """Keeps what every write held, to see where it was cut."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []

    def write(self, data: Any) -> int:
        self.writes.append(bytes(data))
        return super().write(data)


class Scene:
    """A remote run, a line to it, a mirror folder, and followers in threads."""

    def __init__(self, base: Path) -> None:
        self.folder = mirror_folder(base / "mirror")
        self.remote = Remote()
        self.line = Line(self.remote)
        self.mirrors: list[Mirror] = []
        self.out, self.notes = Out(), io.StringIO()
        self.code: int | BaseException | None = None
        self.thread: threading.Thread | None = None

    def mirror(self, *, timing: Timing = TIMING, **options: Any) -> Mirror:
        mirror = Mirror(self.folder, place_opener=self.line.open, timing=timing, **options)
        self.mirrors.append(mirror)
        mirror.start()
        return mirror

    def logs(
        self, *, follow: bool = False, tail: int | None = None, whole: bool = False, **options: Any
    ) -> int:
        with_mirror = options.pop("mirror", None) or self.mirror(once=not follow)
        try:
            return follow_log(
                self.folder,
                follow=follow,
                tail=tail,
                whole=whole,
                out=self.out,
                mirror=with_mirror,
                notes=self.notes,
            )
        finally:
            with_mirror.stop()

    def in_thread(self, **options: Any) -> None:
        def work() -> None:
            try:
                self.code = self.logs(**options)
            except BaseException as error:
                self.code = error

        self.thread = threading.Thread(target=work)
        self.thread.start()

    def join(self) -> int | BaseException | None:
        assert self.thread is not None
        self.thread.join(60)
        assert not self.thread.is_alive()
        return self.code


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setenv("DFLASHCTL_TIME_SCALE", "0.01")
    monkeypatch.setattr(trouble, "_PATIENCE_S", 60.0)
    made = Scene(tmp_path)
    yield made
    for mirror in made.mirrors:
        mirror.stop(60.0)


def test_every_byte_is_printed_once_across_breaks_and_the_exit_code_is_the_runs(scene: Scene) -> None:
    dice = random.Random(4)
    outage = threading.Event()

    def fate(number: int) -> Callable[[], str | None]:
        left = dice.randrange(3, 12)

        def ask() -> str | None:
            nonlocal left
            left -= 1
            return dice.choice(["lost", "ended"]) if outage.is_set() or (left < 0 and number < 5) else None

        return ask

    scene.line.fate = fate
    scene.in_thread(follow=True)
    log = b""
    for number in range(60):
        part = f"step {number} größe 日本 🚀 ".encode() * dice.randrange(0, 4) + b"\n"
        for cut in range(0, len(part), 11):
            scene.remote.files["train.log"] += part[cut : cut + 11]
            time.sleep(0.0005)
        log += part
    # The breaks above may each be over before the follower looks; this one waits until it is seen.
    outage.set()
    until(lambda: "dflashctl: no connection (" in scene.notes.getvalue())
    outage.clear()
    until(lambda: "connected again" in scene.notes.getvalue())
    scene.remote.files["train.log"] += b"no newline at the end \xf0\x9f"
    log += b"no newline at the end \xf0\x9f"
    scene.remote.finish(3)
    assert scene.join() == 3
    assert scene.out.getvalue() == log
    for write in scene.out.writes[:-1]:
        write.decode()  # no character is cut
        assert write.endswith(b"\n")


@pytest.mark.parametrize(("code", "signal"), [(0, None), (1, None), (2, None), (137, "SIGKILL")])
def test_a_follower_returns_the_exit_code_of_the_design(scene: Scene, code: int, signal: str | None) -> None:
    scene.remote.status(
        "killed" if signal else "failed" if code else "finished", exit_code=code, signal=signal
    )
    scene.remote.supervisor = scene.remote.trainer = "gone"
    assert scene.logs(follow=True) == code
    said = f"KILLED {signal}\n" if signal else f"FAILED rc={code}\n" if code else ""
    notes = scene.notes.getvalue()
    assert said in notes if code else notes == ""


def test_a_follower_of_a_run_that_somebody_else_resumed_goes_on_to_its_new_end(scene: Scene) -> None:
    scene.remote.files["train.log"] += b"attempt 1\n"
    scene.remote.finish(1)
    assert scene.logs(follow=True) == 1
    scene.remote.files["train.log"] += b"attempt 2\n"
    scene.remote.status("running", attempt=2)
    scene.remote.supervisor = scene.remote.trainer = "alive"
    scene.in_thread(follow=True)
    until(lambda: b"attempt 2" in scene.out.getvalue())
    scene.remote.finish(3)
    assert scene.join() == 3


def test_an_ended_run_whose_place_cannot_be_asked_is_printed_with_that_and_its_code(scene: Scene) -> None:
    scene.remote.files["train.log"] += b"attempt 1\n"
    scene.remote.finish(1)
    assert scene.logs(follow=True) == 1
    scene.line.error = UnreachableError("gpubox: no route")
    assert scene.logs(follow=True) == 1
    assert scene.logs() == 0
    assert scene.out.getvalue() == b"attempt 1\n" * 3
    assert scene.notes.getvalue().count("gpubox: no route") == 2


def test_a_follower_of_an_ended_run_ends_where_its_folder_takes_no_writer(scene: Scene) -> None:
    scene.remote.finish(1)
    assert scene.logs(follow=True) == 1
    (scene.folder / LOCK).unlink()
    (scene.folder / LOCK).mkdir()
    assert scene.logs(follow=True) == 1
    assert "mirror.lock" in scene.notes.getvalue()


def test_a_follower_of_a_failed_run_is_told_what_is_known_to_help(scene: Scene) -> None:
    scene.remote.files["train.log"] += b"RuntimeError: CUDA out of memory\n"
    scene.remote.finish(1)
    assert scene.logs(follow=True) == 1
    known = diagnose_text("CUDA out of memory")
    assert known is not None
    assert scene.notes.getvalue().splitlines()[-1] == f"dflashctl: what to do: {known.do}"


def test_a_run_that_nobody_works_on_any_more_is_lost(scene: Scene) -> None:
    scene.remote.supervisor = scene.remote.trainer = "gone"
    assert scene.logs(follow=True) == 74
    assert "LOST: neither supervisor nor trainer" in scene.notes.getvalue()


def test_a_half_line_waits_for_its_rest_and_is_shown_when_nothing_comes(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = HandClock()
    monkeypatch.setattr(logs, "time", SimpleNamespace(monotonic=clock, time=time.time))
    scene.in_thread(follow=True)
    scene.remote.files["train.log"] += b"one\nLoading \xe6\x97"
    until(lambda: scene.out.getvalue() == b"one\n")
    for passed in (0.0, 0.99):
        clock.show(passed * logs.QUIET_S)
        until(clock.was_read)
        assert scene.out.getvalue() == b"one\n"
    clock.show(1.01 * logs.QUIET_S)
    until(lambda: scene.out.getvalue() == b"one\nLoading ")  # and still not half a character
    scene.remote.files["train.log"] += b"\xa5 done\n"
    until(lambda: scene.out.getvalue() == b"one\nLoading \xe6\x97\xa5 done\n")
    scene.remote.finish()
    assert scene.join() == 0


def test_a_line_without_an_end_is_passed_on_in_pieces(scene: Scene) -> None:
    scene.in_thread(follow=True)
    scene.remote.files["train.log"] += b"x" * 300_000
    until(lambda: len(scene.out.getvalue()) > 200_000)
    scene.remote.finish()
    assert scene.join() == 0
    assert scene.out.getvalue() == b"x" * 300_000


def test_without_follow_what_is_there_is_fetched_and_printed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASHCTL_TIME_SCALE", "6")  # what was heard a busy machine's moment ago is not old
    scene.remote.files["train.log"] += b"so far\nhalf"
    assert scene.logs() == 0
    assert scene.out.getvalue() == b"so far\nhalf"
    assert scene.notes.getvalue() == ""
    scene.remote.files["train.log"] += b" and more\n"
    assert scene.logs() == 0
    assert scene.out.getvalue() == b"so far\nhalfso far\nhalf and more\n"


def test_without_follow_an_unreachable_place_is_said_with_the_age_of_what_is_printed(scene: Scene) -> None:
    scene.remote.files["train.log"] += b"so far\n"
    assert scene.logs() == 0
    scene.line.error = UnreachableError("no route to host")
    assert scene.logs() == 0
    assert scene.out.getvalue() == b"so far\n" * 2
    assert "as of" in scene.notes.getvalue()
    assert "no route to host" in scene.notes.getvalue()


def test_without_follow_and_without_a_byte_the_error_is_raised(scene: Scene) -> None:
    scene.line.error = UnreachableError("no route to host")
    with pytest.raises(UnreachableError):
        scene.logs()


@pytest.mark.parametrize(
    ("log", "count", "printed"),
    [
        (b"a\nb\nc\n", 2, b"b\nc\n"),
        (b"a\nb\nc", 2, b"b\nc"),
        (b"a\nb\nc\n", 0, b""),
        (b"a\nb\n", 9, b"a\nb\n"),
        (b"\n\n\n", 2, b"\n\n"),
        (b"x" * 70_000 + b"\n" + b"y" * 70_000 + b"\nlast\n", 2, b"y" * 70_000 + b"\nlast\n"),
        (b"", 5, b""),
    ],
)
def test_tail_gives_the_last_lines(scene: Scene, log: bytes, count: int, printed: bytes) -> None:
    scene.remote.files["train.log"] += log
    assert scene.logs(tail=count) == 0
    assert scene.out.getvalue() == printed


def test_tail_and_follow_wait_for_the_end_of_what_is_there_before_they_count(scene: Scene) -> None:
    scene.line.chunk = 100
    scene.remote.files["train.log"] += b"".join(b"line %d\n" % number for number in range(2000))
    scene.in_thread(follow=True, tail=1)
    until(lambda: scene.out.getvalue())
    scene.remote.files["train.log"] += b"new\n"
    scene.remote.finish()
    assert scene.join() == 0
    assert scene.out.getvalue() == b"line 1999\nnew\n"


def test_bytes_that_were_left_out_are_said_and_not_invented(scene: Scene) -> None:
    line = b"0123456789abcde\n"
    scene.remote.files["train.log"] += line * ((LOG_TAIL_BYTES + 160_000) // len(line))
    scene.line.chunk = 1 << 20
    assert scene.logs() == 0
    assert scene.out.getvalue() == line * (LOG_TAIL_BYTES // len(line))
    assert "160000 older bytes were not copied" in scene.notes.getvalue()


def test_all_of_a_log_that_was_attached_late_is_fetched_and_printed_in_order(scene: Scene) -> None:
    line = b"0123456789abcde\n"
    log = line * ((LOG_TAIL_BYTES + 160_000) // len(line))
    scene.remote.files["train.log"] += log
    scene.line.chunk = 1 << 20
    assert scene.logs() == 0
    assert "--all" in scene.notes.getvalue()
    scene.out.seek(0)
    scene.out.truncate()
    ask_for_whole_log(scene.folder)
    assert scene.logs(whole=True) == 0
    assert scene.out.getvalue() == log


def test_all_of_a_log_is_waited_for_by_a_follower_beside_the_holder(scene: Scene) -> None:
    log = b"".join(b"line %d\n" % n for n in range(200_000))
    scene.remote.files["train.log"] += log
    scene.line.chunk = 1 << 20
    holder = scene.mirror()
    until(lambda: holder.holds_lock and rundir.read_whole(scene.folder / MIRROR)["complete"])
    ask_for_whole_log(scene.folder)
    scene.in_thread(follow=True, whole=True)
    until(lambda: scene.out.getvalue() == log)
    scene.remote.files["train.log"] += b"new\n"
    scene.remote.finish()
    assert scene.join() == 0
    assert scene.out.getvalue() == log + b"new\n"


def test_bytes_that_come_with_the_mirrors_end_are_printed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = b"".join(b"line %d\n" % n for n in range(200_000))
    scene.remote.files["train.log"] += log
    scene.line.chunk = 1 << 20
    ask_for_whole_log(scene.folder)
    scene.line.hang.clear()  # nothing arrives before the first look
    mirror = scene.mirror(once=True)
    look = MirrorReader.waits_at_hole

    def late(reader: MirrorReader) -> bool:  # a look at the hole that takes until the mirror has filled it
        until(lambda: not mirror.running)
        return look(reader)

    monkeypatch.setattr(MirrorReader, "waits_at_hole", late)
    read, held_up = MirrorReader.read, threading.Event()

    def early(reader: MirrorReader, *most: int) -> Any:
        if not held_up.is_set():
            held_up.set()
            scene.line.hang.set()
            return None  # what a look before the first byte finds
        return read(reader, *most)

    monkeypatch.setattr(MirrorReader, "read", early)
    assert scene.logs(whole=True, mirror=mirror) == 0
    assert scene.out.getvalue() == log


def test_older_bytes_that_cannot_be_had_now_are_left_out_and_said(scene: Scene) -> None:
    log = b"".join(b"line %d\n" % n for n in range(200_000))
    scene.remote.files["train.log"] += log
    scene.line.chunk = 1 << 20
    assert scene.logs() == 0
    shown = scene.out.getvalue()
    scene.line.error = UnreachableError("no route")
    ask_for_whole_log(scene.folder)
    assert scene.logs(whole=True) == 0
    assert scene.out.getvalue() == shown * 2
    assert "no route" in scene.notes.getvalue()


@pytest.mark.parametrize("follow", [False, True])
def test_an_older_feed_that_fills_no_holes_is_waited_for_no_longer_than_its_limit(
    scene: Scene, follow: bool
) -> None:
    line = b"0123456789abcde\n"
    scene.remote.files["train.log"] += line * ((LOG_TAIL_BYTES + 160_000) // len(line))
    scene.remote.fills_holes = False
    scene.line.chunk = 1 << 20
    ask_for_whole_log(scene.folder)
    mirror = scene.mirror(once=not follow, timing=dataclasses.replace(TIMING, fill_s=0.5))
    scene.in_thread(follow=follow, whole=True, mirror=mirror)
    until(lambda: scene.out.getvalue() == line * (LOG_TAIL_BYTES // len(line)))
    said = f"160000 older bytes are left out: {NO_OLDER}; `dflashctl pull RUN log` gets all of it"
    assert said in scene.notes.getvalue()
    scene.remote.files["train.log"] += b"new\n"
    scene.remote.finish()
    assert scene.join() == 0
    assert not follow or scene.out.getvalue().endswith(line + b"new\n")


def test_a_log_that_begins_anew_is_printed_anew_and_said(scene: Scene) -> None:
    scene.in_thread(follow=True)
    scene.remote.files["train.log"] += b"first life\n"
    until(lambda: scene.out.getvalue() == b"first life\n")
    scene.remote.replace_file("train.log", b"second\n")
    until(lambda: scene.out.getvalue() == b"first life\nsecond\n")
    scene.remote.finish()
    assert scene.join() == 0
    assert "truncated or replaced" in scene.notes.getvalue()


def test_a_reader_beside_the_holder_of_the_lock_sees_the_same_bytes(scene: Scene) -> None:
    holder = scene.mirror()
    until(lambda: holder.holds_lock)
    scene.in_thread(follow=True)
    for number in range(50):
        scene.remote.files["train.log"] += b"line %d\n" % number
        time.sleep(0.002)
    until(lambda: len(scene.out.getvalue()) == len(scene.remote.files["train.log"]))
    assert scene.line.attempts == 1
    holder.stop()
    scene.remote.files["train.log"] += b"after the takeover\n"
    scene.remote.finish()
    assert scene.join() == 0
    assert scene.out.getvalue() == bytes(scene.remote.files["train.log"])


def test_a_holder_that_stands_still_is_named(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trouble, "_PATIENCE_S", 0.2)
    record = {"kind": "mirror", "state": "connected", "t": time.time(), "pid": 4711, "files": {}}
    (scene.folder / MIRROR).write_text(json.dumps(record))
    import fcntl

    with (scene.folder / "mirror.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        scene.in_thread(follow=True)
        until(lambda: "process 4711 holds this run's mirror" in scene.notes.getvalue())
    scene.remote.finish()
    assert scene.join() == 0


def test_a_feed_that_refuses_for_good_ends_the_follower(scene: Scene) -> None:
    scene.remote.run_id = "another-run"
    with pytest.raises(ProtocolError, match="another-run"):
        scene.logs(follow=True)


def test_a_refused_login_does_not_end_a_follower(scene: Scene) -> None:
    from controller.errors import AuthenticationError

    scene.line.error = AuthenticationError("no key fits", "add one to the agent")
    scene.in_thread(follow=True)
    until(lambda: "refused: no key fits: add one to the agent" in scene.notes.getvalue())
    scene.line.error = None
    scene.remote.finish()
    assert scene.join() == 0
    assert scene.notes.getvalue().count("no key fits") == 1


@pytest.mark.slow
def test_on_a_terminal_the_line_is_rewritten_with_its_countdown_and_wiped(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    scene.notes = Terminal()
    scene.line.error = UnreachableError("no route")
    timing = type(TIMING)(backoff=(2.5,), jitter=0.0, poll_s=0.005, beat_s=0.02)
    mirror = Mirror(scene.folder, place_opener=scene.line.open, timing=timing)
    scene.mirrors.append(mirror)
    mirror.start()
    scene.in_thread(follow=True, mirror=mirror)
    counted = ("next try in 2 s", "next try in 1 s")
    until(lambda: all(seconds in scene.notes.getvalue() for seconds in counted))
    assert "\n" not in scene.notes.getvalue()
    scene.line.error = None
    scene.remote.files["train.log"] += b"hello\n"
    mirror.poke()
    until(lambda: scene.out.getvalue() == b"hello\n")
    scene.remote.finish()
    assert scene.join() == 0
    assert "\r\033[K" in scene.notes.getvalue()
    assert scene.notes.getvalue().endswith("\n")


def test_a_reader_that_has_gone_is_noticed_while_nothing_is_printed(scene: Scene) -> None:
    reading, writing = os.pipe()
    mirror = scene.mirror()
    os.close(reading)
    with os.fdopen(writing, "wb", buffering=0) as out, pytest.raises(BrokenPipeError):
        follow_log(scene.folder, follow=True, tail=None, out=out, mirror=mirror, notes=scene.notes)


@given(text=st.text(min_size=1, max_size=8), cut=st.integers(0, 40))
@settings(max_examples=200, deadline=None)
def test_whole_characters_never_cuts_one_and_holds_at_most_three_bytes(text: str, cut: int) -> None:
    data = text.encode("utf-8", "replace")[:cut]
    end = whole_characters(data)
    data[:end].decode()
    assert len(data) - end <= 3
    if data.decode(errors="ignore").encode() == data:
        assert end == len(data)


@given(data=st.binary(max_size=8))
def test_bytes_that_are_no_utf8_are_not_held_for_ever(data: bytes) -> None:
    assert 0 <= len(data) - whole_characters(data) <= 3
    assert whole_characters(data + b"\n") == len(data) + 1
    assert whole_characters(data + b"\x80\x80\x80\x80") == len(data) + 4


def test_a_reader_discards_bytes_that_changed_under_it(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def claim(generation: int, size: int) -> None:
        files = {
            "train.log": {"generation": generation, "size": size, "extents": [[0, size]] if size else []}
        }
        rundir.write_whole(scene.folder / MIRROR, json.dumps({"files": files}).encode())

    (scene.folder / "train.log").write_bytes(b"old bytes")
    claim(1, 9)
    reader = MirrorReader(scene.folder)
    read = os.pread
    swapped = False

    def pread(descriptor: int, size: int, offset: int) -> bytes:
        nonlocal swapped
        if not swapped:  # the writer replaces the file between our two looks at its record
            swapped = True
            claim(2, 0)
            (scene.folder / "train.log").write_bytes(b"new")
            claim(2, 3)
        return read(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", pread)
    piece = reader.read()
    assert piece is not None
    assert piece.data == b"new"
    assert reader.read() is None
