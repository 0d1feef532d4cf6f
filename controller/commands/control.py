"""The commands that act on a run: `stop`."""

from __future__ import annotations

from typing import Annotated

import typer

from controller.commands.options import Run, say
from controller.errors import RunLostError


def stop(
    run: Run = None,
    grace: Annotated[
        float | None,
        typer.Option("--grace", min=0, metavar="S", help="Seconds until the run is killed. [60]"),
    ] = None,
) -> int:
    """Let a run write a checkpoint and end, and wait for that.

    \b
    dflashctl stop
    dflashctl stop demo-1130 --grace 300
    """
    from controller.launch import RunPlace
    from controller.launch import stop as stop_run
    from controller.paths import find_run
    from controller.watching import last_state

    directory = find_run(run)
    run_place = RunPlace.read(directory)
    refusal: RunLostError | None = None
    try:
        stop_run(run_place, grace_s=grace)
        say(f"{run_place.run_id}: asked to stop; waiting for its end (Ctrl-C leaves it to itself)")
    except RunLostError as error:
        refusal = error
    state = last_state(directory, wait=refusal is None)
    if refusal is not None and not state.ended:
        raise refusal
    say(f"{run_place.run_id}: {state.health.headline}")
    return 0
