"""The command line: the table of its commands, and what errors become. stdout is data, stderr is narration.

The commands stand in `controller/commands/`: they parse, call and print, and hold no logic.

`main` alone turns errors into `error:` and `hint:` lines and exit codes (errors.py has them). Imports
are made by the command that needs them, so that help and completion start without paramiko or textual.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import io
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from controller.commands import control, drafters, launch, places, pull, report, watch
from controller.errors import (
    INTERNAL_EXIT_CODE,
    DflashctlError,
    InterruptedByUser,
    LocalStateError,
    UsageError,
)
from controller.narration import Loudness, explain, say, set_loudness

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

BROKEN_PIPE = 141
"""Exit code when stdout's reader has gone (128 + SIGPIPE), as of any filter."""


class _ReaderGoneError(Exception):
    """Whoever read our stdout has closed it."""


@contextlib.contextmanager
def _our_endings() -> Iterator[None]:
    """Errors of ours for what typer would turn into exit codes of its own."""
    try:
        yield
    except KeyboardInterrupt:
        raise InterruptedByUser("interrupted; a run that was started goes on") from None
    except BrokenPipeError:
        raise _ReaderGoneError from None


class _Commands(typer.core.TyperGroup):
    """Ends as we say, whether a command runs or its words are still read (which imports pydantic)."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with _our_endings():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with _our_endings():
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


def main(arguments: list[str] | None = None) -> int:
    """The entry point: run one command and return its exit code."""
    _have_streams()
    given = sys.argv[1:] if arguments is None else arguments
    atexit.register(gc.freeze)  # all ends at once: to look for cycles first would take 30 ms
    try:
        with _our_endings():
            result = app(args=loudness_first(given), prog_name="dflashctl", standalone_mode=False)
            sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except DflashctlError as error:
        return _fail(error)
    except _ReaderGoneError:
        _forget_stdout()
        return BROKEN_PIPE
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            _forget_stdout()
            what = error.filename or "stdout or a file"
            return _fail(LocalStateError(f"{what}: cannot be written ({error.strerror})", "Make room."))
        if isinstance(error, _usage_exception()):
            return _fail(UsageError(error.format_message(), _help_hint(error)))
        return _defect(error)


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def _forget_stdout() -> None:
    """Have nobody write what stdout still holds: the interpreter would try at its end, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _have_streams() -> None:
    """Where one of the three streams was closed (`2>&-`), nothing reads or writes in its place.

    Python has None for it, and print takes that for stdout: narration would stand among the data. And the
    next file that is opened would get its number. What stdout's encoding lacks, it shows as stderr does: `–`
    in a locale of long ago, a file name that is no text.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 - until the process ends
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def loudness_first(words: Sequence[str]) -> list[str]:
    """`words` with `--quiet` and `--verbose` in front, wherever they stood: they are of every command.

    Words behind `--`, and all that follow `exec` and `python`, are somebody else's.
    """
    front: list[str] = []
    rest: list[str] = []
    ours = True
    for word in words:
        if ours and word in _LOUDNESS:
            front.append(word)
            continue
        ours = ours and word not in ("--", "exec", "python")
        rest.append(word)
    return [*front, *rest]


_LOUDNESS = ("--quiet", "-q", "--verbose", "-v")


def _fail(error: DflashctlError) -> int:
    if isinstance(error, InterruptedByUser):
        print(file=sys.stderr)
        say(error.message)
        return error.exit_code
    from controller.text import safe_line

    explain(error)
    say(f"error: {safe_line(error.message)}")  # a part of it may be what a host or a login said
    for line in error.hint.splitlines():
        say(f"hint: {safe_line(line)}")
    return error.exit_code


def _usage_exception() -> type[Any]:
    """click's ClickException: typer has it inside (0.16 on) or beside itself, and exports a leaf."""
    return typer.BadParameter.__mro__[2]


def _help_hint(error: Any) -> str:
    context = getattr(error, "ctx", None)
    return f"See: {context.command_path} --help" if context is not None else ""


def _defect(error: Exception) -> int:
    from controller.defect_report import write_report
    from controller.text import safe_line, safe_lines

    path = write_report(error, {})
    if path is None:
        print("\n".join(safe_lines("".join(traceback.format_exception(error)))), file=sys.stderr)
    where = "its report stands above" if path is None else f"its report is {path}"
    said = safe_line(str(error))
    say(f"error: unexpected {type(error).__name__}: {said}; a defect of dflashctl; {where}")
    return INTERNAL_EXIT_CODE
