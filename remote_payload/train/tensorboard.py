"""TensorBoard as a sink of the same events: optional, and unable to stop or slow a run.

A thread of its own reads `events.jsonl` as it grows and writes the numbers of `step` and `eval` records into
`tensorboard/` in the run directory. The file is the queue between the two: nobody who writes an event waits
for this thread or knows of it, what it has not read yet takes no memory, and nothing has to be dropped.
Whatever fails here (no package, a full disk, a writer that raises) is one line of the log and the end of the
sink; a writer that hangs is left behind when the run ends, since the thread is a daemon.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from remote_payload import rundir
from remote_payload.crash import one_line

FOLDER = "tensorboard"
KINDS = ("step", "eval")
PACKAGES = ("torch.utils.tensorboard", "tensorboardX")
PERIOD_S = 1.0
MOST_BYTES = 1 << 20
"""Read of the events at once."""

_HEAD = frozenset({"v", "t", "mono", "attempt", "rank", "kind", "step"})


class Writer(Protocol):
    """What tensorboard's and tensorboardX's SummaryWriter have in common."""

    def add_scalar(self, tag: str, value: float, step: int, walltime: float) -> Any:
        """Add one number of one curve."""

    def flush(self) -> Any:
        """Write what was added."""

    def close(self) -> Any:
        """Flush and end."""


MakeWriter = Callable[[Path, int | None], Writer]
"""From a folder, and the step from which on earlier numbers in it are void (None: none are)."""


def summary_writer(folder: Path, purge_step: int | None) -> Writer:
    """A writer of the package that is installed. Raises ImportError when neither is."""
    for name in PACKAGES:
        with contextlib.suppress(ImportError):
            writer: Writer = importlib.import_module(name).SummaryWriter(str(folder), purge_step=purge_step)
            return writer
    raise ImportError("neither tensorboard nor tensorboardX is installed")


class TensorBoardSink:
    """Copies one attempt's events; `start` it before the run and `stop` it after."""

    def __init__(
        self,
        run_dir: Path,
        attempt: int,
        log: Callable[[str], None],
        make_writer: MakeWriter = summary_writer,
    ) -> None:
        self._events = run_dir / rundir.EVENTS
        self._folder = run_dir / FOLDER
        self._attempt = attempt
        self._log = log
        self._make_writer = make_writer
        self._offset = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._live, name="tensorboard", daemon=True)

    def start(self) -> None:
        """Begin to copy."""
        self._thread.start()

    def stop(self, patience_s: float = 5.0) -> None:
        """Copy what is there, and end; after `patience_s` the thread is left behind."""
        self._stopping.set()
        self._thread.join(patience_s)
        if self._thread.is_alive():
            self._log(
                f"TensorBoard did not take all events within {patience_s:g} s; the run does not wait for it"
            )

    def _live(self) -> None:
        writer: Writer | None = None
        try:
            last = False
            while not last:
                last = self._stopping.wait(PERIOD_S)
                while records := self._new_records():
                    for record in records:
                        if writer is None:
                            purge = record["step"] if self._attempt > 1 else None
                            writer = self._make_writer(self._folder, purge)
                        for tag, value in scalars(record):
                            writer.add_scalar(tag, value, record["step"], record["t"])
                if writer is not None:
                    writer.flush()
            if writer is not None:
                writer.close()
        except ImportError as error:
            self._log(
                f"No TensorBoard: {error}; pip install tensorboard (or tensorboardX), or set"
                " tensorboard = false. The run goes on without it"
            )
        except Exception as error:  # whatever a foreign package raises, training is not concerned
            self._log(f"TensorBoard failed and is dropped ({one_line(error)}); the run goes on without it")

    def _new_records(self) -> list[dict[str, Any]]:
        """Records of this attempt that have numbers; empty when all bytes so far were read."""
        found: list[dict[str, Any]] = []
        while not found:
            with self._events.open("rb") as file:
                file.seek(self._offset)
                lines, size = rundir.complete_lines(file.read(MOST_BYTES))
            if not size:
                break
            self._offset += size
            records, _ = rundir.read_records(lines)
            found = [
                record
                for record in records
                if record.get("kind") in KINDS
                and record.get("attempt") == self._attempt
                and isinstance(record.get("step"), int)
            ]
        return found


def scalars(record: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a record as (tag, value): `step/loss`, `step/accuracy/1`, `eval/by_kind/code/tau`."""
    for name, value in record.items():
        if name not in _HEAD:
            yield from _flat(f"{record['kind']}/{name}", value)


def _flat(tag: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield tag, float(value)
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _flat(f"{tag}/{name}", inner)
    elif isinstance(value, list):
        for number, inner in enumerate(value, 1):
            yield from _flat(f"{tag}/{number}", inner)
