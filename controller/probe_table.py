"""The answers of `probe` as lines of a table: which ways of running a step work in a place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from controller.text import safe_line

HEADER = f"{'mode':<16}{'trees':<7}{'where':<9}{'passes':<20}{'torch':<16}{'step ms':>9}  outcome"


def line(record: Mapping[str, Any]) -> str:
    """One record of the payload's `probe` as a line under `HEADER`; fields it lacks are shown as `?`."""
    trees = {True: "on", False: "off", None: "-"}.get(record.get("trees"), "?")
    milliseconds = record.get("step_ms")
    shown = f"{milliseconds:.2f}" if isinstance(milliseconds, int | float) else "-"
    outcome = "works" if record.get("works") else f"fails: {record.get('failure') or 'no reason given'}"
    if record.get("refused"):
        outcome += "; training refuses it"
    if record.get("fp8", "none") != "none":
        outcome += f"; fp8 = {record['fp8']}"
    words = [str(record.get(name) or "?") for name in ("mode", "where", "passes", "torch")]
    made = f"{words[0]:<16}{trees:<7}{words[1]:<9}{words[2]:<20}{words[3]:<16}{shown:>9}  {outcome}"
    return safe_line(made)
