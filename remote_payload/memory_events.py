"""How often the kernel's out-of-memory killer struck, before and after: the only witness of a SIGKILL.

Nobody tells a process why it was killed. The memory cgroup counts its kills (version 2: `memory.events`,
version 1: `memory.oom_control`); /proc/vmstat counts those of the whole machine. Standard library only.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryEvents:
    """Counts of out-of-memory kills since boot; None where the kernel does not say."""

    container: int | None
    machine: int | None
    limit_gib: float | None
    """The container's memory limit, or None where there is none."""
    at_limit: int | None = None
    """How often the container was at its limit and got no more; version 2 alone counts that."""


def read(cgroups: Path = _CGROUPS, proc: Path = Path("/proc")) -> MemoryEvents:
    """The counts as they are now. Never raises: what cannot be read is None."""
    folders = _folders(cgroups, proc)
    kills = [
        count
        for folder in folders
        for name in ("memory.events", "memory.oom_control")
        if (count := _counter(folder / name, "oom_kill")) is not None
    ]
    limits = [
        limit
        for folder in folders
        for name in ("memory.max", "memory.limit_in_bytes")
        if (limit := _bytes(folder / name)) is not None
    ]
    hits = [hit for folder in folders if (hit := _counter(folder / "memory.events", "oom")) is not None]
    return MemoryEvents(
        container=kills[0] if kills else None,
        machine=_counter(proc / "vmstat", "oom_kill"),
        limit_gib=round(min(limits) / 2**30, 3) if limits else None,
        at_limit=sum(hits) if hits else None,
    )


def used_gib(cgroups: Path = _CGROUPS, proc: Path = Path("/proc")) -> float | None:
    """What the container uses now, page cache and all, or None where the kernel does not say."""
    for folder in _folders(cgroups, proc):
        for name in ("memory.current", "memory.usage_in_bytes"):
            if (used := _bytes(folder / name)) is not None:
                return round(used / 2**30, 3)
    return None


def hint(before: MemoryEvents, after: MemoryEvents) -> str:
    """What the counts say about a process that was killed by SIGKILL between the two readings."""
    if _rose(before.container, after.container):
        return f"out of memory: the kernel killed it{_limit(before, after)}"
    if _rose(before.machine, after.machine):
        return "probably out of memory: the kernel killed something on this machine meanwhile"
    if after.container is not None:
        return "not by the kernel for lack of memory, so by somebody or something else"
    return "out of memory? or killed by hand; the kernel does not say here"


def beside(before: MemoryEvents, after: MemoryEvents) -> str | None:
    """What to add to a failed trainer's reason, when the kernel killed a process of its container."""
    if not _rose(before.container, after.container):
        return None
    return f"meanwhile the kernel killed a process here for lack of memory{_limit(before, after)}"


def _limit(before: MemoryEvents, after: MemoryEvents) -> str:
    """Whose memory was full, as far as that is known: a kill counts for the container whoever lacked it."""
    if after.limit_gib is None:
        return ""
    if after.at_limit is None or _rose(before.at_limit, after.at_limit):
        return f" (limit {after.limit_gib:g} GiB)"
    return f" (not at its limit of {after.limit_gib:g} GiB: the whole machine had no more)"


def _rose(before: int | None, after: int | None) -> bool:
    return before is not None and after is not None and after > before


def _folders(cgroups: Path, proc: Path) -> list[Path]:
    """Where this process's memory cgroup may be seen, the most exact one first."""
    folders = []
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers:
            folders.append(cgroups / path.lstrip("/"))
        elif "memory" in controllers.split(","):
            folders.append(cgroups / "memory" / path.lstrip("/"))
    return [*folders, cgroups, cgroups / "memory"]


def _counter(path: Path, name: str) -> int | None:
    for line in _text(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdecimal():
            return int(value)
    return None


def _bytes(path: Path) -> int | None:
    text = _text(path).strip()
    # Version 1 says "no limit" by a number near 2**63, version 2 by the word max.
    return int(text) if text.isdecimal() and int(text) < 2**60 else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
