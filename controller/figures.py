"""Numbers as an operator reads them: short, of constant width where they change, `–` when not known."""

from __future__ import annotations

import time

UNKNOWN = "–"


def count(value: float | None) -> str:
    """`12,345`."""
    return UNKNOWN if value is None else f"{value:,.0f}"


def short(value: float | None) -> str:
    """Three digits and a letter: `812`, `1.2k`, `123k`, `4.5M`."""
    if value is None:
        return UNKNOWN
    for letter in ("", "k", "M", "G"):
        if abs(value) < 999.5:
            small = letter and abs(value) < 9.95
            return f"{value:.1f}{letter}" if small else f"{value:.0f}{letter}"
        value /= 1000
    return f"{value:.1f}T"


def decimal(value: float | None, places: int = 3) -> str:
    """`2.345`."""
    if value is None:
        return UNKNOWN
    return f"{value:.{places}f}" if abs(value) < 1000 else f"{value:.2e}"


def tick(value: float) -> str:
    """The label of an axis, at most six characters: `0`, `2.5`, `120k`, `3e-4`."""
    if not value:
        return "0"
    if abs(value) >= 1000:
        shown = f"{value / 1000:.4g}k" if abs(value) < 1e6 else f"{value / 1e6:.4g}M"
        return shown if len(shown) <= 6 else short(value)
    if abs(value) >= 0.001:
        return f"{value:.4g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def scientific(value: float | None) -> str:
    """`3.0e-4`."""
    if value is None:
        return UNKNOWN
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def share(value: float | None, places: int = 0) -> str:
    """`38%` of 0.38."""
    return UNKNOWN if value is None else f"{value * 100:.{places}f}%"


def seconds(value: float | None) -> str:
    """A step's time: `812ms`, `3.4s`."""
    if value is None:
        return UNKNOWN
    return f"{value * 1e3:.0f}ms" if value < 1 else f"{value:.1f}s"


def span(value: float | None) -> str:
    """A time to come or past: `8s`, `6m`, `3h12m`, `2d04h`."""
    if value is None:
        return UNKNOWN
    whole = max(0, int(value))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m" if whole >= 600 else f"{whole // 60}m{whole % 60:02d}s"
    if whole < 48 * 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def clock(t: float | None, form: str = "%H:%M:%S") -> str:
    """The time of day, or what `form` (as of strftime) asks for, in this machine's zone."""
    try:
        return "--:--:--" if t is None else time.strftime(form, time.localtime(t))
    except (OverflowError, ValueError, OSError):  # a record may hold a time that no calendar has
        return "--:--:--"


def bar(value: float | None, width: int) -> str:
    """A bar of `width` cells filled to the share `value`, in eighths of a cell."""
    if value is None:
        return "·" * width
    eighths = round(min(1.0, max(0.0, value)) * width * 8)
    full, rest = divmod(eighths, 8)
    partial = " ▏▎▍▌▋▊▉"[rest] if rest else ""
    return ("█" * full + partial).ljust(width, "░" if full + bool(rest) < width else " ")


def amount(size: int) -> str:
    """`1.9 GiB`, `812 KiB`, `40 bytes`."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} byte{'s' * (size != 1)}"
