"""What the threads of one run share."""

from __future__ import annotations

import collections
import dataclasses
import queue
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from remote_payload.job import Job
from remote_payload.rundir import RecordWriter
from remote_payload.train.alarm import TauWatch
from remote_payload.train.batch import Batch, BatchMaker, RowShape
from remote_payload.train.bottleneck import Periodic
from remote_payload.train.buckets import EpochPlan
from remote_payload.train.checkpoint import folder_of
from remote_payload.train.checkpoint_index import Best, CheckpointIndex
from remote_payload.train.contract import Contract
from remote_payload.train.drafter import DrafterConfig
from remote_payload.train.evaluation import Evaluation, Report
from remote_payload.train.features import FeatureCache, Features
from remote_payload.train.progress import Progress
from remote_payload.train.run_control import Handover, OrderedQueue, RunControl
from remote_payload.train.saver import Saver
from remote_payload.train.statistics import Statistics
from remote_payload.train.sync import Reduction
from remote_payload.train.target import Target
from remote_payload.train.useful_work import UsefulWork

Log = Callable[[str], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """The drafter after a step, on its way to the evaluator."""

    step: int
    weights: dict[str, Tensor]
    ready: torch.cuda.Event | None
    """Recorded after the copy; None on a CPU."""
    seconds: float
    """That the copy took of the drafter's time."""
    tau_estimate: float | None
    """Training's own at that time."""


@dataclasses.dataclass(kw_only=True, slots=True)
class Run:
    """Everything the threads of one run share."""

    job: Job
    run_dir: Path
    model: str | Path
    config: DrafterConfig
    shape: RowShape
    statistics: Statistics
    steps: int
    rows_per_step: int
    batches_per_epoch: int
    """Of the first epoch; later ones differ by a few."""
    plan: Callable[[int], EpochPlan]
    maker: BatchMaker
    cache: FeatureCache | None
    evaluation: Evaluation | None
    events: RecordWriter
    progress: Progress
    control: RunControl
    log: Log
    batches: OrderedQueue[Batch]
    features: list[OrderedQueue[Features]]
    targets: list[Handover[Target]]
    ready: list[Handover[bool]]
    reduction: Reduction
    to_evaluate: queue.SimpleQueue[Snapshot | None]
    checkpoints: CheckpointIndex
    contract: Contract
    watch: TauWatch
    saver: Saver
    init_from: Path | None = None
    """The released drafter whose weights the run begins with."""
    loaded: Target | None = None
    """A target that was loaded before any had its device; the first one there takes it."""
    resume_from: Path | None = None
    """The checkpoint that this attempt goes on from."""
    first_step: int = 0
    """Steps that earlier attempts made."""
    best: Best | None = None
    reports: list[Report] = dataclasses.field(default_factory=list)
    unevaluated: int = 0
    """Evaluations of this attempt that there was no memory for."""
    first_loss: float | None = None
    last_loss: float | None = None
    step: int = 0
    stopped: bool = False
    eager_step_s: float | None = None
    compiled_step_s: float | None = None
    saved: Path | None = None
    trained: collections.deque[tuple[int, Batch]] = dataclasses.field(default_factory=collections.deque)
    """Step (from 1) and batch of the rows since the last report, of all replicas."""

    says_bottleneck: Periodic = dataclasses.field(default_factory=Periodic)
    useful: UsefulWork = dataclasses.field(default_factory=UsefulWork)
    """Operations of both sides, for MFU."""
    training_s: float = 0.0
    """Seconds from the first step's start to the last step's end."""

    @property
    def tokens_per_s(self) -> float | None:
        """Context tokens a second over all steps so far."""
        return self.progress.tokens / self.training_s if self.training_s else None

    @property
    def first_sequence(self) -> int:
        """The number of the first batch of this attempt."""
        return self.first_step * self.rows_per_step

    def evaluates(self, step: int) -> bool:
        """Whether the drafter is evaluated after `step` steps."""
        every = self.job.eval_every
        due = step in (0, self.steps) or (bool(every) and step % every == 0)
        return self.evaluation is not None and due

    @property
    def best_path(self) -> Path | None:
        """The checkpoint of the best decoded tau, while it stands there."""
        path = folder_of(self.run_dir, self.best.step) if self.best else None
        return path if path is not None and path.is_dir() else None

    @property
    def replicas(self) -> int:
        """M, the number of drafter replicas."""
        return len(self.features)
