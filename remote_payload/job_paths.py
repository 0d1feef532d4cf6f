"""Where the files lie that a job names. Standard library only."""

from __future__ import annotations

from pathlib import Path
from typing import Final

PAYLOAD_PREFIX: Final = "payload:"
"""A path that begins so is meant inside the shipped `remote_payload` folder."""


def locate(path: str, workspace: Path) -> Path:
    """A path of the job: inside the shipped payload, absolute, or relative to the workspace."""
    if path.startswith(PAYLOAD_PREFIX):
        return Path(__file__).parent / path.removeprefix(PAYLOAD_PREFIX)
    return workspace / Path(path).expanduser()
