"""Evaluating a drafter: one of a run where the run is, or a folder of this machine, here or in a place."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from controller.errors import UsageError
from controller.includes import PREFIX
from controller.inventory import Host
from controller.narration import Say
from controller.paths import expanded
from controller.payload_tool import run_tool
from controller.place import open_place
from controller.run_place import RunPlace
from controller.ship import Sent

CONFIG: Final = "config.json"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """How to evaluate; None: as the tool's default says."""

    prompts: Path | None
    count: int | None
    max_new_tokens: int | None
    device: str
    dtype: str | None

    def argv(self) -> list[str]:
        """The tool's options for it."""
        options = {
            "--count": self.count,
            "--max-new-tokens": self.max_new_tokens,
            "--device": self.device,
            "--dtype": self.dtype,
            "--prompts": f"{PREFIX}{self.prompts.absolute().name}" if self.prompts is not None else None,
        }
        given = [word for key, value in options.items() if value is not None for word in (key, str(value))]
        return [*given, "--json"]

    def files(self) -> list[Path]:
        """What has to be in the place. Raises UsageError when it is not here."""
        if self.prompts is None:
            return []
        if not self.prompts.exists():
            raise UsageError(f"--prompts {self.prompts}: there is no such file")
        return [self.prompts]


def is_folder(text: str | None) -> bool:
    """Whether `text` means the folder of a drafter here, and not a run by its id."""
    return text is not None and ("/" in text or text == "." or (Path(text) / CONFIG).is_file())


def evaluate_run(
    directory: Path,
    question: Question,
    *,
    checkpoint: str | None,
    say: Say,
    progress: Sent | None = None,
) -> Mapping[str, Any]:
    """Evaluate a checkpoint of the run mirrored in `directory`, where the run is; the tool's record.

    Raises ToolError for what the place refuses.
    """
    run_place = RunPlace.read(directory)
    files = question.files()
    argv = [run_place.run_dir, *question.argv()]
    argv += ["--checkpoint", checkpoint] if checkpoint is not None else []
    with open_place(run_place.host) as place:
        return run_tool(place, "evaluate", argv, files=files, say=say, progress=progress)


def evaluate_folder(
    folder: Path,
    question: Question,
    host: Host,
    *,
    target: str | None,
    trust_remote_code: bool,
    say: Say,
    progress: Sent | None = None,
    accept_new_host_key: bool = False,
) -> Mapping[str, Any]:
    """Evaluate the drafter in `folder` in `host`, where it is brought if need be; the tool's record.

    `target`: None for the one that the folder names. Raises UsageError without prompts, ToolError for what
    the place refuses.
    """
    if not (folder / CONFIG).is_file():
        raise UsageError(
            f"{folder}: has no {CONFIG}; expected the folder of a DFlash drafter, or a run's id",
            "dflashctl runs lists the runs.",
        )
    if question.prompts is None:
        raise UsageError(
            f"{folder}: a drafter's folder has no prompts of its own", "Name a file: --prompts FILE"
        )
    argv = [f"{PREFIX}{folder.absolute().name}", *question.argv()]
    argv += ["--target", _located(target, host)] if target is not None else []
    argv += ["--trust-remote-code"] if trust_remote_code else []
    files: Sequence[Path] = [folder, *question.files()]
    with open_place(host, accept_new_host_key=accept_new_host_key) as place:
        argv += ["--cache", f"{place.workspace}/cache"]
        return run_tool(place, "evaluate", argv, files=files, say=say, progress=progress)


def _located(target: str, host: Host) -> str:
    """A target's folder that is relative here, as the place finds it."""
    here = expanded(target)
    return str(here.absolute()) if host.kind == "local" and here.is_dir() else target
