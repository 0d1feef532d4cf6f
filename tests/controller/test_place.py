"""What every kind of place promises, on this machine; tests/rig/test_place.py has the remote kinds."""

import math
import os
import select
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controller import local, passing
from controller.errors import ConnectionLostError, UnreachableError
from controller.inventory import Host
from controller.local import LocalProcess
from controller.place import BegunProcess, Place, open_place, script
from tests.waiting import until

ECHO = "import sys; sys.stdout.write(''.join(text + '\\0' for text in sys.argv[1:]))"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with open_place(Host(name="local", kind="local", workspace=str(tmp_path))) as opened:
        yield opened


def crossed(place: Place, texts: list[str]) -> list[str]:
    done = place.run([place.python, "-I", "-c", ECHO, *texts], timeout=60)
    assert done.status == 0, done.stderr
    return done.stdout.decode("utf-8", "surrogateescape").split("\0")[:-1]


TEXT = st.text(st.characters(exclude_characters="\0", codec="utf-8"))
NASTY = [
    "",
    " ",
    "it's",
    '"quoted"',
    "$(touch /tmp/owned) `id` ${HOME} $$",
    "line\nbreak\n",
    "tab\tand\rreturn",
    "-n",
    "--keep-env",
    "--",
    "\\n \\0101 \\\\ \\",
    "100% %s %b",
    "*",
    "~",
    "grüße 漢字 🙂",
    "a;b&c|d<e>f#g!h",
    "\x01\x1b[31m\x7f",
]


def test_arguments_cross_every_layer_unharmed(place: Place) -> None:
    assert crossed(place, NASTY) == NASTY


@given(st.lists(TEXT, max_size=200))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_crosses_unharmed(place: Place, texts: list[str]) -> None:
    assert crossed(place, texts) == texts


def test_the_script_is_ascii_and_a_nul_byte_is_refused() -> None:
    assert script(["grüße"], "nonce", []).isascii()
    with pytest.raises(ValueError, match="NUL"):
        script(["a\0b"], "nonce", [])


def test_both_streams_and_the_exit_status_arrive(place: Place) -> None:
    done = place.run(["sh", "-c", "echo out; echo err >&2; exit 7"], timeout=60)
    assert (done.status, done.stdout, done.stderr) == (7, b"out\n", b"err\n")


@pytest.mark.parametrize(("number", "status"), [("TERM", 143), ("KILL", 137)])
def test_death_by_a_signal_is_told_as_128_plus_its_number(place: Place, number: str, status: int) -> None:
    assert place.run(["sh", "-c", f"kill -{number} $$"], timeout=60).status == status


def test_an_absent_program_is_status_127(place: Place) -> None:
    done = place.run(["/nonexistent/python"], timeout=60)
    assert done.status == 127
    assert b"/nonexistent/python" in done.stderr


def test_megabytes_go_both_ways_at_once(place: Place) -> None:
    data = bytes(range(256)) * (8 << 12)
    noisy = (
        "import shutil, sys; sys.stderr.write('e' * 300000);"
        "shutil.copyfileobj(sys.stdin.buffer, sys.stdout.buffer, 65536); sys.stderr.write('end')"
    )
    done = place.run([place.python, "-c", noisy], stdin=data, timeout=60)
    assert done.status == 0
    assert done.stdout == data
    assert done.stderr.endswith(b"eend")
    assert len(done.stderr) == 64 * 1024


def test_a_command_that_does_not_read_its_stdin_ends_all_the_same(place: Place) -> None:
    assert place.run(["true"], stdin=b"x" * (4 << 20), timeout=60).status == 0


def test_stderr_after_the_end_of_stdout_does_not_block_it(place: Place) -> None:
    late = "import os,sys; os.close(1); sys.stderr.write('x'*3000000); sys.stderr.flush()"
    assert place.run([place.python, "-c", late], timeout=60).status == 0


class Chatter:
    """A login that prints without an end: `yes` in a shell's start file."""

    stderr = b""
    closed = False
    reads = 0

    def receive(self, timeout: float) -> bytes:
        self.reads += 1
        assert self.reads < 1_000_000, "nobody gives it up"
        return b"y\n"

    def close(self) -> None:
        self.closed = True


def test_a_login_that_prints_for_ever_is_given_up_and_let_go() -> None:
    login = Chatter()
    with pytest.raises(UnreachableError, match="did not begin"):
        BegunProcess(login, "nonce", 0.2, "gpubox")  # type: ignore[arg-type]
    assert login.closed


def test_a_slow_command_is_given_up(place: Place) -> None:
    begun = time.monotonic()
    with pytest.raises(ConnectionLostError, match="more than"):
        place.run(["sleep", "600"], timeout=0.3)
    assert time.monotonic() - begun < 60


def test_receive_returns_none_while_nothing_comes_and_bytes_when_they_do(place: Place) -> None:
    process = place.start(["cat"])
    assert process.receive(0.05) is None
    process.send(b"ping\n")
    assert process.receive(60) == b"ping\n"
    assert process.wait(0.05) is None
    process.close_stdin()
    process.close_stdin()
    assert process.receive(60) == b""
    assert process.wait(60) == 0
    process.close()


def test_a_command_that_takes_nothing_is_given_up_after_the_limit(place: Place) -> None:
    process = place.start(["sleep", "60"])
    with pytest.raises(ConnectionLostError, match=r"took nothing for 0\.2 s"):
        process.send(b"x" * (1 << 20), limit_s=0.2)
    process.close()


def test_a_command_of_exec_may_read_its_stdin_when_it_likes() -> None:
    limits: list[float] = []

    class Lazy:
        def send(self, data: bytes, *, limit_s: float) -> None:
            limits.append(limit_s)

        def close_stdin(self) -> None: ...

    passing._feed(Lazy(), b"a program", False)  # type: ignore[arg-type]
    assert limits == [math.inf]


def test_sending_to_a_closed_process_is_a_lost_connection(place: Place) -> None:
    process = place.start(["cat"])
    process.close()
    with pytest.raises(ConnectionLostError):
        process.send(b"x" * 100)
    process.close()


def test_what_is_sent_reaches_no_file_that_was_opened_after_the_command_was_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = LocalProcess(["sleep", "60"])
    number = process._in
    opened: list[int] = []

    class ClosedMeanwhile:
        """Another thread closes the command while this one waits for room in the pipe."""

        def register(self, descriptor: int, events: int) -> None: ...

        def poll(self, timeout: float) -> list[tuple[int, int]]:
            monkeypatch.undo()
            process.close()
            reader, writer = os.pipe()
            os.dup2(writer, number)
            opened.extend({reader, writer, number})
            os.set_blocking(reader, False)
            opened.insert(0, reader)
            return [(number, select.POLLOUT)]

    monkeypatch.setattr(local.select, "poll", ClosedMeanwhile)
    with pytest.raises(ConnectionLostError, match="closed"):
        process.send(b"x" * (1 << 20))
    with pytest.raises(BlockingIOError):  # nothing came
        os.read(opened[0], 1)
    for descriptor in set(opened):
        os.close(descriptor)


def test_commands_of_one_place_run_side_by_side(place: Place) -> None:
    statuses: list[int] = []
    threads = [
        threading.Thread(
            target=lambda n=n: statuses.append(
                place.run(["sh", "-c", f"sleep 0.2; exit {n}"], timeout=60).status
            )
        )
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(statuses) == [0, 1, 2, 3]


def test_nothing_of_the_callers_environment_gets_in(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    names = {line.split(b"=")[0] for line in place.run(["env"], timeout=60).stdout.splitlines()}
    assert names <= {b"PATH", b"HOME", b"USER", b"LANG", b"LC_ALL", b"PWD", b"OLDPWD", b"SHLVL", b"_"}


def test_a_closed_local_process_leaves_nothing_behind(place: Place) -> None:
    process = place.start(["sh", "-c", "echo $$; sleep 300"])
    pid = int(process.receive(60) or b"0")
    assert Path(f"/proc/{pid}").exists()
    process.close()
    until(lambda: state_of(pid) in ("gone", "Z"), seen=lambda: state_of(pid))


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"
