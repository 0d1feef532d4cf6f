"""Exporting a run's drafter: written and verified where the run is, then pulled here."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Final

from controller.errors import ConnectionLostError, LocalStateError, ToolError
from controller.narration import Say
from controller.payload_tool import run_tool
from controller.place import open_place
from controller.pull import Progress, pull
from controller.run_place import RunPlace
from controller.run_records import number, table, text, whole
from controller.ship import Sent

EXPORTS: Final = "exports"


@dataclasses.dataclass(frozen=True, slots=True)
class Exported:
    """A complete export; the field names are the keys of `export --json`."""

    run: str
    name: str
    step: int | None
    dtype: str
    bytes: int | None
    tensors: int | None
    tau: float | None
    """Decoded, of this checkpoint; None: it was not evaluated."""
    tau_macro: float | None
    check: dict[str, Any]
    place: str
    path: str
    """Where it is in the place."""
    directory: str | None
    """Where it is here; None: it was not pulled."""


def export(
    directory: Path,
    *,
    checkpoint: str | None,
    name: str | None,
    dtype: str,
    device: str,
    force: bool,
    to: Path | None,
    say: Say,
    upload: Sent | None = None,
    progress: Progress | None = None,
) -> Exported:
    """Export a checkpoint of the run mirrored in `directory`, and pull it into `to` (None: leave it there).

    Raises ToolError for what the place refuses: no such checkpoint, an export of that name, a full disk; and
    what `pull` raises.
    """
    run_place = RunPlace.read(directory)
    argv = [run_place.run_dir, "--dtype", dtype, "--device", device, "--json"]
    argv += ["--checkpoint", checkpoint] if checkpoint is not None else []
    argv += [f"--name={name}"] if name is not None else []
    argv += ["--force"] if force else []
    with open_place(run_place.host) as place:
        answer = run_tool(place, "export", argv, say=say, progress=upload)
    written = text(answer, "name")
    if not written:
        raise ToolError(f"{run_place.host.name}: export: its answer names no export")
    exported = Exported(
        run=run_place.run_id,
        name=written,
        step=whole(answer, "step"),
        dtype=text(answer, "dtype"),
        bytes=whole(answer, "bytes"),
        tensors=whole(answer, "tensors"),
        tau=number(answer, "tau"),
        tau_macro=number(answer, "tau_macro"),
        check=dict(table(answer, "check")),
        place=run_place.host.name,
        path=text(answer, "path"),
        directory=None,
    )
    if to is None:
        return exported
    try:
        pull(directory, [f"{EXPORTS}/{written}"], to, say=say, progress=progress)
    except (ConnectionLostError, LocalStateError) as error:
        error.hint = f"It is complete there: dflashctl pull {run_place.run_id} {EXPORTS}/{written}"
        raise
    return dataclasses.replace(exported, directory=str(to / EXPORTS / written))
