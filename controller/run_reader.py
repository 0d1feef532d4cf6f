"""Reads a mirrored run directory a bit at a time and keeps its `RunState`.

Every `poll` reads the small files whole and of the appended ones only what is new, at most `SLICE` bytes of
each: a mirror with 400,000 events is caught up over many polls (`RunState.unread_bytes` says what is left),
while the overview is complete from the first, since `progress.json` alone can draw it. Files may be absent,
end in half a line, shrink, or be replaced: the mirror's writer is another process. Nothing here raises for
what a file holds.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

from controller import paths, run_records
from controller.foreign_reader import ForeignReader
from controller.health import Limits
from controller.mirror_files import MIRROR
from controller.run_records import Crash, Record, table, text, whole
from controller.run_state import News, RunState, reduce
from controller.text import safe_lines
from controller.timing import Timing
from remote_payload import rundir

SLICE = 1 << 20
"""Most bytes read of one appended file in one poll: about 4,000 events, 40 ms."""

LONGEST_LINE = 8 << 20
"""A line longer than this is no record; it is counted once and passed over. So is a crash's file."""

LAST_WORDS = 12
"""Lines of the log's end that are kept of a run that has ended."""


class LineCursor:
    """Where we are in one file that grows: gives its new whole lines, at most `SLICE` bytes a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._file: tuple[int, int] | None = None
        self._generation: int | None = None
        self._half = b""
        self._passing = False
        self.unread = 0
        self.size = 0

    def read(self, generation: int | None = None) -> tuple[list[bytes], int, bool]:
        """New whole lines, how many lines were too long, and whether the file started over.

        `generation` is what mirror.json says of the file; a change means that it was replaced.
        """
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                restarted = self._restarted(status, generation)
                if restarted:
                    self._offset, self._half, self._passing = 0, b"", False
                self.size = status.st_size
                file.seek(self._offset)
                data = file.read(SLICE)
        except OSError:
            return [], 0, False
        self._offset += len(data)
        self.unread = max(0, self.size - self._offset)
        lines, too_long = self._lines(data)
        return lines, too_long, restarted

    def _restarted(self, status: os.stat_result, generation: int | None) -> bool:
        identity = (status.st_dev, status.st_ino)
        changed = self._file is not None and identity != self._file
        changed |= status.st_size < self._offset
        if generation is not None:
            changed |= self._generation is not None and generation != self._generation
            self._generation = generation
        self._file = identity
        return changed and self._offset > 0

    def _lines(self, data: bytes) -> tuple[list[bytes], int]:
        too_long = 0
        if self._passing:
            end = data.find(b"\n") + 1
            if not end:
                return [], 0
            self._passing, data = False, data[end:]
        data = self._half + data
        lines, taken = rundir.complete_lines(data)
        self._half = data[taken:]
        if len(self._half) > LONGEST_LINE:
            self._half, self._passing, too_long = b"", True, 1
        return lines, too_long


class RunReader:
    """Follows the mirror in `directory`; one thread only. `scale` shortens all ages, for tests."""

    def __init__(self, directory: Path, *, scale: float | None = None) -> None:
        if scale is None:
            scale = Timing.from_environment().scale
        self._directory = directory
        self._limits = Limits().scaled(scale)
        self._cursors = {
            name: LineCursor(directory / name) for name in (rundir.EVENTS, rundir.GPU, rundir.SUPERVISOR_LOG)
        }
        self._small: dict[str, tuple[tuple[int, int, int], Record | None]] = {}
        self._crashes: dict[str, tuple[tuple[int, int], Crash | None]] = {}
        self._state = RunState()
        place = rundir.read_whole(directory / paths.PLACE) or {}
        self._launched = _launched(place)
        self._foreign = ForeignReader(directory, place) if text(place, "log_path") else None

    @property
    def state(self) -> RunState:
        """The state after the last poll."""
        return self._state

    def poll(self, now: float, *, history: bool = True) -> RunState:
        """Read what is new and return the state at the laptop's Unix time `now`.

        A bounded amount of work: poll again at once while `unread_bytes` of the state is not 0. Without
        `history` only the small files are read, which takes a millisecond and draws most of an overview.
        """
        mirror, status = self._record(MIRROR), self._record(rundir.STATUS)
        files = table(mirror or {}, "files")
        records: dict[str, tuple[Record, ...]] = {}
        unparsable: dict[str, int] = {}
        restarted = set()
        for name, cursor in self._cursors.items():
            if not history:
                records[name] = ()
                continue
            lines, too_long, again = cursor.read(whole(table(files, name), "generation"))
            found, bad = rundir.read_records(lines)
            records[name] = tuple(found)
            unparsable[name] = bad + too_long
            if again:
                restarted.add(name)
        crashes, stacks = self._crash_folder()
        foreign = self._foreign.poll() if self._foreign and history else None
        if foreign is not None:
            records[rundir.EVENTS] = foreign.events
            restarted |= {rundir.EVENTS} if foreign.restarted else set()
        news = News(
            run=foreign.run if foreign else self._record(rundir.RUN) or self._launched,
            job=self._record(rundir.JOB),
            status=status,
            progress=foreign.progress if foreign else self._record(rundir.PROGRESS),
            exit=self._record(rundir.EXIT),
            mirror=mirror,
            events=records[rundir.EVENTS],
            gpu=records[rundir.GPU],
            supervisor=records[rundir.SUPERVISOR_LOG],
            crashes=crashes,
            stacks=stacks,
            last_words=self._last_words() if self._state.ended or _says_ended(status) else (),
            unparsable=unparsable,
            restarted=frozenset(restarted),
            unread_bytes=sum(cursor.unread for cursor in self._cursors.values())
            + (1 if not history or (foreign and foreign.more) else 0),
            total_bytes=sum(cursor.size for cursor in self._cursors.values()),
        )
        self._state = reduce(self._state, news, now, self._limits)
        return self._state

    def catch_up(self, now: float) -> RunState:
        """Poll until all that is here has been read; where more comes as fast as that, to that point."""
        state = self.poll(now)
        while left := state.unread_bytes:
            state = self.poll(now)
            if state.unread_bytes >= left:
                break
        if state.ended and not state.last_words:  # a run that is lost says so only when all is weighed
            state = self.poll(now)
        return state

    def _record(self, name: str) -> Record | None:
        """The record of a small file; parsed again only when the file has changed.

        A file that has become unreadable or half written keeps its last good record.
        """
        path = self._directory / name
        try:
            status = path.stat()
            key = (status.st_ino, status.st_mtime_ns, status.st_size)
            known = self._small.get(name)
            if known is not None and known[0] == key:
                return known[1]
            record: Record | None = _toml(path) if name == rundir.JOB else rundir.read_whole(path)
            if record is None and known is not None:
                return known[1]
        except OSError:
            return None
        self._small[name] = (key, record)
        return record

    def _crash_folder(self) -> tuple[tuple[Crash, ...], tuple[str, ...]]:
        try:
            with os.scandir(self._directory / rundir.CRASH) as entries:
                names = sorted(entry.name for entry in entries)
        except OSError:
            return (), ()
        reports = [n for n in names if n.startswith("thread-") and n.endswith(".json")]
        for name in reports:
            path = self._directory / rundir.CRASH / name
            try:
                status = path.stat()
            except OSError:
                continue
            key = (status.st_mtime_ns, status.st_size)
            if name not in self._crashes or self._crashes[name][0] != key:
                record = rundir.read_whole(path) if status.st_size <= LONGEST_LINE else None
                crash = None if record is None else run_records.crash(record, name)
                self._crashes[name] = (key, crash)
        found = tuple(crash for _, crash in self._crashes.values() if crash is not None)
        return found, tuple(n for n in names if n.startswith("stacks-"))

    def _last_words(self) -> tuple[str, ...]:
        try:
            with (self._directory / rundir.TRAIN_LOG).open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - 16384))
                data = file.read(16384)
        except OSError:
            return ()
        lines = [line for line in safe_lines(data.decode("utf-8", "replace")) if line.strip()]
        return tuple(lines[-LAST_WORDS:])


def _launched(place: Record) -> Record | None:
    """What `place.json` says of a run of which nothing has been heard yet, by the names of `run.json`."""
    host = table(place, "host")
    known = {
        "id": place.get("run_id"), "job": place.get("job_name"), "created": place.get("created"),
        "place": host.get("name"), "host": host.get("address"),
    }  # fmt: skip
    return known if place else None


def _says_ended(status: Record | None) -> bool:
    return text(status or {}, "state") in rundir.ENDED


def _toml(path: Path) -> dict[str, Any] | None:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
