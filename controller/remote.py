"""Places behind ssh: a machine itself, and an LXC container of a Proxmox host.

`pct exec` checks the container and becomes lxc-attach: no shell, no terminal, binary-safe pipes. It takes
ASCII arguments only, its default leaks the host's environment (`--keep-env 0`, which versions before
5.0.9 do not know), and its own failures have the exit statuses of commands, so they are told by their text.
"""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Final

from controller.errors import ContainerError, DflashctlError, PctError, UnreachableError
from controller.place import (
    BEGIN_GRACE_S,
    BegunProcess,
    NotBegunError,
    Place,
    Process,
    new_nonce,
    script,
)
from controller.ssh import SshConnection

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controller.inventory import Host

_LOCALE: Final = ("LC_ALL=C.UTF-8", "LANG=C.UTF-8")
_INSIDE: Final = ("HOME=/root", "USER=root", *_LOCALE)
"""`pct exec` enters as root; with a cleared environment it sets neither of the first two."""
_BARE: Final = ("-i", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
"""Without --keep-env, pct lets the host's environment in and leaves a short PATH."""


class Ssh(Place):
    """A machine reached by ssh; commands run as its login user."""

    def __init__(self, description: Host, *, accept_new_host_key: bool = False) -> None:
        super().__init__(description)
        self._connection = SshConnection(
            description.address,
            user=description.user,
            port=description.port,
            timeout=description.connect_timeout,
            accept_new=accept_new_host_key,
        )

    def start(self, argv: Sequence[str]) -> Process:
        """See `Place`."""
        try:
            return self._begin(["sh", "-c"], argv, _LOCALE)
        except NotBegunError as error:
            raise UnreachableError(
                f"{self.host}: the login shell runs no command: {_last_line(error)}",
                f"Try: {self.description.command_line('true')}",
            ) from error

    def close(self) -> None:
        """Close the SSH connection."""
        self._connection.close()

    def _begin(self, shell: Sequence[str], argv: Sequence[str], env: Sequence[str]) -> BegunProcess:
        nonce = new_nonce()
        command = shlex.join([*shell, script(argv, nonce, env)])
        process = self._connection.start(f"exec {command}")
        timeout = self.description.connect_timeout + BEGIN_GRACE_S
        return BegunProcess(process, nonce, timeout, self.host)


class Proxmox(Ssh):
    """An LXC container, entered from its Proxmox host by `pct exec`."""

    def __init__(self, description: Host, *, accept_new_host_key: bool = False) -> None:
        super().__init__(description, accept_new_host_key=accept_new_host_key)
        self._keep_env = True

    def start(self, argv: Sequence[str]) -> Process:
        """See `Place`; an older pct is noticed at the first command and remembered."""
        pct = ["pct", "exec", str(self.description.container)]
        if self._keep_env:
            try:
                return self._begin([*pct, "--keep-env", "0", "--", "sh", "-c"], argv, _INSIDE)
            except NotBegunError as error:
                if not re.search(r"unknown option:? *\"?-*keep-env", error.text, re.IGNORECASE):
                    raise self._explained(error) from error
                self._keep_env = False
        try:
            return self._begin([*pct, "--", "sh", "-c"], argv, [*_BARE, *_INSIDE])
        except NotBegunError as error:
            raise self._explained(error) from error

    def _explained(self, error: NotBegunError) -> DflashctlError:
        """The leaf of our tree for what pct, or the host's shell instead of it, said."""
        number, text, user = self.description.container, error.text, self.description.user
        ssh = self.description.model_copy(update={"kind": "ssh"}).command_line
        which = f"container {number} on {self.host}"
        if re.search(r"pct: (command )?not found|unknown command:? '?pct|pct: No such", text):
            root = user in ("", "root")
            return PctError(
                f"{self.host}: there is no pct, so it is no Proxmox host, or {user or 'the user'}"
                " may not see it",
                "Is that its address? For a machine without containers use kind ssh."
                if root
                else "pct needs root: set user to root.",
            )
        if re.search(rf"'?{number}'? not running", text):
            return ContainerError(f"{which} is stopped", f"Start it: {ssh('pct', 'start', str(number))}")
        if match := re.search(r"nodes/([^/]+)/(?:lxc|qemu-server)/\d+\.conf' does not exist", text):
            return ContainerError(
                f"{which} does not exist (on its node {match[1]})",
                f"It may be on another node of the cluster. Which are on this one says: {ssh('pct', 'list')}",
            )
        if re.search(r"is locked|can't lock file", text):
            return ContainerError(
                f"{which} is locked: {_last_line(error)}",
                "A backup or migration may be at work; try again later.",
            )
        if "lxc-attach" in text and "Failed to exec" in text:
            return ContainerError(
                f"{which} has no sh: {_last_line(error)}", "Is its root file system mounted?"
            )
        return PctError(
            f"pct exec {number} on {self.host} failed with status {error.status}: {_last_line(error)}",
            f"Try: {self.description.command_line('true')}",
        )


def _last_line(error: NotBegunError) -> str:
    lines = [line.strip() for line in error.text.splitlines() if line.strip()]
    return lines[-1] if lines else f"it said nothing and left with status {error.status}"
