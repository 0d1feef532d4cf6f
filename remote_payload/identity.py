"""Who a process is: pid, start time and boot id together, since a pid alone is given to others.

The start time is field 22 of /proc/PID/stat, in clock ticks since boot, so it says something only within
one boot; a container gets a boot id of its own each time it starts. Standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

Presence = Literal["alive", "gone", "reused", "none"]
"""`alive`: the very process. `gone`: nobody. `reused`: another one has its pid. `none`: never known."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_DEAD = frozenset("ZXx")


def boot_id() -> str:
    """This boot's (in a container: this start's) random id, or "" where the kernel does not say."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def start_ticks(pid: int) -> int | None:
    """When process `pid` started, in clock ticks since boot, or None when no such process lives.

    A zombie does not live: where nobody reaps (init is `sleep`), dead processes stay listed for ever.
    """
    fields = _stat(pid)
    return None if fields is None or fields[0] in _DEAD else int(fields[19])


def parent_of(pid: int) -> int | None:
    """The pid of the parent of `pid`, or None when no such process is listed."""
    fields = _stat(pid)
    return None if fields is None else int(fields[1])


def children() -> list[int]:
    """The pids of this process's living children, however they came to it."""
    here = os.getpid()
    pids = [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdecimal()]
    return [pid for pid in pids if parent_of(pid) == here and start_ticks(pid) is not None]


def catches(pid: int, signal_number: int) -> bool:
    """Whether process `pid` has a handler of its own for the signal, whose default would end it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name == "SigCgt":
            return bool(int(value, 16) >> (signal_number - 1) & 1)
    return False


def identity(pid: int) -> dict[str, int] | None:
    """`{"pid", "start_ticks"}` of a living process, or None when there is none."""
    ticks = start_ticks(pid)
    return None if ticks is None else {"pid": pid, "start_ticks": ticks}


def state_of(known: object, recorded_boot: object) -> Presence:
    """What became of the process written down as `known` (anything) in the boot `recorded_boot`."""
    if not isinstance(known, Mapping):
        return "none"
    pid, ticks = known.get("pid"), known.get("start_ticks")
    if not isinstance(pid, int) or not isinstance(ticks, int):
        return "none"
    if recorded_boot != boot_id():
        return "gone"
    now = start_ticks(pid)
    if now is None:
        return "gone"
    return "alive" if now == ticks else "reused"


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the third (state) on."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:  # no such process, or it went away while we read
        return None
    # The second field is the command in parentheses and may itself hold spaces and parentheses.
    fields = text.rpartition(")")[2].split()
    return fields or None
