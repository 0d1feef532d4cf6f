"""One LXC container of a rig: this machine's own root file system under a writable delta.

So the container has the interpreter, the virtual environment and the libraries of the machine
without an image to build, while everything that it writes stays in the delta. /tmp, /var/tmp, /run
and /dev/shm are its own, as on a real one: a file that a test left in /tmp is not in the container.

Its first process is a shell that reaps orphans, as a real init does: under a bare `sleep` each
detached process would stay a zombie, and look alive by its pid.
"""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from tests.rig import cgroups
from tests.rig.cgroups import RigError

HERE = Path(__file__).resolve().parent
HOSTNAME = "dflash-ct"
WORKSPACE = PurePosixPath("/workspace")
NVIDIA_SMI = PurePosixPath("/usr/local/bin/nvidia-smi")
NVIDIA_HOME = PurePosixPath("/usr/local/lib/rig-nvidia-smi")
INIT = PurePosixPath("/usr/local/lib/rig-init")

LXC_CONFIG = """\
lxc.uts.name = {hostname}
lxc.rootfs.path = overlay:{state}/lower:{delta}
lxc.net.0.type = empty
lxc.mount.auto = proc:mixed sys:ro cgroup:mixed
lxc.autodev = 1
lxc.init.cmd = {init}
lxc.apparmor.profile = unconfined
lxc.cgroup.dir = {group}
{limit_key} = {limit}
{mounts}
"""
OWN = ("/dev/shm", "/run", "/tmp", "/var/tmp")
PVE_CONFIG = """\
arch: amd64
cores: 2
hostname: {hostname}
memory: {megabytes}
ostype: debian
rootfs: local-zfs:subvol-{vmid}-disk-0,size=64G
swap: 0
"""
# The two ways in which a GPU is given to a container.
PVE_GPUS = {
    200: """\
dev0: /dev/nvidia0
dev1: /dev/nvidia1
dev2: /dev/nvidiactl
dev3: /dev/nvidia-uvm
""",
    201: """\
lxc.cgroup2.devices.allow: c 195:* rwm
lxc.cgroup2.devices.allow: c 509:* rwm
lxc.mount.entry: /dev/nvidia0 dev/nvidia0 none bind,optional,create=file
lxc.mount.entry: /dev/nvidia-uvm dev/nvidia-uvm none bind,optional,create=file
""",
}


class Container:
    """Container `vmid` of the rig at `state`, at most `memory` bytes large."""

    def __init__(self, state: Path, vmid: int, memory: int) -> None:
        self.state, self.vmid, self.memory = state, vmid, memory
        self.home = state / "lxc" / str(vmid)
        self.delta = self.home / "delta"

    def create(self) -> None:
        """Writes its configuration, for LXC and for pct, and what its delta starts with."""
        self.delta.mkdir(parents=True)
        limit_key, limit = cgroups.memory_limit(self.memory)
        (self.home / "config").write_text(
            LXC_CONFIG.format(
                hostname=HOSTNAME,
                state=self.state,
                delta=self.delta,
                init=INIT,
                group=self.state.name,
                limit_key=limit_key,
                limit=limit,
                mounts="\n".join(mounts()),
            )
        )
        (self.state / "pve" / f"{self.vmid}.conf").write_text(
            PVE_CONFIG.format(hostname=HOSTNAME, vmid=self.vmid, megabytes=self.memory >> 20)
            + PVE_GPUS.get(self.vmid, "")
        )
        self.path(WORKSPACE).mkdir()
        python = f"{Path(sys.executable).resolve()} -I -S"
        self._install(
            INIT,
            "#!/bin/sh\nip link set lo up\nsleep infinity &\nwhile :; do wait; done\n",
        )
        self._install(NVIDIA_SMI, f'#!/bin/sh\nexec {python} {NVIDIA_HOME}/nvidia_smi.py "$@"\n')
        for name in ("nvidia_smi.py", "nvidia_smi_2xh200.txt"):
            self._install(NVIDIA_HOME / name, (HERE / name).read_text())
        self._install(NVIDIA_HOME / "mode", "ok")

    def _install(self, path: PurePosixPath, text: str) -> None:
        target = self.path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        target.chmod(0o755)

    def pct(self, verb: str) -> None:
        """`pct VERB VMID`; raises `RigError` with what it said if that fails."""
        call = subprocess.run(
            [self.state / "bin" / "pct", verb, str(self.vmid)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        if call.returncode:
            log = self.state / "log" / f"lxc-{self.vmid}.log"
            lines = log.read_text().splitlines() if log.exists() else []
            said = "\n".join([call.stderr.strip(), *(x for x in lines if "ERROR" in x)])
            raise RigError(f"pct {verb} {self.vmid} failed: {said}")

    def lxc(self, tool: str, *args: str) -> str:
        """Output of an lxc tool on this container."""
        argv = [tool, "-P", str(self.state / "lxc"), "-n", str(self.vmid), *args]
        call = subprocess.run(argv, capture_output=True, text=True, timeout=60)
        if call.returncode:
            raise RigError(f"{' '.join(argv)} failed: {call.stderr or call.stdout}")
        return call.stdout.strip()

    def pid(self) -> int | None:
        """Host pid of its first process; None while it is stopped."""
        call = subprocess.run(
            ["lxc-info", "-P", self.state / "lxc", "-n", str(self.vmid), "-pH"],
            capture_output=True,
            text=True,
            timeout=60,
        )
        return int(call.stdout) if call.stdout.strip() else None

    def path(self, path: str | PurePosixPath) -> Path:
        """Where the host finds the container's file `path`, an absolute one.

        A running container is looked at through its first process, a stopped one in its delta.
        Absolute symbolic links on the way lead to the host's own files.
        """
        inside = PurePosixPath(path)
        assert inside.is_absolute(), path
        pid = self.pid() if (self.home / "config").exists() else None
        root = Path(f"/proc/{pid}/root") if pid else self.delta
        return root / inside.relative_to("/")

    def argv(self, argv: Sequence[str]) -> list[str]:
        """The host's command that runs `argv` in it, as `pct exec --keep-env 0` would."""
        lxcpath = str(self.state / "lxc")
        return ["lxc-attach", "-P", lxcpath, "-n", str(self.vmid), "--clear-env", "--", *argv]

    def run(
        self,
        argv: Sequence[str],
        *,
        input: bytes | None = None,
        timeout: float = 60,
        check: bool = False,
    ) -> subprocess.CompletedProcess[bytes]:
        """Runs `argv` in the container, past ssh and pct."""
        return subprocess.run(
            self.argv(argv),
            input=input,
            stdin=subprocess.DEVNULL if input is None else None,
            capture_output=True,
            timeout=timeout,
            check=check,
            cwd="/",
        )

    def processes(self) -> set[int]:
        """Host pids of its live processes, the first one left out."""
        group = f"{self.state.name}/lxc.payload.{self.vmid}"
        return cgroups.members(group) - {self.pid() or 0}

    @contextmanager
    def memory_limited(self, size: int) -> Iterator[None]:
        """For a while the container may use `size` bytes: one more and the kernel kills in it."""
        files = [
            group / name
            for group in cgroups.groups(f"{self.state.name}/lxc.payload.{self.vmid}")
            for name in ("memory.limit_in_bytes", "memory.max")
            if group.name.startswith("lxc.payload") and (group / name).exists()
        ]
        if not files:
            raise RigError(f"container {self.vmid} has no memory limit to change; does it run?")
        for file in files:
            file.write_text(str(size))
        try:
            yield
        finally:
            for file in files:
                file.write_text(str(self.memory))


def mounts() -> list[str]:
    """The container's own file systems, and what of the interpreter its root does not show.

    That is a virtual environment or an installation below one of its own file systems, or on
    another device than /: bound in read-only, at its own place.
    """
    lines = [f"lxc.mount.entry = tmpfs {p[1:]} tmpfs rw,nosuid,nodev,create=dir 0 0" for p in OWN]
    root = Path("/").stat().st_dev
    for path in sorted({Path(sys.prefix), Path(sys.base_prefix)}):
        if any(path.is_relative_to(p) for p in OWN) or path.stat().st_dev != root:
            there = str(path).replace("\\", "\\134").replace(" ", "\\040")
            lines.append(f"lxc.mount.entry = {there} {there[1:]} none bind,ro,create=dir 0 0")
    return lines
