"""`logs`: the run's log on stdout, every byte once; what happens to the connection on stderr.

Only bytes of the log reach stdout, never half a character, and half a line only when nothing has come
for a moment or nothing will come any more. A connection that is lost, refused or slow is told on stderr,
one line per change, and never ends a follower: the run decides how that ends, and with which exit code.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, TextIO

from controller.errors import DflashctlError, ProtocolError, RunLostError
from controller.mirror_reader import MOST_BYTES, MirrorReader, Piece
from controller.suspension import Suspension
from controller.text import safe_line
from controller.trouble import Trouble
from controller.waiting import Waiter, wait_until_current

if TYPE_CHECKING:
    from controller.mirror import Mirror

QUIET_S: Final = 0.5
"""A half line is printed after so many seconds without more: a prompt, a progress bar."""
_LONGEST: Final = 1 << 16
"""A line without an end is printed in pieces from here on."""


def follow_log(
    directory: Path,
    *,
    follow: bool,
    tail: int | None,
    out: BinaryIO,
    whole: bool = False,
    mirror: Mirror | None = None,
    notes: TextIO | None = None,
) -> int:
    """Print the log of the run mirrored in `directory` to `out`; `tail`: only its last lines, and on;
    `whole`: also what a late attachment left out, which was asked for (`mirror.ask_for_whole_log`).

    `mirror` is the one that this process started for the folder (with `once` unless `follow`); without
    it what others write is followed. Returns the run's exit code when it followed to the end, and 0 when
    it did not follow. Raises ProtocolError when the feed refuses for good, BrokenPipeError when nobody
    reads `out` any more, and without `follow` the error that kept us from getting a single byte.
    """
    reader = MirrorReader(directory, skip_holes=not whole)
    printer = _Printer(out)
    trouble = Trouble(sys.stderr if notes is None else notes, lambda: printer.at_line_start)
    with Suspension(mirror) as suspension:
        waiter = Waiter(reader, mirror, out, suspension.check)
        if tail is not None or not (follow or whole):
            wait_until_current(reader, trouble, waiter)
        if tail is not None:
            reader.skip_to_last_lines(tail)
        try:
            while True:
                suspension.check()
                seen, gave_up = waiter.seen(), waiter.gave_up  # before the record that they are about
                record = reader.record()
                ended = waiter.has_ended(record)
                settled = waiter.is_settled(record)  # before the look for bytes that it vouches for
                if follow or whole:
                    trouble.tell(record, mirror, time.time())
                piece = reader.read()
                if piece is not None:
                    missing = _missing(record, whole) if tail is None else None
                    _show(piece, printer, trouble, missing=missing)
                    continue
                if whole and not reader.skip_holes and reader.waits_at_hole():
                    nobody = gave_up or (mirror is None and ended)
                    if not nobody and not record.get("no_older"):
                        waiter.wait(seen)
                        continue
                    reader.skip_holes = True  # they cannot be had now
                    continue
                if ended or (not follow and settled):
                    break
                if gave_up:
                    raise _refusal(record, mirror)
                printer.idle()
                waiter.wait(seen)
        finally:
            trouble.clear()
    printer.finish()
    if not follow:
        if mirror is not None and mirror.error is not None and record.get("last_heard") is None:
            raise mirror.error
        if not ended or (mirror is not None and mirror.error is not None):
            trouble.tell_age(record, mirror, time.time())
        return 0
    return _end(directory, trouble)


def _missing(record: Mapping[str, object], whole: bool) -> str:
    """What is said of older bytes that are not here, after their number."""
    if not whole:
        return "were not copied and are left out here; --all gets them"
    if why := record.get("no_older"):
        return f"are left out: {safe_line(str(why))}; `dflashctl pull RUN log` gets all of it"
    return "cannot be had now and are left out"


def _show(piece: Piece, printer: _Printer, trouble: Trouble, *, missing: str | None) -> None:
    """Print a piece; `missing` is said of bytes that lack before it (None: nothing)."""
    if piece.restarted:
        printer.finish()
        trouble.note("the log was truncated or replaced; it begins anew")
    if piece.missing and missing is not None:
        trouble.note(f"{piece.missing} older bytes {missing}")
    if piece.data:
        trouble.clear()
        printer.write(piece.data)


def _end(directory: Path, trouble: Trouble) -> int:
    """The exit code of an ended run; how it ended is told unless it finished."""
    from controller.run_reader import RunReader

    state = RunReader(directory).poll(time.time())
    code = RunLostError.exit_code if state.exit_code is None else state.exit_code
    if code:
        health = state.health
        told = f"{health.headline}: {health.detail}" if health.detail else health.headline
        trouble.note(safe_line(f"{state.run_id} {told}".strip()))
        if state.diagnosis is not None:
            trouble.note(f"what to do: {state.diagnosis.do}")
    return code


def _refusal(record: dict[str, object], mirror: Mirror | None) -> DflashctlError:
    if mirror is not None and mirror.error is not None:
        return mirror.error
    return ProtocolError(str(record.get("error") or "the mirror ended before the run did"))


class _Printer:
    """Bytes of a log to a stream, cut only where a reader may see a cut."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._held = b""
        self._held_since = 0.0
        self._terminal = _is_terminal(out)
        _widen(out)
        self._ends_a_line = True

    @property
    def at_line_start(self) -> bool:
        """Whether a note on the same terminal would begin a line of its own."""
        return self._ends_a_line or not self._terminal

    def write(self, data: bytes) -> None:
        """Print `data` up to its last line end; a `\\r` ends a progress bar's state."""
        if self._held:
            data = self._held + data
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if len(data) - end > _LONGEST:
            end = whole_characters(data)
        self._print(memoryview(data)[:end])
        self._held = data[end:]
        self._held_since = time.monotonic()

    def idle(self) -> None:
        """Nothing new came: print a half line that has waited long enough."""
        if self._held and time.monotonic() - self._held_since >= QUIET_S:
            end = whole_characters(self._held)
            self._print(self._held[:end])
            self._held = self._held[end:]

    def finish(self) -> None:
        """Print what is held: nothing will continue it."""
        self._print(self._held)
        self._held = b""

    def _print(self, data: bytes | memoryview) -> None:
        if data:
            self._out.write(data)
            self._out.flush()
            self._ends_a_line = data[-1:] == b"\n"


def _widen(out: BinaryIO) -> None:
    """Let a pipe hold as much as is written at once: its reader is then woken less often."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # no pipe, or not on Linux
        fcntl.fcntl(out.fileno(), fcntl.F_SETPIPE_SZ, MOST_BYTES)


def _is_terminal(out: BinaryIO) -> bool:
    try:
        return os.isatty(out.fileno())
    except (OSError, ValueError):
        return False


def whole_characters(data: bytes) -> int:
    """How many bytes of `data` do not belong to a UTF-8 character that is cut off at its end."""
    for back in range(1, min(4, len(data) + 1)):
        byte = data[-back]
        if byte >= 0xC0:
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4 if byte < 0xF8 else 1
            return len(data) - back if needed > back else len(data)
        if byte < 0x80:
            break
    return len(data)
