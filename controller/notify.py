"""Notify hooks: a command of the user's, run on this machine when a run ends, fails or stalls.

`$XDG_CONFIG_HOME/dflashctl/notify.toml` names it: `command` (a list: argv; a string: for `sh -c`), `on`
(which states, in small letters) and `timeout` (seconds). Not hosts.toml, because that may lie in the folder
where one happens to be, and whoever wrote it must not run commands here. Whoever follows a run (`logs
--follow`, `tui`, `watch`) runs the hook; a marker in the mirror folder lets each event through once,
however many follow. What is news is decided by the local copy: a run that this machine knew to have ended
before does not end again.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from controller.errors import InventoryError
from controller.glance import Glance, glance
from controller.health import Word
from controller.narration import Say
from controller.paths import home
from controller.run_records import number, text, whole
from controller.text import last_line, safe_line
from controller.timing import Timing
from remote_payload import rundir

NOTIFIED: Final = "notified"
"""Folder of markers in the mirror folder."""
EVENTS: Final = tuple(
    word.lower()
    for word in (
        Word.FINISHED, Word.STOPPED, Word.FAILED, Word.KILLED, Word.LOST, Word.STALLED, Word.RESTARTING,
    )
)  # fmt: skip
_LOOK_S: Final = 1.0
_MOST_S: Final = 86400
"""Longest time that a hook may be given: whoever follows the run waits for it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Hook:
    """What is run, and when."""

    command: tuple[str, ...]
    on: frozenset[str] = frozenset(EVENTS)
    timeout_s: float = 30.0


def hook_file() -> Path:
    """Where the user's hook is written down; it need not exist."""
    named = os.environ.get("XDG_CONFIG_HOME", "")
    base = Path(named) if named.startswith("/") else home() / ".config"
    return base / "dflashctl" / "notify.toml"


def shell(command: str) -> tuple[str, ...]:
    """argv of a command line."""
    return ("/bin/sh", "-c", command)


def load_hook() -> Hook | None:
    """The user's hook, or None when there is no notify.toml. Raises InventoryError."""
    path = hook_file()
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise InventoryError(f"{path}: cannot be read ({why})") from error
    unknown = sorted(set(values) - {"command", "on", "timeout"})
    if unknown:
        raise InventoryError(f"{path}: unknown key {unknown[0]!r}; known: command, on, timeout")
    command, on, timeout = values.get("command"), values.get("on", list(EVENTS)), values.get("timeout", 30)
    if isinstance(command, str) and command:
        argv = shell(command)
    elif isinstance(command, list) and command and all(isinstance(word, str) for word in command):
        argv = tuple(command)
    else:
        raise InventoryError(f"{path}: command = {command!r}: expected a string, or a list of strings")
    if not isinstance(on, list) or not set(map(str, on)) <= set(EVENTS):
        raise InventoryError(f"{path}: on = {on!r}: expected a list of {', '.join(EVENTS)}")
    usable = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if not (usable and 0 < timeout <= _MOST_S):
        raise InventoryError(
            f"{path}: timeout = {timeout!r}: expected a number of seconds above 0, at most {_MOST_S}"
        )
    return Hook(argv, frozenset(on), float(timeout))


@contextmanager
def notifying(directory: Path, say: Say, hook: Hook | None = None) -> Iterator[None]:
    """Run the hook (the user's unless `hook` is given) for what happens to the run meanwhile.

    A hook that is damaged or fails is one line to `say`, and changes nothing else.
    """
    try:
        hook = hook or load_hook()
    except InventoryError as error:
        say(f"warning: {error.message}")
        hook = None
    if hook is None:
        yield
        return
    notifier = Notifier(directory, hook, say)
    thread = threading.Thread(target=notifier.run, name="notify", daemon=True)
    thread.start()
    try:
        yield
    finally:
        notifier.over.set()
        thread.join(hook.timeout_s + 5)


class Notifier:
    """Looks at one mirror folder once a second, and once more when its follower ends."""

    def __init__(self, directory: Path, hook: Hook, say: Say) -> None:
        self._directory = directory
        self._hook = hook
        self._say = say
        self._look_s = _LOOK_S * Timing.from_environment().scale
        self._known = _event(glance(directory, time.time()))
        self.over = threading.Event()

    def run(self) -> None:
        """Look until `over` is set, and then a last time."""
        last = False
        while not last:
            last = self.over.wait(self._look_s)
            seen = glance(self._directory, time.time())
            event = _event(seen)
            if event is None or event == self._known:
                continue
            self._known = event
            if str(seen.health.word).lower() in self._hook.on and self._claim(event):
                problem = call(self._hook, variables(self._directory, seen))
                if problem:
                    self._say(f"notify: {problem}")

    def _claim(self, event: str) -> bool:
        """Whether nobody else told of this event, and nobody will."""
        try:
            folder = self._directory / NOTIFIED
            folder.mkdir(mode=0o700, exist_ok=True)
            os.close(os.open(folder / event, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            return False
        except OSError as error:
            self._say(f"notify: {self._directory / NOTIFIED} cannot be written ({error.strerror})")
            return False
        return True


def _event(seen: Glance) -> str | None:
    """The name of what happened; None while nothing has."""
    word = seen.health.word
    if str(word).lower() not in EVENTS:
        return None
    stalled = f"-{seen.since:.0f}" if word is Word.STALLED and seen.since is not None else ""
    return f"{seen.attempt}-{str(word).lower()}{stalled}"


def variables(directory: Path, seen: Glance) -> dict[str, str]:
    """What the hook is told, as environment variables; text of the remote is one safe line each."""
    run = rundir.read_whole(directory / rundir.RUN) or {}
    values: Mapping[str, Any] = {
        "RUN": directory.parent.name,
        "HOST": directory.name,
        "JOB": text(run, "job"),
        "STATE": str(seen.health.word).lower(),
        "REASON": seen.health.detail,
        "EXIT_CODE": seen.health.exit_code,
        "ATTEMPT": seen.attempt,
        "STEP": whole(seen.progress, "step"),
        "STEPS": whole(seen.progress, "steps"),
        "LOSS": number(seen.progress, "loss"),
        "TAU": number(seen.progress, "tau"),
        "DIRECTORY": directory,
    }
    return {f"DFLASHCTL_{name}": _text(value) for name, value in values.items()}


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:g}" if isinstance(value, float) else safe_line(str(value))


def call(hook: Hook, told: Mapping[str, str]) -> str:
    """Run the hook's command to its end; returns what went wrong in one line, or the empty text."""
    try:
        process = subprocess.Popen(
            hook.command,
            env=os.environ | told,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        return f"{hook.command[0]} cannot be run ({error.strerror})"
    with process:  # closes its stderr, which something may hold that it left behind in a session of its own
        try:
            said = last_line(process.communicate(timeout=hook.timeout_s)[1], "")
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            return f"the command took more than {hook.timeout_s:g} s and was ended"
    if process.returncode:
        return f"the command ended with exit status {process.returncode}" + (f": {said}" if said else "")
    return ""
