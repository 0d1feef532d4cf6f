"""Host keys: verified against OpenSSH's known_hosts files, never accepted in silence.

The files are read here and not by paramiko, which gives up at a damaged line and knows neither wildcards
nor @revoked. An unknown key is refused with the command that accepts it, or appended when `accept-new`
was asked for; a changed or revoked one is refused always, with its line. StrictHostKeyChecking `no`
counts as `accept-new`: a changed key is refused all the same.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from controller.errors import HostKeyError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import paramiko

    from controller.ssh_config import SshSettings


class Entry(NamedTuple):
    """One line of a known_hosts file."""

    path: Path
    line: int
    marker: str
    """``, `@revoked` or `@cert-authority`"""
    hosts: str
    key_type: str
    key: bytes


class KnownHosts:
    """What the files of one host say about its key."""

    def __init__(self, settings: SshSettings, *, accept_new: bool) -> None:
        self._new_keys = settings.new_host_keys
        self._name = settings.host_key_name
        self._accept_new = accept_new or settings.strict_host_keys in ("accept-new", "no")
        self._login = settings.login
        entries = [entry for path in settings.known_hosts for entry in read(path)]
        self._entries = [entry for entry in entries if matches(entry.hosts, self._name)]
        self._portless: list[Entry] = []
        if self._name.startswith("["):  # as ssh does: a key known without the port is good too
            portless = self._name[1:].partition("]")[0]
            self._portless = [entry for entry in entries if matches(entry.hosts, portless)]

    @property
    def key_types(self) -> list[str]:
        """The types of the keys that are known, to be asked for first."""
        known = [entry.key_type for entry in (*self._entries, *self._portless) if not entry.marker]
        return list(dict.fromkeys(known))

    def verify(self, key: paramiko.PKey) -> None:
        """Pass when `key` is the host's. Raises HostKeyError; adds a new key where that was asked for."""
        blob, kind = key.asbytes(), key.get_name()
        for entry in (*self._entries, *self._portless):
            if entry.marker == "@revoked" and entry.key == blob:
                raise HostKeyError(
                    f"{self._name} shows a key that {entry.path}:{entry.line} revokes: {fingerprint(key)}",
                    "Do not go on before whoever runs the host has explained it.",
                )
        plain = [entry for entry in self._entries if not entry.marker]
        if any(entry.key == blob for entry in (*plain, *(e for e in self._portless if not e.marker))):
            return
        for entry in plain:
            if entry.key_type == kind:
                raise self._changed(entry, key)
        if self._accept_new:
            self._append(key)
            return
        authority = [entry for entry in self._entries if entry.marker == "@cert-authority"]
        why = (
            f"{self._name} is known by a certificate authority ({authority[0].path}:{authority[0].line}),"
            f" which dflashctl cannot check; it shows the {kind} key {fingerprint(key)}"
            if authority
            else f"{self._name} is not in known_hosts; it shows the {kind} key {fingerprint(key)}"
        )
        raise HostKeyError(
            why,
            f"If that is its key, accept it once with: ssh {self._login} true"
            " (or give --accept-new-host-key).",
        )

    def _changed(self, entry: Entry, key: paramiko.PKey) -> HostKeyError:
        remove = shlex.join(["ssh-keygen", "-f", str(entry.path), "-R", self._name])
        return HostKeyError(
            f"{self._name} shows another host key than {entry.path}:{entry.line} has:"
            f" {key.get_name()} {fingerprint(key)}",
            f"Was it installed anew? Then remove the old key with: {remove}"
            " . If it was not, somebody may be in between: do not go on.",
        )

    def _append(self, key: paramiko.PKey) -> None:
        path = self._new_keys
        if path is None:
            return
        line = f"{self._name} {key.get_name()} {key.get_base64()}\n"
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            before = path.read_bytes() if path.exists() else b""
            with path.open("ab") as file:
                file.write(b"\n" * (bool(before) and not before.endswith(b"\n")) + line.encode())
        except OSError as error:
            raise HostKeyError(f"{path}: the host key cannot be added ({error.strerror})") from error


def read(path: Path) -> Iterator[Entry]:
    """The lines of a known_hosts file that are keys; other lines are nobody's business, as for ssh."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.split()
        marker = fields.pop(0) if fields and fields[0].startswith("@") else ""
        if len(fields) < 3 or fields[0].startswith("#"):
            continue
        try:
            key = base64.b64decode(fields[2], validate=True)
        except binascii.Error:
            continue
        name = fields[1].encode()
        if key[:4] == len(name).to_bytes(4, "big") and key[4 : 4 + len(name)] == name:
            yield Entry(path, number, marker, fields[0], fields[1], key)


def matches(hosts: str, name: str) -> bool:
    """Whether the first field of a line, hashed or a list of patterns, means the host `name`."""
    name = name.lower()
    if hosts.startswith("|1|"):
        try:
            salt, digest = (base64.b64decode(part) for part in hosts[3:].split("|"))
        except ValueError:
            return False
        return hmac.compare_digest(hmac.new(salt, name.encode(), "sha1").digest(), digest)
    found = False
    for pattern in hosts.lower().split(","):
        negated = pattern.startswith("!")
        expression = re.escape(pattern[negated:]).replace(r"\*", ".*").replace(r"\?", ".")
        if re.fullmatch(expression, name):
            if negated:
                return False
            found = True
    return found


def fingerprint(key: paramiko.PKey) -> str:
    """The key's fingerprint as OpenSSH prints it: `SHA256:` and unpadded base64."""
    digest = base64.b64encode(hashlib.sha256(key.asbytes()).digest()).decode()
    return "SHA256:" + digest.rstrip("=")
