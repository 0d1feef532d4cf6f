"""The communication thread: the only one that calls NCCL, for the GPUs of all replicas.

torch's NCCL for one process keeps its communicators in a map without a lock, and a collective that is begun
on one GPU and never on another hangs both for ever. So one thread begins each collective on all GPUs in one
group, and only after every replica has come to the end of its step: one that failed before has begun nothing,
and the others leave by Aborted.

Nothing here waits for a device, and no collective is in a graph. A replica's stream marks each bucket of its
flat gradient when the bucket is collected. The side stream of its GPU waits for the first mark of all
replicas, so that no NCCL kernel holds multiprocessors while another replica still computes, and then for the
marks of its own GPU, bucket by bucket; the replica's stream waits for the end. NCCL takes one rank a GPU:
replicas that share one are added up there first, and get copies of the sum.

What is overlapped and what is not, by arithmetic for 1.05e9 weights (8B) on two GPUs, of which each sends and
receives the whole gradient at 330 GB/s, beside a step of 158 ms:

- The sum takes 12.7 ms in float32, 8 % of the step, and 6.4 ms in bfloat16, 4 %. So where a replica's step is
  one row, the gradient stays in the type in which autograd gives it, which halves it and all that reads it.
  Each of D - 1 additions then rounds to bfloat16, as autograd rounded each part. Sums over rows are float32.
- Collecting (1 ms in bfloat16, 1.5 in float32) runs beside the sum of earlier buckets: 0.1 ms of it, the
  first bucket, is in the open. Buckets end where a parameter does, from 64 MiB on, large enough for NCCL.
- Forward and backward are one graph, or one compiled call, in which the first gradient and the last become
  known together to whoever stands outside; a collective inside is ruled out. So nothing runs beside backward.
- Where a step has several rows they are added up first: sums after each row would move so much more often,
  and that of the last row would be in the open all the same.
- Clipping needs the norm of the whole sum, so AdamW cannot begin with the first bucket. Norms bucket by
  bucket would hide 0.5 ms of reading, for a norm outside of the optimizer's graph.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from remote_payload.job import JobError
from remote_payload.train import execution
from remote_payload.train.agreement import Agreement, Contribution
from remote_payload.train.devices import DRAFTERS_FIRST
from remote_payload.train.run_control import RunControl, ThreadStatus

TRIAL_LIMIT_S = 60.0
"""For NCCL's first sums, which take a second or two."""

_TRIALS = (
    (torch.float64, 100),
    (torch.bfloat16, 1000),
    (torch.bfloat16, 2**25),
    (torch.float32, 1000),
    (torch.float32, 2**24),
)
"""Types and sizes of the trial's sums: statistics, buckets of norms and of matrices. NCCL connects its GPUs
anew for each of its algorithms, so this also brings forward what the first step would wait for."""


class Gpus:
    """What is asked of CUDA and of NCCL."""

    def obstacle(self, devices: Sequence[torch.device]) -> str | None:
        """Why NCCL cannot sum over these devices of replicas, or None; starts nothing."""
        kinds = {device.type for device in devices}
        if kinds != {"cuda"}:
            return "NCCL sums between GPUs alone"
        if len(set(devices)) == 1:
            return f"all replicas are on {devices[0]}"
        if not hasattr(torch._C, "_nccl_all_reduce"):
            return "this torch was built without NCCL"
        if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
            return "with CUDA_LAUNCH_BLOCKING one thread cannot begin a collective on several GPUs"
        return None

    def side(self, device: torch.device) -> torch.cuda.Stream:
        """A new stream."""
        return torch.cuda.Stream(device, DRAFTERS_FIRST)  # every replica waits for a sum

    def current(self, device: torch.device) -> torch.cuda.Stream:
        """This thread's stream."""
        return torch.cuda.current_stream(device)

    def on(self, stream: torch.cuda.Stream) -> contextlib.AbstractContextManager[None]:
        """Put work on `stream`."""
        return torch.cuda.stream(stream)

    def event(self) -> torch.cuda.Event:
        """A new event."""
        return torch.cuda.Event()

    def all_reduce(self, tensors: Sequence[Tensor], streams: Sequence[torch.cuda.Stream]) -> None:
        """Begin to sum `tensors`, one a device, in place; raises RuntimeError for what NCCL refuses."""
        from torch.cuda import nccl

        nccl.all_reduce(tensors, streams=streams)


@dataclasses.dataclass(slots=True)
class _Rank:
    """One GPU, as NCCL counts them."""

    device: torch.device
    replicas: list[int]
    stream: torch.cuda.Stream
    done: torch.cuda.Event
    statistics: Tensor | None = None


class Communication:
    """Sums over the replicas of several GPUs by NCCL, in the thread that runs `trial` and `serve`."""

    def __init__(self, devices: Sequence[torch.device], control: RunControl, gpus: Gpus) -> None:
        """`devices` of the replicas by number; `gpus` has no obstacle for them."""
        self._devices, self._control, self._gpus = list(devices), control, gpus
        self._ranks: list[_Rank] = []
        self._given: list[Contribution | None] = [None] * len(devices)
        self._agreement: Agreement | None = None
        self._step = 0
        self._closed = False
        self._changed = threading.Condition()
        control.on_abort(self._wake)

    def trial(self) -> float:
        """Start NCCL and sum numbers whose sums are known; seconds that it took.

        Raises RuntimeError for NCCL's errors and for wrong sums, JobError when it hangs: then a GPU is
        occupied for good.
        """
        start = time.perf_counter()
        for device in dict.fromkeys(self._devices):
            replicas = [number for number, each in enumerate(self._devices) if each == device]
            self._ranks.append(_Rank(device, replicas, self._gpus.side(device), self._gpus.event()))
        count = len(self._ranks)
        pairs: list[tuple[Tensor, Tensor]] = []
        with execution.CAPTURE_LOCK:
            for dtype, size in _TRIALS:
                given = []
                for number, rank in enumerate(self._ranks):
                    with self._gpus.on(rank.stream):  # small whole numbers: exact in every type and order
                        places = torch.arange(size, device=rank.device).remainder_(7)
                        given.append((places + number).to(dtype))
                        expected = places * count + count * (count - 1) // 2
                        pairs.append((given[-1], expected.to(dtype)))
                self._gpus.all_reduce(given, self._streams)
            for rank in self._ranks:
                with self._gpus.on(rank.stream):
                    rank.done.record()
        while not all(rank.done.query() for rank in self._ranks):
            if time.perf_counter() - start > TRIAL_LIMIT_S:
                raise JobError(
                    f"NCCL's trial sums were not done after {TRIAL_LIMIT_S:.0f} s; set reduction = 'peer'"
                )
            self._control.check()
            time.sleep(0.002)
        wrong = [f"{found.dtype} [{len(found)}]" for found, sum_ in pairs if not found.equal(sum_)]
        if wrong:
            raise RuntimeError(f"wrong sums of {', '.join(dict.fromkeys(wrong))}")
        return time.perf_counter() - start

    def serve(self, status: ThreadStatus | None = None) -> None:
        """Add up step by step until `close`. Raises Aborted when another thread failed."""
        while True:
            if status is not None:
                status.enter("waiting for the replicas")
            given = self._next()
            if given is None:
                return
            if status is not None:
                status.enter("summing")
            self._begin(given)
            with self._changed:
                self._agreement = Agreement.of(given)
                self._given = [None] * len(given)
                self._step += 1
                self._changed.notify_all()

    def reduce(self, replica: int, mine: Contribution) -> tuple[Agreement, Tensor]:
        """As `Reduction.reduce`; on the stream on which `mine.weights` marked its buckets."""
        with self._changed:
            self._given[replica] = mine
            self._changed.notify_all()
            step = self._step
            while self._step == step:
                self._control.check()
                self._changed.wait()
            agreement = self._agreement
        rank = next(rank for rank in self._ranks if replica in rank.replicas)
        self._gpus.current(rank.device).wait_event(rank.done)
        assert agreement is not None and rank.statistics is not None
        return agreement, rank.statistics

    def close(self) -> None:
        """Let `serve` return: no replica will come again."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _next(self) -> list[Contribution] | None:
        """What all replicas brought, once all have; None after `close`."""
        with self._changed:
            while True:
                self._control.check()
                given = [contribution for contribution in self._given if contribution is not None]
                if len(given) == len(self._given):
                    return given
                if self._closed:
                    assert not given, "a replica came to a step that another has left"
                    return None
                self._changed.wait()

    def _begin(self, given: list[Contribution]) -> None:
        """Put the whole reduction on the side streams."""
        gpus = self._gpus
        with execution.CAPTURE_LOCK:
            for number, bucket in enumerate(given[0].weights.buckets):
                parts = []
                for rank in self._ranks:
                    here = [given[replica] for replica in rank.replicas]
                    for contribution in given if number == 0 else here:
                        rank.stream.wait_event(contribution.weights.ready[number])
                    with gpus.on(rank.stream):
                        parts.append(_add_up(here, bucket))
                gpus.all_reduce(parts, self._streams)
                for rank in self._ranks:
                    with gpus.on(rank.stream):
                        for replica in rank.replicas[1:]:
                            first, other = given[rank.replicas[0]].weights, given[replica].weights
                            other.total[bucket].copy_(first.total[bucket])
            gpus.all_reduce([self._statistics(rank, given) for rank in self._ranks], self._streams)
            for rank in self._ranks:
                with gpus.on(rank.stream):
                    rank.done.record()

    def _statistics(self, rank: _Rank, given: list[Contribution]) -> Tensor:
        """The sum over a GPU's replicas, in a tensor of the rank's own."""
        with self._gpus.on(rank.stream):
            if rank.statistics is None:
                rank.statistics = torch.empty_like(given[rank.replicas[0]].statistics)
            for number, replica in enumerate(rank.replicas):
                if number == 0:
                    rank.statistics.copy_(given[replica].statistics)
                else:
                    rank.statistics.add_(given[replica].statistics)
        return rank.statistics

    @property
    def _streams(self) -> list[torch.cuda.Stream]:
        return [rank.stream for rank in self._ranks]

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


def _add_up(here: list[Contribution], bucket: slice) -> Tensor:
    """A bucket's sum over the replicas of one GPU, where the first of them has its total."""
    first = here[0].weights
    total = first.total[bucket]
    if first.total is not first.local:
        total.copy_(first.local[bucket])
    for other in here[1:]:
        total.add_(other.weights.local[bucket])
    return total
