"""`events.jsonl` as the trainer writes it: a disk without room costs events, and not the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from remote_payload.rundir import RecordWriter


class EventLog(RecordWriter):
    """Leaves out what the disk refuses, and says so; also how many it was, once the disk takes one again."""

    def __init__(self, path: Path, *, attempt: int, log: Callable[[str], None]) -> None:
        """Raises OSError when `path` cannot be opened."""
        super().__init__(path, attempt=attempt)
        self._name = path.name
        self._log = log
        self._lost = 0

    def write(self, kind: str, **fields: Any) -> None:
        """As `RecordWriter.write`, without its OSError."""
        try:
            super().write(kind, **fields)
        except OSError as error:
            if not self._lost:
                self._log(f"{self._name} cannot be written: {error.strerror}; the run goes on without it")
            self._lost += 1
            return
        if self._lost:
            lost, self._lost = self._lost, 0
            self._log(f"{self._name} is written again; {lost} events are lost")
