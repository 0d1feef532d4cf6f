"""Reads the end of a mirrored `train.log` as it grows, for a screen: never more than a screen can use.

A screen is no archive. A log is opened at its last lines, whatever its size, and when it grows faster than a
view can show it (100,000 lines a second) only the end of what came is decoded, and how much was passed over
is said; `dflashctl logs` gives every byte.
"""

from __future__ import annotations

import collections
import dataclasses
from pathlib import Path

from controller.mirror_reader import MirrorReader, Piece
from controller.text import LineDecoder

FIRST_LINES = 1000
"""Lines of the end that are shown at the start."""

PIECE_BYTES = 256 << 10
KEPT_PIECES = 2
"""Pieces decoded in one poll, the newest ones: 512 KiB, about 8,000 lines, 20 ms."""

FIRST_PIECES = 16
"""Pieces decoded at the start: a line of 1 MB must not be all one sees."""

MOST_PIECES = 256
"""Pieces read in one poll: 64 MiB."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogNews:
    """New whole lines, safe to show; the unfinished last line as it stands; bytes passed over."""

    lines: tuple[str, ...] = ()
    partial: str = ""
    skipped_bytes: int = 0
    missing_bytes: int = 0
    """Bytes before these lines that the mirror does not have."""
    restarted: bool = False
    """The file was truncated or replaced: what was shown before is of another one."""


class LogTail:
    """Follows `train.log` in the mirror folder `directory`; one thread only."""

    def __init__(self, directory: Path) -> None:
        self._reader = MirrorReader(directory)
        self._decoder = LineDecoder()
        self._begun = False

    def poll(self) -> LogNews | None:
        """What is new since the last call, or None."""
        most = KEPT_PIECES if self._begun else FIRST_PIECES
        if not self._begun:
            self._reader.skip_to_last_lines(FIRST_LINES)
        kept: collections.deque[Piece] = collections.deque()
        skipped = 0
        missing = 0
        restarted = False
        for _ in range(MOST_PIECES):
            piece = self._reader.read(PIECE_BYTES)
            if piece is None:
                break
            kept.append(piece)
            restarted |= piece.restarted and self._begun
            missing += piece.missing if self._begun else 0
            self._begun = True
            if len(kept) > most:
                skipped += len(kept.popleft().data)
        if not kept:
            return None
        if skipped or missing or restarted:
            self._decoder.restart()
        data = b"".join(piece.data for piece in kept)
        if skipped:
            cut = data.find(b"\n") + 1
            skipped, data = skipped + cut, data[cut:]
        return LogNews(
            lines=tuple(self._decoder.feed(data)),
            partial=self._decoder.partial,
            skipped_bytes=skipped,
            missing_bytes=missing,
            restarted=restarted,
        )
