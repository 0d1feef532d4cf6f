"""`doctor`: a place looked at from the connection to the clock, one line each; the first wall ends the way.

Everything goes through what a launch uses: the same connection, the same payload, the same preflight, which
is asked for what takes seconds as well. An error on the way becomes the line that it is about.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final

from controller import doctor
from controller.doctor import Check
from controller.errors import (
    AuthenticationError,
    ContainerError,
    DflashctlError,
    HostKeyError,
    PayloadEnvironmentError,
    PctError,
    ShipError,
)
from controller.inventory import Host
from controller.place import Place, open_place
from controller.ship import pack, ship, start
from controller.text import last_line, safe_line
from remote_payload import rundir
from remote_payload.job import Job

MEETING_PORT: Final = 29400
"""Where the processes of a run on several hosts find each other: torchrun's own."""

_STEPS: Final = ("reachable", "host key", "login", "pct", "container")
_LINES: Final[dict[type[DflashctlError], str]] = {
    HostKeyError: "host key",
    AuthenticationError: "login",
    PctError: "pct",
    ContainerError: "container",
}
_HOST_S: Final = 30.0


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """All lines about one place."""

    host: Host
    checks: list[Check]
    error: DflashctlError | None
    """What ended the way before the place could be looked at."""

    @property
    def exit_code(self) -> int:
        """0 without a failure, the code of the error in the way, or 71 for what a launch would refuse."""
        if self.error is not None:
            return self.error.exit_code
        failed = any(check.level == "failure" for check in self.checks)
        return PayloadEnvironmentError.exit_code if failed else 0

    def to_json(self) -> dict[str, Any]:
        """The object that `doctor --json` prints."""
        return {
            "host": self.host.name,
            "address": self.host.address,
            "exit_code": self.exit_code,
            "checks": [dataclasses.asdict(check) for check in self.checks],
        }


def look_at(host: Host, job: Job | None, *, accept_new_host_key: bool = False) -> Report:
    """Examine `host` for `job`. Never raises for what is wrong with the place."""
    checks: list[Check] = []
    with open_place(host, accept_new_host_key=accept_new_host_key) as place:
        try:
            checks += _way(place)
            config = _container(place, checks)
            checks += _inside(place, job, config)
        except DflashctlError as error:
            checks += _walled(error, host, {check.name for check in checks})
            return Report(host, checks, error)
    return Report(host, checks, None)


def between(hosts: Sequence[Host]) -> list[Check]:
    """Whether each of several hosts can be reached by every other, on the port where a run would meet.

    One line a direction. Raises what shipping raises: the hosts themselves were looked at before.
    """
    payload, checks = pack(), []
    for host in hosts:
        with open_place(host) as place:
            listener = start(place, payload, ["listen", str(MEETING_PORT)])
            try:
                said = listener.record(_HOST_S) or {"addresses": [], "why": "it ended without a word"}
                for other in hosts:
                    if other is not host:
                        checks.append(_reached(other, host, said))
            finally:
                listener.process.close()
    return checks


def _reached(other: Host, host: Host, said: Mapping[str, Any]) -> Check:
    """The line about the way from `other` to the listening `host`."""
    name = f"{other.name} to {host.name}"
    answer: Mapping[str, Any] = {"reached": None, "why": said["why"]}
    if said["why"] is None:
        with open_place(other) as place:
            command = ["reach", ",".join(said["addresses"]), str(MEETING_PORT)]
            answer = rundir.decode(ship(place, pack(), command).output) or {"reached": None, "why": "no word"}
    if answer["reached"]:
        return Check(name, "ok", f"{answer['reached']} port {MEETING_PORT}")
    return Check(
        name,
        "failure",
        safe_line(str(answer["why"])),
        f"Give both a network in common, and let port {MEETING_PORT} and those above 32767 through.",
    )


def _way(place: Place) -> list[Check]:
    """Into the place and back; raises what is in the way."""
    begun = time.monotonic()
    place.run(["true"], timeout=_HOST_S)
    first = time.monotonic() - begun
    begun = time.monotonic()
    place.run(["true"], timeout=_HOST_S)
    again = time.monotonic() - begun
    if place.description.kind == "local":
        return [Check("reachable", "ok", "this machine")]
    names = _STEPS if place.description.kind == "proxmox" else _STEPS[:3]
    seen = {"reachable": f"{place.host}, {first:.2f} s to connect and run, {again:.2f} s to run again"}
    texts = {"host key": "known", "login": place.description.user or "as ssh has it"}
    texts |= {"pct": "runs commands", "container": f"{place.description.container} runs"}
    return [Check(name, "ok", (seen | texts)[name]) for name in names]


def _container(place: Place, checks: list[Check]) -> str:
    """`pct config`; a lock in it is worth a line."""
    from controller.remote import Proxmox

    if not isinstance(place, Proxmox):
        return ""
    number = str(place.description.container)
    done = place.on_host(["pct", "config", number], timeout=_HOST_S)
    text = done.stdout.decode(errors="replace")
    for line in text.splitlines():
        key, _, value = line.partition(": ")
        if key == "lock":
            checks[:] = [check for check in checks if check.name != "container"]
            checks.append(
                Check(
                    "container",
                    "warning",
                    f"{number} runs, locked: {safe_line(value)}",
                    "A backup or migration may be at work, and may stop it; commands run meanwhile."
                    f" If none is: pct unlock {number}",
                )
            )
    return text


def _inside(place: Place, job: Job | None, config: str) -> list[Check]:
    question = json.dumps(doctor.question(job, place.description, deep=True))
    shipped = ship(place, pack(), ["preflight", place.workspace, question])
    answer = rundir.decode(shipped.output)
    if answer is None:
        said = last_line(shipped.stderr)
        raise PayloadEnvironmentError(f"{place.name}: preflight failed with status {shipped.status}: {said}")
    return doctor.examine(answer, job, place.description, received=time.time(), config=config)


def _walled(error: DflashctlError, host: Host, made: set[str]) -> list[Check]:
    """The line that `error` is about, after good ones for what came before it."""
    wall = _LINES.get(type(error), "reachable")
    if isinstance(error, PayloadEnvironmentError):
        wall = "workspace" if "workspace" in error.message else "Python"
    elif isinstance(error, ShipError):
        wall = "payload"
    before = _STEPS[: _STEPS.index(wall)] if wall in _STEPS else ()
    lines = [Check(name, "ok", "") for name in before if name not in made]
    return [*lines, Check(wall, "failure", error.message.removeprefix(f"{host.name}: "), error.hint)]


def report_text(checks: Sequence[Check]) -> str:
    """The lines for people; what to do about several checks in a row stands once, below the last of them."""
    marks = {"ok": "ok      ", "warning": "warning ", "failure": "FAILURE "}
    width = max(len(check.name) for check in checks)
    lines = []
    for check, following in zip_longest(checks, checks[1:]):
        lines.append(f"{marks[check.level]} {check.name.ljust(width)}  {safe_line(check.seen)}".rstrip())
        if check.level != "ok" and (following is None or following.todo != check.todo):
            lines += [f"{'':9}{'':{width}}  -> {safe_line(line)}" for line in check.todo.splitlines()]
    return "\n".join(lines)
