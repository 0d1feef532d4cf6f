"""The feed as a command in a place: how it is started, and what is said when it is silent or ends."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Self

from controller import paths
from controller.errors import ConnectionLostError, DflashctlError, LocalStateError
from controller.frames import FrameDecoder
from controller.place import Process
from controller.text import last_line
from controller.timing import Timing
from remote_payload import rundir


@dataclasses.dataclass(frozen=True, slots=True)
class FeedCommand:
    """What starts the feed of a mirror folder."""

    serves: str
    """What its `hello` names: the run's id, or the path of a log that is no run's."""
    argv: list[str]
    is_foreign: bool
    """Whether it serves a log that is no run's."""

    @classmethod
    def of(cls, directory: Path, nonce: str, timing: Timing) -> Self:
        """By the place.json in `directory`. Raises LocalStateError when it cannot be used."""
        path = directory / paths.PLACE
        place = rundir.read_whole(path) or {}
        for key in ("run_id", "python", "payload_dir", "run_dir"):
            if not isinstance(place.get(key), str):
                raise LocalStateError(
                    f"{path}: no {key!r}; the file is absent or was not written by a launch",
                    "without it nobody knows where the run is; launch anew",
                )
        argv = timing.command([place["python"], "-S", f"{place['payload_dir']}/remote_payload"])
        log = place.get("log_path")
        if isinstance(log, str):
            return cls(log, [*argv, "feed-log", log, nonce], True)
        return cls(place["run_id"], [*argv, "feed", place["run_dir"], nonce], False)


def silent(timing: Timing, decoder: FrameDecoder, greeted: bool) -> ConnectionLostError:
    """The error for a feed that says nothing; `greeted`: its `hello` has come."""
    if greeted:
        return ConnectionLostError(f"nothing was heard for {timing.silence_s:g} s")
    if decoder.started:
        return ConnectionLostError(f"the feed started and said nothing for {timing.hello_s:g} s")
    return ConnectionLostError(f"the feed did not start within {timing.hello_s:g} s")


def ended(process: Process, decoder: FrameDecoder) -> DflashctlError:
    """Why a feed's output ended, in one sentence."""
    status = process.wait(1.0)
    last = last_line(process.stderr.strip() or (b"" if decoder.started else decoder.noise), "")
    how = "ended" if status is None else f"ended with status {status}"
    what = "the feed" if decoder.started else "the command that starts the feed"
    return ConnectionLostError(f"{what} {how}" + (f": {last}" if last else ""))
