"""Files of the laptop that a run gets beside its payload: sent once by content, linked into its directory.

They lie in `<workspace>/includes/<sha256>`, read-only, and are hard links in `runs/<id>/include/NAME` (copies
where the disk has no links), so that a run keeps what it was given. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from remote_payload import rundir
from remote_payload.leftovers import left_behind

INCLUDES: Final = "includes"
INCLUDE: Final = "include"
"""The folder in the run directory."""
_CHUNK: Final = 1 << 20
_STALE_S: Final = 24 * 3600
_PART = re.compile(r"[^/\0]+")


class IncludeError(Exception):
    """A file did not arrive whole, or cannot be put in its place; one sentence."""


def main(workspace: str) -> int:
    """Take files: a line `{"files": [{"sha256", "size"}, ...]}`, an answer `{"missing": [...]}`, their bytes.

    They come in that order without anything between them; at the end `{"ok": true}`, or `{"ok": false,
    "error"}`.
    """
    folder = Path(workspace) / INCLUDES
    order = rundir.decode(sys.stdin.buffer.readline()) or {}
    wanted = {str(file["sha256"]): int(file["size"]) for file in order["files"]}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        missing = []
        for digest in wanted:
            try:
                os.utime(folder / digest)  # used now: pruning goes by it
            except FileNotFoundError:
                missing.append(digest)
        print(json.dumps({"missing": missing}), flush=True)
        for digest in missing:
            _take(folder, digest, wanted[digest])
    except (OSError, IncludeError) as error:
        print(json.dumps({"ok": False, "error": str(error)}), flush=True)
        return 1
    print(json.dumps({"ok": True}), flush=True)
    return 0


def put(workspace: Path, run_dir: Path, files: Sequence[Mapping[str, Any]]) -> None:
    """Put `files` (`name`, `sha256`) into the run directory. Raises IncludeError, OSError."""
    for file in files:
        name, digest = str(file["name"]), str(file["sha256"])
        parts = name.split("/")
        if not re.fullmatch(r"[0-9a-f]{64}", digest) or not all(map(_is_part, parts)):
            raise IncludeError(f"{name!r} is no name of an included file")
        target = run_dir / INCLUDE / name
        target.parent.mkdir(parents=True, exist_ok=True)
        source = workspace / INCLUDES / digest
        if not source.is_file():
            raise IncludeError(f"{name}: its content {digest[:12]} did not arrive")
        try:
            os.link(source, target)
        except OSError:
            shutil.copyfile(source, target)


def _is_part(part: str) -> bool:
    return _PART.fullmatch(part) is not None and part not in (".", "..")


def _take(folder: Path, digest: str, size: int) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix=".incoming-", dir=folder)
    try:
        seen, left = hashlib.sha256(), size
        with os.fdopen(descriptor, "wb") as file:
            while left:
                data = sys.stdin.buffer.read(min(_CHUNK, left))
                if not data:
                    raise IncludeError(f"only {size - left} of {size} bytes arrived")
                file.write(data)
                seen.update(data)
                left -= len(data)
            file.flush()
            os.fsync(file.fileno())
        if seen.hexdigest() != digest:
            raise IncludeError("the bytes that arrived have another sha256: did the file change meanwhile?")
        Path(temporary).chmod(0o444)
        Path(temporary).replace(folder / digest)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _sweep(folder: Path) -> None:
    for path in left_behind(folder.glob(".incoming-*"), _STALE_S):
        path.unlink(missing_ok=True)
