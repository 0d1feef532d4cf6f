"""The entry. Ctrl-C is taken care of first: what is imported after that is half of a short command's time."""

from __future__ import annotations

from controller.interruption import Interrupts


def main(arguments: list[str] | None = None) -> int:
    """Run one command, of `sys.argv` or of `arguments`, and return its exit code."""
    with Interrupts() as interrupts:
        from controller.command_line import run

        return run(arguments, interrupts)
