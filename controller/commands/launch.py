"""`launch`: ship the payload and start a job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from controller import completion
from controller.commands.options import (
    HostOption,
    JsonOption,
    PlaceOptions,
    pure_json,
    show_upload,
    with_place_options,
)
from controller.commands.watch import follow_to_stdout
from controller.narration import detail, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controller.inventory import Host
    from controller.launch import LaunchedRun
    from remote_payload.job import Job


ChangesOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the job; repeatable."),
]
RestartOption = Annotated[
    str | None,
    typer.Option("--restart", metavar="WHEN", help="never or on-crash; the job's key `restart`."),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Also on GPUs that somebody uses.")]


def with_restart(changes: list[str] | None, restart: str | None) -> list[str]:
    """The changes to the job, that of `--restart` among them."""
    return [*(changes or []), *([f"restart={restart}"] if restart is not None else [])]


@with_place_options
def launch(
    host: HostOption = None,
    job: Annotated[
        str,
        typer.Option(
            "--job",
            metavar="NAME|FILE",
            help="A job of the payload by name, or a TOML file.",
            autocompletion=completion.jobs,
        ),
    ] = "demo",
    changes: ChangesOption = None,
    restart: RestartOption = None,
    force: ForceOption = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the log to the run's end.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be done; contact nobody.")
    ] = False,
    include: Annotated[
        list[Path] | None,
        typer.Option(
            "--include",
            metavar="PATH",
            help="A file or folder that the run gets as include/NAME; repeatable.",
        ),
    ] = None,
    *,
    where: PlaceOptions,
    as_json: JsonOption = False,
) -> int:
    """Ship the payload to a place and start a job there, detached.

    Prints the run's id as soon as it runs.

    \b
    dflashctl launch --job demo --follow
    dflashctl launch --host gpubox --job mine.toml --set learning_rate=3e-4
    dflashctl launch --host gpubox --job mine.toml --restart on-crash
    dflashctl launch --host gpubox --job mine.toml --include data.arrow --set dataset=include:data.arrow
    """
    pure_json(as_json, follow=follow, dry_run=dry_run)
    chosen = where.chosen(host)
    if dry_run:
        _print_dry_run(chosen, *_loaded(job, changes, restart), include or ())
        return 0
    from controller.place import open_place

    with open_place(chosen, accept_new_host_key=where.accept_new_host_key) as place:
        place.connect_soon()  # while the job is read, and the rest imported and packed; nothing is sent yet
        name, checked = _loaded(job, changes, restart)
        from controller.launch import launch as launch_run

        run = launch_run(
            chosen,
            checked,
            name,
            say=say,
            progress=show_upload,
            accept_new_host_key=where.accept_new_host_key,
            force=force,
            include=include or (),
        )
    print(json.dumps(launch_record(run, chosen)) if as_json else run.run_id, flush=True)
    if not follow:
        say(f"follow it: dflashctl tui {run.run_id}   or: dflashctl logs --follow {run.run_id}")
        return 0
    code = follow_to_stdout(run.local_dir, follow=True, tail=None)
    say(f"run directory: {run.run_dir} on {chosen.name}")
    say(f"copied to: {run.local_dir}")
    for what in ("tui", "status", "logs"):
        say(f"look at it: dflashctl {what} {run.run_id}")
    return code


def _loaded(job: str, changes: list[str] | None, restart: str | None) -> tuple[str, Job]:
    """The job's name and the job, as it is to run."""
    from controller import jobs

    return jobs.load(job, with_restart(changes, restart))


def launch_record(run: LaunchedRun, host: Host) -> dict[str, str]:
    """What `launch --json` prints."""
    return {
        "run": run.run_id,
        "place": host.name,
        "host": host.address,
        "run_dir": run.run_dir,
        "payload": run.digest,
        "directory": str(run.local_dir),
    }


def _print_dry_run(host: Host, name: str, job: Job, include: Sequence[Path]) -> None:
    from controller.includes import collect
    from controller.ship import pack

    payload = pack()
    directory = payload.directory(host.workspace)
    say(f"place: {host.name} ({host.kind}, {host.address}), python {host.python}")
    say(f"payload: {len(payload.files)} files, {len(payload.tar) / 2**20:.1f} MiB, to {directory}")
    for file, size in payload.files:
        detail(f"{size:>8} {file}")
    for included in collect(include):
        say(f"  {included.size:>8} include/{included.name} (in the run directory)")
    run_dir = f"{host.workspace}/runs/{name}-..."
    say(f"then: {host.command_line(host.python, f'{directory}/remote_payload', 'preflight', host.workspace)}")
    say(f"then a run directory {run_dir} with the job below, and its trainer:")
    say(f"  {host.python} {directory}/remote_payload train {run_dir} 1")
    say("  its environment: " + (", ".join(host.env) or "bare"))
    print(job.to_toml(), end="")
