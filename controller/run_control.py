"""Requests to a run that lives: stop, checkpoint. And what is left of it on its GPUs afterwards."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from controller.errors import DflashctlError, RunLostError
from controller.gpu_claims import still_held
from controller.place import open_place
from controller.run_place import RunPlace, answer_of, by, payload_command
from controller.text import safe_line
from remote_payload.rundir import Request


def stop(run_place: RunPlace, *, grace_s: float) -> None:
    """Ask the run to checkpoint and end; it is ended by force `grace_s` seconds later.

    Returns once the request lies there. Raises RunLostError when nobody is there to act on it, also
    because the run has ended.
    """
    ask(run_place, Request.STOP, {"grace_s": grace_s})


def ask(run_place: RunPlace, request: Request, content: dict[str, Any] | None = None) -> None:
    """Place a request in the run's `control/`. Raises RunLostError when nobody is there to act on it."""
    told = json.dumps({"by": by(), **(content or {})}).encode()
    with open_place(run_place.host) as place:
        argv = ["control", run_place.run_dir, str(request)]
        answer, said = answer_of(payload_command(place, run_place.payload_dir, argv, told))
    if not answer.get("ok"):
        raise RunLostError(f"{run_place.run_id}: {safe_line(said)}")


def memory_left(run_place: RunPlace, uuids: Collection[str]) -> list[str]:
    """What still holds memory of the GPUs `uuids`, one line each. Asks the place unless there are none."""
    if not uuids:
        return []
    try:
        with open_place(run_place.host) as place:
            argv = ["gpu-use", run_place.host.workspace]
            answer, said = answer_of(payload_command(place, run_place.payload_dir, argv))
    except DflashctlError as error:
        return [f"whether its GPUs are free is not known: {error.message}"]
    if not answer.get("gpus"):
        why = answer.get("why") or said
        return [f"whether its GPUs are free is not known: {safe_line(str(why))}"]
    return [safe_line(line) for line in still_held(answer, uuids)]
