"""The commands about a place itself: `exec`, `python`, `gpus`, `doctor`, `setup`, `prune`."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from controller.commands.launch import ChangesOption
from controller.commands.options import (
    HostOption,
    JsonOption,
    PlaceOptions,
    check_device,
    pure_json,
    show_upload,
    with_place_options,
)
from controller.errors import PayloadEnvironmentError, UsageError
from controller.narration import say

REST = {"allow_interspersed_args": False, "ignore_unknown_options": True}
"""Context settings of a command whose last words are somebody else's."""


@with_place_options
def exec_(
    argv: Annotated[list[str], typer.Argument(metavar="ARGV", help="The command, after `--`.")],
    host: HostOption = None,
    *,
    where: PlaceOptions,
) -> int:
    """Run a command in a place.

    It runs in the workspace, and finds the venv's programs first. Standard input, output and errors are
    passed on byte for byte; no shell and no terminal on the way. Ctrl-C ends the command there. The exit code
    is the command's; an `error:` line says when it is ours.

    \b
    dflashctl exec --host gpubox -- nvidia-smi
    dflashctl exec --host gpubox -- sh -c 'tar c data | sha256sum'
    """
    from controller.passing import run_command
    from controller.place import open_place

    chosen = where.chosen(host)
    with open_place(chosen, accept_new_host_key=where.accept_new_host_key) as place:
        return run_command(place, argv)


@with_place_options
def python(
    program: Annotated[str, typer.Argument(metavar="FILE|-", help="A program here, or - for stdin.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Its arguments.")] = None,
    host: HostOption = None,
    *,
    where: PlaceOptions,
) -> int:
    """Run a Python program of this machine in a place's venv.

    It runs in the workspace, with the place's variables; with FILE its stdin is ours. Ctrl-C ends it there.
    The exit code is its own.

    \b
    dflashctl python --host gpubox check.py --deep
    echo 'import torch; print(torch.cuda.device_count())' | dflashctl python --host gpubox -
    """
    from controller.passing import run_python
    from controller.place import open_place

    chosen = where.chosen(host)
    try:
        text = sys.stdin.buffer.read() if program == "-" else Path(program).read_bytes()
    except OSError as error:
        raise UsageError(f"{program}: cannot be read ({error.strerror})") from error
    with open_place(chosen, accept_new_host_key=where.accept_new_host_key) as place:
        return run_python(place, program, text, arguments or [], stdin=program != "-")


@with_place_options
def gpus(
    host: HostOption = None,
    watch: Annotated[bool, typer.Option("--watch", help="Again and again, until Ctrl-C.")] = False,
    interval: Annotated[
        float,
        typer.Option("--interval", min=1, max=3600, metavar="S", help="Seconds between listings of --watch."),
    ] = 5.0,
    as_json: JsonOption = False,
    *,
    where: PlaceOptions,
) -> int:
    """Show the GPUs of a place, and which runs use them.

    With --json one object a listing: `t`, `gpus`, `why` (null, or what is wrong), `runs` that live.

    \b
    dflashctl gpus --host gpubox --watch
    dflashctl gpus --host gpubox --json | jq '.gpus[].memory_used_gib'
    """
    from controller.gpu_table import table
    from controller.place import open_place
    from controller.ship import pack, start

    chosen = where.chosen(host)
    listed: dict[str, Any] = {}
    with open_place(chosen, accept_new_host_key=where.accept_new_host_key) as place:
        words = [f"{interval:g}"] if watch else []
        arrived = start(place, pack(), ["gpus", place.workspace, *words])
        try:
            while (record := arrived.record(100.0 + interval)) is not None:
                listed = record
                if as_json:
                    print(json.dumps(record), flush=True)
                    continue
                if watch and sys.stdout.isatty():
                    print("\033[H\033[J", end="")
                print(table(record), flush=True)
        finally:
            arrived.process.close()
    if not listed:
        raise PayloadEnvironmentError(
            f"{chosen.name}: its GPUs could not be listed", f"See: dflashctl doctor --host {chosen.name}"
        )
    return 0


@with_place_options
def probe(
    host: HostOption = None,
    device: Annotated[
        str,
        typer.Option("--device", metavar="DEVICE", help="auto (the first GPU, else the CPU), cpu, cuda:N."),
    ] = "auto",
    fp8: Annotated[
        str,
        typer.Option(
            "--fp8",
            metavar="PARTS",
            help="Multiply 8-bit numbers in these parts, as a job's fp8: head, mlp, head+mlp, all.",
        ),
    ] = "none",
    as_json: JsonOption = False,
    *,
    where: PlaceOptions,
) -> int:
    """Try every way of running a training step in a place.

    Says which of them work there, and how fast: CUDA graphs by hand, compiled, eager, inductor's own graphs
    with trees and without, in worker threads and in the main one. Each has a process of its own in the
    place's venv, and a small draft model. Minutes on a GPU. With --json one object a mode.

    \b
    dflashctl probe --host gpubox
    dflashctl probe --host gpubox --device cuda:1 --json | jq 'select(.works)'
    dflashctl probe --host gpubox --fp8 all
    """
    from controller.place import open_place
    from controller.probe_table import HEADER, line
    from controller.ship import pack, start

    check_device(device)
    chosen = where.chosen(host)
    worked = False
    refusal: str | None = None
    with open_place(chosen, accept_new_host_key=where.accept_new_host_key) as place:
        arrived = start(place, pack(), ["probe", device, fp8])
        try:
            if not as_json:
                print(HEADER, flush=True)
            while (record := arrived.record(300.0)) is not None:
                if record.get("ok") is False:
                    refusal = str(record.get("error"))
                    break
                worked |= bool(record.get("works"))
                print(json.dumps(record) if as_json else line(record), flush=True)
        finally:
            arrived.process.close()
    if refusal:
        raise UsageError(refusal)
    if not worked:
        raise PayloadEnvironmentError(
            f"{chosen.name}: no way of running a step works there",
            "The table says why of each; `dflashctl doctor` looks at the venv.",
        )
    return 0


@with_place_options
def doctor(
    host: HostOption = None,
    job: Annotated[
        str | None, typer.Option("--job", metavar="NAME|FILE", help="Whether this job could run there.")
    ] = None,
    changes: ChangesOption = None,
    as_json: JsonOption = False,
    *,
    where: PlaceOptions,
) -> int:
    """Look whether a place can train, and say what to mend.

    Connection, container, venv, GPUs, disk, memory, clock: one line each, ok, warning or failure, what was
    seen, what to do. The exit code is 0 without a failure, else that of what is in the way (66 to 72). With
    several --host also whether they can reach each other. --json: one object a host, and one for what is
    between them.

    \b
    dflashctl doctor --host gpubox --job qwen3.toml
    dflashctl doctor --host gpubox --json | jq '.checks[] | select(.level != "ok")'
    """
    from controller import jobs
    from controller.checkup import between, look_at, report_text

    hosts = [where.chosen([name]) for name in host or []] or [where.chosen(None)]
    if job is None and changes:
        raise UsageError("--set changes a job, and --job names none")
    checked = None if job is None else jobs.load(job, changes or [])[1]
    code, all_reached = 0, True
    for each in hosts:
        report = look_at(each, checked, accept_new_host_key=where.accept_new_host_key)
        code = code or report.exit_code
        all_reached &= report.error is None
        if len(hosts) > 1 and not as_json:
            print(f"{each.name}:")
        print(json.dumps(report.to_json()) if as_json else report_text(report.checks), flush=True)
    if len(hosts) > 1 and all_reached:
        ways = between(hosts)
        record = {"hosts": [each.name for each in hosts], "checks": [dataclasses.asdict(way) for way in ways]}
        print(json.dumps(record) if as_json else "between them:\n" + report_text(ways))
        if any(way.level == "failure" for way in ways):
            code = code or PayloadEnvironmentError.exit_code
    return code


@with_place_options
def setup(
    host: HostOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be done; contact nobody.")
    ] = False,
    as_json: JsonOption = False,
    *,
    where: PlaceOptions,
) -> int:
    """Make or mend a place's virtual environment.

    By uv where it is installed, else by pip. A venv that a running job uses is left alone; a setup that broke
    off is mended by the next. hosts.toml may have `base_python`, `index` and, for a place without internet,
    `wheels`: a folder of wheels there.

    \b
    dflashctl setup --host gpubox
    dflashctl setup --host gpubox --dry-run
    """
    from controller.ship import pack
    from controller.venv import plan, set_up

    pure_json(as_json, dry_run=dry_run)
    chosen = where.chosen(host)
    if dry_run:
        print(plan(chosen))
        return 0
    done = set_up(chosen, pack(), say, accept_new_host_key=where.accept_new_host_key, progress=show_upload)
    versions = ", ".join(f"{name} {version}" for name, version in done["packages"].items())
    say(f"{chosen.name}: {chosen.venv} {'is ready' if done['changed'] else 'was whole already'}: {versions}")
    if as_json:
        print(json.dumps({"host": chosen.name, "venv": chosen.venv, **done}))
    return 0


@with_place_options
def prune(
    host: HostOption = None,
    older_than: Annotated[
        str, typer.Option("--older-than", metavar="SPAN", help="Of no use for so long: 14d, 12h, 0.")
    ] = "14d",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List, and remove nothing.")] = False,
    as_json: JsonOption = False,
    *,
    where: PlaceOptions,
) -> int:
    """Remove old runs and payloads from a place; asks first.

    Lists what it would remove, included files too. Never a run that lives, nor the payload of a run that
    stays, or of a log that this machine follows. Copies on this machine stay.

    \b
    dflashctl prune --host gpubox --dry-run
    dflashctl prune --host gpubox --older-than 30d --yes
    """
    from controller import pruning
    from controller.figures import amount
    from controller.place import open_place
    from controller.ship import pack

    chosen, payload = where.chosen(host), pack()
    older_s = pruning.seconds(older_than)
    with open_place(chosen, accept_new_host_key=where.accept_new_host_key) as place:
        items = pruning.examine(place, payload, older_s)
        going = [item for item in items if item["kept"] is None]
        answers: list[dict[str, Any]] = []
        if not as_json or not (yes or dry_run):
            say(pruning.table(items) if items else f"{chosen.name}: there is nothing")
        if going and not dry_run:
            freed = amount(sum(item["bytes"] for item in going))
            if not yes and not _agreed(f"{chosen.name}: remove {len(going)} of {len(items)} ({freed})?"):
                say("nothing was removed")
                going = []
            else:
                answers = pruning.remove(place, payload, older_s, going)
    for answer in answers:
        if "kept" in answer:
            say(f"kept {answer['kept']}: {answer['why']}")
    if answers:
        gone = [answer for answer in answers if "removed" in answer]
        say(f"{chosen.name}: removed {len(gone)}, {amount(sum(a['bytes'] for a in gone))} freed")
    if as_json:
        removed = [answer["removed"] for answer in answers if "removed" in answer]
        print(json.dumps({"host": chosen.name, "items": items, "removed": removed}))
    return 0


def _agreed(question: str) -> bool:
    """Ask on the terminal. Raises UsageError where there is none."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(f"{question} There is no terminal to answer on", "Give --yes, or --dry-run to look.")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
