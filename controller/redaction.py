"""Takes secrets, user names and hosts out of text that a user is about to publish. Pure.

Two nets: what is named like a secret (`HF_TOKEN=...`, `"password": "..."`, `--api-key ...`, a bearer header,
a login in a URL) loses its value whatever that looks like, and what looks like a well-known kind of token
goes wherever it stands. A home directory becomes `~`, the user names that are known become `<user>`, the
hosts `<host>`. What it cannot know, a secret with no name and no form, stays: read before you publish.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

REMOVED: Final = "<removed>"

_NAME = (  # of bounded length: a line is 4,096 characters, and may be one word of digits
    r"[\w.-]{0,80}(?:token|secret|passw(?:or)?d|passwd|passphrase|api[_-]?key|access[_-]?key|private[_-]?key|credential"
    r"|auth(?:orization)?|cookie|session[_-]?id|signature|(?<![a-z])(?:key|pwd|pass|sig))s?(?![a-z])[\w-]{0,80}"
)
_HARMLESS = re.compile(
    r"(?:mask|pad|eos|bos|special|per|num|max|min|new|total|drop|keep|tokens?_per|context|prompt)[\w.-]*token"
    r"|token[\w-]*(?:budget|id|ids|count|s_per|izer|type|s|/s|s/s|_embd|_embedding)$"
    r"|tokens?$(?<!token)|key_?(?:value|states?|padding|error|board|proj|cache)|author(?:s|ed)?$|keyerror|\w*kv\w*",
    re.IGNORECASE,
)
_QUOTED_OR_WORD = r"(?:\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'|[^\s,;&'\"}\])]+)"
_NAMED = re.compile(
    rf"(?P<name>{_NAME})(?P<between>[\"']?\s{{0,3}}(?:=|:(?!//))\s{{0,3}})(?P<value>{_QUOTED_OR_WORD})",
    re.IGNORECASE,
)
_FLAG = re.compile(rf"(?P<name>--{_NAME})(?P<between>[ ]+)(?P<value>(?!-){_QUOTED_OR_WORD})", re.IGNORECASE)
_HEADER = re.compile(r"\b(Bearer|Basic|Token)[ ]+[A-Za-z0-9+/._~=-]{6,}", re.IGNORECASE)
_AUTHORIZATION = re.compile(r"(authorization[\"']?\s*[:=]\s*)[^\n]+", re.IGNORECASE)
_LOGIN = re.compile(r"(\b[a-z][a-z0-9+.-]*://)(?:[^\s/@:\"']+:[^\s@\"']+|[^\s/@\"']+)@", re.IGNORECASE)
_FORMS = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|\b(?:hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|sk-[\w-]{16,}|xox[abprs]-[\w-]{10,}|(?:AKIA|ASIA)[0-9A-Z]{16}|AIza[\w-]{30,}|npm_[A-Za-z0-9]{30,}"
    r"|pypi-[\w-]{30,}|ya29\.[\w-]{20,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)",
    re.DOTALL,
)
_HOME = re.compile(r"(?:/(?:home|Users)/(?!\.)[^/\s\"':,;)\]]+|(?<![\w./-])/root)(?![\w.-])")
_WINDOWS_HOME = re.compile(r"\b[A-Za-z]:(?:\\\\?|/)Users(?:\\\\?|/)[^\\/\s\"':,;)\]]+")
_AT = re.compile(r"\b(?P<user>[a-z_][a-z0-9_.-]*)@(?P<host>[A-Za-z0-9][A-Za-z0-9.-]*)", re.IGNORECASE)
_ADDRESS = re.compile(
    r"(?<![\d.])(?!127\.|0\.0\.0\.0)(?:\d{1,3}\.){3}\d{1,3}(?![\d.]*\d)"
    r"|(?<![\w:])(?:[0-9a-f]{1,4}:){3,7}(?::?[0-9a-f]{1,4}){1,4}(?![\w:])",
    re.IGNORECASE,
)


def redacted(text: str, *, users: Iterable[str] = (), hosts: Iterable[str] | None = ()) -> str:
    """`text` without secrets, home directories, the names in `users`, and hosts.

    `hosts`: names to remove besides addresses; None keeps hosts and addresses as they are.
    """
    text = _FORMS.sub(REMOVED, text)
    text = _LOGIN.sub(rf"\1{REMOVED}@", text)
    text = _AUTHORIZATION.sub(rf"\1{REMOVED}", text)
    text = _HEADER.sub(rf"\1 {REMOVED}", text)
    for pattern in (_FLAG, _NAMED):
        text = pattern.sub(_without_value, text)
    text = _WINDOWS_HOME.sub("~", _HOME.sub("~", text))
    if hosts is not None:
        text = _AT.sub(_without_login, text)
        for host in sorted(
            {host for host in hosts if len(host) > 1 and host != "local"}, key=len, reverse=True
        ):
            text = re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w-])", "<host>", text)
        text = _ADDRESS.sub("<host>", text)
    for user in sorted({user for user in users if user and user != "root"}, key=len, reverse=True):
        text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(user)}(?![A-Za-z0-9])", "<user>", text)
    return text


def _without_value(found: re.Match[str]) -> str:
    name, value = found["name"], found["value"]
    if _HARMLESS.fullmatch(name.lstrip("-")) or _HARMLESS.search(name.rpartition(".")[2]):
        return found[0]
    if value.strip("\"'") in ("", REMOVED, "None", "null", "true", "false", "True", "False"):
        return found[0]
    quote = value[0] if value[0] in "\"'" else ""
    return f"{name}{found['between']}{quote}{REMOVED}{quote}"


def _without_login(found: re.Match[str]) -> str:
    return found[0] if found["user"].lower() in ("git",) else "<user>@<host>"
