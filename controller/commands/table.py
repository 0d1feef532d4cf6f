"""The table of commands, as typer reads it; importing it takes half of a short command's time.

The commands parse, call and print, and hold no logic. Imports are made by the command that needs them, so
that help and completion start without paramiko or textual.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
import typer.core

from controller.commands import control, drafters, launch, places, pull, report, watch
from controller.errors import UsageError
from controller.interruption import OurEndings
from controller.narration import Loudness, set_loudness


class _Commands(typer.core.TyperGroup):
    """Ends as we say, whether a command runs or its words are still read (which imports pydantic)."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with OurEndings():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with OurEndings():
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Commands,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Say only warnings and errors. With every command.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Say also what is run elsewhere. With every command.")
    ] = False,
) -> None:
    """Train DFlash drafters on a GPU box: launch a run, follow it, know how it is.

    \b
    dflashctl launch --host gpubox --follow
    dflashctl tui
    dflashctl -q launch --host gpubox --json

    \b
    Exit codes, when not 0: 1 to 63 the trainer's own, 128 + n killed by signal n, and
    64 usage, 65 hosts.toml, 66 unreachable, 67 host key, 68 login, 69 pct, 70 container,
    71 venv or workspace, 72 payload not sent, 73 not started, 74 nobody is there, 75 protocol,
    76 connection lost, 77 local files, 78 GPUs in use, 79 not in time, 80 Ctrl-C, 81 not pulled,
    82 no checkpoint, 83 not exported or evaluated, 99 a defect, 141 nobody reads stdout.
    """
    if quiet and verbose:
        raise UsageError("--quiet and --verbose exclude each other")
    if quiet or verbose:
        set_loudness(Loudness.QUIET if quiet else Loudness.VERBOSE)
    if version:
        from controller import __version__

        print(f"dflashctl {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit


for command in (
    launch.launch,
    watch.logs,
    watch.status,
    control.stop,
    control.checkpoint,
    control.stacks,
    control.resume,
    pull.pull,
    drafters.export,
    drafters.evaluate,
    watch.tui,
    watch.watch,
    watch.runs,
    report.report,
):
    app.command()(command)
app.command("exec", context_settings=places.REST)(places.exec_)
app.command(context_settings=places.REST)(places.python)
app.command()(places.gpus)
app.command()(places.doctor)
app.command()(places.probe)
app.command()(places.setup)
app.command()(places.prune)
