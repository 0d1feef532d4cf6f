"""A log that we did not start: reached like a run, kept like a run, and no run.

`attach` brings the payload (the feed is part of it) to the place, asks it for the file, and makes the local
folder that a Mirror fills: `$XDG_STATE_HOME/dflashctl/logs/<host>/<name>-<hash of the path>/`. A second
attachment finds the same folder, and does without an answer from the place when there is none.
"""

from __future__ import annotations

import time
from pathlib import Path, PurePosixPath

from controller import paths
from controller.errors import ConnectionLostError, UsageError
from controller.inventory import Host
from controller.narration import Say
from controller.place import open_place
from controller.run_place import RunPlace
from controller.ship import pack, ship
from controller.text import last_line, safe_line
from remote_payload import rundir


def attach(
    host: Host,
    log_path: str,
    *,
    say: Say = lambda text: None,
    accept_new_host_key: bool = False,
) -> Path:
    """The mirror folder of the log `log_path` in `host`, ready for a Mirror.

    Raises UsageError when there is no such file there, and what `ship` and `Place.start` raise, but for a
    lost connection to a log that was attached before: its mirror waits for the place.
    """
    if not log_path.startswith("/"):
        raise UsageError(f"--path {log_path!r} is relative", "Give the file's absolute path in the place.")
    log_path = str(PurePosixPath(log_path))
    directory = paths.log_mirror_dir(host.address, host.container, log_path)
    payload = pack()
    try:
        with open_place(host, accept_new_host_key=accept_new_host_key) as place:
            shipped = ship(place, payload, ["log-status", log_path])
    except ConnectionLostError as error:
        if (directory / paths.PLACE).exists():
            say(f"{host.name}: {error.message}; showing what was copied of {log_path}")
            return directory
        raise
    answer = rundir.decode(shipped.output) or {}
    if not answer.get("ok"):
        near = [name for name in answer.get("near", ()) if isinstance(name, str)]
        said = safe_line(str(answer.get("error") or "")) or last_line(shipped.stderr)
        raise UsageError(
            f"{host.name}: {said}", f"Did you mean: {', '.join(near)}?" if near else "Is that its path there?"
        )
    if shipped.sent:
        say(f"{host.name}: payload {payload.digest[:12]} sent")
    paths.made(directory)
    RunPlace(
        host=host,
        run_id=directory.name,
        run_dir=str(PurePosixPath(log_path).parent),
        payload_dir=shipped.directory,
        digest=payload.digest,
        python=host.python,
        created=round(time.time(), 3),
        job_name=log_path,
        log_path=log_path,
    ).write(directory)
    return directory
