"""The communication thread in whole runs: on a CPU, where a collective is done as soon as it is begun."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from remote_payload.train import communication, sync
from remote_payload.train.communication import Gpus
from remote_payload.train.weights import FlatWeights
from tests.payload.test_run_endings import fail_at, raise_broken
from tests.payload.trial import Trial

pytestmark = pytest.mark.slow

TWO = {"targets": ["cpu"], "drafters": ["cpu"] * 2, "rows_per_step": 4, "held_out": ""}


class Done:
    """A stream and an event of a device that is never behind."""

    def wait_event(self, event: object) -> None:
        pass

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True


class CpuAsGpus(Gpus):
    """Replicas that share one device, which NCCL has as its only rank."""

    fails_at: int | None = None
    calls = 0

    def obstacle(self, devices: Sequence[torch.device]) -> str | None:
        return None

    def side(self, device: torch.device) -> Any:
        return Done()

    def current(self, device: torch.device) -> Any:
        return Done()

    def on(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def event(self) -> Any:
        return Done()

    def all_reduce(self, tensors: Sequence[Tensor], streams: Sequence[Any]) -> None:
        CpuAsGpus.calls += 1
        if CpuAsGpus.calls == self.fails_at:
            raise RuntimeError("NCCL Error 1: unhandled cuda error")


def by_nccl(fails_at: int | None = None, *, drafter_fails: bool = False) -> None:
    """In the child: NCCL works here, up to its call number `fails_at`."""
    CpuAsGpus.fails_at = fails_at
    sync.Gpus = CpuAsGpus  # type: ignore[misc]
    communication._TRIALS = ((torch.float32, 100),)  # type: ignore[assignment]
    plain = FlatWeights.__init__

    def marked(self: FlatWeights, *arguments: Any, **options: Any) -> None:
        plain(self, *arguments, **options)
        self.ready = [Done() for _ in self.buckets]  # type: ignore[misc]

    FlatWeights.__init__ = marked  # type: ignore[method-assign]
    if drafter_fails:
        fail_at("remote_payload.train.optimizer", "Optimizer.step", 5, raise_broken)


def test_a_run_with_the_communication_thread_makes_the_bits_of_one_by_peer_copies(tmp_path: Path) -> None:
    copies, nccl = Trial(tmp_path, "copies", steps=8, **TWO), Trial(tmp_path, "nccl", steps=8, **TWO)
    assert copies.fork() == 0, copies.log
    assert nccl.fork(by_nccl) == 0, nccl.log
    mine, theirs = copies.tensors(8), nccl.tensors(8)
    assert all(value.equal(theirs[name]) for name, value in mine.items())
    (first,), (second,) = copies.events("reduction"), nccl.events("reduction")
    assert (first["way"], first["reason"], first["trial_s"]) == ("peer", "NCCL sums between GPUs alone", None)
    assert second["way"] == "nccl" and second["trial_s"] >= 0
    assert "Gradients are added up by peer copies: NCCL sums between GPUs alone" in copies.log
    assert "Gradients are added up by NCCL: its trial over cpu gave the right sums" in nccl.log
    states = {entry["name"]: entry["state"] for entry in nccl.progress["threads"]}
    assert states["reduction"] == "ended" and set(states.values()) == {"ended"}
    assert "reduction" not in {entry["name"] for entry in copies.progress["threads"]}


def test_where_the_trial_fails_a_run_goes_on_by_peer_copies_and_says_why(tmp_path: Path) -> None:
    trial = Trial(tmp_path, steps=4, **TWO)
    assert trial.fork(functools.partial(by_nccl, 1)) == 0, trial.log
    (event,) = trial.events("reduction")
    assert event["way"] == "peer"
    assert event["reason"].startswith("NCCL's trial failed: RuntimeError: NCCL Error 1")
    assert trial.exit["outcome"] == "finished"


def test_a_run_that_insists_on_nccl_is_refused_where_it_cannot_be(tmp_path: Path) -> None:
    trial = Trial(tmp_path, steps=4, reduction="nccl", **TWO)
    assert trial.fork() != 0
    assert trial.exit["outcome"] == "refused" and "Traceback" not in trial.log
    assert "reduction = 'nccl': NCCL sums between GPUs alone; use 'auto' or 'peer'" in trial.exit["error"]


@pytest.mark.parametrize("culprit", ["drafter", "reduction"])
def test_a_failure_of_a_drafter_or_of_the_communication_thread_ends_all_threads(
    tmp_path: Path, culprit: str
) -> None:
    trial = Trial(tmp_path, steps=500, **TWO)
    broken = (
        functools.partial(by_nccl, drafter_fails=True)
        if culprit == "drafter"
        else functools.partial(by_nccl, 9)
    )
    assert trial.fork(broken) == 1, trial.log
    (crash,) = trial.crashes()
    assert crash["role"] == culprit and trial.exit["outcome"] == "crashed"
    states = {entry["name"]: entry["state"] for entry in trial.progress["threads"]}
    assert states.pop(crash["thread"]) == "failed" and set(states.values()) == {"ended"}
