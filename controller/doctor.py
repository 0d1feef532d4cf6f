"""The checks of a place that a launch makes first, each with what was seen and what to do about it.

They judge what `remote_payload preflight` answered; nothing here contacts anybody, so a check is a pure
function of that answer, the job and the place.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

from controller.errors import PayloadEnvironmentError
from controller.inventory import Host
from remote_payload.job import Job

Level = Literal["ok", "warning", "failure"]

OLDEST: Final = {"torch": "2.11", "transformers": "5.17", "pyarrow": "16", "safetensors": "0.4.3"}
"""The payload's packages and the oldest version of each, as in pyproject.toml's extra `payload`."""

_LITTLE_GIB: Final = 5.0
_TOO_LITTLE_GIB: Final = 0.5


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """One line of the doctor's report."""

    name: str
    level: Level
    seen: str
    todo: str = ""


def examine(answer: Mapping[str, Any], job: Job, host: Host) -> list[Check]:
    """The checks of `host` for `job`, by preflight's `answer`."""
    return [
        Check("Python", "ok", f"{answer['python']} ({host.python})"),
        *_packages(answer["modules"], host),
        _gpus(answer["gpus"], job),
        _workspace(answer["workspace"], host),
    ]


def require(checks: list[Check], host: Host) -> None:
    """Raise PayloadEnvironmentError for the failures among `checks`, all in one."""
    failures = [check for check in checks if check.level == "failure"]
    if failures:
        raise PayloadEnvironmentError(
            f"{host.name}: " + "; ".join(check.seen for check in failures),
            "\n".join(dict.fromkeys(check.todo for check in failures if check.todo)),
        )


def _packages(versions: Mapping[str, str | None], host: Host) -> Iterator[Check]:
    wanted = [f"{name}>={oldest}" for name, oldest in OLDEST.items()]
    install = host.command_line(host.python, "-m", "pip", "install", *wanted)
    todo = f"Install what is missing: {install}"
    for name, oldest in OLDEST.items():
        version = versions.get(name)
        if version is None:
            yield Check(name, "failure", f"{name} is not installed in {host.python}", todo)
        elif _numbers(version) < _numbers(oldest):
            yield Check(name, "failure", f"{name} {version} is older than {oldest}", todo)
        else:
            yield Check(name, "ok", version)


def _gpus(seen: int | str, job: Job) -> Check:
    named = {device for device in (*job.targets, *job.drafters) if device.startswith("cuda:")}
    needed = max((int(device[5:]) + 1 for device in named), default=0)
    if isinstance(seen, str):
        if needed:
            return Check(
                "GPUs",
                "failure",
                f"the job names {', '.join(sorted(named))}, but {seen}",
                "Give the container its GPUs, or train on the CPU:"
                """ --set 'targets=["cpu"]' --set 'drafters=["cpu"]'""",
            )
        if "not installed" in seen:
            return Check("GPUs", "ok", f"none ({seen}); the CPU trains")
        return Check("GPUs", "warning", f"no GPU can be used: {seen}", "Without one the CPU trains.")
    if needed > seen:
        return Check(
            "GPUs",
            "failure",
            f"the job names cuda:{needed - 1}, but nvidia-smi lists {seen} GPUs",
            "Change `targets` and `drafters` of the job.",
        )
    return Check("GPUs", "ok", f"{seen}")


def _workspace(seen: Mapping[str, Any], host: Host) -> Check:
    path, free = seen["path"], seen["free_gib"]
    if not seen["writable"]:
        return Check(
            "workspace",
            "failure",
            f"the workspace {path} cannot be written",
            "Make it writable there, or name another `workspace` in hosts.toml.",
        )
    if free is not None and free < _LITTLE_GIB:
        todo = f"See: {host.command_line('df', '-h', path)}"
        level: Level = "failure" if free < _TOO_LITTLE_GIB else "warning"
        return Check("workspace", level, f"only {free:.1f} GiB are free in {path}", todo)
    return Check("workspace", "ok", f"{path}" + ("" if free is None else f", {free:.0f} GiB free"))


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: 2.13.0+cpu is (2, 13, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()
