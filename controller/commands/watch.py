"""The commands that look at a run: `logs`, `status`, `tui`, `watch`, `runs`."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from controller.commands.options import (
    HostOption,
    JsonOption,
    PlaceOptions,
    Run,
    with_place_options,
)
from controller.errors import UsageError
from controller.narration import say

PathOption = Annotated[
    str | None,
    typer.Option("--path", metavar="FILE", help="A log of --host that is no run's, by its absolute path."),
]


@with_place_options
def logs(
    run: Run = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Until the run has ended.")] = False,
    tail: Annotated[
        int | None, typer.Option("--tail", min=0, metavar="N", help="Only the last N lines, and on.")
    ] = None,
    whole: Annotated[
        bool, typer.Option("--all", help="From its first byte, also of a log of gigabytes.")
    ] = False,
    path: PathOption = None,
    host: HostOption = None,
    *,
    where: PlaceOptions,
) -> int:
    """Print a run's log: every byte once, across lost connections.

    Of a log that is long already its last MiB comes first, and older bytes only with --all. With --path
    it is the log of another program, which is followed until Ctrl-C.

    With --follow the exit code is the run's: 0 finished, 1 to 63 the trainer's own, 128 + n killed.

    \b
    dflashctl logs --follow
    dflashctl logs --tail 20 demo-1130
    dflashctl logs --host gpubox --path /workspace/train.log --follow
    """
    directory = _directory(run, path, host, where)
    return follow_to_stdout(directory, follow=follow, tail=tail, whole=whole)


def _directory(run: str | None, path: str | None, host: list[str] | None, where: PlaceOptions) -> Path:
    """The mirror folder of the run, or of the log at `path` in a place, which is attached to."""
    if path is None:
        if host is not None or where.is_given:
            raise UsageError(
                "--host and its like need --path; a run is named by its id", "See: dflashctl runs"
            )
        from controller.paths import find_run

        return find_run(run)
    if run is not None:
        raise UsageError(f"both a run ({run}) and --path ({path}) were given", "Name one of them.")
    from controller.foreign import attach

    return attach(where.chosen(host), path, say=say, accept_new_host_key=where.accept_new_host_key)


def status(
    run: Run = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> int:
    """Say how a run is, and how old that news is.

    \b
    dflashctl status
    dflashctl status --json | jq .state
    """
    from controller.paths import find_run
    from controller.status import print_status
    from controller.watching import mirrored

    directory = find_run(run)
    with mirrored(directory, once=True) as mirror:
        return print_status(directory, as_json, mirror=mirror)


@with_place_options
def tui(
    run: Run = None,
    path: PathOption = None,
    host: HostOption = None,
    *,
    where: PlaceOptions,
) -> int:
    """Watch a run: state, loss, tau, threads, GPUs, log. `q` leaves it running.

    With --path it is the log of a program that was not launched from here: its buckets, steps and GPUs,
    as far as its lines say them.

    \b
    dflashctl tui
    dflashctl tui demo-1130
    dflashctl tui --host gpubox --path /workspace/train.log
    """
    from controller.notify import notifying
    from controller.tui.app import run_tui
    from controller.tui.snapshot import Watched

    def opener(run_directory: Path) -> Watched:
        from controller.watching import new_mirror  # what connects: not before the first screen

        return new_mirror(run_directory)

    directory = _directory(run, path, host, where)
    notes: list[str] = []  # the screen is the app's; what is to be said is said after it
    try:
        with notifying(directory, notes.append):
            return run_tui(directory, None, opener)
    finally:
        for note in notes:
            say(note)


def watch(
    run: Run = None,
    notify: Annotated[
        str | None,
        typer.Option("--notify", metavar="COMMAND", help="Run when it ends, fails or stalls."),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Print what happens to a run, a line each, to its end.

    Needs no terminal. The exit code is the run's. --notify takes the place of the command in the user's
    notify.toml; the command finds DFLASHCTL_RUN, _STATE, _REASON, _TAU and others in its environment.

    \b
    dflashctl watch
    dflashctl watch demo-1130 --notify 'notify-send "$DFLASHCTL_RUN: $DFLASHCTL_STATE"'
    """
    from controller.changes import print_changes
    from controller.notify import Hook, notifying, shell
    from controller.paths import find_run
    from controller.watching import mirrored

    directory = find_run(run)
    hook = Hook(shell(notify)) if notify else None
    with notifying(directory, say, hook), mirrored(directory) as mirror:
        return print_changes(directory, mirror, as_json=as_json, out=sys.stdout)


def runs(as_json: Annotated[bool, typer.Option("--json", help="One JSON object a run.")] = False) -> int:
    """List the runs that this machine knows, newest first.

    Asks nobody: says what was last heard of each, and how long ago. `status` asks.

    \b
    dflashctl runs
    dflashctl runs --json | jq -r .run
    """
    from controller.listing import print_runs

    print_runs(sys.stdout, as_json=as_json)
    return 0


def follow_to_stdout(directory: Path, *, follow: bool, tail: int | None, whole: bool = False) -> int:
    """Print a run's log; the exit code is the run's, when followed to its end."""
    from controller.logs import follow_log
    from controller.mirror import ask_for_whole_log
    from controller.notify import notifying
    from controller.watching import mirrored

    if whole:
        ask_for_whole_log(directory)
    hooks = notifying(directory, say) if follow else nullcontext()
    with hooks, mirrored(directory, once=not follow) as mirror:
        return follow_log(
            directory, follow=follow, tail=tail, whole=whole, out=sys.stdout.buffer, mirror=mirror
        )
