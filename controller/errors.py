"""Everything that can go wrong on the laptop's side: one tree, a hint and an exit code at each leaf.

The command line prints `error: <message>` and `hint: <hint>` and leaves with `exit_code`; nobody else
turns an error into an exit. 0 to 63 belong to the trainer, 128 + n to signals, 64 to 99 to dflashctl.
"""

from __future__ import annotations

from typing import ClassVar


class DflashctlError(Exception):
    """What failed, in one sentence, and what to do about it."""

    exit_code: ClassVar[int] = 99

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(DflashctlError):
    """An option, job, key or run that the user named and that does not exist."""

    exit_code = 64


class InventoryError(DflashctlError):
    """hosts.toml cannot be used, or the place asked for is not in it."""

    exit_code = 65


class ConnectionLostError(DflashctlError):
    """A connection broke or could not be made; whoever can wait tries again."""

    exit_code = 76


class UnreachableError(ConnectionLostError):
    """No TCP connection or no SSH server at the other end: refused, timed out, name unknown."""

    exit_code = 66


class HostKeyError(DflashctlError):
    """The host key is unknown, or another one than known_hosts has."""

    exit_code = 67


class AuthenticationError(DflashctlError):
    """The server accepts none of the keys that we have."""

    exit_code = 68


class PctError(DflashctlError):
    """The host has no pct, or pct refused for a reason that is not the container's state."""

    exit_code = 69


class ContainerError(DflashctlError):
    """The container is absent, stopped or locked."""

    exit_code = 70


class PayloadEnvironmentError(DflashctlError):
    """The interpreter, the venv, a package or the workspace is missing in the place."""

    exit_code = 71


class ShipError(DflashctlError):
    """The payload did not arrive whole."""

    exit_code = 72


class LaunchError(DflashctlError):
    """The payload is there, and refused to start the run."""

    exit_code = 73


class RunLostError(DflashctlError):
    """The container says that neither supervisor nor trainer is there, and the run had not ended."""

    exit_code = 74


class ProtocolError(DflashctlError):
    """The feed refuses, speaks another version, or speaks nonsense."""

    exit_code = 75


class LocalStateError(DflashctlError):
    """The laptop's own folder (mirror, lock, state) cannot be used."""

    exit_code = 77


class GpusInUseError(DflashctlError):
    """Another run or process uses a GPU that the run would use, and `--force` was not given."""

    exit_code = 78


class NotInTimeError(DflashctlError):
    """What was asked for did not come within its limit; it may come yet."""

    exit_code = 79


class InterruptedByUser(DflashctlError):
    """Ctrl-C: the view ends, the run goes on."""

    exit_code = 80


class PullError(DflashctlError):
    """What was to be pulled is not there, or did not arrive whole."""

    exit_code = 81


class CheckpointError(DflashctlError):
    """The run tried to write the checkpoint that it was asked for, and could not."""

    exit_code = 82


class ToolError(DflashctlError):
    """An export or an evaluation was refused in the place, or failed there."""

    exit_code = 83


INTERNAL_EXIT_CODE = 99
"""Exit code of an exception nobody expected: a defect of dflashctl."""
