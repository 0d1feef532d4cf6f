"""What ~/.ssh/config says about a host, by the word of OpenSSH's own client: `ssh -G`.

So Include, Match, patterns, tokens and the order of values mean here what they mean for ssh, whatever its
version; paramiko's parser knows no Include and fewer kinds of Match. It is used, with fabric's loader, only
where there is no ssh program, and then a file that it would read differently is refused with a word.

OpenSSH takes the home folder from the password database and not from $HOME; where the two differ, $HOME is
meant: its configuration is given to ssh by name, and paths below the other home are taken to be below $HOME.
`Match exec` commands run, as they do for ssh.
"""

from __future__ import annotations

import dataclasses
import os
import pwd
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Final

from controller.errors import UnreachableError
from controller.paths import expanded, home

_ASK_S: Final = 15.0
_NONE: Final = ("none", "")
_SYSTEM = Path("/etc/ssh/ssh_config")
Values = dict[str, list[str]]
"""The values of each key, lower case, in their order."""


@dataclasses.dataclass(frozen=True, slots=True)
class SshSettings:
    """How to reach and to trust one host. Names are those of ssh_config(5)."""

    alias: str
    """The name that was asked for."""
    hostname: str
    port: int
    user: str
    identity_files: tuple[Path, ...]
    identities_only: bool
    identity_agent: str | None
    """Path of the agent's socket; None: no agent."""
    proxy_jump: str
    """`[user@]host[:port],...`; empty: none."""
    proxy_command: str
    """Tokens expanded; empty: none."""
    known_hosts: tuple[Path, ...]
    """The user's files, and then the machine's."""
    new_host_keys: Path | None
    """The user's first file; None: there is none, and a new key is written nowhere."""
    strict_host_keys: str
    """`yes`, `ask`, `accept-new` or `no`."""
    host_key_name: str
    """What known_hosts calls it: HostKeyAlias, or the host name with a port that is not 22."""
    connect_timeout: float | None
    address_family: socket.AddressFamily
    bind_address: str | None

    @property
    def peer(self) -> str:
        """The host for error texts."""
        return self.hostname if self.port == 22 else f"{self.hostname} port {self.port}"

    @property
    def account(self) -> str:
        """User and host for error texts."""
        return f"{self.user}@{self.peer}"

    @property
    def login(self) -> str:
        """What ssh is given to get there."""
        login = f"{self.user}@{self.alias}"
        return login if self.port == 22 else f"-p {self.port} {login}"


def look_up(alias: str, *, user: str = "", port: int | None = None) -> SshSettings:
    """The settings for `alias`; `user` and `port` outdo the file. Raises UnreachableError."""
    given: Values = {"user": [user] if user else [], "port": [str(port)] if port else []}
    ssh = shutil.which("ssh")
    found = _ask_ssh(ssh, alias, user, port) if ssh else _ask_fabric(alias)
    return _settings(alias, found | {key: values for key, values in given.items() if values})


def _other_home() -> str:
    """The home that ssh would take, when it is not $HOME; empty otherwise."""
    try:
        own = pwd.getpwuid(os.getuid()).pw_dir.rstrip("/")
    except KeyError:
        return ""
    return own if os.environ.get("HOME", own).rstrip("/") != own else ""


def _file_option() -> list[str]:
    if not _other_home():
        return []
    for path in (home() / ".ssh" / "config", _SYSTEM):
        if path.is_file():
            return ["-F", str(path)]
    return ["-F", "none"]


def _ask_ssh(ssh: str, alias: str, user: str, port: int | None) -> Values:
    argv = [ssh, "-G", *_file_option()]
    if user:
        argv += ["-l", user]
    if port:
        argv += ["-p", str(port)]
    try:
        done = subprocess.run(
            [*argv, "--", alias], stdin=subprocess.DEVNULL, capture_output=True, timeout=_ASK_S
        )
    except subprocess.TimeoutExpired as error:
        raise UnreachableError(
            f"{alias}: `ssh -G {alias}` gave no answer within {_ASK_S:g} s",
            "A `Match exec` or CanonicalizeHostname of ~/.ssh/config may hang.",
        ) from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        line = next((text for text in said if " line " in text), said[-1] if said else "it said nothing")
        raise UnreachableError(
            f"{alias}: ~/.ssh/config cannot be used ({line})", f"ssh says the same: ssh -G {alias}"
        )
    values: Values = {}
    for line in done.stdout.decode(errors="replace").splitlines():
        key, _, value = line.partition(" ")
        values.setdefault(key.lower(), []).append(value)
    return values


def _ask_fabric(alias: str) -> Values:
    """The same without an ssh program, as far as fabric and paramiko read it. Raises UnreachableError."""
    if sys.modules.get("invoke", sys) is None:  # place.py spares it; fabric is made of it
        del sys.modules["invoke"]
    import fabric

    user = home() / ".ssh" / "config"
    for path in (user, _SYSTEM):
        if path.is_file():
            _refuse_include(path)
    settings = fabric.Config(lazy=True, user_ssh_path=str(user), system_ssh_path=str(_SYSTEM))
    try:
        settings.load_ssh_config()
        found = settings.base_ssh_config.lookup(alias)
    except Exception as error:  # paramiko has several kinds, one for each sort of Match
        raise UnreachableError(f"{alias}: ~/.ssh/config cannot be used ({error})") from error
    return {key: value if isinstance(value, list) else [value] for key, value in found.items()}


def _refuse_include(path: Path) -> None:
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        if re.match(r"\s*include\b", line, re.IGNORECASE):
            raise UnreachableError(
                f"{path}:{number}: Include cannot be followed without the ssh program",
                "Install OpenSSH's client here, or write what it includes into the file.",
            )


def _settings(alias: str, values: Values) -> SshSettings:
    def one(key: str, default: str = "") -> str:
        return values.get(key, [default])[0]

    hostname, user = one("hostname", alias), one("user") or _own_name()
    text = one("port", "22")
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise UnreachableError(f"{alias}: ~/.ssh/config cannot be used (Port {text} is no port)")
    port = int(text)
    key_alias = one("hostkeyalias")
    tokens = {
        "%": "%", "d": str(home()), "h": hostname, "i": str(os.getuid()), "k": key_alias or alias,
        "L": socket.gethostname().partition(".")[0], "l": socket.gethostname(), "n": alias, "p": text,
        "r": user, "u": _own_name(),
    }  # fmt: skip

    def filled(value: str) -> str:
        return re.sub(r"%(.)", lambda match: tokens.get(match[1], match[0]), value)

    def paths(key: str, default: str) -> list[Path]:
        words = [word.strip('"') for value in values.get(key, [default]) for word in value.split()]
        return [_at_home(filled(word)) for word in words if word not in ("none", "/dev/null")]

    own_hosts = paths("userknownhostsfile", "~/.ssh/known_hosts ~/.ssh/known_hosts2")
    identities = [filled(name.strip('"')) for name in values.get("identityfile", _DEFAULT_KEYS)]
    jump, command = one("proxyjump"), one("proxycommand")
    timeout = one("connecttimeout")
    strict = one("stricthostkeychecking", "ask").lower()
    families = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}
    return SshSettings(
        alias=alias,
        hostname=hostname,
        port=port,
        user=user,
        identity_files=tuple(_at_home(name) for name in identities if name not in _NONE),
        identities_only=one("identitiesonly", "no").lower() in ("yes", "true"),
        identity_agent=_agent(filled(one("identityagent", "SSH_AUTH_SOCK").strip('"'))),
        proxy_jump="" if jump in _NONE else jump,
        proxy_command="" if command in _NONE else filled(command),
        known_hosts=(
            *own_hosts,
            *paths("globalknownhostsfile", "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"),
        ),
        new_host_keys=own_hosts[0] if own_hosts else None,
        strict_host_keys={"true": "yes", "false": "no", "off": "no"}.get(strict, strict),
        host_key_name=key_alias or (hostname if port == 22 else f"[{hostname}]:{port}"),
        connect_timeout=float(timeout) if timeout.isdecimal() and timeout != "0" else None,
        address_family=families.get(one("addressfamily"), socket.AF_UNSPEC),
        bind_address=None if one("bindaddress") in _NONE else one("bindaddress"),
    )


def _at_home(path: str) -> Path:
    """A path of the configuration, below $HOME where ssh expanded `~` to another home."""
    other = _other_home()
    if other and path.startswith(f"{other}/"):
        return home() / path.removeprefix(f"{other}/")
    return expanded(path)


_DEFAULT_KEYS: Final = [f"~/.ssh/id_{kind}" for kind in ("rsa", "ecdsa", "ed25519")]


def _agent(value: str) -> str | None:
    if value.startswith("$"):
        value = os.environ.get(value[1:].strip("{}"), "")
    elif value == "SSH_AUTH_SOCK":
        value = os.environ.get("SSH_AUTH_SOCK", "")
    return None if value in _NONE else str(expanded(value))


def _own_name() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return os.environ.get("USER", "root")
