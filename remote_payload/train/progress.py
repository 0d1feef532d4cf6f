"""The record of progress: all of progress.json, in one place that threads write to and one thread reads.

What the host knows (tokens, batches, waiting) is counted as it happens; what only the device knows comes as
a `Reading`, at most once a second.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
from collections.abc import Sequence
from typing import Any

import torch

from remote_payload.train.batch import Batch
from remote_payload.train.run_control import OrderedQueue, ThreadStatus
from remote_payload.train.statistics import Reading, quotient

EMA_STEPS = 50
"""Steps after which a loss counts 1/e in the moving average."""

_COUNTED_BY_BUCKET = (
    *("batches", "tokens", "drawn", "candidates", "documents", "covered"),
    *("padding", "seconds", "loss"),
)
_CARRIED_ON = ("loss", "loss_ema", "tau_estimate", "tau", "tau_step", "nonfinite_steps", "alarm")
"""What a checkpoint keeps of the progress; the rest is of one attempt, or follows from the step."""


@dataclasses.dataclass(slots=True)
class BucketProgress:
    """One length bucket so far."""

    low: int
    high: int
    planned: int = 0
    planned_share: float = 0.0
    batches: int = 0
    tokens: int = 0
    drawn: int = 0
    candidates: int = 0
    documents: int = 0
    covered: int = 0
    padding: float = 0.0
    seconds: float = 0.0
    loss: float | None = None
    peak_gib: float | None = None

    def record(self, number: int) -> dict[str, Any]:
        """The bucket's entry in progress.json."""
        return {
            "bucket": number,
            "low": self.low,
            "high": self.high,
            "planned": self.planned,
            "planned_share": rounded(self.planned_share, 4),
            "batches": self.batches,
            "tokens": self.tokens,
            "padding_share": rounded(self.padding / self.batches, 4) if self.batches else None,
            "anchor_coverage_share": rounded(quotient(self.drawn, self.candidates), 4),
            "tokens_per_s": rounded(quotient(self.tokens, self.seconds), 1),
            "loss": rounded(self.loss, 4),
            "peak_gib": rounded(self.peak_gib, 3),
        }


class Progress:
    """The whole of progress.json; threads write to it, one thread reads it once a second."""

    def __init__(self, edges: Sequence[int]) -> None:
        self.lock = threading.Lock()
        self.phase = "loading"
        self.buckets = [BucketProgress(low, high) for low, high in itertools.pairwise(edges)]
        self.threads: list[ThreadStatus] = []
        self.queues: dict[str, list[OrderedQueue[Any]]] = {}
        self.values: dict[str, Any] = {
            "step": 0,
            "steps": None,
            "epoch": 0.0,
            "eta_s": None,
            "loss": None,
            "loss_ema": None,
            "ce": None,
            "tau_estimate": None,
            "tau": None,
            "tau_step": None,
            "gradient_norm": None,
            "learning_rate": None,
            "step_s": None,
            "tokens_per_s": None,
            "mfu_share": None,
            "execution": None,
            "recompiles": 0,
            "nonfinite_steps": 0,
            "checkpoint": None,
            "checkpoint_error": None,
            "best": None,
            "alarm": None,
            "skipped": {},
        }
        self.tokens = 0
        self.drawn = 0
        self.candidates = 0
        self._ema_sum = self._ema_weight = 0.0

    def thread(self, name: str, role: str, device: str) -> ThreadStatus:
        """Register a thread."""
        status = ThreadStatus(name, role, device)
        with self.lock:
            self.threads.append(status)
        return status

    def set_plan(self, batches: Sequence[int]) -> None:
        """The batches of each bucket in the epoch that begins."""
        with self.lock:
            for bucket, planned in zip(self.buckets, batches, strict=True):
                bucket.planned = planned
                bucket.planned_share = planned / max(1, sum(batches))

    def row_done(self, batch: Batch, seconds: float) -> None:
        """Count one trained row; `seconds` is its share of the step's time."""
        with self.lock:
            self.tokens += batch.tokens
            self.drawn += batch.drawn
            self.candidates += batch.supervised
            bucket = self.buckets[batch.bucket]
            bucket.batches += 1
            bucket.tokens += batch.tokens
            bucket.drawn += batch.drawn
            bucket.candidates += batch.supervised
            bucket.documents += batch.documents
            bucket.covered += batch.covered
            bucket.padding += batch.padding_share
            bucket.seconds += seconds

    def rows(self) -> int:
        """Rows trained so far, of earlier attempts too."""
        with self.lock:
            return sum(bucket.batches for bucket in self.buckets)

    def coverage(self) -> dict[str, float | None]:
        """Shares of eligible anchor places that were drawn, and of documents that drew one, so far."""
        with self.lock:
            return self._coverage()

    def _coverage(self) -> dict[str, float | None]:
        covered, documents = (
            sum(getattr(bucket, name) for bucket in self.buckets) for name in ("covered", "documents")
        )
        return {
            "anchor_coverage_share": rounded(quotient(self.drawn, self.candidates), 4),
            "document_coverage_share": rounded(quotient(covered, documents), 4),
        }

    def target_peak(self, bucket: int, peak_gib: float) -> None:
        """Note the most memory a target's device held during a batch of `bucket`."""
        with self.lock:
            held = self.buckets[bucket]
            held.peak_gib = max(held.peak_gib or 0.0, peak_gib)

    def read(self, reading: Reading, steps: int) -> None:
        """Take in a reading over the last `steps` steps."""
        with self.lock:
            for bucket, loss in zip(self.buckets, reading.bucket_loss, strict=True):
                bucket.loss = bucket.loss if loss is None else loss
            self.values["loss"] = rounded(reading.loss, 5)
            self.values["ce"] = rounded(reading.ce, 5)
            self.values["tau_estimate"] = rounded(reading.tau_estimate, 4)
            if reading.loss is not None and math.isfinite(reading.loss):
                keep = (1 - 1 / EMA_STEPS) ** steps
                self._ema_sum = keep * self._ema_sum + (1 - keep) * reading.loss
                self._ema_weight = keep * self._ema_weight + (1 - keep)
                self.values["loss_ema"] = rounded(self._ema_sum / self._ema_weight, 5)

    def update(self, **values: Any) -> None:
        """Set top-level values of progress.json."""
        with self.lock:
            assert not values.keys() - self.values.keys()
            self.values.update(values)

    def state(self) -> dict[str, Any]:
        """The counters that a resumed run goes on with, for a checkpoint."""
        with self.lock:
            return {
                "tokens": self.tokens,
                "drawn": self.drawn,
                "candidates": self.candidates,
                "ema": [self._ema_sum, self._ema_weight],
                "buckets": [
                    {name: getattr(bucket, name) for name in _COUNTED_BY_BUCKET} for bucket in self.buckets
                ],
                "values": {name: self.values[name] for name in _CARRIED_ON},
            }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on with the counters of `state`."""
        with self.lock:
            self.tokens, self.drawn = state["tokens"], state["drawn"]
            self.candidates = state["candidates"]
            self._ema_sum, self._ema_weight = state["ema"]
            for bucket, counted in zip(self.buckets, state["buckets"], strict=True):
                for name in _COUNTED_BY_BUCKET:
                    setattr(bucket, name, counted.get(name, getattr(bucket, name)))
            self.values |= {name: state["values"].get(name) for name in _CARRIED_ON}

    def queue_depths(self) -> dict[str, int]:
        """Rows that wait in each kind of queue."""
        return {name: sum(map(len, queues)) for name, queues in self.queues.items()}

    def snapshot(self) -> dict[str, Any]:
        """The fields of progress.json."""
        with self.lock:
            sides = {
                role: [t.waiting_share() for t in self.threads if t.role == role]
                for role in ("target", "drafter")
            }
            return {
                "phase": self.phase,
                **self.values,
                "tokens": self.tokens,
                "anchors": self.drawn,
                **self._coverage(),
                "wait": {
                    f"{role}s_share": rounded(quotient(sum(shares), len(shares)), 3)
                    for role, shares in sides.items()
                },
                "queues": {
                    name: {"depth": depth, "capacity": sum(q.capacity for q in self.queues[name])}
                    for name, depth in self.queue_depths().items()
                },
                "buckets": [bucket.record(number) for number, bucket in enumerate(self.buckets)],
                "threads": [thread.record() for thread in self.threads],
                "devices": [device_record(d, self.threads) for d in _devices(self.threads)],
            }


def device_record(device: str, threads: Sequence[ThreadStatus]) -> dict[str, Any]:
    """A device's entry in progress.json; memory is null on a CPU."""
    record: dict[str, Any] = {
        "device": device,
        "uuid": None,
        "roles": [thread.name for thread in threads if thread.device == device],
        "allocated_gib": None,
        "reserved_gib": None,
        "peak_gib": None,
        "total_gib": None,
    }
    if device.startswith("cuda") and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(device)
        record |= {
            "uuid": f"GPU-{properties.uuid}",
            "allocated_gib": gib(torch.cuda.memory_allocated(device)),
            "reserved_gib": gib(torch.cuda.memory_reserved(device)),
            "peak_gib": gib(torch.cuda.max_memory_allocated(device)),
            "total_gib": gib(properties.total_memory),
        }
    return record


def gib(size: int) -> float:
    """Bytes in GiB, to three places."""
    return round(size / 2**30, 3)


def rounded(value: float | None, places: int) -> float | None:
    """`value` to `places` places, or None."""
    return None if value is None else round(value, places)


def _devices(threads: Sequence[ThreadStatus]) -> list[str]:
    return sorted({thread.device for thread in threads if thread.role != "reader"})
