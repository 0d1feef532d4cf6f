"""The command line: parse, call, print. stdout is data, stderr is narration.

`main` alone turns errors into `error:` and `hint:` lines and exit codes (errors.py has them). Imports
are made by the command that needs them, so that help and completion start without paramiko or textual.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from controller.errors import (
    INTERNAL_EXIT_CODE,
    DflashctlError,
    InterruptedByUser,
    RunLostError,
    UsageError,
)

if TYPE_CHECKING:
    from controller.inventory import Host

BROKEN_PIPE = 141
"""Exit code when stdout's reader has gone (128 + SIGPIPE), as of any filter."""


class _ReaderGoneError(Exception):
    """Whoever read our stdout has closed it."""


class _Commands(typer.core.TyperGroup):
    """Catches what typer would turn into exit codes of its own."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise InterruptedByUser("interrupted; a run that was started goes on") from None
        except BrokenPipeError:
            raise _ReaderGoneError from None


app = typer.Typer(
    cls=_Commands,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Run = Annotated[
    str | None, typer.Argument(help="The run's id, or its beginning. The newest run if not given.")
]
HostOption = Annotated[
    list[str] | None,
    typer.Option(
        "--host", metavar="PLACE", help="Place of hosts.toml, by name or address. Its `default` if not given."
    ),
]
KindOption = Annotated[
    str | None,
    typer.Option("--kind", metavar="KIND", help="local, ssh or proxmox: for a place that the file lacks."),
]
ContainerOption = Annotated[
    int | None,
    typer.Option("--container", metavar="VMID", help="Number of the LXC container (kind proxmox)."),
]
UserOption = Annotated[str | None, typer.Option("--user", metavar="NAME", help="Login name for ssh.")]
PortOption = Annotated[int | None, typer.Option("--port", metavar="N", help="TCP port of the ssh server.")]


@app.callback(invoke_without_command=True)
def start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Train DFlash drafters on a GPU box: launch a run, follow it, know how it is.

    \b
    dflashctl launch --host gpubox --follow
    dflashctl tui

    \b
    Exit codes, when not 0: 1 to 63 the trainer's own, 128 + n killed by signal n, and
    64 usage, 65 hosts.toml, 66 unreachable, 67 host key, 68 login, 69 pct, 70 container,
    71 venv or workspace, 72 payload not sent, 73 not started, 74 nobody is there, 75 protocol,
    76 connection lost, 77 local files, 80 Ctrl-C, 99 a defect, 141 nobody reads stdout.
    """
    if version:
        from controller import __version__

        print(f"dflashctl {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit


@app.command()
def launch(
    host: HostOption = None,
    job: Annotated[
        str, typer.Option("--job", metavar="NAME|FILE", help="A job of the payload by name, or a TOML file.")
    ] = "demo",
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the job; repeatable."),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the log to the run's end.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be done; contact nobody.")
    ] = False,
    kind: KindOption = None,
    container: ContainerOption = None,
    user: UserOption = None,
    port: PortOption = None,
    accept_new_host_key: Annotated[
        bool, typer.Option("--accept-new-host-key", help="Trust a host that known_hosts lacks.")
    ] = False,
) -> int:
    """Ship the payload to a place and start a job there, detached.

    Prints the run's id as soon as it runs.

    \b
    dflashctl launch --job demo --follow
    dflashctl launch --host gpubox --job mine.toml --set learning_rate=3e-4
    """
    from controller import jobs

    chosen = _host(host, kind, container, user, port)
    name, checked = jobs.load(job, changes or [])
    if dry_run:
        _print_dry_run(chosen, name, checked.to_toml())
        return 0
    from controller.launch import launch as launch_run

    run = launch_run(
        chosen,
        checked,
        name,
        say=_say,
        progress=_progress,
        accept_new_host_key=accept_new_host_key,
    )
    print(run.run_id, flush=True)
    if not follow:
        _say(f"follow it: dflashctl tui {run.run_id}   or: dflashctl logs --follow {run.run_id}")
        return 0
    code = _follow_log(run.local_dir, follow=True, tail=None)
    _say(f"run directory: {run.run_dir} on {chosen.name}")
    _say(f"copied to: {run.local_dir}")
    for what in ("tui", "status", "logs"):
        _say(f"look at it: dflashctl {what} {run.run_id}")
    return code


@app.command()
def logs(
    run: Run = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Until the run has ended.")] = False,
    tail: Annotated[
        int | None, typer.Option("--tail", min=0, metavar="N", help="Only the last N lines, and on.")
    ] = None,
) -> int:
    """Print a run's log: every byte once, across lost connections.

    With --follow the exit code is the run's: 0 finished, 1 to 63 the trainer's own, 128 + n killed.

    \b
    dflashctl logs --follow
    dflashctl logs --tail 20 demo-1130
    """
    from controller.paths import find_run

    return _follow_log(find_run(run), follow=follow, tail=tail)


@app.command()
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


@app.command()
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
        _say(f"{run_place.run_id}: asked to stop; waiting for its end (Ctrl-C leaves it to itself)")
    except RunLostError as error:
        refusal = error
    state = last_state(directory, wait=refusal is None)
    if refusal is not None and not state.ended:
        raise refusal
    _say(f"{run_place.run_id}: {state.health.headline}")
    return 0


@app.command()
def tui(run: Run = None) -> int:
    """Watch a run: state, loss, tau, threads, GPUs, log. `q` leaves it running.

    \b
    dflashctl tui
    dflashctl tui demo-1130
    """
    from controller.paths import find_run
    from controller.tui.app import run_tui
    from controller.watching import new_mirror

    directory = find_run(run)
    return run_tui(directory, new_mirror(directory))


@app.command()
def runs(as_json: Annotated[bool, typer.Option("--json", help="One JSON object a run.")] = False) -> int:
    """List the runs that this machine knows, newest first.

    Asks nobody: says what was last heard of each.

    \b
    dflashctl runs
    dflashctl runs --json | jq -r .run
    """
    from controller.listing import print_runs

    print_runs(sys.stdout, as_json=as_json)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """The entry point: run one command and return its exit code."""
    try:
        result = app(args=arguments, prog_name="dflashctl", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except DflashctlError as error:
        return _fail(error)
    except (_ReaderGoneError, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt:
        return InterruptedByUser.exit_code
    except Exception as error:
        if isinstance(error, _usage_exception()):
            return _fail(UsageError(error.format_message(), _help_hint(error)))
        return _defect(error)


def _fail(error: DflashctlError) -> int:
    if isinstance(error, InterruptedByUser):
        print(file=sys.stderr)
        _say(error.message)
        return error.exit_code
    _say(f"error: {error.message}")
    for line in error.hint.splitlines():
        _say(f"hint: {line}")
    return error.exit_code


def _usage_exception() -> type[Any]:
    """click's ClickException: typer has it inside (0.16 on) or beside itself, and exports a leaf."""
    return typer.BadParameter.__mro__[2]


def _help_hint(error: Any) -> str:
    context = getattr(error, "ctx", None)
    return f"See: {context.command_path} --help" if context is not None else ""


def _defect(error: Exception) -> int:
    from controller.paths import state_root

    text = "".join(traceback.format_exception(error))
    path = state_root() / "crashes" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text(text)
        where = f"its report is {path}"
    except OSError:
        print(text, file=sys.stderr)
        where = "its report stands above"
    _say(f"error: unexpected {type(error).__name__}: {error}; a defect of dflashctl; {where}")
    return INTERNAL_EXIT_CODE


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _progress(sent: int, total: int) -> None:
    """Show the upload of a payload, on a terminal alone."""
    if sys.stderr.isatty():
        end = "\r" if sent < total else "\r\033[K"
        print(f"sending {sent >> 10} of {total >> 10} KiB", end=end, file=sys.stderr, flush=True)


def _host(
    wanted: list[str] | None,
    kind: str | None,
    container: int | None,
    user: str | None,
    port: int | None,
) -> Host:
    from controller.inventory import choose

    if wanted is not None and len(wanted) > 1:
        raise UsageError(
            f"--host was given {len(wanted)} times; a run uses one host so far",
            "Give it once.",
        )
    return choose(wanted[0] if wanted else None, kind=kind, container=container, user=user, port=port)


def _print_dry_run(host: Host, name: str, job: str) -> None:
    from controller.ship import pack

    payload = pack()
    directory = f"{host.workspace}/payloads/{payload.digest}"
    _say(f"place: {host.name} ({host.kind}, {host.address}), python {host.python}")
    _say(f"payload {payload.digest} ({len(payload.tar)} bytes) to {directory}:")
    for file, size in payload.files:
        _say(f"  {size:>8} {file}")
    run_dir = f"{host.workspace}/runs/{name}-..."
    _say(
        f"then: {host.command_line(host.python, f'{directory}/remote_payload', 'preflight', host.workspace)}"
    )
    _say(f"then a run directory {run_dir} with the job below, and its trainer:")
    _say(f"  {host.python} {directory}/remote_payload train {run_dir} 1")
    _say("  its environment: " + (", ".join(host.env) or "bare"))
    print(job, end="")


def _follow_log(directory: Path, *, follow: bool, tail: int | None) -> int:
    from controller.logs import follow_log
    from controller.watching import mirrored

    with mirrored(directory, once=not follow) as mirror:
        return follow_log(directory, follow=follow, tail=tail, out=sys.stdout.buffer, mirror=mirror)
