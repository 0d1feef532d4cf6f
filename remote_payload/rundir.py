"""The run directory: its names, its states, and how records are written and read.

A run is a directory. The payload fills it, the controller copies it, and nothing else crosses between
the two machines, so this file is the whole contract; `docs/rundir.md` explains every record. Standard
library only, because the supervising half of the payload and the controller both import it.
"""

from __future__ import annotations

import enum
import json
import math
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

SCHEMA_VERSION: Final = 1
"""Version of the records in a run directory (`v` of every record)."""

PROTOCOL_VERSION: Final = 1
"""Version of the frames between feed and mirror."""

RUN: Final = "run.json"
JOB: Final = "job.toml"
STATUS: Final = "status.json"
SUPERVISOR_LOG: Final = "supervisor.jsonl"
PROGRESS: Final = "progress.json"
TRAIN_LOG: Final = "train.log"
EVENTS: Final = "events.jsonl"
GPU: Final = "gpu.jsonl"
EXIT: Final = "exit.json"
CRASH: Final = "crash"
STACKS: Final = f"{CRASH}/stacks-request.txt"
"""A trainer's answers to `Request.STACKS`, one after another."""
CHECKPOINTS: Final = "checkpoints"
CONTROL: Final = "control"

APPENDED: Final = (TRAIN_LOG, EVENTS, GPU, SUPERVISOR_LOG)
"""Files that only grow; the feed sends them as `append` frames. So are the files in `crash/`."""

REPLACED: Final = (RUN, JOB, STATUS, PROGRESS, EXIT)
"""Small files that are replaced whole; the feed sends them as `replace` frames."""

MAX_FRAME_BYTES: Final = 1 << 20
"""Most payload bytes in one frame, and so the largest file that may be replaced whole."""

_CRASH_NAME = re.compile(r"crash/[A-Za-z0-9][A-Za-z0-9._-]*")
_RUN_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_STEP = re.compile(r"step-(\d+)")


class State(enum.StrEnum):
    """What `status.json` may say. `lost` and `unknown` are never written: a reader derives them."""

    LAUNCHING = "launching"
    RUNNING = "running"
    STOPPING = "stopping"
    FINISHED = "finished"
    FAILED = "failed"
    KILLED = "killed"
    STALLED = "stalled"
    RESTARTING = "restarting"
    """An attempt crashed and the supervisor waits to begin the next one."""


ENDED: Final = (State.FINISHED, State.FAILED, State.KILLED)
"""States after which nothing follows in an attempt."""


class Request(enum.StrEnum):
    """What the controller may ask for: a file of this name in `control/`, empty or one JSON object."""

    STOP = "stop"
    CHECKPOINT = "checkpoint"
    STACKS = "stacks"


class TrainerExit(enum.IntEnum):
    """The trainer's own exit codes (1 to 63). 128 + n: killed by signal n. 64 to 99: dflashctl's."""

    FINISHED = 0
    CRASHED = 1
    """A thread failed; `crash/` has every thread's traceback."""
    REFUSED = 2
    """The job, the data or the model cannot be used; the log's last line says why."""
    STOPPED = 3
    """Ended by request or by SIGTERM before its last step; the checkpoint is complete."""


def is_mirrored(name: str) -> bool:
    """Whether a feed may send, and a mirror may write, the file `name` (relative, `/` between parts)."""
    return name in APPENDED or name in REPLACED or _CRASH_NAME.fullmatch(name) is not None


def is_run_id(text: str) -> bool:
    """Whether `text` is a run id: 1 to 63 lower-case letters, digits and dashes, no dash in front."""
    return _RUN_ID.fullmatch(text) is not None


def step_of(name: str) -> int | None:
    """N of a checkpoint's folder `step-N`; None of any other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def checkpoint_steps(run_dir: Path) -> list[int]:
    """Steps of the checkpoints that stand in a run directory, rising."""
    folder = run_dir / CHECKPOINTS
    steps = [step_of(path.name) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(step for step in steps if step is not None)


def write_whole(path: Path, content: bytes) -> None:
    """Replace the small file `path` by `content`: complete or untouched, also after a power cut.

    Raises OSError when the folder cannot be written.
    """
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def encode(record: Mapping[str, Any]) -> bytes:
    """One record as one line of JSON with its newline.

    JSON has no NaN: a float that is not finite becomes null, and the names of such fields stand in
    `nonfinite`, so that a reader can tell "not a number" from "not known".
    """
    lost: list[str] = []
    clean = {key: _finite(value, key, lost) for key, value in record.items()}
    if lost:
        clean["nonfinite"] = sorted(set(lost))
    return json.dumps(clean, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _finite(value: Any, key: str, lost: list[str]) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        lost.append(key)
        return None
    if isinstance(value, Mapping):
        return {str(k): _finite(v, f"{key}.{k}", lost) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v, key, lost) for v in value]
    return value


def decode(line: bytes) -> dict[str, Any] | None:
    """The record in one line, or None when it is none (readers count those and go on)."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def read_whole(path: Path) -> dict[str, Any] | None:
    """The record in a small file, or None when the file is absent or holds none."""
    try:
        return decode(path.read_bytes())
    except OSError:
        return None


def complete_lines(data: bytes) -> tuple[list[bytes], int]:
    """Split `data` into whole lines without their newline, and say how many bytes they took.

    A last line without a newline is left alone: its writer has not finished it.
    """
    end = data.rfind(b"\n") + 1
    return data[:end].split(b"\n")[:-1], end


class RecordWriter:
    """Appends records to one file, each as one whole line in one `write()`; safe between threads.

    A file that a killed writer left without a last newline gets one first, so that the half line
    stays one line of its own.
    """

    def __init__(self, path: Path, *, attempt: int, rank: int | None = None) -> None:
        self._lock = threading.Lock()
        self._cut = False
        self._common: dict[str, Any] = {"attempt": attempt}
        if rank is not None:
            self._common["rank"] = rank
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            os.write(self._descriptor, b"\n")

    def write(self, kind: str, **fields: Any) -> None:
        """Append one record of `kind`; `v`, `t`, `mono`, `attempt` and `rank` are added.

        Raises OSError when the disk refuses it. One that has no room for all of the line takes a part of it,
        which stays a line of its own too.
        """
        line = encode(stamp(kind, self._common | fields))
        with self._lock:
            line = b"\n" + line if self._cut else line
            self._cut = os.write(self._descriptor, line) < len(line)

    def close(self) -> None:
        """Close the file; the writer cannot be used afterwards."""
        os.close(self._descriptor)


def stamp(kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """A record's common head (`v`, `t` in Unix seconds, `mono` in seconds, `kind`) before `fields`."""
    return {
        "v": SCHEMA_VERSION,
        "t": round(time.time(), 3),
        "mono": round(time.monotonic(), 3),
        "kind": kind,
        **fields,
    }


def read_records(lines: Iterable[bytes]) -> tuple[list[dict[str, Any]], int]:
    """The records in `lines`, and how many lines held none."""
    decoded = [decode(line) for line in lines if line.strip()]
    records = [record for record in decoded if record is not None]
    return records, len(decoded) - len(records)
