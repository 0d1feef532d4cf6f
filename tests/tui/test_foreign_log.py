"""A log that dflashctl did not start, on the screen: its buckets, GPUs, curve, tail, and nothing made up."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from controller.tui.app import RunApp
from controller.tui.run_screen import RunScreen
from tests.tui import golden
from tests.tui.conftest import screen_text
from tests.tui.test_run_tui import Terminal

LOG = "".join(f"{text}\n" for text in golden.Run(step=80).log).replace("tau~ 3.41", "tau 3.41")


def mirrored_log(folder: Path) -> Path:
    """The mirror folder of a log at /workspace/train.log, last written a second before `golden.NOW`."""
    run = golden.Run()
    directory = folder / "logs" / "10.1.2.6" / "train.log-0123456789ab"
    directory.mkdir(parents=True)
    (directory / "train.log").write_text(LOG)
    (directory / "gpu.jsonl").write_bytes(b"".join(map(golden._line, run.gpu)))
    place = {
        "host": {"name": "gpu1/200", "kind": "proxmox", "address": "10.1.2.6", "container": 200},
        "run_id": "train.log-0123456789ab", "job_name": "/workspace/train.log", "created": golden.NOW - 60,
        "log_path": "/workspace/train.log",
    }  # fmt: skip
    (directory / "place.json").write_text(json.dumps(place))
    container = golden.NOW + golden.AHEAD
    files = {
        name: {"generation": 1, "size": (size := (directory / name).stat().st_size), "extents": [[0, size]]}
        for name in ("train.log", "gpu.jsonl")
    }
    written = {"train.log": {"generation": 1, "size": len(LOG), "written": container - 1.0}}
    beat = {
        "t": container - 1.2, "boot_id": golden.BOOT, "supervisor": "none", "trainer": "none",
        "source": "log", "files": written,
    }  # fmt: skip
    mirror = {
        "t": golden.NOW - 1, "kind": "mirror", "state": "connected", "tries": 0, "beat": beat,
        "files": files, "last_heard": golden.NOW - 1.2, "clock_difference_s": golden.AHEAD,
    }  # fmt: skip
    (directory / "mirror.json").write_text(json.dumps(mirror))
    return directory


async def test_its_buckets_gpus_roles_steps_and_tail_are_shown_under_its_own_name(tmp_path: Path) -> None:
    app = RunApp(mirrored_log(tmp_path), clock=lambda: golden.NOW, period_s=None)
    async with app.run_test(size=(100, 34)) as pilot:
        await pilot.pause()
        await pilot.pause()
        shown = screen_text(pilot)
        assert shown.startswith(" ● LIVE 1.2s")
        for part in (
            "/workspace/train.log gpu1/200", "step 80", "loss 2.", "[  770, 1216)", "10.2%", "0 T ", "7 D ",
            "8 × H200", "step     80  loss",
        ):  # fmt: skip
            assert part in shown, part
        assert "recompiles" not in shown and "ckpt" not in shown
        await pilot.press("4", "z")
        await pilot.pause()
        shown = screen_text(pilot)
        assert "59,823 batches an epoch" in shown
        assert "replica 1 ready on cuda:7\n" in shown
        assert "?" not in shown.replace("? help", ""), "what its lines do not say is left out"


@pytest.mark.parametrize("key", ["S", "c"])
async def test_it_can_only_be_watched_which_is_said_before_anything_is_asked(
    key: str, tmp_path: Path
) -> None:
    app = RunApp(mirrored_log(tmp_path), clock=lambda: golden.NOW, period_s=None)
    async with app.run_test(size=(100, 34)) as pilot:
        await pilot.pause()
        await pilot.press(key)
        await pilot.pause()
        assert "it can only be watched" in screen_text(pilot)
        assert isinstance(app.screen, RunScreen), "nothing is asked"


@pytest.mark.slow
def test_a_log_that_grows_is_followed_on_a_real_terminal(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(LOG)
    terminal = _Tui(log, tmp_path)
    try:
        terminal.read_until(b"step     80")
        with log.open("a") as file:
            file.write("step 81/400 loss 1.234\n")
        terminal.read_until(b"1.234")
        os.write(terminal.master, b"q")
        assert terminal.finish() == 0
    finally:
        terminal.close()


PROGRAM = "import sys; from controller.cli import main; sys.exit(main())"


class _Tui(Terminal):
    """`dflashctl tui --host local --path LOG` at 100x30, with a home of its own."""

    def __init__(self, log: Path, home: Path) -> None:
        self.master, self.slave = pty.openpty()
        termios.tcsetwinsize(self.slave, (30, 100))
        self.before = termios.tcgetattr(self.slave)
        environment = os.environ | {
            "TERM": "xterm-256color", "COLORTERM": "truecolor", "HOME": str(home),
            "XDG_STATE_HOME": str(home / "state"), "XDG_DATA_HOME": str(home / "data"),
        }  # fmt: skip
        self.child = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "tui", "--host", "local", "--path", str(log)],
            stdin=self.slave, stdout=self.slave, stderr=self.slave, env=environment, start_new_session=True,
        )  # fmt: skip
        self.output = b""
