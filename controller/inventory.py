"""hosts.toml: where a payload can run, read into checked `Host`s.

The file is looked for in $DFLASHCTL_HOSTS, ./hosts.toml, then the user's configuration folder; without
any, one place is built in: `local`, this machine. A place is asked for by its name or its address, and
one that the file lacks can be described on the command line. Every error names file, key and line (as
far as it can be found), and the nearest valid name.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from controller.errors import InventoryError, UsageError
from controller.hosts_file import find_file
from controller.paths import expanded, home

Kind = Literal["local", "ssh", "proxmox"]
BUILT_IN = "the built-in places"

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_KINDS = ("local", "ssh", "proxmox")
_EXPECTED = {
    "missing": f"is missing; expected one of {', '.join(_KINDS)}",  # `kind`, the only key without a default
    "int_type": "expected a whole number",
    "float_type": "expected a number of seconds",
    "string_type": "expected a string in quotes",
    "bool_type": "expected true or false",
    "string_pattern_mismatch": "expected letters, digits and ._-, the first a letter or digit",
    "literal_error": f"expected one of {', '.join(_KINDS)}",
    "greater_than": "expected more than {gt}",
    "less_than": "expected less than {lt}",
    "less_than_equal": "expected at most {le:g}",
}


class Host(BaseModel):
    """One place: how to reach it, and where things lie in it. Serialised whole into place.json."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str = Field(pattern=f"^{_NAME}$")
    kind: Kind
    address: str = "local"
    """Name or IP address for ssh (an alias of ~/.ssh/config too); `local` for this machine."""
    user: str = ""
    """Login name; empty: what ~/.ssh/config says, or one's own."""
    port: int | None = Field(None, gt=0, lt=65536)
    """TCP port; None: what ~/.ssh/config says, or 22."""
    container: int | None = Field(None, gt=0)
    """VMID of the LXC container; kind proxmox only."""
    venv: str = ""
    """Absolute folder of the virtual environment with the payload's packages."""
    workspace: str = ""
    """Absolute folder for payloads and runs."""
    connect_timeout: float | None = Field(None, gt=0, le=3600)
    """Seconds until a connection attempt is given up; None: what ~/.ssh/config says, or 10."""
    sudo: bool = False
    """Whether commands of the machine behind ssh need `sudo -n`, because `user` is not root."""
    base_python: str = "python3"
    """Interpreter from which `setup` makes the venv."""
    index: str = ""
    """Address of the package index that `setup` uses; empty: the installer's own."""
    wheels: str = ""
    """Absolute folder of wheels in the place, for one without internet: used alone without `index`."""
    env: dict[str, str] = {}
    """Variables of the trainer."""

    @property
    def python(self) -> str:
        """Absolute path of the interpreter in the place."""
        return f"{self.venv.rstrip('/')}/bin/python" if self.venv else sys.executable

    def command_line(self, *argv: str) -> str:
        """What a person would type on the laptop to run `argv` in the place."""
        if self.kind == "local":
            return shlex.join(argv)
        inner = list(argv)
        if self.kind == "proxmox":
            inner = ["pct", "exec", str(self.container), "--", *argv]
        if self.sudo:
            inner = ["sudo", *inner]
        text = shlex.join(inner)
        plain = shlex.split(text) == text.split(" ")
        port = f"-p {self.port} " if self.port else ""
        login = f"{self.user}@{self.address}" if self.user else self.address
        return f"ssh {port}{login} {text if plain else shlex.quote(text)}"

    @model_validator(mode="after")
    def _check_together(self) -> Host:
        if self.kind == "proxmox" and self.container is None:
            raise ValueError("container: is missing; kind proxmox needs the container's number")
        if self.kind != "proxmox" and self.container is not None:
            raise ValueError(f"container: kind {self.kind} has none; did you mean kind proxmox?")
        if self.kind != "local" and self.address == "local":
            raise ValueError(f"address: is missing; kind {self.kind} needs one")
        user, at, rest = self.address.rpartition("@")
        if at:
            apart = f'`address = "{rest}"` and `user = "{user}"`'
            raise ValueError(f"address: {self.address!r}: write {apart}")
        _, colon, port = self.address.partition(":")
        if colon and port.isdecimal():
            raise ValueError(f"address: {self.address!r}: write the port as `port = {port}`")
        if self.address.startswith("-") or not re.fullmatch(r"[\w.:%-]+", self.address):
            raise ValueError(f"address: {self.address!r} is no host name or IP address")
        if self.kind == "local" and self.sudo:
            raise ValueError("sudo: kind local has none; run dflashctl as the user who may")
        for key, value in self:
            if isinstance(value, str) and "\0" in value:
                raise ValueError(f"{key}: holds a NUL byte, which no command can be given")
        for key in ("venv", "workspace", "wheels"):
            path = getattr(self, key)
            if path and not path.startswith("/"):
                raise ValueError(f"{key}: {path!r} is relative; expected an absolute path")
        return self


class Inventory(NamedTuple):
    """The places of one hosts.toml."""

    source: str
    default: str
    hosts: dict[str, Host]
    env: dict[str, str]


def load() -> Inventory:
    """The inventory that counts here. Raises InventoryError."""
    path = find_file()
    if path is None:
        return parse('default = "local"\n[places.local]\nkind = "local"\n', BUILT_IN)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise InventoryError(f"{path}: cannot be read ({why})") from error
    return parse(text, str(path))


def parse(text: str, source: str) -> Inventory:
    """Read the text of a hosts.toml; `source` names it in errors. Raises InventoryError."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InventoryError(f"{source}: is not TOML: {error}") from error
    for key, value in table.items():
        hint = f"A place is a table [places.{key}]." if isinstance(value, dict) and "kind" in value else ""
        _known(key, ("default", "places", "env"), _Spot(source, text, (key,)), hint)
    places = table.get("places", {})
    spot = _Spot(source, text, ("places",))
    if not isinstance(places, dict) or not all(isinstance(v, dict) for v in places.values()):
        raise InventoryError(f"{spot}: expected tables such as [places.gpubox]")
    env = _env(table.get("env", {}), _Spot(source, text, ("env",)))
    hosts = {}
    for name, values in places.items():
        at = _Spot(source, text, ("places", name))
        own = _env(values.get("env", {}), at.inside("env"))
        hosts[name] = _host({**values, "name": name, "env": env | own}, at)
    if not hosts:
        raise InventoryError(f"{source}: has no place", "Add a table such as [places.gpubox].")
    default = table.get("default", next(iter(hosts)))
    if not isinstance(default, str) or default not in hosts:
        raise InventoryError(
            f"{_Spot(source, text, ('default',))} = {default!r}: is no place of this file;"
            f" {_nearest(str(default), hosts)}"
        )
    return Inventory(source, default, hosts, env)


def choose(
    wanted: str | None,
    *,
    kind: str | None = None,
    container: int | None = None,
    user: str | None = None,
    port: int | None = None,
) -> Host:
    """The place called or addressed `wanted` (None: the default), with what the options change.

    A place that the file lacks is made from the options when they say its kind. Raises
    InventoryError, and UsageError for options that cannot be.
    """
    if wanted == "":  # as of a variable that is not set: the default would be another machine
        raise UsageError("--host is empty", "Name a place, or leave --host out for the default.")
    inventory = load()
    if kind is not None and kind not in _KINDS:
        raise UsageError(f"--kind {kind}: expected one of {', '.join(_KINDS)}")
    given = {"kind": kind, "container": container, "user": user, "port": port}
    changes = {key: value for key, value in given.items() if value is not None}
    name = wanted or inventory.default
    found = inventory.hosts.get(name)
    if found is None:
        addressed = [host for host in inventory.hosts.values() if host.address == name]
        if len(addressed) > 1:
            names = ", ".join(host.name for host in addressed)
            raise InventoryError(
                f"{inventory.source}: several places have the address {name}: {names}",
                "Ask for one by its name.",
            )
        found = addressed[0] if addressed else None
    if found is not None:
        if not changes:
            return found
        return _described({**found.model_dump(), **changes})
    login, at, address = name.rpartition("@")
    if kind is None and container is None:
        hint = "Add it there, or describe it: --kind ssh, or --kind proxmox --container 200."
        if inventory.source == BUILT_IN:
            hint = hint.replace("there", "to a hosts.toml, here or in ~/.config/dflashctl")
        raise InventoryError(
            f"{inventory.source}: has no place called or addressed {name!r};"
            f" {_nearest(address, inventory.hosts)}",
            f"Name the user apart: --host {address} --user {login}" if at else hint,
        )
    changes.setdefault("kind", "proxmox")
    label = re.sub(r"[^A-Za-z0-9._-]", "-", name).lstrip("-._") or "host"
    return _described({"name": label, "address": name, "env": inventory.env, **changes})


def _described(values: dict[str, Any]) -> Host:
    """The place that the command line describes. Raises UsageError."""
    try:
        return _host(values, _Spot("the command line", "", ()))
    except InventoryError as error:
        raise UsageError(error.message, error.hint) from error


class _Spot(NamedTuple):
    """A table or key of the file, for error texts: `hosts.toml:12: places.gpubox.port`."""

    source: str
    text: str
    keys: tuple[str, ...]

    def inside(self, key: str) -> _Spot:
        return self._replace(keys=(*self.keys, key))

    def __str__(self) -> str:
        line = self._line()
        where = f"{self.source}:{line}" if line else self.source
        return f"{where}: {'.'.join(self.keys)}" if self.keys else where

    def _line(self) -> int | None:
        """The line of the key, or else of its table; None when the file writes it in another way."""
        header, best = "", None
        for number, line in enumerate(self.text.splitlines(), 1):
            if match := re.match(r"\s*\[\s*([^\]]+?)\s*\]", line):
                header = match[1].replace('"', "").replace(" ", "")
                if header == ".".join(self.keys):
                    return number
                if header == ".".join(self.keys[:-1]):
                    best = number
            elif header == ".".join(self.keys[:-1]):
                match = re.match(r"\s*\"?([A-Za-z0-9_-]+)\"?\s*=", line)
                if match and match[1] == self.keys[-1]:
                    return number
        return best


def _nearest(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"


def _known(key: str, known: Any, spot: _Spot, hint: str = "") -> None:
    if key not in known:
        raise InventoryError(f"{spot}: unknown key; {_nearest(key, known)}", hint)


def _env(table: Any, spot: _Spot) -> dict[str, str]:
    if not isinstance(table, dict):
        raise InventoryError(f"{spot}: expected a table of variables")
    env = {}
    for name, value in table.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise InventoryError(f"{spot.inside(name)}: is no name of a variable")
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise InventoryError(
                f"{spot.inside(name)}: expected a string in quotes"
            )  # not its value: a secret
        if "\0" in str(value):
            raise InventoryError(f"{spot.inside(name)}: a variable cannot hold a NUL byte")
        env[name] = str(value)
    return env


def _host(values: dict[str, Any], spot: _Spot) -> Host:
    for key in values:
        _known(key, Host.model_fields, spot.inside(key))
    filled = dict(values)
    if filled.get("kind") == "local":
        named = os.environ.get("XDG_DATA_HOME", "")
        base = named if named.startswith("/") else home() / ".local" / "share"
        filled.setdefault("workspace", "")
        filled["workspace"] = filled["workspace"] or str(Path(base) / "dflashctl")
        for key in ("workspace", "venv", "wheels"):
            if isinstance(filled.get(key), str) and filled[key].startswith("~"):
                filled[key] = str(expanded(filled[key]))
    else:
        filled.setdefault("workspace", "/workspace")
        filled.setdefault("venv", "/root/venv")
        if filled.get("kind") == "proxmox":
            filled.setdefault("user", "root")
    try:
        return Host.model_validate(filled)
    except ValidationError as error:
        first = error.errors()[0]
        if first["loc"]:
            key = str(first["loc"][0])
            expected = _EXPECTED.get(first["type"], first["msg"]).format(**first.get("ctx", {}))
            hidden = first["type"] == "missing" or key in ("env", "index")  # they may hold secrets
            shown = "" if hidden else f" = {first['input']!r}"
            raise InventoryError(f"{spot.inside(key)}{shown}: {expected}") from error
        key, _, expected = str(first["ctx"]["error"]).partition(": ")
        raise InventoryError(f"{spot.inside(key)}: {expected}") from error
