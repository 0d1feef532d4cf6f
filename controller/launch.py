"""From a job to a run that lives without us: check, ship, start; and the requests to a run that lives.

Two remote commands when the payload is there already: one that brings the payload and examines the
place, one that starts the supervisor. The local folder with place.json is made before the start, so a
connection that breaks in between leaves a run that `status` can ask about, never one that nobody knows.
"""

from __future__ import annotations

import dataclasses
import getpass
import json
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, ValidationError

from controller import __version__, doctor, paths
from controller.errors import (
    ConnectionLostError,
    LaunchError,
    LocalStateError,
    PayloadEnvironmentError,
    RunLostError,
)
from controller.inventory import Host
from controller.place import Completed, Place, open_place
from controller.ship import Payload, pack, ship
from controller.timing import SCALE_VARIABLE, Timing
from remote_payload import rundir
from remote_payload.job import Job

COMMAND_S: Final = 60.0
"""Longest time of a short remote command."""


class RunPlace(BaseModel):
    """place.json: how to reach a run again."""

    model_config = ConfigDict(frozen=True)

    host: Host
    run_id: str
    run_dir: str
    payload_dir: str
    digest: str
    python: str
    created: float
    """Unix seconds of the laptop."""
    job_name: str

    @classmethod
    def read(cls, directory: Path) -> RunPlace:
        """The one in the mirror folder `directory`. Raises LocalStateError."""
        path = directory / paths.PLACE
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise LocalStateError(f"{path}: cannot be read ({error.strerror})") from error
        except ValidationError as error:
            raise LocalStateError(f"{path}: is damaged ({error.errors()[0]['msg']})") from error


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchedRun:
    """A run that was started."""

    run_id: str
    run_dir: str
    """In the place."""
    payload_dir: str
    digest: str
    local_dir: Path
    """The mirror folder, with place.json and nothing else yet."""


def launch(
    host: Host,
    job: Job,
    job_name: str,
    *,
    say: Callable[[str], None] = lambda text: None,
    progress: Callable[[int, int], None] | None = None,
    accept_new_host_key: bool = False,
) -> LaunchedRun:
    """Start `job` in `host`, detached. `say` is told each step, `progress` the bytes sent.

    Raises the leaf that fits: everything of `place` and `ship`, PayloadEnvironmentError for a failed
    check, LaunchError when the payload refuses.
    """
    payload = pack()
    with open_place(host, accept_new_host_key=accept_new_host_key) as place:
        _prepare(place, payload, job, say, progress)
        return _start(place, payload, job, job_name)


def _prepare(
    place: Place,
    payload: Payload,
    job: Job,
    say: Callable[[str], None],
    progress: Callable[[int, int], None] | None,
) -> None:
    """Ship the payload and examine the place."""
    host = place.description
    shipped = ship(place, payload, ["preflight", place.workspace], progress=progress)
    if shipped.new_workspace:
        say(f"{host.name}: made the workspace {place.workspace}")
    size = f"{len(payload.files)} files, {len(payload.tar) / 1024:.0f} KiB"
    how = f"sent ({size})" if shipped.sent else "is there already"
    say(f"{host.name}: payload {payload.digest[:12]} {how}")
    answer = rundir.decode(shipped.output)
    if answer is None:
        raise PayloadEnvironmentError(
            f"{host.name}: preflight failed with status {shipped.status}: {_last(shipped.stderr)}"
        )
    checks = doctor.examine(answer, job, host)
    doctor.require(checks, host)
    fine = [f"{check.name} {check.seen}" for check in checks if check.level == "ok"]
    say(f"{host.name}: {', '.join(fine)}")
    for check in checks:
        if check.level == "warning":
            say(f"warning: {host.name}: {check.seen}; {check.todo}")


def _start(place: Place, payload: Payload, job: Job, job_name: str) -> LaunchedRun:
    host = place.description
    run_id = new_run_id(job_name, time.time())
    while paths.mirror_dir(run_id, place.host).exists():  # the folder below must be ours alone
        run_id = new_run_id(job_name, time.time())
    payload_dir = f"{place.workspace}/payloads/{payload.digest}"
    run_dir = f"{place.workspace}/runs/{run_id}"
    created = round(time.time(), 3)
    run_place = RunPlace(
        host=host,
        run_id=run_id,
        run_dir=run_dir,
        payload_dir=payload_dir,
        digest=payload.digest,
        python=place.python,
        created=created,
        job_name=job_name,
    )
    local_dir = paths.make_mirror_dir(run_id, place.host)
    try:
        rundir.write_whole(local_dir / paths.PLACE, run_place.model_dump_json().encode() + b"\n")
    except OSError as error:
        raise LocalStateError(f"{local_dir}: cannot be written ({error.strerror})") from error
    run = {
        "id": run_id,
        "created": created,
        "payload": payload.digest,
        "place": host.name,
        "host": place.host,
        "hosts": [place.host],
        "workspace": place.workspace,
        "python": place.python,
        "job": job_name,
        "env": host.env,
        "by": by(),
        "dflashctl": __version__,
    }
    order = json.dumps({"run": run, "job": job.to_toml()}).encode()
    try:
        done = _payload_command(place, payload_dir, ["start", place.workspace, run_id], order)
    except ConnectionLostError as error:
        error.hint = f"Whether it started says: dflashctl status {run_id}"
        raise
    answer = rundir.decode(done.stdout) or {}
    if not answer.get("ok"):
        shutil.rmtree(local_dir.parent, ignore_errors=True)
        said = answer.get("error") or _last(done.stderr)
        raise LaunchError(f"{host.name}: the run was not started: {said}")
    return LaunchedRun(run_id, run_dir, payload_dir, payload.digest, local_dir)


def new_run_id(job_name: str, now: float) -> str:
    """A run id such as `demo-1130-0231-ab12`: job, local date and time, four random characters."""
    stem = re.sub(r"[^a-z0-9]+", "-", job_name.lower()).strip("-")[:40] or "run"
    alphabet = "abcdefghijkmnpqrstuvwxyz23456789"
    end = "".join(secrets.choice(alphabet) for _ in range(4))
    return f"{stem}-{time.strftime('%m%d-%H%M', time.localtime(now))}-{end}"


def stop(run_place: RunPlace, *, grace_s: float | None = None) -> None:
    """Ask the run to checkpoint and end; SIGKILL after `grace_s` (None: the supervisor's default).

    Returns once the request lies there. Raises RunLostError when nobody is there to act on it, also
    because the run has ended.
    """
    content: dict[str, Any] = {"by": by()}
    if grace_s is not None:
        content["grace_s"] = grace_s
    with open_place(run_place.host) as place:
        argv = ["control", run_place.run_dir, rundir.Request.STOP]
        done = _payload_command(place, run_place.payload_dir, argv, json.dumps(content).encode())
    answer = rundir.decode(done.stdout) or {}
    if not answer.get("ok"):
        raise RunLostError(f"{run_place.run_id}: {answer.get('error') or _last(done.stderr)}")


def by() -> str:
    """Who asks: user@machine."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a uid without a name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def _payload_command(place: Place, payload_dir: str, command: Sequence[str], stdin: bytes) -> Completed:
    argv = [place.python, f"{payload_dir}/remote_payload", *command]
    scale = Timing.from_environment().scale
    if scale != 1:
        argv = ["env", f"{SCALE_VARIABLE}={scale:g}", *argv]
    return place.run(argv, stdin=stdin, timeout=COMMAND_S)


def _last(stderr: bytes) -> str:
    lines = stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
