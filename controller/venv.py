"""`setup`: the place's virtual environment, made or mended by the payload's own command over there."""

from __future__ import annotations

import json
from typing import Any, Final

from controller.errors import ConnectionLostError, PayloadEnvironmentError, UsageError
from controller.inventory import Host
from controller.narration import Say
from controller.place import open_place
from controller.requirements import OLDEST
from controller.ship import Payload, Sent, start
from controller.text import safe_line

_SILENCE_S: Final = 60.0
"""The payload gives a sign every 5 s."""


def set_up(
    host: Host,
    payload: Payload,
    say: Say,
    *,
    accept_new_host_key: bool = False,
    progress: Sent | None = None,
) -> dict[str, Any]:
    """Make or mend the venv of `host`; `{"changed", "packages"}`. `say` is told each line of the installer.

    Raises PayloadEnvironmentError, and what shipping raises. Ends its installer when it is interrupted.
    """
    require_venv(host)
    order = {key: getattr(host, key) for key in ("workspace", "venv", "index", "wheels")}
    with open_place(host, accept_new_host_key=accept_new_host_key) as place:
        arrived = start(place, payload, ["setup"], python=host.base_python, progress=progress)
        try:
            arrived.process.send(json.dumps(order).encode() + b"\n")
            while (record := arrived.record(_SILENCE_S)) is not None:
                if (done := record.get("done")) is not None:
                    return dict(done)
                if error := record.get("error"):
                    raise PayloadEnvironmentError(
                        f"{host.name}: {safe_line(str(error))}", safe_line(str(record.get("hint", "")))
                    )
                for key, lead in (("step", "+ "), ("line", "  ")):
                    if text := record.get(key):
                        say(f"{lead}{safe_line(str(text))}")
        finally:
            arrived.process.close()
    raise ConnectionLostError(f"{host.name}: the setup ended without a word", "Run it again: it mends.")


def require_venv(host: Host) -> None:
    """Raise UsageError for a place whose interpreter is dflashctl's own."""
    if not host.venv:
        raise UsageError(
            f"{host.name}: has no `venv` of its own, it uses the interpreter that runs dflashctl",
            "Name a `venv` for it in hosts.toml.",
        )


def plan(host: Host) -> str:
    """What `set_up` would do, without asking anybody."""
    require_venv(host)
    lines = [
        f"in {host.name}, by {host.base_python}, with uv where it is installed and pip elsewhere:",
        f"  make {host.venv}, unless it is there and whole",
        *(f"  install {name}>={oldest}" for name, oldest in OLDEST.items()),
    ]
    if host.wheels:
        lines.append(f"  from the folder {host.wheels}" + ("" if host.index else " alone"))
    if host.index:
        lines.append("  from the `index` of hosts.toml")
    return "\n".join(lines)
