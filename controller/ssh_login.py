"""Logging in by public key, in OpenSSH's order: the agent's copies of the configured keys, the agent's other
keys (not with IdentitiesOnly), the configured files, and last those of them that a passphrase locks.

A passphrase is asked for on a terminal alone, in the main thread alone (a view whose mirror connects in the
background must never find its terminal taken), at most three times a key; the unlocked key stays in this
process's memory and the passphrase nowhere. Without a terminal the error names the key and ssh-add.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import paramiko
from paramiko.agent import AgentSSH

from controller.errors import AuthenticationError

if TYPE_CHECKING:
    from controller.ssh_config import SshSettings

_AGENT_S: Final = 60.0
"""An agent may ask its user before it signs."""
_TRIES: Final = 3
_MAGIC: Final = b"openssh-key-v1\0"

_unlocked: dict[Path, paramiko.PKey] = {}
"""Keys whose passphrase was given to this process."""

Ask = Callable[[Path], str | None]
"""Asks for the passphrase of a key; None: nobody can be asked, or nobody wants to answer."""


def ask_on_terminal(path: Path) -> str | None:
    """The passphrase of the key at `path`, asked for where there is a terminal and nothing is shown on it."""
    main = threading.current_thread() is threading.main_thread()
    if not (main and sys.stdin.isatty() and sys.stderr.isatty()):
        return None
    try:
        return getpass.getpass(f"Passphrase of the key {path}: ", stream=sys.stderr) or None
    except EOFError:
        return None


def log_in(transport: paramiko.Transport, settings: SshSettings, ask: Ask = ask_on_terminal) -> None:
    """Authenticate `transport`, whose host key is verified. Raises AuthenticationError."""
    agent = _Agent(settings.identity_agent)
    tried: list[str] = []
    locked: list[Path] = []
    try:
        for name, key in _keys(settings, agent, locked):
            if _accepted(transport, settings, key, name, tried):
                return
        for path in locked:
            unlocked = _unlock(path, ask)
            if unlocked is not None and _accepted(transport, settings, unlocked, str(path), tried):
                return
    finally:
        agent.close()
    still = [path for path in locked if path not in _unlocked]
    if still:
        raise AuthenticationError(
            f"{settings.account}: the key {still[0]} is locked by a passphrase",
            f"Unlock it first: ssh-add {still[0]}",
        )
    offered = ", ".join(tried) if tried else "there is none: no agent, and no key file that can be read"
    raise AuthenticationError(
        f"{settings.account}: the server accepts none of our keys ({offered})",
        f"Try: ssh {settings.login} true . If it asks for a password, install a key: ssh-copy-id"
        f" {settings.login}",
    )


def _keys(settings: SshSettings, agent: _Agent, locked: list[Path]) -> Iterator[tuple[str, paramiko.PKey]]:
    """The keys to try, with their names; `locked` is told of the files that need a passphrase."""
    files = [path for path in settings.identity_files if path.is_file()]
    public = {path: public_part(path) for path in files}
    held = {key.asbytes(): key for key in agent.get_keys()}
    for path in settings.identity_files:  # with only its .pub file here, the agent has the key
        blob = public.get(path) or public_part(path)
        if blob in held:
            yield f"{path} in the agent", held.pop(blob)
            files = [other for other in files if other != path]
    if not settings.identities_only:
        for key in held.values():
            yield f"{getattr(key, 'comment', '') or key.get_name()} in the agent", key
    for path in files:
        if path in _unlocked:
            yield str(path), _unlocked[path]
            continue
        info = path.stat()
        if info.st_uid == os.getuid() and stat.S_IMODE(info.st_mode) & 0o077:
            continue  # ssh ignores a key that others may read
        key = _load(path, None)
        if isinstance(key, paramiko.PKey):
            yield str(path), key
        elif key == "locked":
            locked.append(path)


def _accepted(
    transport: paramiko.Transport, settings: SshSettings, key: paramiko.PKey, name: str, tried: list[str]
) -> bool:
    """Whether the server lets us in with `key`. Raises AuthenticationError when more tries are useless."""
    tried.append(name)
    try:
        left = transport.auth_publickey(settings.user, key)
    except paramiko.BadAuthenticationType as error:
        raise AuthenticationError(
            f"{settings.account}: the server takes no keys, only {', '.join(error.allowed_types)}",
            "dflashctl logs in by key: allow PubkeyAuthentication there.",
        ) from error
    except paramiko.AuthenticationException as error:
        if not transport.is_active():
            raise _too_many(settings, tried) from error
        return False
    except (paramiko.SSHException, EOFError, OSError) as error:
        if not transport.is_active():
            raise _too_many(settings, tried) from error
        return False  # the agent would not sign: ssh goes on to the next key too
    if left:
        raise AuthenticationError(
            f"{settings.account}: beside the key the server wants {', '.join(left)}",
            "Steps that a person takes are ssh's: dflashctl has the key alone.",
        )
    return bool(transport.is_authenticated())


def _too_many(settings: SshSettings, tried: list[str]) -> AuthenticationError:
    return AuthenticationError(
        f"{settings.account}: the server hung up after {len(tried)} keys ({', '.join(tried)})",
        "Name the right one in ~/.ssh/config: IdentityFile and IdentitiesOnly yes.",
    )


def _unlock(path: Path, ask: Ask) -> paramiko.PKey | None:
    for _ in range(_TRIES):
        passphrase = ask(path)
        if passphrase is None:
            return None
        key = _load(path, passphrase)
        if isinstance(key, paramiko.PKey):
            _unlocked[path] = key
            return key
    return None


def _load(path: Path, passphrase: str | None) -> paramiko.PKey | str:
    """The key in a file, with its certificate if there is one; `locked`, or `bad` for what is no key."""
    key: Any = None
    for kind in (paramiko.Ed25519Key, paramiko.ECDSAKey, paramiko.RSAKey):
        try:
            key = kind.from_private_key_file(str(path), passphrase)
            break
        except paramiko.PasswordRequiredException:
            return "locked"
        except Exception:  # paramiko and cryptography have many for a key of another kind, or none
            continue
    if key is None:
        return "bad" if passphrase is None else "locked"
    certificate = path.with_name(f"{path.name}-cert.pub")
    if certificate.is_file():
        with contextlib.suppress(Exception):  # one of another key, or none: the key itself may do
            key.load_certificate(str(certificate))
    assert isinstance(key, paramiko.PKey)
    return key


def public_part(path: Path) -> bytes:
    """The public key of the file at `path`, from it or from the .pub beside it; b"" where there is none.

    An OpenSSH key shows it without its passphrase, so a locked one can be found in the agent.
    """
    import base64

    try:
        fields = path.with_name(f"{path.name}.pub").read_text(encoding="ascii", errors="replace").split()
        return base64.b64decode(fields[1])
    except (OSError, ValueError, IndexError):
        pass
    try:
        lines = path.read_text(encoding="ascii", errors="replace").split("\n")
        data = base64.b64decode("".join(line for line in lines if line and not line.startswith("-")))
        if not data.startswith(_MAGIC):
            return b""
        data = data[len(_MAGIC) :]
        for _ in range(3):  # cipher, key derivation and its options
            data = data[4 + int.from_bytes(data[:4], "big") :]
        return data[8 : 8 + int.from_bytes(data[4:8], "big")]  # after the number of keys
    except (OSError, ValueError):
        return b""


class _Agent(AgentSSH):  # type: ignore[misc]
    """The agent at a socket; without one, or with one that does not answer, it holds no keys."""

    def __init__(self, path: str | None) -> None:
        super().__init__()
        if path is None:
            return
        peer = socket.socket(socket.AF_UNIX)
        peer.settimeout(_AGENT_S)
        try:
            peer.connect(path)
            self._connect(peer)
        except (OSError, paramiko.SSHException, EOFError):
            peer.close()

    def close(self) -> None:
        """Let go of it."""
        self._close()
