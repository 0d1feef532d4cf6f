"""place.json, the laptop's note of where a run is; and the payload's short commands about that run."""

from __future__ import annotations

import getpass
import os
import shlex
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from controller import paths
from controller.errors import LocalStateError
from controller.inventory import Host
from controller.narration import detail
from controller.place import Completed, Place
from controller.text import last_line
from controller.timing import Timing
from remote_payload import rundir

COMMAND_S: Final = 60.0
"""Longest time of a short remote command."""


def _known(host: object) -> object:
    """A place as this version knows it: another version of dflashctl may have written more of it."""
    return {key: host[key] for key in Host.model_fields if key in host} if isinstance(host, dict) else host


class RunPlace(BaseModel):
    """place.json: how to reach a run again."""

    model_config = ConfigDict(frozen=True)

    host: Annotated[Host, BeforeValidator(_known)]
    run_id: str
    run_dir: str
    payload_dir: str
    digest: str
    python: str
    created: float
    """Unix seconds of the laptop."""
    job_name: str
    log_path: str | None = None
    """Of a log that is no run's: the file's path in the place; `run_dir` is its folder then."""

    @classmethod
    def read(cls, directory: Path) -> RunPlace:
        """The one in the mirror folder `directory`. Raises LocalStateError."""
        path = directory / paths.PLACE
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise LocalStateError(f"{path}: cannot be read ({error.strerror})") from error
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            raise LocalStateError(
                f"{path}: is damaged ({key + ': ' if key else ''}{first['msg']})",
                f"It says where the run is, and the run goes on without it. What was copied is beside it; to"
                f" forget the run here: rm -r {shlex.quote(str(directory))}",
            ) from error

    def write(self, directory: Path) -> None:
        """Write it into the mirror folder `directory`. Raises LocalStateError."""
        try:
            rundir.write_whole(directory / paths.PLACE, self.model_dump_json().encode() + b"\n")
        except OSError as error:
            raise LocalStateError(f"{directory}: cannot be written ({error.strerror})") from error


def payload_argv(place: Place, payload_dir: str, command: Sequence[str]) -> list[str]:
    """What runs `command` of the payload in `place`, on clocks as fast as ours."""
    argv = [place.python, f"{payload_dir}/remote_payload", *command]
    return Timing.from_environment().command(argv)


def payload_command(place: Place, payload_dir: str, command: Sequence[str], stdin: bytes = b"") -> Completed:
    """Run a short command of the payload. Raises what `Place.run` raises."""
    argv = payload_argv(place, payload_dir, command)
    detail(place.description.command_line(*argv))
    return place.run(argv, stdin=stdin, timeout=COMMAND_S)


def answer_of(done: Completed) -> tuple[Mapping[str, Any], str]:
    """The payload's answer, and what it said when it refused (its error, or the end of its stderr)."""
    answer = rundir.decode(done.stdout) or {}
    return answer, str(answer.get("error") or last_line(done.stderr))


def by() -> str:
    """Who asks: user@machine."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a uid without a name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
