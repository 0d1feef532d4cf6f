"""Places behind ssh: a machine itself, and an LXC container of a Proxmox host.

`pct exec` checks the container and becomes lxc-attach: no shell, no terminal, binary-safe pipes. It takes
ASCII arguments only, its default leaks the host's environment (`--keep-env 0`, which versions before
5.0.9 do not know), and its own failures have the exit statuses of commands, so they are told by their text.
A user who is not root goes through `sudo -n`, which never asks.
"""

from __future__ import annotations

import json
import re
import shlex
from typing import TYPE_CHECKING, Any, Final

from controller.errors import (
    AuthenticationError,
    ContainerError,
    DflashctlError,
    PctError,
    UnreachableError,
)
from controller.place import (
    BEGIN_GRACE_S,
    BegunProcess,
    Command,
    Completed,
    NotBegunError,
    Place,
    new_nonce,
    script,
)
from controller.ssh import DEFAULT_TIMEOUT_S, SshConnection, release, shared
from controller.text import last_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controller.inventory import Host

_SUDO: Final = ("sudo", "-n", "-H", "--")
_LOCALE: Final = ("LC_ALL=C.UTF-8", "LANG=C.UTF-8")
_INSIDE: Final = ("HOME=/root", "USER=root", *_LOCALE)
"""`pct exec` enters as root; with a cleared environment it sets neither of the first two."""
_BARE: Final = ("-i", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
"""Without --keep-env, pct lets the host's environment in and leaves a short PATH."""


class Ssh(Place):
    """A machine reached by ssh; commands run as its login user, or as root by sudo."""

    def __init__(self, description: Host, *, accept_new_host_key: bool = False) -> None:
        super().__init__(description)
        self._accept_new = accept_new_host_key
        self._held: SshConnection | None = None

    def start(self, argv: Sequence[str]) -> Command:
        """See `Place`."""
        try:
            return self._begin(["sh", "-c"], argv, _LOCALE)
        except NotBegunError as error:
            raise self._refused(error) or UnreachableError(
                f"{self.host}: the login shell runs no command: {_last_line(error)}",
                f"Try: {self.description.command_line('true')}",
            ) from error

    def connect_soon(self) -> None:
        """See `Place`."""
        self._connection.connect_soon()

    def close(self) -> None:
        """Let go of the SSH connection, which ends unless another place of this process has it too."""
        connection, self._held = self._held, None
        if connection is not None:
            release(connection)

    @property
    def _connection(self) -> SshConnection:
        if self._held is None:
            host = self.description
            self._held = shared(
                host.address,
                user=host.user,
                port=host.port,
                timeout=host.connect_timeout,
                accept_new=self._accept_new,
            )
        return self._held

    def _begin(self, shell: Sequence[str], argv: Sequence[str], env: Sequence[str]) -> Command:
        nonce = new_nonce()
        sudo = _SUDO if self.description.sudo else ()
        command = shlex.join([*sudo, *shell, script(argv, nonce, env)])
        process = self._connection.start(f"exec {command}")
        timeout = (self.description.connect_timeout or DEFAULT_TIMEOUT_S) + BEGIN_GRACE_S
        return BegunProcess(process, nonce, timeout, self.host)

    def _refused(self, error: NotBegunError) -> DflashctlError | None:
        """What sudo said instead of running the command, or None when it was not sudo."""
        if not self.description.sudo:
            return None
        said = re.search(
            r"^sudo: .*|^.*(?:is not in the sudoers|is not allowed to execute).*", error.text, re.M
        )
        if said is None and "sudo: not found" not in error.text:
            return None
        user, what = self.description.user or "the user", said[0].strip() if said else "there is no sudo"
        allowed = "/usr/sbin/pct, /usr/bin/pvesh" if self.description.kind == "proxmox" else "ALL"
        return AuthenticationError(
            f"{self.host}: {user} cannot become root without a password: {what}",
            f"Allow it there, as root, by visudo: {user} ALL=(root) NOPASSWD: {allowed}",
        )


class Proxmox(Ssh):
    """An LXC container, entered from its Proxmox host by `pct exec`."""

    def __init__(self, description: Host, *, accept_new_host_key: bool = False) -> None:
        super().__init__(description, accept_new_host_key=accept_new_host_key)
        self._keep_env = True

    def start(self, argv: Sequence[str]) -> Command:
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
        if (refused := self._refused(error)) is not None:
            return refused
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
                else "pct needs root: set `user` to root, or `sudo = true`.",
            )
        if re.search(rf"'?{number}'? not running", text):
            return ContainerError(f"{which} is stopped", f"Start it: {ssh('pct', 'start', str(number))}")
        if match := re.search(r"nodes/([^/]+)/(?:lxc|qemu-server)/\d+\.conf' does not exist", text):
            return self._elsewhere(which, match[1])
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

    def _elsewhere(self, which: str, node: str) -> ContainerError:
        """The error for a container that this node has not: pct says no more, the cluster may."""
        ssh = self.description.model_copy(update={"kind": "ssh"}).command_line
        there = self._in_cluster()
        other = there.get("node")
        if there.get("type") == "qemu":
            return ContainerError(
                f"{which} is no container but a virtual machine (on node {other})",
                "Reach it as a place of kind ssh, by its own address.",
            )
        if other and other != node:
            return ContainerError(
                f"{which} is on another node of the cluster: {other}, and not {node}",
                f"Set the place's `address` to that of {other}.",
            )
        return ContainerError(
            f"{which} does not exist (on its node {node})",
            f"Which ones there are on this node says: {ssh('pct', 'list')}",
        )

    def _in_cluster(self) -> dict[str, Any]:
        """What the cluster says of the container; empty when it does not know, or cannot be asked."""
        argv = ["pvesh", "get", "/cluster/resources", "--type", "vm", "--output-format", "json"]
        try:
            rows = json.loads(self.on_host(argv).stdout)
            return next(row for row in rows if row.get("vmid") == self.description.container)
        except (DflashctlError, ValueError, StopIteration, AttributeError, TypeError):
            return {}

    def on_host(self, argv: Sequence[str], timeout: float = 20.0) -> Completed:
        """Run a command of the Proxmox host itself, on the same connection. Raises what `run` raises."""
        # sudo stands in front of the command and not of a shell: rules allow pct and pvesh alone.
        host = self.description.model_copy(update={"kind": "ssh", "container": None, "sudo": False})
        sudo = _SUDO if self.description.sudo else ()
        with Ssh(host, accept_new_host_key=self._accept_new) as place:
            return place.run([*sudo, *argv], timeout=timeout)


def _last_line(error: NotBegunError) -> str:
    return last_line(error.text.encode(), f"it said nothing and left with status {error.status}")
