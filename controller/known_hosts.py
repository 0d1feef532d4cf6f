"""Host keys: verified against OpenSSH's known_hosts files, never accepted in silence.

fabric accepts any key and never reads known_hosts, so both are done here: the files that ssh_config
names are loaded into paramiko's client, an unknown key is refused with the command that accepts it (or
appended when the user asked for `accept-new`), and a changed one is refused with its line.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import paramiko
from paramiko.hostkeys import HostKeyEntry, HostKeys

from controller.errors import HostKeyError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_DEFAULT = "~/.ssh/known_hosts ~/.ssh/known_hosts2"
_GLOBAL = "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"


class KnownHosts(paramiko.MissingHostKeyPolicy):  # type: ignore[misc]
    """The known_hosts files of one connection, and what to do about a key that is not in them."""

    def __init__(self, ssh_config: Mapping[str, Any], *, accept_new: bool, login: str) -> None:
        user_files = str(ssh_config.get("userknownhostsfile", _DEFAULT))
        global_files = str(ssh_config.get("globalknownhostsfile", _GLOBAL))
        names = [*user_files.split(), *global_files.split()]
        self._files = [Path(name.strip('"')).expanduser() for name in names if name != "none"]
        strict = str(ssh_config.get("stricthostkeychecking", "ask")).lower()
        self._accept_new = accept_new or strict in ("accept-new", "no", "off")
        self._login = login

    def install(self, client: paramiko.SSHClient) -> None:
        """Make `client` verify host keys by these files."""
        keys = client.get_host_keys()
        for path in self._files:
            for _, entry in _entries(path):
                for name in entry.hostnames:
                    keys.add(name, entry.key.get_name(), entry.key)
        client.set_missing_host_key_policy(self)

    def missing_host_key(self, client: object, hostname: str, key: paramiko.PKey) -> None:
        """Paramiko's call for a key of a host that no file has. Raises HostKeyError."""
        if self._accept_new:
            self._append(hostname, key)
            return
        raise HostKeyError(
            f"{hostname} is not in known_hosts; it shows the {key.get_name()} key {fingerprint(key)}",
            f"If that is its key, accept it once with: ssh {self._login} true"
            " (or give --accept-new-host-key).",
        )

    def changed(self, hostname: str, key: paramiko.PKey) -> HostKeyError:
        """The error for a host that shows another key than the one that is known."""
        line = self._line(hostname)
        known = f"line {line[1]} of {line[0]}" if line else "known_hosts"
        remove = f"ssh-keygen -f {line[0]} -R '{hostname}'" if line else "ssh-keygen -R"
        return HostKeyError(
            f"{hostname} shows another host key than {known} has: {key.get_name()} {fingerprint(key)}",
            f"Was it installed anew? Then remove the old key with: {remove}"
            " . If it was not, somebody may be in between: do not go on.",
        )

    def _line(self, hostname: str) -> tuple[Path, int] | None:
        for path in self._files:
            for number, entry in _entries(path):
                if HostKeys()._hostname_matches(hostname, entry):
                    return path, number
        return None

    def _append(self, hostname: str, key: paramiko.PKey) -> None:
        if not self._files:
            return
        path = self._files[0]
        line = f"{hostname} {key.get_name()} {key.get_base64()}\n"
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            before = path.read_bytes() if path.exists() else b""
            with path.open("ab") as file:
                file.write(b"\n" * (bool(before) and not before.endswith(b"\n")) + line.encode())
        except OSError as error:
            raise HostKeyError(f"{path}: the host key cannot be added ({error.strerror})") from error


def _entries(path: Path) -> Iterator[tuple[int, HostKeyEntry]]:
    """The lines of a known_hosts file that are keys; other lines are nobody's business, as for ssh.

    paramiko's own loader gives up at a line with bad base64.
    """
    if not path.is_file():
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    for number, line in enumerate(text.splitlines(), 1):
        try:
            entry = HostKeyEntry.from_line(line, number)
        except Exception:  # it has several kinds for lines that are no keys
            continue
        if entry is not None:
            yield number, entry


def fingerprint(key: paramiko.PKey) -> str:
    """The key's fingerprint as OpenSSH prints it: `SHA256:` and unpadded base64."""
    digest = base64.b64encode(hashlib.sha256(key.asbytes()).digest()).decode()
    return "SHA256:" + digest.rstrip("=")
