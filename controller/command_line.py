"""The command line: one command from its words to its exit code. stdout is data, stderr is narration.

`controller/commands/table.py` has the commands. `run` alone turns errors into `error:` and `hint:` lines and
exit codes (errors.py has them), and says where Ctrl-C may come (interruption.py).
"""

from __future__ import annotations

import atexit
import errno
import gc
import io
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from controller.errors import (
    INTERNAL_EXIT_CODE,
    DflashctlError,
    InterruptedByUser,
    LocalStateError,
    UsageError,
)
from controller.interruption import Interrupts, OurEndings, ReaderGoneError, ignore_from_now_on
from controller.narration import explain, say

if TYPE_CHECKING:
    from collections.abc import Sequence

BROKEN_PIPE = 141
"""Exit code when stdout's reader has gone (128 + SIGPIPE), as of any filter."""


def run(arguments: list[str] | None, interrupts: Interrupts) -> int:
    """Run one command, of `sys.argv` or of `arguments`, and return its exit code."""
    _have_streams()
    atexit.register(gc.freeze)  # all ends at once: to look for cycles first would take 30 ms
    atexit.register(ignore_from_now_on)
    words = loudness_first(sys.argv[1:] if arguments is None else arguments)
    try:
        with OurEndings(), interrupts.allowed:
            from controller.commands.table import app

            result = app(args=words, prog_name="dflashctl", standalone_mode=False)
            sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except DflashctlError as error:
        return _fail(error)
    except ReaderGoneError:
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
    import typer

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
