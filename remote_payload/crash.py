"""What a dying trainer leaves behind in `crash/`: one record a failed thread, and stacks of all threads.

Three ways in, because a process dies in three ways. An exception in a thread: the thread itself calls
`write_thread`. A fatal signal (a segmentation fault in a CUDA library): faulthandler writes the stacks to
`stacks-fatal.txt`, which therefore has to be open, and empty, from the start. A hang: `dump_stacks` from
inside, or SIGUSR1 from outside, which works while every thread waits for a lock. Standard library only.
"""

from __future__ import annotations

import faulthandler
import re
import signal
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from remote_payload import rundir

FATAL = "stacks-fatal.txt"
REQUEST = Path(rundir.STACKS).name

_MOST_TRACEBACK = 256 * 1024
_MOST_ERROR = 500

# faulthandler keeps a descriptor number, not the file: it must stay open for the process's life.
_kept_open: list[IO[bytes]] = []
_naming = threading.Lock()


def install(run_dir: Path) -> None:
    """Have fatal signals and SIGUSR1 dump all threads' stacks into `crash/`.

    Call it first in the trainer's main thread. Raises OSError when `crash/` cannot be written.
    """
    fatal, request = (_open_appending(run_dir, name) for name in (FATAL, REQUEST))
    faulthandler.enable(file=fatal, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=request, all_threads=True, chain=False)
    _kept_open.extend((fatal, request))


def write_thread(
    run_dir: Path,
    *,
    thread: str,
    role: str,
    device: str | None,
    step: int | None,
    bucket: int | None,
    samples: Sequence[int],
    error: BaseException,
    first: bool,
    memory: str | None,
    attempt: int,
) -> str:
    """Write the record of a failed thread into `crash/`, whole or not at all.

    `first`: whether this thread failed before all others. `samples`: dataset indices of the batch in hand.
    `memory`: the device's memory summary. Returns the file's name in `crash/`; an earlier record of a
    thread of the same name is kept, the new one gets a number. Raises OSError when it cannot be written.
    """
    record = rundir.stamp(
        "crash",
        {
            "attempt": attempt,
            "thread": thread,
            "role": role,
            "device": device,
            "step": step,
            "bucket": bucket,
            "samples": [int(sample) for sample in samples],
            "error": one_line(error),
            "traceback": _middle_cut("".join(traceback.format_exception(error)), _MOST_TRACEBACK),
            "first": first,
            "memory": memory,
        },
    )
    with _naming:
        path = _free_name(run_dir, f"thread-{_file_part(thread)}", ".json")
        rundir.write_whole(path, rundir.encode(record))
    return path.name


def dump_stacks(run_dir: Path, why: str) -> str:
    """Append the stacks of all threads to `crash/stacks-<why>.txt`; returns the file's name there.

    Raises OSError when it cannot be written.
    """
    name = f"stacks-{_file_part(why)}.txt"
    with _open_appending(run_dir, name) as file:
        file.write(heading(why))
        faulthandler.dump_traceback(file=file, all_threads=True)
    return name


def heading(why: str) -> bytes:
    """The line that stands above a dump of stacks: faulthandler itself says neither when nor why."""
    return f"--- {time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime())}: {why}\n".encode()


def one_line(error: BaseException) -> str:
    """An exception as `Type: first line of its message`, at most 500 characters.

    The first line, because compilers and CUDA put advice and dumps into the later ones.
    """
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else _qualified(kind)
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # an exception's own __str__ may fail, and its type is still worth saying
        lines = []
    text = f"{name}: {lines[0].strip()}" if lines else name
    return text if len(text) <= _MOST_ERROR else text[: _MOST_ERROR - 1] + "…"


def _qualified(kind: type[BaseException]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _folder(run_dir: Path) -> Path:
    folder = run_dir / rundir.CRASH
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _open_appending(run_dir: Path, name: str) -> IO[bytes]:
    return (_folder(run_dir) / name).open("ab", buffering=0)


def _free_name(run_dir: Path, stem: str, suffix: str) -> Path:
    path, number = _folder(run_dir) / f"{stem}{suffix}", 1
    while path.exists():
        number += 1
        path = path.with_name(f"{stem}-{number}{suffix}")
    return path


def _file_part(text: str) -> str:
    """`text` with only the characters that a mirrored name in `crash/` may have."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:80] or "unnamed"


def _middle_cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
