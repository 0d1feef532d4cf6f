"""The feed as a process, read by a decoder written from docs/rundir.md alone."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from remote_payload import feed
from remote_payload.run_folder import RunFolder
from tests.waiting import until

ROOT = Path(__file__).parents[2]
BOOT = Path("/proc/sys/kernel/random/boot_id").read_text().strip()

FAST = 0.05
PATIENT = """
import dataclasses, sys
from pathlib import Path
from remote_payload import feed
scaled = feed.Timing.scaled
feed.Timing.scaled = lambda scale: dataclasses.replace(scaled(scale), silence=60.0)
sys.exit(feed.feed(Path(sys.argv[2]), sys.argv[3]))
"""
"""A feed at `FAST` that a busy machine, which holds the pings up, does not end."""


class Reader:
    """Starts a feed and keeps, by generation, the bytes it sends."""

    def __init__(
        self,
        run_dir: Path,
        request: Any = None,
        *,
        scale: float = FAST,
        pings: bool = True,
        reading: bool = True,
        slow: float = 0.0,
        command: str = "feed",
        program: str = "",
    ) -> None:
        if not program and command == "feed" and scale == FAST:
            program = PATIENT
        how = ["-c", program] if program else [str(ROOT / "remote_payload")]
        self.process = subprocess.Popen(
            [sys.executable, "-S", *how, command, str(run_dir), "nonce-1"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"DFLASHCTL_TIME_SCALE": str(scale), "PYTHONPATH": str(ROOT)},
        )
        self.frames: list[dict[str, Any]] = []
        self.appended: dict[tuple[str, int], bytearray] = {}
        self.first_offset: dict[tuple[str, int], int] = {}
        self.older = bytearray()
        self.small: dict[str, bytes] = {}
        self.failure: str | None = None
        self.ended = threading.Event()
        self.say({"have": {}, "log_tail": None} if request is None else request)
        self._pings = pings
        self._slow = slow
        self.pause = threading.Lock()
        """Whoever holds it holds the reader up, at its next frame of appended bytes."""
        threading.Thread(target=self._ping, args=(scale,), daemon=True).start()
        if reading:
            threading.Thread(target=self._read, daemon=True).start()

    def say(self, value: Any) -> None:
        text = value if isinstance(value, bytes) else json.dumps(value).encode() + b"\n"
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(text)
            self.process.stdin.flush()

    def _ping(self, scale: float) -> None:
        while self._pings and self.process.poll() is None:
            self.say({})
            time.sleep(5 * scale)

    def _read(self) -> None:
        stream = self.process.stdout
        assert stream is not None
        try:
            assert stream.readline() == b"nonce-1\n"
            while line := stream.readline():
                frame = json.loads(line)
                size = frame.get("size")
                data = stream.read(size) if size is not None else b""
                if len(data) != (size or 0):
                    break
                self._take(frame, data)
        except (AssertionError, ValueError, KeyError) as error:
            self.failure = repr(error)
        self.ended.set()

    def _take(self, frame: dict[str, Any], data: bytes) -> None:
        kind = frame["frame"]
        assert len(data) <= 1 << 20
        if kind == "append":
            with self.pause:
                time.sleep(self._slow)
            key = (frame["file"], frame["generation"])
            if frame["offset"] < self.first_offset.get(key, 0):
                assert frame["offset"] == len(self.older), "a gap or a repetition"
                self.older += data
                self.frames.append(frame)
                return
            held = self.appended.setdefault(key, bytearray())
            start = self.first_offset.setdefault(key, frame["offset"])
            assert frame["offset"] == start + len(held), "a gap or a repetition"
            held += data
        elif kind == "replace":
            self.small[frame["file"]] = data
        elif kind == "beat":
            for name, state in frame["files"].items():
                key = (name, state["generation"])
                got = self.first_offset.get(key, 0) + len(self.appended.get(key, b""))
                assert key not in self.first_offset or state["size"] <= got, "announced, not sent"
        self.frames.append(frame)

    def newest(self, name: str) -> tuple[int, bytes]:
        generations = [g for n, g in self.appended if n == name]
        if not generations:
            return 0, b""
        return max(generations), bytes(self.appended[name, max(generations)])

    def kinds(self, kind: str) -> list[dict[str, Any]]:
        return [frame for frame in list(self.frames) if frame["frame"] == kind]

    def until(self, condition: Callable[[], object]) -> None:
        until(lambda: self.failure or condition(), seen=lambda: self.frames[-3:])
        assert self.failure is None, self.failure

    def waiting_bytes(self) -> int:
        """Bytes that the feed has sent and nobody has read yet, in the pipe."""
        assert self.process.stdout is not None
        held = fcntl.ioctl(self.process.stdout.fileno(), termios.FIONREAD, bytes(4))
        return int.from_bytes(held, sys.byteorder)

    def until_newest(self, name: str, generation: int, data: bytes) -> None:
        self.until(lambda: self.newest(name) == (generation, data))

    def until_small(self, name: str, data: bytes) -> None:
        self.until(lambda: self.small.get(name) == data)

    def until_supervisor(self, presence: str) -> None:
        self.until(lambda: presence in [beat["supervisor"] for beat in self.kinds("beat")[-1:]])

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            with contextlib.suppress(OSError):
                assert stream is not None
                stream.close()


@contextlib.contextmanager
def reading(run_dir: Path, request: Any = None, **options: Any) -> Iterator[Reader]:
    reader = Reader(run_dir, request, **options)
    try:
        yield reader
    finally:
        reader.close()


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def have(data: bytes, size: int | None = None, generation: int = 1, **more: Any) -> dict[str, Any]:
    """What a mirror says of a file of which it has the first `size` bytes of `data`."""
    size = len(data) if size is None else size
    head, tail = data[: min(size, 4096)], data[max(0, size - 256) : size]
    told = {"generation": generation, "size": size, "head": len(head), "head_sha256": sha(head)}
    return told | {"tail": len(tail), "tail_sha256": sha(tail)} | more


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "a-run"
    (path / "crash").mkdir(parents=True)
    return path


def write_status(run_dir: Path, process: int | None, boot: str = BOOT) -> None:
    who = None
    if process is not None:
        stat = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        who = {"pid": process, "start_ticks": int(stat[19])}
    record = {"kind": "status", "boot_id": boot, "supervisor": who, "trainer": who}
    temporary = run_dir / ".status.tmp"
    temporary.write_text(json.dumps(record))
    temporary.rename(run_dir / "status.json")


def test_hello_comes_first_and_names_the_run_and_the_versions(run_dir: Path) -> None:
    with reading(run_dir) as reader:
        reader.until(lambda: bool(reader.kinds("beat")))
        hello = reader.frames[0]
        assert hello["frame"] == "hello"
        assert (hello["protocol"], hello["schema"], hello["run"]) == (1, 1, "a-run")
        assert hello["boot_id"] == BOOT
        assert abs(hello["t"] - time.time()) < 60


def test_all_bytes_of_all_files_arrive_also_half_lines(run_dir: Path) -> None:
    contents = {
        "train.log": os.urandom(3_000_000) + b"no newline at the end",
        "events.jsonl": b'{"a":1}\n{"half',
        "gpu.jsonl": b"",
        "crash/thread-x.json": b"{}\n",
    }
    for name, data in contents.items():
        (run_dir / name).write_bytes(data)
    (run_dir / "job.toml").write_text("x = 1\n")
    with reading(run_dir) as reader:
        reader.until(lambda: bool(reader.kinds("beat")))
        for name, data in contents.items():
            if data:
                assert sha(reader.newest(name)[1]) == sha(data)
        assert reader.small == {"job.toml": b"x = 1\n"}
        sizes = {n: s["size"] for n, s in reader.kinds("beat")[0]["files"].items()}
        assert sizes == {name: len(data) for name, data in contents.items()}
        # The half line is completed, and only the new bytes are sent.
        with (run_dir / "events.jsonl").open("ab") as file:
            file.write(b' line"}\n')
        whole = (run_dir / "events.jsonl").read_bytes()
        reader.until(lambda: reader.newest("events.jsonl") == (1, whole))


def test_a_writer_at_full_speed_loses_nothing_and_beats_go_on(run_dir: Path) -> None:
    write_status(run_dir, os.getpid())
    size = 32 << 20
    code = (
        "import os,sys; f=os.open(sys.argv[1], os.O_WRONLY|os.O_CREAT|os.O_APPEND)\n"
        "for n in range(int(sys.argv[2])//65536): os.write(f, os.urandom(65536))"
    )
    with (
        reading(run_dir) as reader,
        subprocess.Popen([sys.executable, "-S", "-c", code, str(run_dir / "train.log"), str(size)]) as writer,
    ):
        assert writer.wait(60) == 0
        reader.until(lambda: len(reader.newest("train.log")[1]) == size)
        assert sha(reader.newest("train.log")[1]) == sha((run_dir / "train.log").read_bytes())
        assert reader.newest("train.log")[0] == 1
        beats = reader.kinds("beat")
        gaps = [b["mono"] - a["mono"] for a, b in itertools.pairwise(beats)]
        assert max(gaps, default=0) < 30.0  # 0.1 s by its clock; the rest is this machine's load


def test_a_reader_gets_only_what_it_lacks(run_dir: Path) -> None:
    data = os.urandom(20_000)
    (run_dir / "train.log").write_bytes(data)
    (run_dir / "events.jsonl").write_bytes(data)
    request = {"have": {"train.log": have(data, 12_345, generation=4)}, "log_tail": None}
    with reading(run_dir, request) as reader:
        reader.until(lambda: bool(reader.kinds("beat")))
        assert reader.appended["train.log", 4] == data[12_345:]
        assert reader.first_offset["train.log", 4] == 12_345
        assert reader.appended["events.jsonl", 1] == data


@pytest.mark.parametrize("what", ["other bytes", "shorter"])
def test_a_file_replaced_while_nobody_watched_is_sent_anew_under_the_next_generation(
    run_dir: Path, what: str
) -> None:
    data = os.urandom(20_000)
    new = data[:10_000] if what == "shorter" else os.urandom(30_000)
    (run_dir / "train.log").write_bytes(new)
    with reading(run_dir, {"have": {"train.log": have(data, generation=2)}}) as reader:
        reader.until(lambda: bool(reader.kinds("beat")))
        assert reader.newest("train.log") == (3, new)
        assert ("train.log", 2) not in reader.appended


@pytest.mark.parametrize("what", ["another end", "another middle, another inode"])
def test_a_replacement_of_the_same_size_and_beginning_is_noticed_by_its_end_or_its_inode(
    run_dir: Path, what: str
) -> None:
    data = os.urandom(20_000)
    new = data[:19_999] + b"\n" if what == "another end" else data[:9000] + b"\n" + data[9001:]
    path = run_dir / "train.log"
    path.write_bytes(new)
    inode = path.stat().st_ino + (0 if what == "another end" else 1)
    with reading(run_dir, {"have": {"train.log": have(data, inode=inode)}}) as reader:
        reader.until(lambda: bool(reader.kinds("beat")))
        assert reader.newest("train.log") == (2, new)


def test_a_file_that_is_the_same_by_inode_head_and_tail_is_continued(run_dir: Path) -> None:
    data = os.urandom(20_000)
    path = run_dir / "train.log"
    path.write_bytes(data + b"more\n")
    with reading(run_dir, {"have": {"train.log": have(data, inode=path.stat().st_ino)}}) as reader:
        reader.until_newest("train.log", 1, b"more\n")
        reader.until(lambda: bool(reader.kinds("beat")))
        assert reader.kinds("beat")[0]["files"]["train.log"]["inode"] == path.stat().st_ino


def test_a_file_that_is_renamed_away_is_sent_to_its_end_before_the_new_one(run_dir: Path) -> None:
    path = run_dir / "train.log"
    path.write_bytes(b"start\n")
    with reading(run_dir) as reader:
        reader.until_newest("train.log", 1, b"start\n")
        reader.process.send_signal(signal.SIGSTOP)
        with path.open("ab") as file:
            file.write(b"last words\n")
            path.rename(run_dir / "train.log.1")
        path.write_bytes(b"new\n")
        reader.process.send_signal(signal.SIGCONT)
        reader.until_newest("train.log", 2, b"new\n")
        assert bytes(reader.appended["train.log", 1]) == b"start\nlast words\n"


def test_truncation_starts_a_generation_even_when_the_file_grew_past_its_old_size(
    run_dir: Path,
) -> None:
    path = run_dir / "train.log"
    path.write_bytes(b"old " * 2000)
    with reading(run_dir) as reader:
        reader.until(lambda: len(reader.newest("train.log")[1]) == 8000)
        with path.open("r+b") as file:  # one write, so no look can fall in between
            file.write(b"new " * 5000)
        reader.until(lambda: reader.newest("train.log") == (2, b"new " * 5000))
        with path.open("r+b") as file:
            file.truncate(100)
        reader.until(lambda: reader.newest("train.log") == (3, (b"new " * 25)))


def test_a_file_rewritten_behind_an_unchanged_head_is_noticed_by_its_last_bytes(
    run_dir: Path,
) -> None:
    path = run_dir / "train.log"
    head = b"h" * 5000
    path.write_bytes(head + b"one" * 300)
    with reading(run_dir) as reader:
        reader.until(lambda: len(reader.newest("train.log")[1]) == 5900)
        path.write_bytes(head + b"two" * 400)
        reader.until(lambda: reader.newest("train.log")[1] == head + b"two" * 400)
        assert reader.newest("train.log")[0] >= 2


def test_a_file_rewritten_in_front_of_unchanged_last_bytes_is_noticed_by_its_head(
    run_dir: Path,
) -> None:
    path = run_dir / "train.log"
    path.write_bytes(b"h" * 5000)
    with reading(run_dir) as reader:
        reader.until(lambda: len(reader.newest("train.log")[1]) == 5000)
        with path.open("r+b") as file:
            file.write(b"other")
        reader.until_newest("train.log", 2, b"other" + b"h" * 4995)


def test_replacement_by_rename_starts_a_generation_even_with_the_same_bytes_in_front(
    run_dir: Path,
) -> None:
    path = run_dir / "events.jsonl"
    path.write_bytes(b"a" * 6000)
    with reading(run_dir) as reader:
        reader.until(lambda: len(reader.newest("events.jsonl")[1]) == 6000)
        other = run_dir / ".new"
        other.write_bytes(b"a" * 7000)
        other.rename(path)
        reader.until(lambda: reader.newest("events.jsonl") == (2, b"a" * 7000))


def test_two_inodes_that_alternate_under_one_name_are_never_taken_for_no_change(
    run_dir: Path,
) -> None:
    """Both files stay linked, so each rename brings back an inode number seen before."""
    path, one, two = run_dir / "train.log", run_dir / ".one", run_dir / ".two"
    one.write_bytes(b"1" * 5000)
    two.write_bytes(b"2" * 5000)
    with reading(run_dir) as reader:
        for generation in range(1, 9):
            source = one if generation % 2 else two
            with (source).open("ab") as file:
                file.write(b"%d" % generation)
            link = run_dir / ".link"
            os.link(source, link)
            link.rename(path)
            expected = source.read_bytes()
            reader.until_newest("train.log", generation, expected)


def test_renames_that_reuse_the_freed_inode_are_noticed(run_dir: Path) -> None:
    path = run_dir / "train.log"
    with reading(run_dir) as reader:
        for generation in range(1, 7):
            temporary = run_dir / ".tmp"
            temporary.write_bytes(b"same head" * 600 + b"%d" % generation)
            temporary.rename(path)
            expected = path.read_bytes()
            reader.until_newest("train.log", generation, expected)


def test_a_deleted_file_leaves_the_beat_and_comes_back_as_a_new_generation(run_dir: Path) -> None:
    path = run_dir / "train.log"
    path.write_bytes(b"first")
    with reading(run_dir) as reader:
        reader.until(lambda: reader.newest("train.log") == (1, b"first"))
        path.unlink()
        reader.until(lambda: bool(reader.kinds("beat")))
        reader.until(lambda: "train.log" not in reader.kinds("beat")[-1]["files"])
        path.write_bytes(b"first")
        reader.until(lambda: reader.newest("train.log") == (2, b"first"))


def test_a_small_file_is_sent_whole_whenever_its_bytes_change(run_dir: Path) -> None:
    with reading(run_dir) as reader:
        for number in range(5):
            temporary = run_dir / ".progress"
            temporary.write_text(json.dumps({"step": number}))
            temporary.rename(run_dir / "progress.json")
            expected = b'{"step": %d}' % number
            reader.until_small("progress.json", expected)
        (run_dir / "progress.json").touch()  # the same bytes again are not sent again
        beats = len(reader.kinds("beat"))
        reader.until(lambda: len(reader.kinds("beat")) > beats + 2)
        sequences = [frame["sequence"] for frame in reader.kinds("replace")]
        assert sequences == sorted(set(sequences)) and len(sequences) == 5


def test_a_small_file_that_is_too_large_is_left_out_and_the_beat_says_so(run_dir: Path) -> None:
    (run_dir / "progress.json").write_bytes(b"x" * ((1 << 20) + 1))
    with reading(run_dir) as reader:
        reader.until(lambda: bool(reader.kinds("beat")))
        assert "progress.json" in reader.kinds("beat")[0]["left_out"]
        assert not reader.kinds("replace")
        (run_dir / "progress.json").write_bytes(b"x" * (1 << 20))
        reader.until(lambda: len(reader.small.get("progress.json", b"")) == 1 << 20)
        reader.until(lambda: "left_out" not in reader.kinds("beat")[-1])


def test_links_pipes_and_odd_names_are_neither_followed_nor_sent(run_dir: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    crash = run_dir / "crash"
    (crash / "link.json").symlink_to(secret)
    (run_dir / "train.log").symlink_to(secret)
    (run_dir / "status.json").symlink_to(secret)
    os.mkfifo(crash / "pipe.json")
    os.mkfifo(run_dir / "events.jsonl")
    (crash / "folder.json").mkdir()
    for name in (".hidden", "with space", "ü", "a\nb", "-dash"):
        (crash / name).write_text("odd")
    (crash / "good-1.json").write_text("good")
    (run_dir / "other.txt").write_text("other")
    with reading(run_dir) as reader:
        reader.until(lambda: len(reader.kinds("beat")) > 3)
        assert set(reader.appended) == {("crash/good-1.json", 1)}
        assert not reader.small
        assert set(reader.kinds("beat")[-1]["files"]) == {"crash/good-1.json"}


def test_a_link_in_place_of_the_crash_folder_is_not_followed(run_dir: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "secret").write_text("secret")
    (run_dir / "crash").rmdir()
    (run_dir / "crash").symlink_to(other)
    with reading(run_dir) as reader:
        reader.until(lambda: len(reader.kinds("beat")) > 2)
        assert not reader.appended


def test_an_empty_crash_file_is_not_announced_until_it_holds_something(run_dir: Path) -> None:
    path = run_dir / "crash" / "stacks-fatal.txt"
    path.touch()
    with reading(run_dir) as reader:
        reader.until(lambda: len(reader.kinds("beat")) > 1)
        assert reader.kinds("beat")[-1]["files"] == {}
        path.write_text("Fatal Python error")
        reader.until(lambda: reader.newest("crash/stacks-fatal.txt")[1] == b"Fatal Python error")


TWO_CRASH_FILES = """
import sys
from pathlib import Path
from remote_payload import feed
feed._MOST_CRASH_FILES = 2
sys.exit(feed.feed(Path(sys.argv[2]), sys.argv[3]))
"""


def test_of_too_many_crash_files_the_newest_are_sent_whatever_their_names(run_dir: Path) -> None:
    def write(name: str, t: int) -> None:
        with (run_dir / "crash" / f"{name}.json").open("a") as file:
            file.write(f"{t}\n")
        os.utime(run_dir / "crash" / f"{name}.json", (t, t))

    def newest(reader: Reader) -> str:
        return "".join(sorted(Path(name).stem for name in reader.kinds("beat")[-1]["files"]))

    for t, name in enumerate("dcba", 1):
        write(name, t)
    with reading(run_dir, program=TWO_CRASH_FILES) as reader:
        reader.until(lambda: bool(reader.kinds("beat")))
        assert newest(reader) == "ab"
        assert reader.kinds("beat")[-1]["left_out"] == {"crash": "2 files, the oldest"}
        write("z", 5)
        reader.until(lambda: newest(reader) == "az")
        assert bytes(reader.appended["crash/z.json", 1]) == b"5\n"
        for t, name in enumerate("bd", 6):  # one that was sent before goes on where it was left
            write(name, t)
        reader.until(lambda: newest(reader) == "bd")
        sent = {Path(name).stem: bytes(data) for (name, _), data in reader.appended.items()}
        assert sent == {"a": b"4\n", "b": b"3\n6\n", "d": b"1\n7\n", "z": b"5\n"}
        assert {generation for _, generation in reader.appended} == {1}


@pytest.mark.parametrize(
    ("data", "tail", "start"),
    [
        (b"one\ntwo\nthree\n", 7, 8),  # 7 bytes back is inside "two"... its end is a line's start
        (b"one\ntwo\nthree\nfour\n", 11, 8),  # exactly at a line's start
        (b"one\ntwo\nthree\n", 100, 0),
        (b"x" * 5000, 100, 4900),  # no line ends: from where it was asked
        (b"one\n" + b"bar\r" * 100, 40, 364),
        (b"one\ntwo\n", 0, 8),
        (b"", 10, 0),
    ],
)
def test_a_log_is_attached_late_at_a_line_start(run_dir: Path, data: bytes, tail: int, start: int) -> None:
    (run_dir / "train.log").write_bytes(data)
    (run_dir / "events.jsonl").write_bytes(data)
    with reading(run_dir, {"have": {}, "log_tail": tail}) as reader:
        reader.until(lambda: bool(reader.kinds("beat")))
        with (run_dir / "train.log").open("ab") as file:
            file.write(b"more")
        reader.until(lambda: reader.newest("train.log")[1].endswith(b"more"))
        assert reader.first_offset["train.log", 1] == start
        assert reader.newest("train.log") == (1, data[start:] + b"more")
        assert reader.newest("events.jsonl")[1] == data  # only the log is cut


def test_older_bytes_are_sent_on_request_and_new_ones_do_not_wait_for_them(run_dir: Path) -> None:
    data = b"".join(b"line %d\n" % n for n in range(1_000_000))
    (run_dir / "train.log").write_bytes(data)
    with reading(run_dir, {"have": {}, "log_tail": 100}) as reader:
        reader.until(lambda: bool(reader.kinds("beat")))
        start = reader.first_offset["train.log", 1]
        assert len(data) - 100 <= start < len(data)
        ranges = [[0, start // 2], [start // 2, start]]
        with reader.pause:
            reader.say({"fill": {"train.log": {"generation": 1, "ranges": ranges}}})
            reader.until(lambda: reader.waiting_bytes() >= 1 << 15)  # it is in the middle of them
            with (run_dir / "train.log").open("ab") as file:
                file.write(b"new\n")
        reader.until(lambda: len(reader.older) == start)
        assert bytes(reader.older) == data[:start]
        assert reader.newest("train.log")[1].endswith(b"new\n")
        offsets = [frame["offset"] for frame in reader.kinds("append")]
        assert offsets.index(len(data)) < len(offsets) - 1, "the last older bytes came behind the new ones"
        before = len(reader.kinds("append"))
        reader.say(
            {"fill": {"train.log": {"generation": 7, "ranges": [[0, 10]]}}}
        )  # a generation of the past
        reader.until(lambda: reader.frames[-1]["frame"] == "beat" and len(reader.kinds("beat")) > 3)
        assert len(reader.kinds("append")) == before


def test_beats_say_who_lives(run_dir: Path) -> None:
    with reading(run_dir) as reader, subprocess.Popen(["sleep", "60"]) as process:
        reader.until(lambda: bool(reader.kinds("beat")))
        assert reader.kinds("beat")[-1]["supervisor"] == "none"
        write_status(run_dir, process.pid)
        reader.until_supervisor("alive")
        assert reader.kinds("beat")[-1]["trainer"] == "alive"
        process.kill()
        reader.until_supervisor("gone")
        write_status(run_dir, os.getpid())
        reader.until_supervisor("alive")
        write_status(run_dir, os.getpid(), boot="another")
        reader.until_supervisor("gone")
        record = json.loads((run_dir / "status.json").read_text()) | {"boot_id": BOOT}
        record["supervisor"]["start_ticks"] += 1
        (run_dir / "status.json").write_text(json.dumps(record))
        reader.until_supervisor("reused")


def test_the_beat_that_tells_of_the_end_comes_after_every_byte(run_dir: Path) -> None:
    """A process writes and dies at once; whoever believes the beat must have it all."""
    code = "import os,sys; sys.stdin.read(1); open(sys.argv[1],'ab').write(os.urandom(5_000_000))"
    for _ in range(4):
        with subprocess.Popen(
            [sys.executable, "-S", "-c", code, str(run_dir / "train.log")], stdin=subprocess.PIPE
        ) as writer:
            write_status(run_dir, writer.pid)
            with reading(run_dir) as reader:
                reader.until_supervisor("alive")
                assert writer.stdin is not None
                writer.stdin.write(b"g")
                writer.stdin.close()
                reader.until_supervisor("gone")
                beat = next(b for b in reader.kinds("beat") if b["supervisor"] == "gone")
                whole = (run_dir / "train.log").read_bytes()
                assert beat["files"]["train.log"]["size"] == len(whole)
                assert sha(reader.newest("train.log")[1]) == sha(whole)


def test_bytes_written_just_before_the_end_was_seen_are_sent_before_the_beat_that_tells_of_it(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The narrowest case, which no real process hits reliably: written and dead between two looks."""
    frames: list[tuple[str, dict[str, Any]]] = []

    class Ended(Exception):
        pass

    class Output(feed.Output):
        def frame(self, kind: str, data: bytes | None = None, /, **fields: Any) -> None:
            frames.append((kind, fields | {"data": data}))
            if fields.get("supervisor") == "gone":
                raise Ended

    class Listener(feed.Listener):
        def __init__(self, silence: float) -> None:
            self.woken = os.open(run_dir, os.O_RDONLY)

        def first(self) -> bytes:
            return b"{}"

        def later(self) -> Iterator[bytes]:
            return iter(())

    class Dying(feed._Feed):
        def _who_lives(self) -> dict[str, str]:
            for name in ("train.log", "crash/thread-x.json"):
                with (run_dir / name).open("ab") as file:
                    file.write(b"last words")
            (run_dir / "status.json").write_text('{"state": "finished"}')
            return {"supervisor": "gone", "trainer": "gone"}

    monkeypatch.setattr(feed, "Listener", Listener)
    with pytest.raises(Ended):
        Dying(RunFolder(run_dir), run_dir.name, Output()).run()
    sent = {fields["file"]: fields["data"] for _, fields in frames if "file" in fields}
    names = {"train.log", "crash/thread-x.json", "status.json"}
    assert sent == {name: (run_dir / name).read_bytes() for name in names}


def test_beats_go_on_while_a_slow_reader_catches_up(run_dir: Path) -> None:
    write_status(run_dir, os.getpid())
    (run_dir / "train.log").write_bytes(bytes(16 << 20))
    with reading(run_dir, slow=0.05) as reader:
        reader.until(lambda: len(reader.newest("train.log")[1]) == 16 << 20)
        reader.until(lambda: reader.frames[-1]["frame"] == "beat")
        before_the_end = []
        for frame in list(reader.frames):
            if frame["frame"] == "beat":
                before_the_end.append(frame)
            if frame["frame"] == "append" and frame["offset"] + frame["size"] == 16 << 20:
                break
        assert len(before_the_end) > 3
        assert all(beat["catching_up"] and beat["files"]["train.log"] for beat in before_the_end)
        assert "catching_up" not in reader.frames[-1]


def test_beats_go_on_after_the_end_until_the_reader_goes(run_dir: Path) -> None:
    with reading(run_dir) as reader:
        reader.until(lambda: len(reader.kinds("beat")) > 5)
        assert reader.process.stdin is not None
        reader._pings = False
        reader.process.stdin.close()
        assert reader.process.wait(60) == 0
        assert reader.process.stderr is not None
        assert reader.process.stderr.read() == b""


def test_a_silent_reader_ends_the_feed(run_dir: Path) -> None:
    started = time.monotonic()
    with reading(run_dir, scale=0.01, pings=False) as reader:
        assert reader.process.wait(60) == 0
        assert time.monotonic() - started > 0.6


def test_a_feed_stuck_in_a_write_ends_as_well(run_dir: Path) -> None:
    (run_dir / "train.log").write_bytes(bytes(8 << 20))
    with reading(run_dir, scale=0.01, pings=False, reading=False) as reader:
        assert reader.process.wait(60) == 0


@pytest.mark.slow
def test_pings_keep_the_feed_of_a_slow_reader_alive(run_dir: Path) -> None:
    (run_dir / "train.log").write_bytes(bytes(8 << 20))
    for scale in (0.01, 0.03, 0.1, 0.3):  # a busy machine may hold the pings up for longer than the silence
        with reading(run_dir, scale=scale, reading=False) as reader:
            time.sleep(120 * scale)  # twice the silence it allows
            if reader.process.poll() is None:
                threading.Thread(target=reader._read, daemon=True).start()
                reader.until(lambda r=reader: len(r.newest("train.log")[1]) == 8 << 20)
                return
    pytest.fail("no feed lived on its pings")


def test_a_broken_stdout_ends_the_feed_quietly(run_dir: Path) -> None:
    with reading(run_dir, reading=False) as reader:
        assert reader.process.stdout is not None and reader.process.stderr is not None
        reader.process.stdout.readline()
        reader.process.stdout.close()
        assert reader.process.wait(60) == 0
        assert reader.process.stderr.read() == b""


@pytest.mark.parametrize(
    ("request_line", "named"),
    [
        (b"not json\n", "not JSON"),
        (b"[1]\n", "not a JSON object"),
        (b'{"have": [1]}\n', "have"),
        (b'{"have": {"train.log": {"generation": 0, "size": 1}}}\n', "have.train.log.generation"),
        (b'{"log_tail": -1}\n', "log_tail"),
        (b'{"log_tail": true}\n', "log_tail"),
    ],
)
def test_a_wrong_request_is_answered_by_an_error_frame_that_names_the_key(
    run_dir: Path, request_line: bytes, named: str
) -> None:
    with reading(run_dir, request_line) as reader:
        assert reader.ended.wait(60)
        assert named in reader.frames[-1]["text"]
        assert reader.frames[-1]["frame"] == "error"
        assert reader.process.wait(60) == 1
        assert reader.process.stderr is not None
        assert reader.process.stderr.read() == b""


def test_a_run_that_is_not_there_is_an_error_frame(tmp_path: Path) -> None:
    with reading(tmp_path / "none") as reader:
        assert reader.ended.wait(60)
        assert "no run directory" in reader.frames[-1]["text"]


def test_a_removed_run_is_an_error_frame(run_dir: Path) -> None:
    (run_dir / "crash").rmdir()
    with reading(run_dir) as reader:
        reader.until(lambda: bool(reader.kinds("beat")))
        run_dir.rmdir()
        assert reader.ended.wait(60)
        assert "removed" in reader.frames[-1]["text"]


@pytest.mark.slow
def test_new_bytes_are_seen_at_once_and_waiting_costs_little(run_dir: Path) -> None:
    for name in ("events.jsonl", "gpu.jsonl", "train.log", "supervisor.jsonl", "status.json"):
        (run_dir / name).write_bytes(b"{}\n" * 3000)
    for number in range(10):
        (run_dir / "crash" / f"thread-{number}.json").write_text("{}")
    with reading(run_dir, scale=100) as reader:
        reader.until(lambda: bool(reader.kinds("beat")))
        delays = []
        with (run_dir / "events.jsonl").open("ab", buffering=0) as file:
            for number in range(1, 21):
                began = time.monotonic()
                file.write(b"{}\n")
                reader.until(lambda n=number: len(reader.newest("events.jsonl")[1]) == 9000 + 3 * n)
                delays.append(time.monotonic() - began)
        assert sorted(delays)[10] < 2.0  # looking at this scale, once in ten seconds, takes five
    with reading(run_dir, scale=1) as reader:
        reader.until(lambda: bool(reader.kinds("beat")))
        before, began = cpu_seconds(reader.process.pid), time.monotonic()
        time.sleep(1.5)
        spent = cpu_seconds(reader.process.pid) - before
        assert spent / (time.monotonic() - began) < 0.02
        assert reader.kinds("beat")[-1]["told_by"] == "inotify"
        reader.process.send_signal(signal.SIGINT)
        assert reader.process.wait(60) == -signal.SIGINT


SILENT = """
import sys
from pathlib import Path
from remote_payload import feed
from remote_payload.run_folder import RunFolder
if {refused}:
    feed.Watch.__init__ = lambda self, wake: (_ for _ in ()).throw(OSError("too many watches"))
else:
    feed.Watch.add = lambda *_: None
sys.exit(feed.feed(Path(sys.argv[2]), sys.argv[3]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("refused", [True, False])
def test_where_the_kernel_tells_nothing_files_are_looked_at_often(run_dir: Path, refused: bool) -> None:
    path = run_dir / "train.log"
    path.write_bytes(b"start\n")
    with reading(run_dir, scale=0.5, program=SILENT.format(refused=refused)) as reader:
        reader.until(lambda: bool(reader.kinds("beat")))
        with path.open("ab", buffering=0) as file:
            for number in range(0 if refused else 3):
                assert reader.kinds("beat")[-1]["told_by"] == "inotify"
                file.write(b"seen before a beat at the latest %d\n" % number)
                reader.until(lambda n=number: reader.newest("train.log")[1].endswith(b"latest %d\n" % n))
            reader.until(lambda: reader.kinds("beat")[-1]["told_by"] == "looking")
            beats = len(reader.kinds("beat"))
            for number in range(20):
                file.write(b"%d\n" % number)
                reader.until(lambda n=number: reader.newest("train.log")[1].endswith(b"%d\n" % n))
            assert len(reader.kinds("beat")) < beats + 19, "they were not seen by the looks before beats"


@pytest.mark.slow
def test_a_log_file_is_fed_under_one_name_through_links_and_rotation(tmp_path: Path) -> None:
    """As of a program that nobody here started."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "logs").mkdir()
    first, second = tmp_path / "elsewhere" / "1.log", tmp_path / "elsewhere" / "2.log"
    first.write_bytes(b"one\n")
    link = tmp_path / "logs" / "latest.log"
    link.symlink_to(first)
    (tmp_path / "logs" / "other.log").write_bytes(b"not asked for\n")
    with reading(link, command="feed-log", scale=0.5) as reader:
        reader.until_newest("train.log", 1, b"one\n")
        assert reader.kinds("hello")[0]["run"] == str(link)
        beats = len(reader.kinds("beat"))
        for _ in range(20):
            with first.open("ab") as file:
                file.write(b"two\n")
            reader.until_newest("train.log", 1, first.read_bytes())
        assert len(reader.kinds("beat")) < beats + 19, "they were not seen by the looks before beats"
        second.write_bytes(b"three\n")
        (tmp_path / "new").symlink_to(second)
        (tmp_path / "new").rename(link)
        reader.until_newest("train.log", 2, b"three\n")
        second.unlink()
        reader.until(lambda: "train.log" not in reader.kinds("beat")[-1]["files"])
        second.write_bytes(b"four\n")
        reader.until_newest("train.log", 3, b"four\n")
        assert {frame["file"] for frame in reader.kinds("append")} == {"train.log", "gpu.jsonl"}
        first = json.loads(reader.newest("gpu.jsonl")[1].split(b"\n")[0])
        assert first["kind"] in ("gpu_none", "gpu_constants", "gpu_problem")  # as the machine is
        assert reader.small == {}
        assert reader.kinds("beat")[-1]["source"] == "log"


def test_a_log_whose_folder_does_not_exist_is_refused_with_its_name(tmp_path: Path) -> None:
    with reading(tmp_path / "nowhere" / "train.log", command="feed-log") as reader:
        assert reader.ended.wait(60)
        assert "nowhere: no folder" in reader.frames[-1]["text"]


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
