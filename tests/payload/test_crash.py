from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from remote_payload import crash, rundir
from tests.waiting import until

ROOT = Path(__file__).parents[2]


def write(run_dir: Path, error: BaseException, **changes: Any) -> str:
    fields: dict[str, Any] = {
        "thread": "drafter 0",
        "role": "drafter",
        "device": "cpu",
        "step": 7,
        "bucket": 2,
        "samples": [3, 1],
        "first": True,
        "memory": None,
        "attempt": 1,
    }
    return crash.write_thread(run_dir, error=error, **(fields | changes))


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


def test_a_record_tells_thread_place_and_the_whole_chain_of_causes(tmp_path: Path) -> None:
    error = raised(RuntimeError("step failed\nadvice of many lines"), raised(KeyError("row")))
    name = write(tmp_path, error)
    record = json.loads((tmp_path / "crash" / name).read_bytes())
    assert name == "thread-drafter-0.json"
    assert record["kind"] == "crash" and record["v"] == 1 and record["attempt"] == 1
    assert (record["thread"], record["role"], record["device"]) == ("drafter 0", "drafter", "cpu")
    assert (record["step"], record["bucket"], record["samples"]) == (7, 2, [3, 1])
    assert record["error"] == "RuntimeError: step failed"
    assert "KeyError: 'row'" in record["traceback"]
    assert "direct cause of the following" in record["traceback"]
    assert "advice of many lines" in record["traceback"]
    assert record["first"] is True


def test_a_second_record_of_one_thread_keeps_the_first(tmp_path: Path) -> None:
    first = write(tmp_path, raised(ValueError("one")))
    second = write(tmp_path, raised(ValueError("two")), attempt=2)
    assert first != second
    read = [json.loads((tmp_path / "crash" / n).read_bytes())["error"] for n in (first, second)]
    assert read == ["ValueError: one", "ValueError: two"]


def test_threads_failing_at_once_under_one_name_lose_nothing(tmp_path: Path) -> None:
    threads = [threading.Thread(target=write, args=(tmp_path, raised(ValueError(str(n))))) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = {json.loads(path.read_bytes())["error"] for path in (tmp_path / "crash").glob("*.json")}
    assert errors == {f"ValueError: {n}" for n in range(8)}


@pytest.mark.parametrize("thread", ["../../etc/x", "targets/0 cuda:0", "ü", "", ".hidden", "x" * 300])
def test_any_thread_name_gives_a_file_that_the_mirror_accepts(tmp_path: Path, thread: str) -> None:
    name = write(tmp_path, raised(ValueError("x")), thread=thread)
    assert rundir.is_mirrored(f"crash/{name}")
    assert (tmp_path / "crash" / name).is_file()
    assert json.loads((tmp_path / "crash" / name).read_bytes())["thread"] == thread


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    "error", [UnprintableError(), ValueError("\udcff\x00"), ValueError("x" * 10**6), ValueError()]
)
def test_an_odd_exception_still_gives_a_whole_small_record(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "crash" / write(tmp_path, raised(error))
    record = rundir.read_whole(path)
    assert record is not None
    assert len(record["error"]) <= 500 and record["error"]
    assert path.stat().st_size < rundir.MAX_FRAME_BYTES


def test_stacks_of_all_threads_are_dumped_and_appended(tmp_path: Path) -> None:
    inside, leave = threading.Event(), threading.Event()

    def a_thread_that_waits() -> None:
        inside.set()
        leave.wait(100)

    waiting = threading.Thread(target=a_thread_that_waits)
    waiting.start()
    assert inside.wait(60)
    name = crash.dump_stacks(tmp_path, "threads did not end")
    assert crash.dump_stacks(tmp_path, "threads did not end") == name
    leave.set()
    waiting.join()
    text = (tmp_path / "crash" / name).read_text()
    assert rundir.is_mirrored(f"crash/{name}")
    assert text.count("UTC: threads did not end") == 2
    assert text.count("in a_thread_that_waits") == 2
    assert text.count("in test_stacks_of_all_threads_are_dumped_and_appended") == 2


TRAINER = """
import sys, threading, time
from pathlib import Path
from remote_payload import crash
crash.install(Path(sys.argv[1]))
lock = threading.Lock()
lock.acquire()
inside = threading.Event()
def held_thread():
    inside.set()
    lock.acquire()
threading.Thread(target=held_thread, daemon=True).start()
inside.wait()
print("ready", flush=True)
if sys.argv[2] == "segfault":
    import ctypes
    ctypes.string_at(0)
time.sleep(600)
"""


def start(run_dir: Path, what: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", TRAINER, str(run_dir), what],
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def test_a_hanging_process_shows_its_stacks_on_sigusr1_and_lives_on(tmp_path: Path) -> None:
    with start(tmp_path, "hang") as process:
        assert (tmp_path / "crash" / crash.FATAL).read_bytes() == b""
        process.send_signal(signal.SIGUSR1)
        path = tmp_path / "crash" / crash.REQUEST
        until(lambda: b"in held_thread" in path.read_bytes(), seen=path.read_bytes)
        assert process.poll() is None
        process.kill()


def test_a_segmentation_fault_leaves_the_stacks_of_all_threads(tmp_path: Path) -> None:
    with start(tmp_path, "segfault") as process:
        assert process.wait(60) == -signal.SIGSEGV
    text = (tmp_path / "crash" / crash.FATAL).read_text()
    assert "Segmentation fault" in text
    assert "in held_thread" in text
