"""The commands that act on a run: `stop`, `checkpoint`, `stacks`, `resume`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from controller.commands.launch import ChangesOption, ForceOption, RestartOption, with_restart
from controller.commands.options import JsonOption, Run, pure_json, show_upload
from controller.commands.watch import follow_to_stdout
from controller.narration import say


def stop(
    run: Run = None,
    grace: Annotated[
        float,
        typer.Option("--grace", min=0, max=86400, metavar="S", help="Seconds until it is ended by force."),
    ] = 60.0,
    as_json: JsonOption = False,
) -> int:
    """Let a run write a checkpoint and end, and wait for that.

    After --grace its whole process group gets SIGTERM, and soon after that SIGKILL. Then its GPUs are
    looked at: what still holds their memory is named.

    \b
    dflashctl stop
    dflashctl stop demo-1130 --grace 300
    """
    from controller.paths import find_run
    from controller.stopping import stop as stop_run

    stopped = stop_run(find_run(run), grace_s=grace, say=say)
    if as_json:
        print(json.dumps(stopped))
    return 0


def checkpoint(
    run: Run = None,
    limit: Annotated[
        float, typer.Option("--limit", min=1, max=86400, metavar="S", help="Longest wait, in seconds.")
    ] = 300.0,
    as_json: JsonOption = False,
) -> int:
    """Have a run write a checkpoint now, and print where it lies.

    \b
    dflashctl checkpoint
    dflashctl checkpoint demo-1130 --json | jq .step
    """
    from controller.paths import find_run
    from controller.stopping import checkpoint as checkpoint_run

    written = checkpoint_run(find_run(run), limit_s=limit, say=say)
    if as_json:
        print(json.dumps(written))
    else:
        print(f"{written['path']} (step {written['step']})")
    return 0


def stacks(
    run: Run = None,
    limit: Annotated[
        float, typer.Option("--limit", min=1, max=86400, metavar="S", help="Longest wait, in seconds.")
    ] = 30.0,
    as_json: JsonOption = False,
) -> int:
    """Print where each thread of a trainer that hangs is.

    Or of one that trains: either goes on as before. For each thread its Python calls, newest first: file,
    line, function. A thread that waits in CUDA or in the kernel shows the line that called it.

    \b
    dflashctl stacks
    dflashctl stacks demo-1130 --json | jq -r .stacks
    """
    from controller.paths import find_run
    from controller.stopping import stacks as stacks_of
    from controller.text import safe_lines

    shown = stacks_of(find_run(run), limit_s=limit, say=say)
    print(json.dumps(shown) if as_json else "\n".join(safe_lines(shown["stacks"])))
    return 0


def resume(
    run: Run = None,
    changes: ChangesOption = None,
    restart: RestartOption = None,
    force: ForceOption = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the log to the run's end.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Go on with a run that ended, from its newest checkpoint.

    The run keeps its job, its directory and its id; it becomes its next attempt. --set may make it train
    longer or evaluate otherwise, but not learn otherwise.

    \b
    dflashctl resume demo-1130 --follow
    dflashctl resume demo-1130 --set steps=5000
    """
    pure_json(as_json, follow=follow)
    import dataclasses

    from controller.paths import find_run
    from controller.resuming import resume as resume_run
    from controller.watching import last_state
    from remote_payload import rundir

    directory = find_run(run)
    if not (directory / rundir.JOB).exists():
        last_state(directory)
    changed = with_restart(changes, restart)
    resumed = resume_run(directory, changed, say=say, progress=show_upload, force=force)
    where = "from the beginning: there is no checkpoint"
    if resumed.checkpoint is not None:
        where = f"from the checkpoint of step {resumed.checkpoint}"
    payload = "the payload of the attempt before"
    if resumed.payload != resumed.payload_before:
        before = resumed.payload_before[:12] or "an unknown one"
        payload = f"payload {resumed.payload[:12]} instead of {before}"
    say(f"{resumed.run}: attempt {resumed.attempt}, {where}, with {payload}")
    print(json.dumps(dataclasses.asdict(resumed)) if as_json else resumed.run, flush=True)
    if not follow:
        say(f"follow it: dflashctl tui {resumed.run}   or: dflashctl logs --follow {resumed.run}")
        return 0
    return follow_to_stdout(directory, follow=True, tail=0)
