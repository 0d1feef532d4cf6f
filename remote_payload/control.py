"""Requests to a run: one file each in `control/`, put there by the controller, taken by the supervisor.

A request is a name (`rundir.Request`) and optional JSON: `by` (who asks), and `grace_s` for `stop`
(seconds from SIGTERM to SIGKILL). Standard library only.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from remote_payload import identity, rundir

_MOST_BYTES = 64 * 1024


class ControlError(Exception):
    """A request that nobody would act on; the text says why in one sentence."""


def place_request(run_dir: Path, name: str, content: bytes) -> None:
    """Ask the supervisor of `run_dir` for `name`, with `content` (JSON, or nothing).

    Raises ControlError when the request is not known, its JSON is none, or no supervisor lives.
    """
    known = [str(request) for request in rundir.Request]
    if name not in known:
        raise ControlError(f"unknown request {name!r}: expected one of {', '.join(known)}")
    if content.strip() and rundir.decode(content) is None:
        raise ControlError(f"the content of request {name} is not a JSON object")
    if len(content) > _MOST_BYTES:
        raise ControlError(f"the content of request {name} is larger than {_MOST_BYTES} bytes")
    status = rundir.read_whole(run_dir / rundir.STATUS)
    if status is None:
        raise ControlError(f"{run_dir}: there is no run (no {rundir.STATUS}); was it removed?")
    if identity.state_of(status.get("supervisor"), status.get("boot_id")) != "alive":
        ended = status.get("state") in rundir.ENDED
        word = f"the run has ended ({status.get('state')})" if ended else "the run's supervisor is gone"
        raise ControlError(f"{word}, so nobody acts on the request {name}")
    try:
        (run_dir / rundir.CONTROL).mkdir(mode=0o700, exist_ok=True)
        rundir.write_whole(run_dir / rundir.CONTROL / name, content)
    except OSError as error:
        room = "; make room there first" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise ControlError(
            f"{run_dir / rundir.CONTROL}: cannot be written ({error.strerror}){room}"
        ) from error


def take_requests(control: Path) -> list[tuple[str, dict[str, Any]]]:
    """The requests that lie in `control`, each with its content; they are removed from there.

    Names with a dot in front are still being written. A link or anything else that is no plain file is
    removed unread.
    """
    taken = []
    try:
        names = sorted(entry.name for entry in os.scandir(control) if not entry.name.startswith("."))
    except OSError:
        return []
    for name in names:
        path = control / name
        content: dict[str, Any] = {}
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as file:
                if stat.S_ISREG(os.fstat(descriptor).st_mode):
                    content = rundir.decode(file.read(_MOST_BYTES)) or {}
        try:
            path.unlink()
        except OSError:  # a folder, say: it stays, and asks for nothing
            continue
        taken.append((name, content))
    return taken
