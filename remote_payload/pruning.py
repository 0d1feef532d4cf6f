"""What a workspace holds that nobody needs any more, and its removal: runs, payloads, included files.

Never removed: a run whose supervisor or trainer lives or that began a moment ago, a payload that a kept run
was started with or that the asking laptop uses, an included file that a kept run has. What goes is moved
aside first, so that nothing half removed is ever taken for a run or a payload. Standard library only.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

from remote_payload import rundir
from remote_payload.includes import INCLUDES
from remote_payload.living import RUNS, alive

PAYLOADS: Final = "payloads"
_ASIDE: Final = ".removing"
_YOUNG_S: Final = 600.0
"""A run without a status so young may be starting."""
_DIGEST = re.compile(r"[0-9a-f]{64}")

Kind = Literal["run", "payload", "include"]


@dataclasses.dataclass(slots=True)
class Item:
    """Something that takes room; the field names are the keys of `prune --json`."""

    kind: Kind
    name: str
    bytes: int
    """On the disk; hard links that others hold too are counted as theirs."""
    age_s: float
    """Since a run's last sign, or a payload's or a file's last use."""
    state: str | None
    """A run's last written state; `lost` when nobody is there and it had not ended."""
    kept: str | None
    """Why it stays, or null: it may go."""


def main(workspace: str) -> int:
    """Answer one order from stdin: `{"older_s", "keep": [digests]}`, and `remove`: `[[kind, name], ...]`.

    Without `remove` one line an item; with it a line `{"removed", "bytes"}` or `{"kept", "why"}` for each.
    """
    order = rundir.decode(sys.stdin.buffer.readline()) or {}
    items = list(examine(Path(workspace), float(order["older_s"]), set(order["keep"])))
    if "remove" not in order:
        for item in items:
            print(json.dumps(dataclasses.asdict(item)), flush=True)
        return 0
    known = {(item.kind, item.name): item for item in items}
    for kind, name in order["remove"]:
        found = known.get((kind, name))
        why = "it is not there any more" if found is None else found.kept
        if found is not None and why is None:
            why = _remove(Path(workspace), found)
        said = {"kept": name, "why": why} if why else {"removed": name, "bytes": found.bytes if found else 0}
        print(json.dumps(said), flush=True)
    return 0


def examine(workspace: Path, older_s: float, keep: set[str]) -> Iterator[Item]:
    """Every run, payload and included file of the workspace; `keep`: digests of payloads in use elsewhere."""
    _sweep(workspace)
    now = time.time()
    running = _running()
    needed: dict[str, str] = {}
    staying: set[int] = set()
    for run_dir in _folders(workspace / RUNS):
        if not rundir.is_run_id(run_dir.name):
            continue
        item = _run(run_dir, now, older_s)
        if item.kept is not None:
            record = rundir.read_whole(run_dir / rundir.RUN) or {}
            needed.setdefault(str(record.get("payload")), run_dir.name)
            staying |= _inodes(run_dir / "include")
        yield item
    for folder in _folders(workspace / PAYLOADS):
        if _DIGEST.fullmatch(folder.name):
            age = now - folder.stat().st_mtime
            why = f"the run {needed[folder.name]} has it" if folder.name in needed else None
            why = why or ("this dflashctl uses it" if folder.name in keep else None)
            why = why or ("a process runs from it" if folder.name in running else None)
            why = why or (f"used {_days(age)} ago" if age < older_s else None)
            yield Item("payload", folder.name, _size(folder), age, None, why)
    for file in sorted((workspace / INCLUDES).glob("*")):
        if _DIGEST.fullmatch(file.name) and file.is_file():
            info = file.stat()
            age = now - info.st_mtime
            why = "a run has it" if info.st_ino in staying else None
            why = why or (f"used {_days(age)} ago" if age < older_s else None)
            yield Item("include", file.name, info.st_blocks * 512, age, None, why)


def _run(run_dir: Path, now: float, older_s: float) -> Item:
    status = rundir.read_whole(run_dir / rundir.STATUS)
    signs = [path.stat().st_mtime for path in (run_dir, run_dir / rundir.STATUS) if path.exists()]
    age = now - max(signs)
    state = None if status is None else status.get("state")
    lives = alive(status or {})
    ended = state in rundir.ENDED
    if lives:
        kept: str | None = f"its {' and '.join(lives)} live{'s' if len(lives) == 1 else ''}"
    elif status is None and age < _YOUNG_S:
        kept = "it may be starting"
    elif age < older_s:
        kept = f"last sign {_days(age)} ago"
    else:
        kept = None
    return Item("run", run_dir.name, _size(run_dir), age, state if ended or lives else "lost", kept)


def _remove(workspace: Path, item: Item) -> str | None:
    """Remove it; why not, if not."""
    folder = {"run": RUNS, "payload": PAYLOADS, "include": INCLUDES}[item.kind]
    aside = workspace / _ASIDE
    gone = aside / f"{item.kind}-{item.name}-{os.getpid()}"
    try:
        aside.mkdir(mode=0o700, exist_ok=True)
        (workspace / folder / item.name).rename(gone)
        if gone.is_dir():
            shutil.rmtree(gone)
        else:
            gone.unlink()
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    with suppress(OSError):
        aside.rmdir()
    return None


def _sweep(workspace: Path) -> None:
    """Finish removals that broke off."""
    for path in _folders(workspace / _ASIDE):
        shutil.rmtree(path, ignore_errors=True)


def _running() -> set[str]:
    """Digests of the payloads that a process of this place was started from: a feed, a supervisor."""
    found: set[str] = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes().decode("utf-8", "replace")
            found.update(re.findall(rf"/{PAYLOADS}/([0-9a-f]{{64}})/", words))
    return found


def _folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())


def _inodes(folder: Path) -> set[int]:
    return {path.stat().st_ino for path in folder.rglob("*") if path.is_file()}


def _size(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                info = Path(parent, name).lstat()
                total += info.st_blocks * 512 if info.st_nlink == 1 else 0
    return total


def _days(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
