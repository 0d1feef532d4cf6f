"""What several commands share: options, the choice of a place, narration on stderr.

Imports nothing heavy, since help and completion load it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from controller import completion
from controller.errors import UsageError
from controller.narration import is_quiet, say

if TYPE_CHECKING:
    from controller.inventory import Host

__all__ = ["say"]  # narration, for the commands

Run = Annotated[
    str | None,
    typer.Argument(
        help="The run's id, or its beginning. The newest run if not given.", autocompletion=completion.runs
    ),
]
HostOption = Annotated[
    list[str] | None,
    typer.Option(
        "--host",
        metavar="PLACE",
        help="Place of hosts.toml, by name or address. Its `default` if not given.",
        autocompletion=completion.places,
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
AcceptOption = Annotated[
    bool, typer.Option("--accept-new-host-key", help="Trust a host that known_hosts lacks.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Data as JSON on stdout.")]


def chosen_host(
    wanted: list[str] | None,
    kind: str | None,
    container: int | None,
    user: str | None,
    port: int | None,
) -> Host:
    """The place that the options name. Raises InventoryError or UsageError."""
    from controller.inventory import choose

    if wanted is not None and len(wanted) > 1:
        raise UsageError(
            f"--host was given {len(wanted)} times; a run uses one host so far",
            "Give it once.",
        )
    return choose(wanted[0] if wanted else None, kind=kind, container=container, user=user, port=port)


def show_upload(sent: int, total: int) -> None:
    """Show the upload of a payload, on a terminal alone."""
    if sys.stderr.isatty() and not is_quiet():
        end = "\r" if sent < total else "\r\033[K"
        print(f"sending {sent >> 10} of {total >> 10} KiB", end=end, file=sys.stderr, flush=True)
