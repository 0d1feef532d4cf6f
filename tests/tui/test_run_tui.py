"""The whole program on a real pseudo-terminal: it starts, shows, and `q` ends it at once."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from controller.errors import UsageError
from controller.tui.app import run_tui
from tests.tui import golden
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.slow  # a process and a terminal each

PROGRAM = """
import sys, threading, time
from pathlib import Path
from controller.tui.app import run_tui

class Stuck:  # a connection that hangs: its thread never looks at anything
    def start(self):
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    def stop(self, timeout=0.0):
        assert timeout <= 0.2
        time.sleep(timeout)
    def poke(self):
        pass

sys.exit(run_tui(Path(sys.argv[1]), Stuck()))
"""


class Terminal:
    """A child on a pseudo-terminal of 80x24."""

    def __init__(self, directory: Path) -> None:
        self.master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (24, 80))
        self.before = termios.tcgetattr(slave)
        environment = os.environ | {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
        self.child = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(directory)], stdin=slave, stdout=slave, stderr=slave,
            env=environment, start_new_session=True,
        )  # fmt: skip
        self.slave = slave
        self.output = b""

    def read_until(self, text: bytes, timeout: float = PATIENCE_S) -> None:
        end = time.monotonic() + timeout
        while text not in self.output:
            left = end - time.monotonic()
            assert left > 0, self.output[-2000:]
            if select.select([self.master], [], [], left)[0]:
                self.output += os.read(self.master, 65536)

    def finish(self) -> int:
        end = time.monotonic() + PATIENCE_S
        while self.child.poll() is None:
            assert time.monotonic() < end, "the view did not end"
            if select.select([self.master], [], [], 0.01)[0]:
                self.output += os.read(self.master, 65536)
        while select.select([self.master], [], [], 0.05)[0]:
            self.output += os.read(self.master, 65536)
        return self.child.returncode

    def close(self) -> None:
        if self.child.poll() is None:
            os.kill(self.child.pid, signal.SIGKILL)
            self.child.wait()
        os.close(self.master)
        os.close(self.slave)


def test_q_ends_the_process_at_once_with_a_connection_that_hangs_and_restores_the_terminal(
    tmp_path: Path,
) -> None:
    terminal = Terminal(golden.healthy().write(tmp_path))
    try:
        terminal.read_until(b"1129-a7f3")
        terminal.read_until(b"detach")
        os.write(terminal.master, b"q")
        assert terminal.finish() == 0, "0.5 s later on a machine that is not busy (bench.tui measures it)"
        drawn, left, after = terminal.output.partition(b"\x1b[?1049l")
        assert left, "the alternate screen was left"
        last = drawn.rpartition(b"\x1b[2J")[2]
        assert b"detach" in drawn and b"m" not in last, "and it was empty"
        assert b"detach" not in after
        assert b"\x1b[?25h" in terminal.output, "the cursor is back"
        assert termios.tcgetattr(terminal.slave) == terminal.before
    finally:
        terminal.close()


def test_what_is_typed_ahead_of_a_question_is_no_key(tmp_path: Path) -> None:
    terminal = Terminal(golden.healthy().write(tmp_path))
    try:
        terminal.read_until(b"detach")
        os.write(terminal.master, b"/lS\r")  # l alone would open the launch form, S ask to stop the run
        with pytest.raises(AssertionError):
            terminal.read_until(b"launch", 1)
        os.write(terminal.master, b"q")
        assert terminal.finish() == 0, "q detaches: no question is open"
    finally:
        terminal.close()


def test_a_run_that_goes_on_is_redrawn_every_second(tmp_path: Path) -> None:
    run = golden.healthy()
    directory = run.write(tmp_path)
    terminal = Terminal(directory)
    try:
        terminal.read_until(b"12,345")
        assert run.progress is not None
        run.progress["step"] = 12_399
        run.write(directory)
        terminal.read_until(b"12,399")
    finally:
        terminal.close()


FAILING = """
import sys
from pathlib import Path
from controller.tui import app, run_screen

def broken(self):
    secret = "what the log said"
    raise ZeroDivisionError("[a defect] of the view")

app.RunApp.action_redraw = broken
sys.exit(app.run_tui(Path(sys.argv[1]), None))
"""


def test_a_defect_of_the_view_leaves_the_terminal_whole_and_one_line_that_says_where_its_report_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PROGRAM", FAILING)
    terminal = Terminal(golden.healthy().write(tmp_path / "run"))
    try:
        terminal.read_until(b"detach")
        terminal.read_until(b"1129-a7f3")
        os.write(terminal.master, b"\x0c")
        assert terminal.finish() == 99
        assert b"\x1b[?1049l" in terminal.output
        after = terminal.output.rpartition(b"\x1b[?1049l")[2].decode()
        assert "error: the view failed, a defect of dflashctl; the run goes on; its report: " in after
        assert "Traceback" not in after
        assert termios.tcgetattr(terminal.slave) == terminal.before
        (report,) = (tmp_path / "state-home").rglob("crashes/*.txt")
        assert str(report) in after.replace("\r\n", "")
        said = report.read_text()
        assert "ZeroDivisionError: [a defect] of the view" in said
        assert "run: 1129-a7f3" in said
        assert "what the log said" not in said.replace('secret = "what the log said"', "")
    finally:
        terminal.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_the_view_leaves_the_terminal_whole(number: int, tmp_path: Path) -> None:
    terminal = Terminal(golden.healthy().write(tmp_path))
    try:
        terminal.read_until(b"detach")
        os.kill(terminal.child.pid, number)
        assert terminal.finish() == 0
        assert b"\x1b[?1049l" in terminal.output
        assert termios.tcgetattr(terminal.slave) == terminal.before
    finally:
        terminal.close()


def test_a_view_ends_with_its_terminal(tmp_path: Path) -> None:
    terminal = Terminal(golden.healthy().write(tmp_path))
    terminal.read_until(b"detach")
    os.close(terminal.slave)
    os.close(terminal.master)
    try:
        assert terminal.child.wait(60) == 128 + signal.SIGHUP
    finally:
        terminal.child.kill()
        terminal.child.wait()


def test_ctrl_z_gives_the_terminal_back_and_a_continued_view_draws_itself_anew(tmp_path: Path) -> None:
    terminal = Terminal(golden.healthy().write(tmp_path))
    try:
        terminal.read_until(b"detach")
        os.write(terminal.master, b"\x1a")
        terminal.read_until(b"\x1b[?1049l")
        stat = Path(f"/proc/{terminal.child.pid}/stat")
        until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "the view to be suspended")
        terminal.output = b""
        os.kill(terminal.child.pid, signal.SIGCONT)
        terminal.read_until(b"\x1b[?1049h")
        terminal.read_until(b"1129-a7f3")
        os.write(terminal.master, b"q")
        assert terminal.finish() == 0
    finally:
        terminal.close()


def test_without_a_terminal_it_says_what_to_use_instead(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs a terminal"):
        run_tui(tmp_path, None)
