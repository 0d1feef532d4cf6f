"""What several commands share: options, and the choice of a place.

Typer reads a command's options from its signature. The five options that describe a place stand in one
dataclass instead, and `with_place_options` spells them out for typer, so that a command has them as one
parameter. Imports nothing heavy, since help and completion load it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from controller import completion
from controller.errors import UsageError
from controller.narration import is_quiet

if TYPE_CHECKING:
    from controller.inventory import Host

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
JsonOption = Annotated[bool, typer.Option("--json", help="Data as JSON on stdout.")]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlaceOptions:
    """What the options beside `--host` say of a place."""

    kind: Annotated[
        str | None,
        typer.Option(
            "--kind", metavar="KIND", help="local, ssh or proxmox: for a place that the file lacks."
        ),
    ] = None
    container: Annotated[
        int | None,
        typer.Option("--container", metavar="VMID", help="Number of the LXC container (kind proxmox)."),
    ] = None
    user: Annotated[str | None, typer.Option("--user", metavar="NAME", help="Login name for ssh.")] = None
    port: Annotated[int | None, typer.Option("--port", metavar="N", help="TCP port of the ssh server.")] = (
        None
    )
    accept_new_host_key: Annotated[
        bool, typer.Option("--accept-new-host-key", help="Trust a host that known_hosts lacks.")
    ] = False

    @property
    def is_given(self) -> bool:
        """Whether they describe a place."""
        return (self.kind, self.container, self.user, self.port) != (None,) * 4

    def chosen(self, wanted: list[str] | None) -> Host:
        """The place that `--host` and these name. Raises InventoryError or UsageError."""
        from controller.inventory import choose

        if wanted is not None and len(wanted) > 1:
            raise UsageError(
                f"--host was given {len(wanted)} times; a run uses one host so far",
                "Give it once.",
            )
        return choose(
            wanted[0] if wanted else None,
            kind=self.kind,
            container=self.container,
            user=self.user,
            port=self.port,
        )


_KEYWORD = inspect.Parameter.KEYWORD_ONLY
_TYPES = get_type_hints(PlaceOptions, include_extras=True)
_SPELLED = [
    inspect.Parameter(field.name, _KEYWORD, default=field.default, annotation=_TYPES[field.name])
    for field in dataclasses.fields(PlaceOptions)
]


def with_place_options(command: Callable[..., int]) -> Callable[..., int]:
    """`command` as typer is to see it: each option of `PlaceOptions` where its signature has `where`."""

    @functools.wraps(command)
    def run(**given: Any) -> int:
        where = PlaceOptions(**{option.name: given.pop(option.name) for option in _SPELLED})
        return command(**given, where=where)

    parameters: list[inspect.Parameter] = []
    for own in inspect.signature(command, eval_str=True).parameters.values():
        parameters += _SPELLED if own.name == "where" else [own.replace(kind=_KEYWORD)]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def pure_json(as_json: bool, *, follow: bool = False, dry_run: bool = False) -> None:
    """Refuse --json beside an option that prints something else on stdout. Raises UsageError."""
    if as_json and follow:
        raise UsageError(
            "--json and --follow exclude each other", "Follow it afterwards: dflashctl watch --json RUN"
        )
    if as_json and dry_run:
        raise UsageError("--json and --dry-run exclude each other", "A dry run prints no JSON.")


def check_device(device: str) -> None:
    """Refuse a --device that no tool knows, before anybody is asked. Raises UsageError."""
    if not re.fullmatch(r"auto|cpu|cuda:\d+", device):
        raise UsageError(f"--device {device}: expected auto, cpu or cuda:N")


def show_upload(sent: int, total: int) -> None:
    """Show the upload of a payload, on a terminal alone."""
    if sys.stderr.isatty() and not is_quiet():
        end = "\r" if sent < total else "\r\033[K"
        print(f"sending {sent >> 10} of {total >> 10} KiB", end=end, file=sys.stderr, flush=True)
