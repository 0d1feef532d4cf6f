"""Where the laptop keeps what it knows: one folder a run and host, and how a user's text names a run.

`$XDG_STATE_HOME/dflashctl/runs/<run-id>/<host>/`; state and not cache, because a container may be gone
while the loss curve of its run is still wanted.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Final

from controller.errors import LocalStateError, UsageError
from controller.run_records import number, text
from remote_payload import rundir

PLACE: Final = "place.json"
"""In a mirror folder: how to reach the run again, written at launch."""

_HOST = re.compile(r"[A-Za-z0-9_:%\[\]@-][A-Za-z0-9._:%\[\]@-]{0,252}")


@dataclasses.dataclass(frozen=True, slots=True)
class KnownRun:
    """A run that this laptop has launched or attached to."""

    run_id: str
    host: str
    directory: Path
    created: float
    """Unix seconds of the launch; the folder's own time where `place.json` cannot be read."""
    job_name: str


def expanded(text: str) -> Path:
    """The path `text`; a `~` in front is a home, but where there is no such user, as for a shell."""
    return Path(os.path.expanduser(text))  # noqa: PTH111 - Path.expanduser raises RuntimeError then


def home() -> Path:
    """The user's home. Raises LocalStateError where there is none: a uid without a name, and no $HOME."""
    try:
        return Path.home()
    except RuntimeError as error:
        raise LocalStateError(
            "this user has no home folder", f"Set HOME, or give uid {os.getuid()} one in /etc/passwd."
        ) from error


def state_root() -> Path:
    """The folder of everything that this laptop knows; not created here.

    The XDG base directory specification has a relative `$XDG_STATE_HOME` ignored. Raises what `home` raises.
    """
    named = os.environ.get("XDG_STATE_HOME", "")
    base = Path(named) if named.startswith("/") else home() / ".local" / "state"
    return base / "dflashctl"


def mirror_dir(run_id: str, host: str) -> Path:
    """The mirror folder of run `run_id` on `host` (an address, or `local`); not created here.

    Raises UsageError when one of the two could name a folder outside of the state root.
    """
    if not rundir.is_run_id(run_id):
        raise UsageError(
            f"{run_id!r} is no run id", "a run id is up to 63 lower-case letters, digits and dashes"
        )
    if not _HOST.fullmatch(host):
        raise UsageError(f"{host!r} is no address of a host")
    return state_root() / "runs" / run_id / host


def log_mirror_dir(host: str, container: int | None, log_path: str) -> Path:
    """The mirror folder of a log that is no run's, at `log_path` on `host`, or in `container` there.

    It is not created here. Raises UsageError when `host` could name a folder outside of the state root.
    """
    if not _HOST.fullmatch(host):
        raise UsageError(f"{host!r} is no address of a host")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", log_path.rpartition("/")[2]).strip(".-")[:40] or "log"
    key = hashlib.sha256(f"{container}:{log_path}".encode(errors="surrogateescape")).hexdigest()[:12]
    return state_root() / "logs" / host / f"{name}-{key}"


def payloads_of_logs() -> set[str]:
    """Digests of the payloads whose feeds follow logs that are no runs': no run directory names these."""
    places = (state_root() / "logs").glob(f"*/*/{PLACE}")
    return {str((rundir.read_whole(place) or {}).get("digest")) for place in places}


def make_mirror_dir(run_id: str, host: str) -> Path:
    """`mirror_dir`, created, for its owner only. Raises LocalStateError when that fails."""
    return made(mirror_dir(run_id, host))


def made(directory: Path) -> Path:
    """The folder, made for its owner with those above it where it is not there. Raises LocalStateError."""
    try:
        missing = [folder for folder in (directory, *directory.parents) if not folder.exists()]
        for folder in reversed(missing):  # mkdir's `parents` would let everybody into those above
            folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise LocalStateError(
            f"cannot create {directory}: {error.strerror}",
            "make it writable, or set XDG_STATE_HOME to a folder that is",
        ) from error
    return directory


def kept(path: Path, text: str) -> Path:
    """The file, written whole and for its owner only, its folders made. Raises LocalStateError."""
    made(path.parent)
    try:
        rundir.write_whole(path, text.encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise LocalStateError(f"{path}: cannot be written ({error.strerror})") from error
    return path


def known_runs() -> list[KnownRun]:
    """Every run in the state root, newest first. Raises LocalStateError when it cannot be read."""
    root = state_root() / "runs"
    runs = []
    for run in _folders(root):
        if rundir.is_run_id(run.name):
            runs += [_known(run.name, host) for host in _folders(run)]
    return sorted(runs, key=lambda run: (run.created, run.run_id, run.host), reverse=True)


def _folders(parent: Path) -> list[Path]:
    """The folders in `parent`; none when it is not there (any more): a launch that failed removes its own."""
    try:
        return [path for path in parent.iterdir() if path.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise LocalStateError(f"cannot read {parent}: {error.strerror}") from error


def _known(run_id: str, folder: Path) -> KnownRun:
    record = rundir.read_whole(folder / PLACE) or {}
    created = number(record, "created")
    if created is None:
        with suppress(OSError):
            created = folder.stat().st_mtime
    return KnownRun(run_id, folder.name, folder, created or 0.0, text(record, "job_name"))


def find_run(text: str | None) -> Path:
    """The mirror folder of the run that `text` names: its id, or a beginning that only one run has.

    None is the newest run. `id/host` chooses among the hosts of one run. Raises UsageError, with the
    nearest names, when there is no such run or more than one.
    """
    runs = known_runs()
    if not runs:
        raise UsageError(
            "no run is known on this machine" if text is None else f"no run {text!r}: none is known",
            f"`dflashctl launch` starts one; runs are kept in {state_root() / 'runs'}",
        )
    if text is None:
        return runs[0].directory
    run_text, _, host = text.partition("/")
    among = [run for run in runs if not host or run.host == host]
    chosen = [run for run in among if run.run_id == run_text]
    if not chosen and run_text:
        chosen = [run for run in among if run.run_id.startswith(run_text)]
    names = sorted({run.run_id for run in chosen})
    if len(names) > 1:
        raise UsageError(f"{text!r} is the beginning of {len(names)} runs", _list(names))
    if len(chosen) > 1:
        raise UsageError(
            f"run {names[0]} has {len(chosen)} hosts",
            _list([f"{run.run_id}/{run.host}" for run in chosen]),
        )
    if chosen:
        return chosen[0].directory
    ids = list(dict.fromkeys(run.run_id for run in runs))
    near = difflib.get_close_matches(run_text, ids, n=3, cutoff=0.5) or ids[:3]
    raise UsageError(f"no run {text!r} is known on this machine", _list(near))


def _list(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return f"did you mean one of: {shown}, ...?" if len(names) > 5 else f"did you mean: {shown}?"
