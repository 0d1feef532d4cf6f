"""Files that people write, read whole; errors name the file and the line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_text(path: Path) -> str:
    """The text of a UTF-8 file. Raises ValueError when it cannot be read, or is none."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 text: {error.reason}") from error


def json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Number (from 1) and value of every line that is not blank. Raises ValueError."""
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{path}: line {number} is no JSON: {error}; expected one value a line"
            ) from error
