"""From a job to a run that lives without us: check, ship, start.

One remote process, whether the payload is there already or not: it takes the payload, examines the place and
starts the supervisor. The local folder with place.json is made before the start, so a
connection that breaks in between leaves a run that `status` can ask about, never one that nobody knows.
"""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from controller import __version__, doctor, paths
from controller.errors import (
    ConnectionLostError,
    GpusInUseError,
    LaunchError,
    LocalStateError,
    PayloadEnvironmentError,
)
from controller.figures import amount
from controller.gpu_claims import conflicts, living, wants_gpus
from controller.includes import Included, collect, located, send
from controller.inventory import Host
from controller.narration import Say
from controller.place import Place, open_place
from controller.run_place import COMMAND_S, RunPlace, answer_of, by
from controller.run_records import Record, table
from controller.ship import Payload, Sent, Session, converse, pack
from controller.text import last_line, safe_line
from remote_payload import rundir
from remote_payload.job import Job


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
    say: Say = lambda text: None,
    progress: Sent | None = None,
    accept_new_host_key: bool = False,
    force: bool = False,
    include: Sequence[Path] = (),
) -> LaunchedRun:
    """Start `job` in `host`, detached. `say` is told each step, `progress` the bytes sent.

    `force`: also on GPUs that somebody uses; `include`: files and folders that the run gets. Raises the leaf
    that fits: everything of `place` and `ship`, PayloadEnvironmentError for a failed check, GpusInUseError,
    LaunchError when the payload refuses.
    """
    payload = pack()
    files = collect(include)
    located(job, "", files)  # a name that is not included is said before anything is sent
    with (
        open_place(host, accept_new_host_key=accept_new_host_key) as place,
        converse(place, payload, examination(host, job), progress=progress) as session,
    ):
        use = prepare(session, job, say=say, force=force)
        known = None if force or not wants_gpus(use, job, host.env) else living(use)
        if files:
            send(place, payload, files, say=say, progress=progress)
        return _start(session, job, job_name, known, files)


def examination(host: Host, job: Job) -> list[str]:
    """The payload's command that examines a place for `job`."""
    return ["preflight", host.workspace, json.dumps(doctor.question(job, host))]


def prepare(session: Session, job: Job, *, say: Say, force: bool, own: str = "") -> Record:
    """Judge the place by the `examination` that the session began with, and see that its GPUs are free.

    `own`: a run that does not count, since it is to go on. Returns what the place said of its GPUs
    (`gpu-use`).
    """
    place, payload = session.place, session.payload
    host = place.description
    if session.new_workspace:
        say(f"{host.name}: made the workspace {place.workspace}")
    size = f"{len(payload.files)} files, {amount(len(payload.tar))}"
    how = f"sent ({size})" if session.sent else "is there already"
    say(f"{host.name}: payload {payload.digest[:12]} {how}")
    done = session.answer()
    answer = rundir.decode(done.stdout)
    if answer is None:
        said = last_line(done.stderr)
        raise PayloadEnvironmentError(f"{host.name}: preflight failed with status {done.status}: {said}")
    checks = doctor.examine(answer, job, host)
    doctor.require(checks, host)
    fine = [f"{check.name} {check.seen}" for check in checks if check.level == "ok"]
    say(f"{host.name}: {', '.join(fine)}")
    for check in checks:
        if check.level == "warning":
            say(f"warning: {host.name}: {check.seen}. {check.todo}")
    use = table(answer, "use")
    in_use = [safe_line(line) for line in conflicts(use, job, host.env, own=own)]
    if in_use and not force:
        raise GpusInUseError(
            f"{host.name}: GPUs of the job are in use: {'; '.join(in_use)}",
            "Wait, stop that, or name other `targets` and `drafters`; --force starts nevertheless.",
        )
    for line in in_use:
        say(f"warning: {host.name}: in use, and shared because of --force: {line}")
    return use


def _start(
    session: Session, job: Job, job_name: str, known: list[str] | None, files: Sequence[Included]
) -> LaunchedRun:
    place, payload = session.place, session.payload
    host = place.description
    run_id = new_run_id(job_name, time.time())
    while paths.mirror_dir(run_id, place.host).exists():  # the folder below must be ours alone
        run_id = new_run_id(job_name, time.time())
    created = round(time.time(), 3)
    run_place = RunPlace(
        host=host,
        run_id=run_id,
        run_dir=f"{place.workspace}/runs/{run_id}",
        payload_dir=session.directory,
        digest=payload.digest,
        python=place.python,
        created=created,
        job_name=job_name,
    )
    local_dir = paths.make_mirror_dir(run_id, place.host)
    try:
        run_place.write(local_dir)
    except LocalStateError:  # a full disk: a folder without place.json would be the newest run from now on
        shutil.rmtree(local_dir.parent, ignore_errors=True)
        raise
    run = {
        "id": run_id,
        "created": created,
        "place": host.name,
        "host": place.host,
        "hosts": [place.host],
        "workspace": place.workspace,
        "job": job_name,
        "by": by(),
        **of_this_attempt(place, payload),
    }
    # Living runs that were taken into account; None: it does not matter who else lives.
    order: dict[str, object] = {
        "run": run,
        "job": located(job, run_place.run_dir, files).to_toml(),
        "known": known,
    }
    order["include"] = [file.to_json() for file in files]
    try:
        argv = ["start", place.workspace, run_id]
        answer, said = answer_of(session.ask(argv, json.dumps(order).encode(), timeout=COMMAND_S))
    except ConnectionLostError as error:
        error.hint = f"Whether it started says: dflashctl status {run_id}"
        raise
    if not answer.get("ok"):
        shutil.rmtree(local_dir.parent, ignore_errors=True)
        raise LaunchError(f"{host.name}: the run was not started: {safe_line(said)}")
    return LaunchedRun(run_id, run_place.run_dir, run_place.payload_dir, payload.digest, local_dir)


def of_this_attempt(place: Place, payload: Payload) -> dict[str, object]:
    """The fields of run.json that a resume replaces."""
    return {
        "payload": payload.digest,
        "python": place.python,
        "env": place.description.env,
        "dflashctl": __version__,
    }


def new_run_id(job_name: str, now: float) -> str:
    """A run id such as `demo-1130-0231-ab12`: job, local date and time, four random characters."""
    stem = re.sub(r"[^a-z0-9]+", "-", job_name.lower()).strip("-")[:40] or "run"
    alphabet = "abcdefghijkmnpqrstuvwxyz23456789"
    end = "".join(secrets.choice(alphabet) for _ in range(4))
    return f"{stem}-{time.strftime('%m%d-%H%M', time.localtime(now))}-{end}"
