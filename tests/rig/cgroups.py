"""Control groups of a rig, on cgroup v1, v2 and the mixture of both.

Everything that a rig starts, and everything that its ssh sessions and containers start, is in a
group below one name at the root of a hierarchy. So what belongs to a rig is a question to the
kernel, not a list that somebody kept: it can be ended after a rig that died without a word.
"""

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from select import poll


class RigError(Exception):
    """The rig cannot be brought up, used or taken down; the message says what to do."""


@dataclass(frozen=True)
class Hierarchy:
    """One mounted hierarchy: where, and what it controls (`unified` for cgroup v2)."""

    path: Path
    controllers: frozenset[str]


def hierarchies() -> list[Hierarchy]:
    """Every mounted cgroup hierarchy, the unified one first."""
    found: dict[str, Hierarchy] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, rest = line.partition(" - ")
        kind, _, options = rest.split(" ")
        if kind in ("cgroup", "cgroup2"):
            names = {"unified"} if kind == "cgroup2" else set(options.split(","))
            path = mount.split(" ")[4]
            found[path] = Hierarchy(Path(path), frozenset(names - {"rw", "ro"}))
    return sorted(found.values(), key=lambda h: "unified" not in h.controllers)


def memory_limit(size: int) -> tuple[str, str]:
    """The lxc key and value that limit a container to `size` bytes on this machine."""
    if any("memory" in h.controllers for h in hierarchies()):
        return "lxc.cgroup.memory.limit_in_bytes", str(size)
    return "lxc.cgroup2.memory.max", str(size)


def groups(name: str) -> list[Path]:
    """The directories of the groups called or below `name`, innermost first."""
    tops = [h.path / name for h in hierarchies()]
    found = [Path(d) for top in tops for d, _, _ in os.walk(top, topdown=False)]
    return [d for d in found if d.is_dir()]


def join(name: str, pid: int) -> None:
    """Moves `pid`, and so what it starts from now on, into the group `name`."""
    for hierarchy in hierarchies():
        if hierarchy.controllers & {"unified", "name=systemd", "freezer", "pids"}:
            group = hierarchy.path / name
            group.mkdir(parents=True, exist_ok=True)
            (group / "cgroup.procs").write_text(str(pid))
            return
    raise RigError("no cgroup hierarchy is mounted; the rig cannot keep track of its processes")


def members(name: str) -> set[int]:
    """Pids of the processes below `name` that live (zombies left out)."""
    pids: set[int] = set()
    for group in groups(name):
        with suppress(OSError):
            pids.update(int(word) for word in (group / "cgroup.procs").read_text().split())
    return {pid for pid in pids if pid and alive(pid)}


def alive(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def kill(name: str, timeout: float = 60.0) -> None:
    """Ends every process below `name`, frozen ones too. Raises `RigError` if some remain."""
    for group in groups(name):
        for switch, value in (("freezer.state", "THAWED"), ("cgroup.freeze", "0")):
            with suppress(OSError):
                if (group / switch).exists():
                    (group / switch).write_text(value)
    deadline = time.monotonic() + timeout
    while pids := members(name):
        assert os.getpid() not in pids, "the rig's own process is never in its group"
        # A dying process leaves its group's list before it is gone: so each is waited for.
        for descriptor in [end(pid) for pid in pids]:
            if descriptor is not None:
                waiting = poll()
                waiting.register(descriptor)
                gone = waiting.poll(max(0.0, deadline - time.monotonic()) * 1000)
                os.close(descriptor)
                if not gone:
                    raise RigError(f"processes of {name} do not end, of {sorted(pids)}")


def end(pid: int) -> int | None:
    """Kills a process; a descriptor that can be read once it is gone, None if it is already."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    return descriptor


def remove(name: str, timeout: float = 60.0) -> None:
    """Removes the groups called or below `name`, which must hold no process."""
    deadline = time.monotonic() + timeout
    while left := groups(name):
        for group in left:
            with suppress(OSError):
                group.rmdir()
        if time.monotonic() > deadline:
            raise RigError(f"cgroups {[str(g) for g in left]} cannot be removed")
        time.sleep(0.005)
