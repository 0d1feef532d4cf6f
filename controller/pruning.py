"""`prune`: what a place holds that nobody needs, listed by the payload, removed when a person says so."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Final

from controller.errors import ConnectionLostError, PayloadEnvironmentError, UsageError
from controller.figures import amount, span
from controller.paths import payloads_of_logs
from controller.place import Place
from controller.ship import Payload, start
from controller.text import aligned, last_line, safe_line

_WAIT_S: Final = 600.0
"""Sizes of many checkpoints are added up before a line comes; their removal takes its time too."""
_UNITS: Final = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}

Item = dict[str, Any]


def seconds(text: str) -> float:
    """A span such as `14d`, `12h`, `30m` or `0` in seconds. Raises UsageError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([dhms]?)", text.strip())
    if match is None:
        raise UsageError(f"--older-than {text}: expected a span such as 14d, 12h or 30m")
    return float(match[1]) * _UNITS[match[2] or "s"]


def examine(place: Place, payload: Payload, older_s: float) -> list[Item]:
    """All runs, payloads and included files there; `kept` says why one stays, null that it may go."""
    return _ask(place, payload, {"older_s": older_s})


def remove(place: Place, payload: Payload, older_s: float, items: Sequence[Item]) -> list[Item]:
    """Remove `items`, each looked at again before: `{"removed", "bytes"}` or `{"kept", "why"}` for each."""
    wanted = [[item["kind"], item["name"]] for item in items]
    return _ask(place, payload, {"older_s": older_s, "remove": wanted})


def _ask(place: Place, payload: Payload, order: dict[str, Any]) -> list[Item]:
    order["keep"] = sorted({payload.digest, *payloads_of_logs()})
    arrived = start(place, payload, ["prune", place.workspace])
    answers = []
    try:
        arrived.process.send(json.dumps(order).encode() + b"\n")
        arrived.process.close_stdin()
        while (record := arrived.record(_WAIT_S)) is not None:
            answers.append(record)
        status = arrived.process.wait(_WAIT_S)
    finally:
        arrived.process.close()
    if status is None:
        raise ConnectionLostError(f"{place.name}: prune closed its output and did not end")
    if status:
        said = last_line(arrived.process.stderr)
        raise PayloadEnvironmentError(f"{place.name}: prune failed with status {status}: {said}")
    return answers


def table(items: Sequence[Item]) -> str:
    """One line an item, as people read them."""
    rows = [("", "KIND", "NAME", "SIZE", "AGE", "STATE")]
    for item in items:
        name = item["name"] if item["kind"] == "run" else item["name"][:12]
        why = item["kept"]
        rows.append(
            (
                "keep" if why else "GOES",
                item["kind"],
                safe_line(name),
                amount(item["bytes"]),
                span(item["age_s"]),
                safe_line("; ".join(filter(None, (item["state"], why)))),
            )
        )
    return "\n".join(aligned(rows))
