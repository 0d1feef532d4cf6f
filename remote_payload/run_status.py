"""What the supervisor says of its run: `status.json`, and its history in `supervisor.jsonl`.

A full disk stops records, not the supervision: what cannot be written is left out, and the status is tried
again with the next heartbeat. Standard library only.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from remote_payload import identity, rundir
from remote_payload.rundir import State


class RunStatus:
    """The state of a run under one supervisor, attempt after attempt; `beat_s` is the heartbeat."""

    def __init__(self, run_dir: Path, attempt: int, beat_s: float) -> None:
        """Raises OSError when supervisor.jsonl cannot be opened."""
        self._dir = run_dir
        self._beat_s = beat_s
        self._next_beat = 0.0
        self._me = identity.identity(os.getpid())
        self.attempt = attempt
        self._records = rundir.RecordWriter(run_dir / rundir.SUPERVISOR_LOG, attempt=attempt)
        self.state = State.LAUNCHING
        self._since = time.time()
        self._reason: str | None = None
        self.trainer: dict[str, int] | None = None
        """Pid and start time of this attempt's trainer."""
        self.exit_code: int | None = None
        self.signal: str | None = None
        self.last_progress: float | None = None
        self.restart: dict[str, Any] | None = None
        """While another attempt is awaited: when it begins, how many restarts there were, the limit."""

    def begin_next_attempt(self) -> None:
        """Everything anew but the number, which rises by one."""
        self.attempt += 1
        with suppress(OSError):
            records = rundir.RecordWriter(self._dir / rundir.SUPERVISOR_LOG, attempt=self.attempt)
            self._records.close()
            self._records = records
        self.trainer, self.exit_code, self.signal, self.last_progress = None, None, None, None
        self.restart = None
        self.enter(State.LAUNCHING, None)

    def enter(self, state: State, reason: str | None) -> None:
        """Change the state, and write it down at once."""
        self.state, self._reason, self._since = state, reason, time.time()
        self.write()

    def beat(self) -> None:
        """Write the status when its heartbeat is due."""
        if time.monotonic() >= self._next_beat:
            self.write()

    def write(self) -> None:
        """Write `status.json` now."""
        self._next_beat = time.monotonic() + self._beat_s
        record = rundir.stamp(
            "status",
            {
                "attempt": self.attempt,
                "state": self.state,
                "since": round(self._since, 3),
                "reason": self._reason,
                "boot_id": identity.boot_id(),
                "supervisor": self._me,
                "trainer": self.trainer,
                "exit_code": self.exit_code,
                "signal": self.signal,
                "last_progress": self.last_progress,
                "restart": self.restart,
            },
        )
        with suppress(OSError):
            rundir.write_whole(self._dir / rundir.STATUS, rundir.encode(record))

    def note(self, kind: str, **fields: Any) -> None:
        """Append a record to `supervisor.jsonl`."""
        with suppress(OSError):
            self._records.write(kind, **fields)
