"""The rig's OpenSSH server: 127.0.0.1, a port, keys, a PATH and a home of its own.

Sessions start in the rig's home so that nothing of this machine's ~/.bashrc runs in them; its own
.bashrc gives HOME back and prints the login noise that a test asked for, as a real one would.
"""

import os
import pwd
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from tests.ports import free_port
from tests.rig import cgroups
from tests.rig.cgroups import RigError

HOST = "127.0.0.1"
ALIAS = "rig"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# sshd insists on this directory; its package makes it where systemd runs, and it is left there.
PRIVILEGE_SEPARATION = Path("/run/sshd")

SSHD_CONFIG = """\
ListenAddress {host}:{port}
HostKey {ssh}/host_key
AuthorizedKeysFile {ssh}/authorized_keys
PidFile none
AuthenticationMethods publickey
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
UseDNS no
PermitUserRC no
LogLevel VERBOSE
SetEnv PATH={state}/bin:{path} HOME={state}/home
Subsystem sftp internal-sftp
"""
SSH_CONFIG = """\
Host {alias} {host}
    HostName {host}
    Port {port}
    User {user}
    IdentityFile {client}/identity
    IdentitiesOnly yes
    IdentityAgent none
    UserKnownHostsFile {client}/known_hosts
    GlobalKnownHostsFile /dev/null
    StrictHostKeyChecking yes
    BatchMode yes
    LogLevel ERROR
"""


def find_sshd() -> str | None:
    """Absolute path of the server, which is not in everybody's PATH."""
    return shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}")


class Sshd:
    """The server of the rig at `state`."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.ssh = state / "ssh"
        self.laptop = state / "laptop"
        client = self.laptop / ".ssh"
        self.user = pwd.getpwuid(os.geteuid()).pw_name
        self.port = 0
        self.identity, self.known_hosts = client / "identity", client / "known_hosts"
        self.client_config = client / "config"
        self.log = state / "log" / "sshd.log"
        self.process: subprocess.Popen[bytes] | None = None
        self._frozen: set[int] = set()

    def create(self) -> None:
        """Makes the keys, the home of its sessions, and a client's home, `laptop`."""
        self.ssh.mkdir()
        self.laptop.mkdir()
        self.identity.parent.mkdir(mode=0o700)
        home = self.state / "home"
        home.mkdir()
        real_home = pwd.getpwuid(os.geteuid()).pw_dir
        (home / ".bashrc").write_text(f"export HOME={real_home}\ncat {home}/noise\n")
        (home / "noise").touch()
        keygen(self.identity)
        shutil.copy(self.identity.with_suffix(".pub"), self.ssh / "authorized_keys")
        keygen(self.ssh / "host_key")

    def start(self) -> None:
        """Starts the server, on the port that it had before if there is one."""
        assert self.process is None, "sshd runs already"
        PRIVILEGE_SEPARATION.mkdir(mode=0o755, exist_ok=True)
        for _ in range(5):
            port = self.port or free_port()
            if self._start_on(port):
                self.port = port
                self._write_client_files()
                return
        raise RigError(f"sshd does not start: {self.log_tail()}")

    def _start_on(self, port: int) -> bool:
        sshd = find_sshd()
        assert sshd is not None
        config = self.ssh / "sshd_config"
        config.write_text(
            SSHD_CONFIG.format(host=HOST, port=port, ssh=self.ssh, state=self.state, path=SYSTEM_PATH)
        )
        # Newer servers lock an address out for a while after its connections broke; breaking
        # them is what the rig is for.
        option = ["-o", "PerSourcePenalties=no"]
        test = subprocess.run([sshd, "-t", "-f", config, *option], capture_output=True, timeout=30)
        before = len(self._log_text())
        self.process = subprocess.Popen(
            [sshd, "-D", "-E", self.log, "-f", config, *(option if test.returncode == 0 else [])],
            stdin=subprocess.DEVNULL,
            env={"PATH": SYSTEM_PATH},
            start_new_session=True,
        )
        cgroups.join(f"{self.state.name}/sshd", self.process.pid)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self.process.poll() is None:
            # A connection of our own would be a child to wait for, among those of clients that come at once.
            if f"Server listening on {HOST} port {port}." in self._log_text()[before:]:
                return True
            time.sleep(0.005)
        self.stop()
        return False

    def _write_client_files(self) -> None:
        kind, key, *_ = (self.ssh / "host_key.pub").read_text().split()
        self.known_hosts.write_text(f"[{HOST}]:{self.port} {kind} {key}\n")
        self.client_config.write_text(
            SSH_CONFIG.format(
                alias=ALIAS,
                host=HOST,
                port=self.port,
                user=self.user,
                client=self.identity.parent,
            )
        )

    def stop(self) -> None:
        """Ends the server and its connections, as when the host is gone."""
        self.kill_connections()
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def children(self) -> list[int]:
        """Pids of the processes that serve one connection each."""
        if self.process is None:
            return []
        pid = self.process.pid
        words = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(word) for word in words if cgroups.alive(int(word))]

    def _signal(self, pids: list[int], number: signal.Signals) -> list[int]:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        return pids

    def kill_connections(self) -> int:
        """Breaks every connection off, now; returns how many there were.

        What ran in them goes on, as it does when the network breaks.
        """
        pids = self._signal(self.children(), signal.SIGKILL)
        while any(cgroups.alive(pid) for pid in pids):
            time.sleep(0.005)
        self._frozen -= set(pids)
        return len(pids)

    def freeze_connections(self) -> int:
        """Stops every connection's process: no byte, no end of file, as when a cable is cut."""
        pids = self._signal(self.children(), signal.SIGSTOP)
        self._frozen |= set(pids)
        return len(pids)

    def thaw_connections(self) -> None:
        """Lets the frozen connections go on."""
        self._signal(sorted(self._frozen & set(self.children())), signal.SIGCONT)
        self._frozen.clear()

    def rotate_host_key(self) -> None:
        """Gives the server another host key; `known_hosts` keeps the one before."""
        before = self.known_hosts.read_text()
        self.stop()
        keygen(self.ssh / "host_key")
        self.start()
        self.known_hosts.write_text(before)

    def trust_host_key(self) -> None:
        """Writes the server's present host key into `known_hosts`."""
        self._write_client_files()

    def log_tail(self, lines: int = 20) -> str:
        """The end of the server's log."""
        return "\n".join(self._log_text().splitlines()[-lines:])

    def _log_text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


def keygen(path: Path) -> None:
    """Makes a key pair at `path`, in place of one that was there."""
    path.unlink(missing_ok=True)
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", path.name, "-f", path],
        check=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
    )
