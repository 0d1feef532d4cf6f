"""Makes or mends the place's virtual environment from the payload's requirements.txt, by uv or pip.

Run by the base interpreter, since the venv's may not exist. A file beside the venv says what is under way,
so that a setup that broke off is seen by the next one: a venv that was never finished is made anew, one that
was being mended is looked through for packages that lack files. What others made and broke is never removed.
A venv that a living run uses is not touched. The end of stdin ends it and its installer. Standard library
only.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final

from remote_payload import lock, rundir
from remote_payload.limited_command import run_within
from remote_payload.living import RUNS, living_runs

REQUIREMENTS: Final = Path(__file__).with_name("requirements.txt")
_LOOK_S: Final = 120.0
_BEAT_S: Final = 5.0
_UV: Final = ("~/.local/bin", "~/.cargo/bin", "/usr/local/bin", "/root/.local/bin")
_LIST_PACKAGES: Final = """\
import csv, importlib.metadata, json, os, re
found, damaged = {}, []
for d in importlib.metadata.distributions():
    name = re.sub(r"[-_.]+", "-", d.metadata["Name"] or "").lower()
    if not name:
        continue
    found.setdefault(name, d.version)
    record = d.read_text("RECORD") or ""  # d.files leaves out what is not there, from Python 3.12 on
    files = [row[0] for row in csv.reader(record.splitlines()) if row and not row[0].endswith(".pyc")]
    if (not record and d.files is None) or not all(os.path.exists(d.locate_file(f)) for f in files):
        damaged.append(name)
print(json.dumps([found, sorted(set(damaged))]))
"""

Say = Callable[[dict[str, Any]], None]


class SetupError(Exception):
    """Nothing can be made; the text says why, `hint` what to do."""

    def __init__(self, text: str, hint: str = "") -> None:
        super().__init__(text)
        self.hint = hint


@dataclasses.dataclass(frozen=True, slots=True)
class Order:
    """What the laptop asks for."""

    workspace: Path
    venv: Path
    index: str
    """Address of the package index, perhaps with a password in it: never among arguments, never said."""
    wheels: str

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Order:
        """The order in the laptop's line of JSON."""
        return cls(Path(values["workspace"]), Path(values["venv"]), values["index"], values["wheels"])


def main(say: Say | None = None) -> int:
    """Read the order from stdin, carry it out, say each step as a line of JSON; 0 when the venv is whole."""
    say = say or _print
    order = rundir.decode(sys.stdin.buffer.readline()) or {}
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: _end())
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    threading.Thread(target=_beat, args=(say,), daemon=True).start()
    try:
        say({"done": set_up(Order.from_mapping(order), say)})
    except SetupError as error:
        say({"error": str(error), "hint": error.hint})
        return 1
    return 0


def set_up(order: Order, say: Say) -> dict[str, Any]:
    """Make or mend the venv; `{"changed", "packages"}`. Raises SetupError."""
    venv = order.venv
    try:
        venv.parent.mkdir(parents=True, exist_ok=True)
        alone = venv.with_name(f".{venv.name}.dflashctl-lock").open("w")
    except OSError as error:
        raise SetupError(f"{venv.parent} cannot be written ({error.strerror})") from error
    with alone:
        try:
            lock.hold(alone.fileno())
        except BlockingIOError:
            raise SetupError(f"another setup of {venv} is at work") from None
        try:
            return _Setup(order, say).run()
        except OSError as error:  # a full disk, a file in the way, a folder that is not ours
            raise SetupError(f"{error.filename or venv} cannot be used ({error.strerror})") from error


class _Setup:
    def __init__(self, order: Order, say: Say) -> None:
        self._order, self._say = order, say
        self._venv = order.venv
        self._python = order.venv / "bin" / "python"
        self._note = order.venv.with_name(f".{order.venv.name}.dflashctl-setup.json")
        self._uv = _find_uv()

    def run(self) -> dict[str, Any]:
        before = (rundir.read_whole(self._note) or {}).get("state")
        listed = self._list()
        make = listed is None or before == "creating"
        if make and listed is None and before is None and self._venv.exists() and any(self._venv.iterdir()):
            raise SetupError(
                f"{self._venv} is there, but no virtual environment that works, and not one of ours",
                f"Remove it (rm -r {self._venv}), or name another `venv` in hosts.toml.",
            )
        wanted = requirements()
        found, damaged = listed or ({}, [])
        # Packages that others put there may be incomplete on purpose; ours, and a mending cut short, may not.
        damaged = [name for name in damaged if name in wanted or before == "mending"]
        missing = [name for name, oldest in wanted.items() if not _is_enough(found.get(name), oldest)]
        if not make and not missing and not damaged:
            self._note_down("complete")
            return {"changed": False, "packages": {name: found[name] for name in wanted}}
        if users := using(self._order.workspace, self._venv):
            raise SetupError(
                f"{self._venv} is used by {', '.join(users)}, which run",
                "Stop them first, or name another `venv` in hosts.toml.",
            )
        if make:
            self._make(again=before is not None)
        else:
            self._note_down("mending")
            if damaged:
                self._install([f"{name}=={found[name]}" for name in damaged], again=damaged)
        self._install(["-r", str(REQUIREMENTS)])
        found, damaged = self._list() or ({}, [])
        damaged = [name for name in damaged if name in wanted]
        lacking = [name for name, oldest in wanted.items() if not _is_enough(found.get(name), oldest)]
        if lacking or damaged:
            raise SetupError(f"after the installation, {', '.join([*lacking, *damaged])} is still not whole")
        self._note_down("complete")
        return {"changed": True, "packages": {name: found[name] for name in wanted}}

    def _make(self, *, again: bool) -> None:
        self._note_down("creating")
        if again and self._venv.exists():
            self._say({"step": f"{self._venv} was never finished, or is broken: making it anew"})
            shutil.rmtree(self._venv)
        if self._uv:
            self._call([self._uv, "venv", "--python", sys.executable, str(self._venv)])
        else:
            self._call([sys.executable, "-m", "venv", str(self._venv)])

    def _install(self, what: Sequence[str], *, again: Sequence[str] = ()) -> None:
        links = ["--find-links", self._order.wheels] if self._order.wheels else []
        if links and not self._order.index:
            links.append("--no-index")
        if self._uv:
            renew = [word for name in again for word in ("--reinstall-package", name)]
            argv = [self._uv, "pip", "install", "--python", str(self._python), *renew]
        else:
            if subprocess.run([self._python, "-m", "pip", "--version"], capture_output=True).returncode:
                self._call([str(self._python), "-m", "ensurepip"])
            renew = ["--force-reinstall", "--no-deps"] if again else []
            quiet = ["--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
            argv = [str(self._python), "-m", "pip", "install", *quiet, *renew]
        self._call([*argv, *links, *what])

    def _call(self, argv: list[str]) -> None:
        """Run an installer, its output passed on line by line. Raises SetupError with its last words."""
        self._say({"step": " ".join(argv)})
        index = self._order.index
        secret = {"PIP_INDEX_URL": index, "UV_INDEX_URL": index, "UV_DEFAULT_INDEX": index} if index else {}
        env = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "UV_"))}
        kept = {key: value for key, value in os.environ.items() if key in ("PIP_CACHE_DIR", "UV_CACHE_DIR")}
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=env | kept | secret | {"PYTHONUNBUFFERED": "1"},
            )
        except OSError as error:
            raise SetupError(f"{argv[0]} cannot be run ({error.strerror})") from error
        _running.append(process)
        lines = []
        assert process.stdout is not None
        for line in _lines(process.stdout):
            lines.append(line)
            self._say({"line": line})
        code = process.wait()
        _running.remove(process)
        if code:
            raise SetupError(f"it ended with exit status {code}: {_reason(lines)}", _hint(lines, self._order))

    def _list(self) -> tuple[dict[str, str], list[str]] | None:
        """Versions by name, and the packages that lack files; None when there is no venv that works.

        Raises SetupError for one that does not answer: a busy network disk is no reason to make it anew.
        """
        if not self._venv.joinpath("pyvenv.cfg").is_file():
            return None
        ask = [str(self._python), "-I", "-c", _LIST_PACKAGES]
        try:
            found, damaged = json.loads(run_within(_LOOK_S, ask, stderr=subprocess.DEVNULL).stdout)
        except subprocess.TimeoutExpired:
            raise SetupError(
                f"{self._python} gave no list of its packages for {_LOOK_S:g} s",
                "Is its disk slow? Try again.",
            ) from None
        except (OSError, ValueError):
            return None
        return found, damaged

    def _note_down(self, state: str) -> None:
        rundir.write_whole(self._note, json.dumps({"state": state, "venv": str(self._venv)}).encode())


def requirements() -> dict[str, str]:
    """The oldest version by name, of `requirements.txt`."""
    lines = (line.partition("#")[0].strip() for line in REQUIREMENTS.read_text(encoding="utf-8").splitlines())
    return dict(line.split(">=") for line in lines if line)


def using(workspace: Path, venv: Path) -> list[str]:
    """The living runs of the workspace whose interpreter is the venv's."""
    users = []
    for run in living_runs(workspace):
        record = rundir.read_whole(workspace / RUNS / run["id"] / rundir.RUN) or {}
        python = record.get("python")
        if isinstance(python, str) and Path(python).parents[1].resolve() == venv.resolve():
            users.append(run["id"])
    return users


_running: list[subprocess.Popen[bytes]] = []


def _end_with_stdin() -> None:
    """The laptop has gone, or was interrupted."""
    while sys.stdin.buffer.read(4096):
        pass
    _end()


def _end() -> None:
    """Leave nothing at work."""
    for process in list(_running):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    os._exit(1)


def _beat(say: Say) -> None:
    while True:
        threading.Event().wait(_BEAT_S)
        with suppress(OSError):
            say({"beat": True})


def _find_uv() -> str | None:
    path = os.pathsep.join([os.environ.get("PATH", ""), *(str(Path(p).expanduser()) for p in _UV)])
    return shutil.which("uv", path=path)


def _lines(stream: IO[bytes]) -> Iterator[str]:
    for raw in stream:
        line = raw.decode("utf-8", "replace").strip()
        if line:
            yield re.sub(r"//[^/@\s]+@", "//***@", line)


def _reason(lines: list[str]) -> str:
    blamed = [line for line in lines if re.search(r"error|fail|no space|not available", line, re.IGNORECASE)]
    return (blamed or lines or ["it said nothing"])[-1]


def _hint(lines: list[str], order: Order) -> str:
    text = "\n".join(lines)
    if "ensurepip" in text:
        return "Install Python's own venv there: apt-get install python3-venv (on Alpine: apk add py3-pip)"
    if "No space left" in text:
        return f"Make room where {order.venv} and /tmp lie."
    if re.search(
        r"No matching distribution|not found in the package registry|no versions of|unsatisfiable", text
    ):
        return (
            f"The folder {order.wheels} lacks it: fill it by `pip download -r requirements.txt`."
            if order.wheels and not order.index
            else "Is the index right, and the interpreter one that it has wheels for?"
        )
    if re.search(r"resolution|NewConnectionError|timed out|Could not connect|dns error", text, re.IGNORECASE):
        return "Has the place no internet? Name `index`, or a folder `wheels`, in hosts.toml."
    return ""


def _is_enough(version: str | None, oldest: str) -> bool:
    return version is not None and _numbers(version) >= _numbers(oldest)


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def _print(record: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()
