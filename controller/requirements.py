"""What the payload needs, by the file that it ships: `remote_payload/requirements.txt`, a package a line."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import remote_payload

FILE: Final = Path(remote_payload.__file__).parent / "requirements.txt"


def _oldest() -> dict[str, str]:
    lines = (line.partition("#")[0].strip() for line in FILE.read_text(encoding="utf-8").splitlines())
    return dict(line.split(">=") for line in lines if line)


OLDEST: Final = _oldest()
"""The payload's packages and the oldest version of each."""
