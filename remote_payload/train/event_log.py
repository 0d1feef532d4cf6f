"""`events.jsonl` as the trainer writes it, and as later attempts and tools look back at it.

A disk without room costs events, and not the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from remote_payload.rundir import EVENTS, RecordWriter, decode


def events_of(run_dir: Path, kind: str) -> Iterator[dict[str, Any]]:
    """The events of one `kind`, of all attempts, in their order; other lines are not parsed.

    Raises OSError when the file cannot be read.
    """
    mark = f'"{kind}"'.encode()
    with (run_dir / EVENTS).open("rb") as file:
        for line in file:
            record = decode(line) if mark in line else None
            if record is not None and record.get("kind") == kind:
                yield record


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
