"""The GPUs as they are now, for a person who asks: one object a listing, once or again and again.

What the sampler writes for a run is joined here: its constants, its newest sample, and which living run has
the GPU. Standard library only.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

from remote_payload.gpu import COMMAND, GpuSampler, Timing
from remote_payload.living import living_runs

_PATIENCE_S: Final = 20.0
"""A person waits: less than a run's sampler gives a first answer."""
_TROUBLE_S: Final = 10.0
"""After a problem, how long a single listing waits for what can be had all the same."""


class _Listings:
    """Takes the sampler's records (as a `RecordWriter` does) and prints one object a listing."""

    def __init__(self, workspace: Path) -> None:
        self._workspace = workspace
        self._constants: dict[str, dict[str, Any]] = {}
        self.problem = ""
        self.news = threading.Event()
        self.done = threading.Event()

    def write(self, kind: str, **fields: Any) -> None:
        """One record of the sampler."""
        if kind == "gpu_constants":
            self._constants |= {gpu["uuid"]: gpu for gpu in fields["gpus"]}
        elif kind == "gpu":
            self._tell([self._joined(uuid, sample) for uuid, sample in fields["gpus"].items()], self.problem)
        elif kind == "gpu_none":
            self._tell([], fields["reason"])

    def _joined(self, uuid: str, sample: dict[str, Any]) -> dict[str, Any]:
        constants = self._constants.get(uuid, {})
        why = {**constants.get("why", {}), **sample.get("why", {})}
        return {"uuid": uuid, **constants, **sample, "why": why}

    def trouble(self, text: str) -> None:
        """A problem of the sampler, as a sentence."""
        self.problem = text
        self.news.set()

    def _tell(self, gpus: list[dict[str, Any]], why: str) -> None:
        runs = list(living_runs(self._workspace))
        for gpu in gpus:
            gpu["runs"] = [run["id"] for run in runs if gpu["uuid"] in run["uuids"]]
        self.problem = ""
        listing = {"t": round(time.time(), 3), "gpus": gpus, "why": why or None, "runs": runs}
        print(json.dumps(listing), flush=True)
        self.done.set()
        self.news.set()


def list_gpus(workspace: Path, every_s: float | None) -> int:
    """Say the GPUs once, or every `every_s` seconds (at least 1) until stdin ends.

    Each object: `t`, `gpus` (index, uuid, the keys of docs/rundir.md's gpu.jsonl, `runs`: ids of the living
    runs that use it), `why` (null, or what is wrong), `runs` (the living runs).
    """
    listings = _Listings(workspace)
    timing = Timing(interval=max(1.0, every_s or 5.0), first_answer=_PATIENCE_S)
    sampler = GpuSampler(listings, on_problem=listings.trouble, timing=timing)
    sampler.start()
    try:
        if every_s is None:
            listings.news.wait(timing.first_answer + timing.silence)
            if not listings.done.wait(_TROUBLE_S if listings.problem else 0):
                listings.write("gpu_none", reason=listings.problem or f"{COMMAND} gave no answer")
        else:
            while sys.stdin.buffer.read(4096):
                pass
    finally:
        sampler.stop()
    return 0
