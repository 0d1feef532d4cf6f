"""A tool of the payload (`export`, `evaluate`) run in a place: its words on our stderr, its answer here.

The payload is always our own version, shipped if need be. The tool ends when we do, or when the connection
breaks: it writes nothing that is half, and can be started again.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from controller.errors import ConnectionLostError, PayloadEnvironmentError, ToolError
from controller.includes import PREFIX, Included, collect, send
from controller.narration import Say, detail
from controller.place import Place
from controller.ship import Sent, pack, start
from controller.text import safe_line

SILENCE_S: Final = 60.0
"""The payload sends a beat every 2 s, however long its tool is silent."""


def run_tool(
    place: Place,
    name: str,
    argv: Sequence[str],
    *,
    files: Sequence[Path] = (),
    say: Say,
    progress: Sent | None = None,
) -> Mapping[str, Any]:
    """Run the tool `name` with `argv` in `place`, and return its answer.

    `files` are brought there first; `include:NAME` in `argv` is then one of them, and in a place of this
    machine simply where it lies. Raises ToolError when the tool refuses or fails, ConnectionLostError, and
    what `ship.start` raises.
    """
    payload, words = pack(), list(argv)
    collected: list[Included] = []
    if place.description.kind == "local":
        here = {f"{PREFIX}{path.absolute().name}": str(path.absolute()) for path in files}
        words = [here.get(word, word) for word in words]
    elif files:
        collected = collect(files)
        send(place, payload, collected, say=say, progress=progress)
    detail(f"{place.name}: {name} {' '.join(words)}")
    arrived = start(place, payload, [name, place.workspace], progress=progress)
    try:
        order = {
            "argv": words,
            "env": place.description.env,
            "include": [file.to_json() for file in collected],
        }
        arrived.process.send(json.dumps(order).encode() + b"\n")
        while (record := arrived.record(SILENCE_S)) is not None:
            if "ok" in record:
                return _answer(place, name, record)
            if isinstance(line := record.get("say"), str) and line.strip():
                say(safe_line(line))
            with contextlib.suppress(ConnectionLostError):  # it may have ended: its last line says how
                arrived.process.send(b"{}\n")
    finally:
        arrived.process.close()
    raise ConnectionLostError(f"{place.name}: {name} ended without an answer")


def _answer(place: Place, name: str, record: Mapping[str, Any]) -> Mapping[str, Any]:
    answer = record.get("answer")
    if record["ok"] and isinstance(answer, dict):
        return answer
    why = safe_line(str(record.get("error", "no word")))
    if why.startswith("ModuleNotFoundError"):
        raise PayloadEnvironmentError(
            f"{place.name}: {name} cannot run with {place.python}: {why}",
            f"Make its venv: dflashctl setup --host {place.name}",
        )
    raise ToolError(f"{place.name}: {name}: {why}")
