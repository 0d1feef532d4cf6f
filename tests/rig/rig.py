"""The rig: a real OpenSSH server in front of a real container host, on this machine alone.

`with Rig() as rig:` brings up sshd on loopback and two LXC containers behind a `pct` that behaves
as Proxmox's does: `rig.vmid` runs, `rig.stopped_vmid` does not. Nothing of it is simulated but pct's
front end and nvidia-smi. It takes down everything it started, also after an error or Ctrl-C; what a
killed rig left behind, the next one takes down first.

A test that needs trouble makes it here: broken or silent connections, a server that is gone or has
another key, login noise, an older pct, a locked container, GPUs that are lost or never answer.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from fcntl import LOCK_EX, flock
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Literal, Self

from tests.rig import leftovers, sshd
from tests.rig.cgroups import RigError
from tests.rig.container import NVIDIA_HOME, NVIDIA_SMI, WORKSPACE, Container

HERE = Path(__file__).resolve().parent
NvidiaMode = Literal["ok", "busy", "fail", "hang", "lost", "absent"]
TOOLS = ("ssh", "ssh-keygen", "lxc-start", "lxc-attach", "lxc-info", "lxc-stop", "unshare", "perl")
PARKED_NVIDIA_SMI = NVIDIA_HOME / "absent"


def unavailable() -> str | None:
    """Why there can be no rig here, as a sentence; None if there can."""
    if os.geteuid() != 0:
        return "the rig needs root: its container and its sshd's sessions are root's"
    missing = [tool for tool in TOOLS if shutil.which(tool, path=sshd.SYSTEM_PATH) is None]
    if sshd.find_sshd() is None:
        missing.insert(0, "sshd")
    if missing:
        return f"the rig lacks {', '.join(missing)}; run {HERE / 'install.sh'} as root"
    return None


class Rig:
    """A container host with an ssh server; see the module for what it is and does.

    `memory`: bytes that each container may use. Raises `RigError` where it cannot come up.
    """

    host = sshd.HOST
    alias = sshd.ALIAS  # the Host of ssh_config
    vmid = 200
    stopped_vmid = 201
    absent_vmid = 999
    workspace = str(WORKSPACE)  # a directory of the container, empty at first
    venv = sys.prefix  # the virtual environment, at the same place in the container
    python = sys.executable

    def __init__(self, memory: int = 4 << 30) -> None:
        self.memory = memory

    def __enter__(self) -> Self:
        if reason := unavailable():
            raise RigError(reason)
        leftovers.sweep()
        self.state, self._claim = leftovers.claim()
        try:
            self._bring_up()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _bring_up(self) -> None:
        for name in ("bin", "log", "lock", "lower", "lxc", "pve"):
            (self.state / name).mkdir()
        for tool in ("pct", "pvesh", "sudo"):
            (self.state / "bin" / tool).symlink_to(HERE / tool)
        self.sshd = sshd.Sshd(self.state)
        self.sshd.create()
        self.container = Container(self.state, self.vmid, self.memory)
        self.container.create()
        self.stopped_container = Container(self.state, self.stopped_vmid, self.memory)
        self.stopped_container.create()
        self.container.pct("start")
        self.sshd.start()
        (self.laptop / "hosts.toml").write_text(self.hosts_toml())
        status = self.pct("status", str(self.vmid))
        if status.stdout != b"status: running\n":
            raise RigError(
                f"pct over ssh says {status.stdout + status.stderr!r}, exit {status.returncode};"
                f" sshd's log ends: {self.sshd.log_tail()}"
            )

    def close(self) -> None:
        """Takes everything down; a second call does nothing."""
        if not hasattr(self, "_claim"):
            return
        process = self.sshd.process if hasattr(self, "sshd") else None
        try:
            leftovers.take_down(self.state)
            if process is not None:
                process.wait()
        finally:
            os.close(self._claim)
            del self._claim

    # What a client needs.

    @property
    def port(self) -> int:
        """The server's port on 127.0.0.1."""
        return self.sshd.port

    @property
    def user(self) -> str:
        """Who logs in."""
        return self.sshd.user

    @property
    def identity(self) -> Path:
        """The private key that the server accepts."""
        return self.sshd.identity

    @property
    def known_hosts(self) -> Path:
        """A known_hosts file with the server's key."""
        return self.sshd.known_hosts

    @property
    def ssh_config(self) -> Path:
        """An ssh client's configuration with the server as Host `rig`."""
        return self.sshd.client_config

    @property
    def laptop(self) -> Path:
        """A home directory whose ~/.ssh logs in to the server by name, address or `rig`."""
        return self.sshd.laptop

    def laptop_env(self) -> dict[str, str]:
        """Variables under which dflashctl knows the rig as a place, and keeps its state there."""
        home = self.laptop
        return {"HOME": str(home), "DFLASHCTL_HOSTS": str(home / "hosts.toml")} | {
            f"XDG_{kind}_HOME": str(home / f".{kind.lower()}")
            for kind in ("STATE", "CONFIG", "CACHE", "DATA")
        }

    def ssh(
        self, command: str, *, input: bytes | None = None, timeout: float = 60
    ) -> subprocess.CompletedProcess[bytes]:
        """Runs a command line on the rig's host by the OpenSSH client, without a tty."""
        return subprocess.run(
            ["ssh", "-F", self.ssh_config, self.alias, command],
            input=input,
            stdin=subprocess.DEVNULL if input is None else None,
            capture_output=True,
            timeout=timeout,
        )

    def pct(
        self, *args: str, input: bytes | None = None, timeout: float = 60
    ) -> subprocess.CompletedProcess[bytes]:
        """Runs `pct ARGS...` on the rig's host through ssh."""
        return self.ssh(shlex.join(["pct", *args]), input=input, timeout=timeout)

    # The container, from beside the path that is under test.

    def container_run(
        self,
        argv: Sequence[str],
        *,
        input: bytes | None = None,
        timeout: float = 60,
        check: bool = False,
    ) -> subprocess.CompletedProcess[bytes]:
        """Runs `argv` in the container without ssh and pct."""
        return self.container.run(argv, input=input, timeout=timeout, check=check)

    def container_argv(self, argv: Sequence[str]) -> list[str]:
        """The host's command that runs `argv` in the container: for a process to keep."""
        return self.container.argv(argv)

    def container_path(self, path: str | PurePosixPath) -> Path:
        """Where this process finds the container's file `path`, to read or to write."""
        return self.container.path(path)

    def container_sha256(self, path: str | PurePosixPath) -> str:
        """The file's sha256 as the container's own sha256sum says."""
        out = self.container_run(["sha256sum", "--", str(path)], check=True).stdout
        return out.decode().split()[0]

    def container_processes(self) -> set[int]:
        """Host pids of what lives in the container besides its first process."""
        return self.container.processes()

    def container_memory(self, size: int) -> AbstractContextManager[None]:
        """Context: the container may use `size` bytes; one more and the kernel kills in it."""
        return self.container.memory_limited(size)

    def freeze_container(self) -> None:
        """Stops every process of the container: an lxc-attach to it hangs."""
        self.container.lxc("lxc-freeze")

    def thaw_container(self) -> None:
        """Lets a frozen container go on."""
        self.container.lxc("lxc-unfreeze")

    def stop_container(self) -> None:
        """Stops the container as `pct stop` does; what it wrote to disk stays."""
        self.container.pct("stop")

    def start_container(self) -> None:
        """Starts the stopped container again: new processes, new boot id."""
        self.container.pct("start")

    def nvidia_smi(self, mode: NvidiaMode, gpu: int = 1) -> None:
        """What the container's nvidia-smi does from now on, running loops included.

        `ok` idle GPUs, `busy` full load, `fail` NVML does not come up, `hang` no answer, and only
        SIGKILL ends it, `lost` GPU number `gpu` fell off the bus, `absent` there is no nvidia-smi.
        """
        program, parked = self.container_path(NVIDIA_SMI), self.container_path(PARKED_NVIDIA_SMI)
        if mode == "absent":
            if program.exists():
                program.rename(parked)
            return
        # A loop that reads the mode between two writes must not find the file empty.
        file = self.container_path(NVIDIA_HOME / "mode")
        new = file.with_name("mode.new")
        new.write_text(f"lost {gpu}" if mode == "lost" else mode)
        new.replace(file)
        if parked.exists():
            parked.rename(program)

    # The server and its connections.

    def sshd_children(self) -> list[int]:
        """Pids of the server's processes that serve one connection each."""
        return self.sshd.children()

    def kill_connections(self) -> int:
        """Breaks every ssh connection off; what ran in them goes on. Returns how many."""
        return self.sshd.kill_connections()

    def freeze_connections(self) -> int:
        """Makes every ssh connection silent, neither data nor an end. Returns how many."""
        return self.sshd.freeze_connections()

    def thaw_connections(self) -> None:
        """Lets the silent connections go on."""
        self.sshd.thaw_connections()

    def stop_sshd(self) -> None:
        """Takes the server and its connections away: new ones are refused."""
        self.sshd.stop()

    def start_sshd(self) -> None:
        """Starts the server again, on the same port with the same key."""
        self.sshd.start()

    def rotate_host_key(self) -> None:
        """Restarts the server with another host key, which `known_hosts` does not have."""
        self.sshd.rotate_host_key()

    def trust_host_key(self) -> None:
        """Puts the server's present host key into `known_hosts`."""
        self.sshd.trust_host_key()

    def login_noise(self, text: str) -> None:
        """What each session prints on stdout before its command's own output."""
        (self.state / "home" / "noise").write_text(text)

    # pct.

    def pct_calls(self) -> list[list[str]]:
        """The arguments of every pct call so far, oldest first."""
        log = self.state / "log" / "pct.log"
        lines = log.read_text().splitlines() if log.exists() else []
        return [[word.encode().decode("unicode_escape") for word in line.split("\t")[2:]] for line in lines]

    def older_pct(self, older: bool = True) -> None:
        """Whether pct is one from before 5.0.9, which does not know --keep-env."""
        flag = self.state / "pve" / "older"
        flag.touch() if older else flag.unlink(missing_ok=True)

    def sudo(self, mode: Literal["allowed", "password", "refused"]) -> None:
        """What the host's sudo says from now on to who asks without a terminal."""
        (self.state / "sudo").write_text("" if mode == "allowed" else mode)

    def cluster(self, guests: list[dict[str, object]]) -> None:
        """What pvesh says of the cluster's guests: `vmid`, `node`, `type` of each."""
        (self.state / "cluster.json").write_text(json.dumps(guests))

    @contextmanager
    def without(self, *programs: str) -> Iterator[None]:
        """Meanwhile the container lacks these programs, absolute paths."""
        for program in programs:
            self.container_run(["mv", program, f"{program}.away"], check=True)
        try:
            yield
        finally:
            for program in programs:
                self.container_run(["mv", f"{program}.away", program], check=True)

    def lock_container(self, reason: str | None, vmid: int = vmid) -> None:
        """Sets the container's `lock:` (backup, ...), which start and stop refuse; None clears."""
        file = self.state / "pve" / f"{vmid}.conf"
        lines = [x for x in file.read_text().splitlines() if not x.startswith("lock: ")]
        file.write_text("\n".join([*lines, *([f"lock: {reason}"] if reason else [])]) + "\n")

    @contextmanager
    def config_lock_held(self, vmid: int = vmid) -> Iterator[None]:
        """Meanwhile another pct call holds the configuration's lock; they give up after 1 s."""
        impatient = self.state / "pve" / "impatient"
        impatient.touch()
        with (self.state / "lock" / f"pve-config-{vmid}.lock").open("a") as file:
            flock(file, LOCK_EX)
            try:
                yield
            finally:
                impatient.unlink()

    def reset(self) -> None:
        """Undoes every trouble that a test made; processes and files in containers stay."""
        if self.sshd.process is None:
            self.start_sshd()
        self.thaw_connections()
        self.trust_host_key()
        self.login_noise("")
        self.older_pct(False)
        self.sudo("allowed")
        self.cluster([])
        for vmid in (self.vmid, self.stopped_vmid):
            self.lock_container(None, vmid)
        if self.stopped_container.pid() is not None:
            self.stopped_container.pct("stop")
        if self.container.pid() is None:
            self.start_container()
        if self.container.lxc("lxc-info", "-sH") == "FROZEN":
            self.thaw_container()
        self.nvidia_smi("ok")

    def hosts_toml(self, name: str = "rig") -> str:
        """A place of hosts.toml that is this rig's container."""
        return (
            f"[places.{name}]\n"
            'kind = "proxmox"\n'
            f'address = "{self.host}"\n'
            f"port = {self.port}\n"
            f'user = "{self.user}"\n'
            f"container = {self.vmid}\n"
            f'venv = "{self.venv}"\n'
            f'workspace = "{self.workspace}"\n'
            "connect_timeout = 10\n"
        )
