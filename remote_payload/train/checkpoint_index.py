"""Which checkpoints stay, which is the best, and `checkpoints/index.json`, which says so to everybody.

Three reasons keep a checkpoint: it is among the newest, it has the best decoded tau, or its step is a
multiple of `checkpoint_keep_every`. One whose evaluation is still under way stays too. An evaluation runs
beside training, on a copy of the weights; so every evaluated step writes a whole checkpoint, and the verdict,
when it comes, decides how long that stays. Whole, because the best drafter may be what somebody goes on from.

The truth is in the folders: an evaluation's result stands in `step-N/evaluation.json`, and the index is made
from them whenever it is written or asked for. A lost index loses nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from remote_payload import rundir
from remote_payload.job import JobError
from remote_payload.train import checkpoint
from remote_payload.train.drafter import DrafterConfig

INDEX = "index.json"
EVALUATION = "evaluation.json"


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A checkpoint that stands there; `tau` is None when it was not evaluated."""

    step: int
    bytes: int
    t: float | None
    tau: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class Best:
    """The step with the best decoded tau so far."""

    step: int
    tau: float


def entries(run_dir: Path) -> list[Entry]:
    """The checkpoints in a run directory by rising step, read from their folders."""
    found = []
    for step in rundir.checkpoint_steps(run_dir):
        folder = checkpoint.folder_of(run_dir, step)
        evaluation = rundir.read_whole(folder / EVALUATION) or {}
        tau = evaluation.get("tau")
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile by the run that owns it
            found.append(
                Entry(
                    step,
                    checkpoint.size_of(folder),
                    checkpoint.written_at(folder),
                    float(tau) if isinstance(tau, int | float) else None,
                )
            )
    return found


def best_of(found: list[Entry]) -> Entry | None:
    """The entry of the highest tau; of equal ones the latest, which has seen more."""
    evaluated = [entry for entry in found if entry.tau is not None]
    return max(evaluated, key=lambda entry: (entry.tau, entry.step), default=None)


def find_checkpoint(run_dir: Path, which: str) -> Path:
    """The folder of a checkpoint by its name: `best`, `last`, `step-N` or `N`.

    `best` is the one with the highest decoded tau. Raises JobError naming what stands there instead.
    """
    found = entries(run_dir)
    if not found:
        raise JobError(f"{run_dir / rundir.CHECKPOINTS}: holds no checkpoint; let the run write one")
    if which == "last":
        return checkpoint.folder_of(run_dir, found[-1].step)
    if which == "best":
        best = best_of(found)
        if best is None:
            raise JobError(
                f"{run_dir / rundir.CHECKPOINTS}: none of its {len(found)} checkpoints was evaluated, so none"
                " is the best; name one (last, step-N), or set held_out and eval_every in the job"
            )
        return checkpoint.folder_of(run_dir, best.step)
    step = which.removeprefix("step-")
    if step.isdecimal() and int(step) in {entry.step for entry in found}:
        return checkpoint.folder_of(run_dir, int(step))
    names = ", ".join(f"step-{entry.step}" for entry in found)
    raise JobError(f"checkpoint {which!r}: there is none of that name; expected last, best or one of {names}")


class CheckpointIndex:
    """The checkpoints of the run that this process trains; safe between its threads."""

    def __init__(self, run_dir: Path, *, keep: int, keep_best: bool, keep_every: int) -> None:
        """Take stock of `run_dir`.

        Args:
            keep: how many of the newest stay.
            keep_best: whether the one of the best tau stays.
            keep_every: multiples of this step stay; 0: none.
        """
        self._run_dir = run_dir
        self._keep, self._keep_best, self._keep_every = keep, keep_best, keep_every
        self._lock = threading.Lock()
        self._awaited: set[int] = set()
        """Steps whose evaluation is under way."""
        self.problem: str | None = None
        """Why the index or an old checkpoint could not be written or removed; None: all is well."""

    @property
    def keeps_best(self) -> bool:
        """Whether an evaluated step has to be saved."""
        return self._keep_best

    def best(self) -> Entry | None:
        """The best of the checkpoints that stand there."""
        return best_of(entries(self._run_dir))

    def tau(self, step: int) -> float | None:
        """The decoded tau of a checkpoint, if it stands there and was evaluated."""
        return next((entry.tau for entry in entries(self._run_dir) if entry.step == step), None)

    def expect(self, step: int) -> None:
        """The evaluation of a checkpoint that stands there follows: it stays until then."""
        with self._lock:
            self._awaited.add(step)

    def expect_no_longer(self, step: int) -> None:
        """The evaluation of `step` does not come after all."""
        with self._lock:
            self._awaited.discard(step)
            self._tidy()

    def save(
        self,
        step: int,
        *,
        config: DrafterConfig,
        weights: Mapping[str, Tensor],
        training: Mapping[str, Tensor],
        record: Mapping[str, Any],
        awaited: bool,
    ) -> Path:
        """Write the checkpoint of `step` and let go of those that nothing keeps.

        `awaited`: its evaluation follows, and it stays until then. Raises SaveError; the old ones stay then.
        """
        with self._lock:
            self.problem = None
            path = checkpoint.save(
                self._run_dir, step, config=config, weights=weights, training=training, record=record
            )
            if awaited:
                self._awaited.add(step)
            self._tidy()
            return path

    def evaluated(self, step: int, record: Mapping[str, Any]) -> bool:
        """Note the evaluation of a saved step; `record` has its `tau`. Whether it is the best that stands."""
        with self._lock:
            self.problem = None
            self._awaited.discard(step)
            folder = checkpoint.folder_of(self._run_dir, step)
            if folder.is_dir():
                try:
                    line = rundir.encode(rundir.stamp("evaluation", {**record, "step": step}))
                    rundir.write_whole(folder / EVALUATION, line)
                except OSError as error:
                    self.problem = f"the evaluation of step {step} could not be kept ({error.strerror})"
            best = self.best()
            self._tidy()
            return best is not None and best.step == step

    def _tidy(self) -> None:
        """Remove what nothing keeps, and write the index. A disk that refuses is noted and ends nothing."""
        found = entries(self._run_dir)
        if not found:  # an evaluation before the first checkpoint
            return
        kept = {entry.step: self._reasons(entry, found) for entry in found}
        try:
            for step, reasons in kept.items():
                if not reasons:
                    checkpoint.remove(checkpoint.folder_of(self._run_dir, step))
            standing = [entry for entry in found if kept[entry.step]]
            best = best_of(standing)
            content = {
                "last": standing[-1].step if standing else None,
                "best": {"step": best.step, "tau": best.tau} if best else None,
                "checkpoints": [
                    {**dataclasses.asdict(entry), "path": f"step-{entry.step}", "kept": kept[entry.step]}
                    for entry in standing
                ],
            }
            text = json.dumps(rundir.stamp("checkpoints", content), indent=2)
            rundir.write_whole(self._run_dir / rundir.CHECKPOINTS / INDEX, text.encode() + b"\n")
        except OSError as error:
            self.problem = f"{error.filename}: {error.strerror}"

    def _reasons(self, entry: Entry, found: list[Entry]) -> list[str]:
        newest = {other.step for other in found[-self._keep :]}
        best = best_of(found)
        reasons = {
            "newest": entry.step in newest,
            "best": self._keep_best and best is not None and best.step == entry.step,
            "every": bool(self._keep_every) and entry.step % self._keep_every == 0,
            "evaluating": entry.step in self._awaited,
        }
        return [reason for reason, holds in reasons.items() if holds]
