"""The trainer as a child process: it cannot outlive its supervisor, and ends with all that it started.

- Its death signal is SIGTERM (PR_SET_PDEATHSIG): should the supervisor die, the trainer checkpoints and ends.
- It leads a process group. The group is killed while the ended leader is still a zombie, since its pid,
  and so the group's number, can be given to nobody else before it is reaped.
- The supervisor is a subreaper: what left the group (a library's daemon) becomes its child and is killed too.

Standard library only.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from remote_payload import identity

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_STRAYS_S = 2.0

_libc = ctypes.CDLL(None, use_errno=True)  # loaded here: nothing may be imported between fork and exec


class TrainerProcess:
    """A started trainer. Make it in the supervisor's main thread: the death signal is tied to that thread."""

    def __init__(self, command: Sequence[str], *, log: Path, cwd: Path, env: Mapping[str, str]) -> None:
        """Start `command` in `cwd` with exactly `env`, its output appended to `log`.

        Raises OSError when it cannot be started.
        """
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        supervisor = os.getpid()

        def die_with_supervisor() -> None:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
            if os.getppid() != supervisor:  # it died between fork and prctl: no signal will come
                os.kill(os.getpid(), signal.SIGKILL)

        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        output = os.open(log, flags, 0o600)
        try:
            # No other thread of the supervisor runs yet, so code between fork and exec is safe.
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=cwd,
                env=dict(env),
                process_group=0,
                preexec_fn=die_with_supervisor,
            )
        finally:
            os.close(output)
        self.pid = self._process.pid
        self.identity = identity.identity(self.pid)
        self.started = time.monotonic()

    def ended(self) -> bool:
        """Whether the trainer has ended (it may be waiting to be reaped)."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.pid, flags) is not None

    def signal(self, number: int) -> bool:
        """Send a signal to the trainer alone; False when it has ended."""
        if self.ended():
            return False
        os.kill(self.pid, number)
        return True

    def signal_group(self, number: int) -> None:
        """Send a signal to the trainer and to everything in its process group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def reap(self) -> int:
        """Kill what the ended trainer left behind and return its exit status, negative for a signal."""
        self.signal_group(signal.SIGKILL)
        return self._process.wait()


def trainer_environment(extra: object) -> dict[str, str]:
    """The whole environment of a trainer: a few harmless variables and the run's `[env]` table."""
    try:
        account = pwd.getpwuid(os.getuid())
        home, user = account.pw_dir, account.pw_name
    except KeyError:  # a container may run under a user that its passwd file does not list
        home, user = os.environ.get("HOME", "/"), str(os.getuid())
    environment = {
        "PATH": os.environ.get("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
        "HOME": home,
        "USER": user,
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
    }
    if isinstance(extra, Mapping):
        environment |= {str(name): str(value) for name, value in extra.items()}
    return environment


def kill_strays(spare: Sequence[int]) -> None:
    """SIGKILL to every child of this process but `spare`, until there are none left, for at most 2 s.

    Killing one hands its own children to us, hence the loop.
    """
    deadline = time.monotonic() + _STRAYS_S
    while time.monotonic() < deadline:
        strays = [pid for pid in identity.children() if pid not in spare]
        if not strays:
            return
        for pid in strays:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
