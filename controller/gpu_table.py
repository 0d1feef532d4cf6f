"""A listing of GPUs as a table for people; every cell that is not known is a dash, with its reason below."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from controller import figures
from controller.text import aligned, safe_line

_HEAD = ("GPU", "NAME", "MEMORY", "BUSY", "POWER", "HEAT", "RUNS")


def table(listing: Mapping[str, Any]) -> str:
    """The lines of one listing of the payload's `gpus` command."""
    rows: list[tuple[str, ...]] = [_HEAD]
    reasons: dict[str, None] = {}
    for gpu in listing["gpus"]:
        rows.append(_row(gpu))
        for why in gpu.get("why", {}).values():
            reasons[f"GPU {gpu.get('index')}: {safe_line(str(why))}"] = None
    if len(rows) == 1:
        return f"no GPU ({safe_line(str(listing['why']))})"
    lines = [figures.clock(listing["t"])] if listing.get("t") else []
    problem = safe_line(str(listing.get("why") or ""))
    if problem and not any(problem in reason for reason in reasons):
        reasons[problem] = None
    return "\n".join([*lines, *aligned(rows), *reasons])


def _row(gpu: Mapping[str, Any]) -> tuple[str, ...]:
    def shown(key: str, form: str, scale: float = 1.0) -> str:
        value = gpu.get(key)
        return form.format(value * scale) if isinstance(value, int | float) else "-"

    def of(part: str, whole: str) -> str:
        return "-" if part == whole == "-" else f"{part}/{whole}"

    return (
        str(gpu.get("index", "-")),
        safe_line(str(gpu.get("name") or "-")),
        of(shown("memory_used_gib", "{:.1f}"), shown("memory_total_gib", "{:.0f} GiB")),
        shown("utilization_share", "{:.0f} %", 100),
        of(shown("power_w", "{:.0f}"), shown("power_limit_w", "{:.0f} W")),
        shown("temperature_c", "{:.0f} °C"),
        safe_line(", ".join(gpu.get("runs", []))),
    )
