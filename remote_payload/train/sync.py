"""The reduction between replicas: every replica ends a step with the same summed gradient.

Replicas run in lockstep. Each publishes its flat gradient, its statistics and its loss weights; a replica
without a batch takes part with zeros (Model-Optimizer #2342: one that stays away hangs the others). There are
two ways to add up, and all replicas hold the same bits after either:

- `nccl`, where replicas live on several GPUs: one communication thread (`train/communication.py`) sums bucket
  by bucket while later buckets are still being collected. Each GPU sends and receives 2 (D - 1) / D of the
  gradient, whatever the number D of GPUs.
- `peer copies`: after a barrier each replica adds up all gradients in the same order on its own device, and
  so reads all the others': M - 1 times the gradient. For CPUs, for replicas that share one GPU, and where
  NCCL is missing or its trial fails.

Which one it is, is decided before a replica is built, because it says where the sum lies.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from remote_payload import crash
from remote_payload.job import JobError
from remote_payload.train.agreement import Agreement, Contribution
from remote_payload.train.communication import TRIAL_LIMIT_S, Communication, Gpus
from remote_payload.train.run_control import Aborted, RunControl, ThreadStatus
from remote_payload.train.weights import SumPlace

__all__ = ["ALONE", "AUTO", "NCCL", "PEER", "Agreement", "Choice", "Contribution", "Reduction"]

AUTO = "auto"
NCCL = "nccl"
PEER = "peer"
ALONE = "alone"


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """How gradients are added up, and why so."""

    way: str
    """`nccl`, `peer` (copies), or `alone`: there is one replica."""
    reason: str
    trial_s: float | None = None
    """That NCCL's start and trial took; None where it was not tried."""


class Reduction:
    """Sums gradients and statistics over replicas, a thread each.

    Where `threaded`, some thread of the caller's must run `serve`, from before the replicas are built until
    one of them has called `close`.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        control: RunControl,
        wanted: str = AUTO,
        gpus: Gpus | None = None,
    ) -> None:
        """`devices` are those of the replicas, by number; `wanted` is a job's `reduction`.

        Raises JobError for a way that cannot work on these devices.
        """
        self._devices, self._control, self._wanted = list(devices), control, wanted
        gpus = gpus or Gpus()
        obstacle = "the job says so" if wanted == PEER else gpus.obstacle(self._devices)
        if wanted == NCCL and obstacle and len(devices) > 1:
            raise JobError(f"reduction = {NCCL!r}: {obstacle}; use {AUTO!r} or {PEER!r}")
        self.threaded = len(devices) > 1 and obstacle is None
        """Whether a thread must run `serve`."""
        self._communication = Communication(self._devices, control, gpus) if self.threaded else None
        self._copies = PeerCopies(len(devices), control)
        self._decided = threading.Event()
        self._choice: Choice | None = None
        control.on_abort(self._decided.set)
        if len(devices) == 1:
            self._decide(Choice(ALONE, "there is one replica"))
        elif obstacle is not None:
            self._decide(Choice(PEER, obstacle))

    def serve(self, status: ThreadStatus | None = None) -> None:
        """The life of the communication thread: try NCCL, then add up step by step until `close`.

        Returns at once when the trial failed: then replicas add up by peer copies, and `choice` says why.
        Raises Aborted when another thread failed, and JobError when the job wants what does not work.
        """
        assert self._communication is not None
        if self._choice is None:
            self._decide(self._try_nccl(self._communication))
        if self._choice is not None and self._choice.way == NCCL:
            self._communication.serve(status)

    @contextlib.contextmanager
    def serving(self) -> Iterator[Choice]:
        """Have `serve` run in a thread of its own meanwhile, where there is no run that would guard it.

        Gives the way that was chosen. What ended the thread early is raised, in the place of the Aborted that
        it caused.
        """
        failed: list[BaseException] = []

        def guarded() -> None:
            try:
                self.serve()
            except Aborted:
                pass
            except BaseException as error:
                failed.append(error)
                self._control.abort()

        thread = threading.Thread(target=guarded, name="reduction") if self.threaded else None
        if thread is not None:
            thread.start()
        try:
            yield self.choice()
        except Aborted:
            if not failed:
                raise
        finally:
            self.close()
            if thread is not None:
                thread.join()
        if failed:
            raise failed[0]

    def choice(self) -> Choice:
        """The way that was chosen; waits for NCCL's trial.

        Raises Aborted when another thread failed, and JobError when NCCL does not answer.
        """
        if not self._decided.wait(2 * TRIAL_LIMIT_S):
            raise JobError(
                f"NCCL did not start within {2 * TRIAL_LIMIT_S:.0f} s on {_names(self._devices)};"
                f" set reduction = {PEER!r}"
            )
        if self._choice is None:
            raise Aborted
        return self._choice

    def place(self, replica: int) -> SumPlace:
        """Where the sum of a replica must lie; waits as `choice` does, and raises what it raises."""
        way = self.choice().way
        if way == ALONE:
            return SumPlace.ALONE
        if way == PEER:
            return SumPlace.IN_FLOAT32
        shared = self._devices.count(self._devices[replica]) > 1
        return SumPlace.BESIDE if shared else SumPlace.IN_PLACE

    def reduce(self, replica: int, mine: Contribution) -> tuple[Agreement, Tensor]:
        """Fill `mine.weights.total` with the sum over all replicas; returns the summed statistics too.

        The host waits until all replicas have come to the end of the step, and never for a device. The
        statistics are to be read before this replica's next step ends, and not to be written. Raises Aborted
        when another replica failed.
        """
        if self.choice().way == NCCL:
            assert self._communication is not None
            return self._communication.reduce(replica, mine)
        return self._copies.reduce(replica, mine)

    def close(self) -> None:
        """No step will follow; called by replicas after their last one, once or more often."""
        if self._communication is not None:
            self._communication.close()

    def _try_nccl(self, communication: Communication) -> Choice:
        try:
            seconds = communication.trial()
        except (Aborted, JobError):
            raise
        except Exception as error:  # whatever NCCL or its driver raises, peer copies still train
            reason = f"NCCL's trial failed: {crash.one_line(error)}"
            if self._wanted == NCCL:
                raise JobError(f"reduction = {NCCL!r}: {reason}; use {AUTO!r} or {PEER!r}") from error
            return Choice(PEER, reason)
        return Choice(NCCL, f"its trial over {_names(self._devices)} gave the right sums", seconds)

    def _decide(self, choice: Choice) -> None:
        self._choice = choice
        self._decided.set()


class PeerCopies:
    """Each replica adds up what all of them publish."""

    def __init__(self, replicas: int, control: RunControl) -> None:
        self._given: list[Contribution | None] = [None] * replicas
        self._read: list[torch.cuda.Event | None] = [None] * replicas
        self._barrier = threading.Barrier(replicas)
        control.on_abort(self._barrier.abort)

    def reduce(self, replica: int, mine: Contribution) -> tuple[Agreement, Tensor]:
        """As `Reduction.reduce`."""
        cuda = mine.statistics.device.type == "cuda"
        if cuda:
            mine.ready = torch.cuda.Event()
            mine.ready.record()
        self._given[replica] = mine
        self._wait()
        given = [contribution for contribution in self._given if contribution is not None]
        statistics = mine.statistics.clone() if len(given) == 1 else torch.zeros_like(mine.statistics)
        if len(given) > 1:
            self._sum(mine, given, statistics)
        agreement = Agreement.of(given)
        if cuda:
            self._read[replica] = event = torch.cuda.Event()
            event.record()
        self._wait()
        for event_of_reader in self._read:  # nobody overwrites a gradient that another device still reads
            if event_of_reader is not None:
                event_of_reader.wait()
        return agreement, statistics

    def _sum(self, mine: Contribution, given: list[Contribution], statistics: Tensor) -> None:
        total = mine.weights.total
        total.zero_()
        for other in given:
            if other.ready is not None:
                other.ready.wait()
            total.add_(other.weights.local.to(total.device, non_blocking=True))
            statistics.add_(other.statistics.to(total.device, non_blocking=True))

    def _wait(self) -> None:
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise Aborted from None


def _names(devices: Sequence[torch.device]) -> str:
    return ", ".join(dict.fromkeys(map(str, devices)))
