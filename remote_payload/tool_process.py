"""A tool of the payload (`export`, `evaluate`) for a laptop: its words as they come, then its answer.

The tool is a process of its own with the place's variables, so that they count from its first import on. It
ends when whoever asked is gone: we end when stdin does or is silent for a minute, and our end is the tool's
death signal. Lines to the laptop are JSON: `{"beat": true}` while there is nothing to say, `{"say": LINE}`
for each line of the tool's stderr, at last `{"ok": true, "answer": {...}}` or `{"ok": false, "error": ...}`.

The order is one line of JSON: `argv` of the tool, `env`, and `include`, files that were brought before
(`includes.py`); a word `include:NAME` of `argv` becomes the path of one. Standard library only.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from remote_payload import rundir
from remote_payload.feed_streams import Listener
from remote_payload.includes import INCLUDE, IncludeError, put
from remote_payload.leftovers import left_behind
from remote_payload.timing import time_scale
from remote_payload.trainer_process import trainer_environment

INCLUDE_PREFIX: Final = "include:"
_GIVEN: Final = ".given-"
_STALE_S: Final = 24 * 3600
_SILENCE_S: Final = 60.0
_BEAT_S: Final = 2.0
_PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)  # loaded here: nothing may be imported between fork and exec


def serve_tool(name: str, workspace: Path) -> int:
    """Run the tool `name` as the order on stdin says; returns the exit code, 1 when it gave no answer."""
    order = rundir.decode(sys.stdin.buffer.readline())
    if order is None:  # whoever asked has gone again
        return 1
    folder: Path | None = None
    try:
        folder = _given(workspace, order.get("include") or [])
        argv = [_located(str(word), folder) for word in order["argv"]]
        process = _start(name, argv, workspace, order.get("env"))
        Listener(_SILENCE_S * time_scale())  # after the fork: that is safe only while we have one thread
        result = _relay(name, process)
    except (OSError, IncludeError) as error:
        result = {"ok": False, "error": str(error)}
    finally:
        if folder is not None:  # before the last line, after which whoever asked may be gone
            shutil.rmtree(folder, ignore_errors=True)
    _say(**result)
    return 0 if result["ok"] else 1


def _given(workspace: Path, files: list[Mapping[str, Any]]) -> Path | None:
    """A folder with the files that were brought; None without any."""
    for left in left_behind(workspace.glob(f"{_GIVEN}*"), _STALE_S):
        shutil.rmtree(left, ignore_errors=True)
    if not files:
        return None
    folder = Path(tempfile.mkdtemp(prefix=_GIVEN, dir=workspace))
    put(workspace, folder, files)
    return folder


def _located(word: str, folder: Path | None) -> str:
    if folder is None or not word.startswith(INCLUDE_PREFIX):
        return word
    return str(folder / INCLUDE / word.removeprefix(INCLUDE_PREFIX))


def _start(name: str, argv: list[str], workspace: Path, env: object) -> subprocess.Popen[bytes]:
    environment = trainer_environment(env)
    payload = str(Path(__file__).resolve().parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [payload, environment.get("PYTHONPATH")]))
    us = os.getpid()

    def die_with_us() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != us:
            os.kill(os.getpid(), signal.SIGKILL)

    return subprocess.Popen(
        [sys.executable, "-P", "-m", f"remote_payload.tools.{name}", *argv],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=workspace,
        env=environment,
        preexec_fn=die_with_us,
    )


def _relay(name: str, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Pass on what the tool says, to its end; the last line to the laptop."""
    assert process.stdout is not None and process.stderr is not None
    said, answer = b"", b""
    last = ""
    with selectors.DefaultSelector() as pipes:
        for pipe in (process.stdout, process.stderr):
            pipes.register(pipe, selectors.EVENT_READ)
        while pipes.get_map():
            ready = pipes.select(_BEAT_S * time_scale())
            if not ready:
                _say(beat=True)
            for key, _ in ready:
                data = os.read(key.fd, 65536)
                if not data:
                    pipes.unregister(key.fileobj)
                elif key.fileobj is process.stdout:
                    answer += data
                else:
                    *lines, said = (said + data).split(b"\n")
                    for line in lines:
                        text = line.decode(errors="replace").rpartition("\r")[2]
                        last = text if text.strip() else last
                        if not text.startswith(f"{name}: "):  # its error, which the answer has
                            _say(say=text)
    status = process.wait()
    last = said.decode(errors="replace") or last
    record = rundir.decode(answer)
    if status == 0 and record is not None:
        return {"ok": True, "answer": record}
    if last.startswith(f"{name}: "):
        error = last.removeprefix(f"{name}: ")
    elif status == -signal.SIGKILL:
        error = "was killed (SIGKILL): by somebody, or for the memory that it took"
    elif status < 0:
        error = f"was killed by {signal.Signals(-status).name}"
    else:
        error = last if status and last else f"ended with status {status} and without an answer"
    return {"ok": False, "error": error, "status": status}


def _say(**fields: object) -> None:
    try:
        print(json.dumps(fields), flush=True)
    except BrokenPipeError:
        os._exit(1)
