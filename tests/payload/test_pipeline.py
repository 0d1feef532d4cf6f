"""What the reader and a target's thread do, without the threads."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from remote_payload.job import Job
from remote_payload.train import pipeline
from remote_payload.train.batch import Batch, BatchMaker, RowShape
from remote_payload.train.buckets import bucket_of, plan_epoch
from remote_payload.train.dataset import Dataset
from remote_payload.train.target_pass import TargetPass
from remote_payload.train.unusable import DataError
from tests.payload.tiny import MASK, VOCABULARY, random_samples, write_arrow

EDGES = [0, 24, 40, 64]


def run_of(folder: Path, steps: int, bad: tuple[int, ...] = ()) -> Any:
    """As much of a Run as the reader knows, over 24 samples of which `bad` cannot be used."""
    samples, prompts = random_samples(24)
    for number in bad:
        samples[number][0] = VOCABULARY
    dataset = Dataset.open(write_arrow(folder / "a.arrow", samples, prompts))
    buckets = bucket_of(dataset.lengths, EDGES)

    @functools.cache
    def plan(epoch: int) -> Any:
        return plan_epoch(dataset.lengths, buckets, token_budget=128, max_batch=3, seed=0, epoch=epoch)

    shape = RowShape(token_budget=128, anchors=16, block_size=4, mask_token_id=MASK, gamma=4.0)
    taken: list[Batch] = []
    return SimpleNamespace(
        job=Job(target="t", dataset="d", mask_token_id=MASK, max_batch=3),
        steps=steps,
        rows_per_step=2,
        batches_per_epoch=len(plan(0).batches),
        plan=plan,
        maker=BatchMaker(dataset, shape, seed=0, vocabulary=VOCABULARY, pad_id=0),
        progress=SimpleNamespace(buckets=[0] * 3, set_plan=lambda _: None, update=lambda **_: None),
        events=SimpleNamespace(write=lambda *_, **__: None),
        control=SimpleNamespace(check=lambda: None),
        log=lambda _line: None,
        batches=SimpleNamespace(put=lambda _number, batch: taken.append(batch), close=lambda: None),
        stopped=False,
        taken=taken,
    )


def read(run: Any, first: int = 0) -> list[int]:
    pipeline.read(run, SimpleNamespace(enter=lambda *_, **__: None), first)  # type: ignore[arg-type]
    return [batch.sequence for batch in run.taken]


@pytest.mark.parametrize("first", [0, 1, 7, 19, 20])
def test_the_reader_makes_the_batches_from_its_first_to_the_last_step_and_no_more(
    tmp_path: Path, first: int
) -> None:
    assert read(run_of(tmp_path, steps=10), first) == list(range(first, 20))


def test_a_dataset_of_which_nothing_can_be_used_ends_the_run_after_one_epoch_or_its_last_step(
    tmp_path: Path,
) -> None:
    run = run_of(tmp_path, steps=10**6, bad=tuple(range(24)))
    with pytest.raises(DataError, match="none of its samples can be used: 24 ids outside the vocabulary"):
        read(run)
    assert len(run.taken) == run.batches_per_epoch - 1
    with pytest.raises(DataError, match="none of its samples can be used"):
        read(run_of(tmp_path, steps=1, bad=tuple(range(24))))


def test_a_resumed_run_is_not_refused_because_its_last_batches_happen_to_be_unusable(tmp_path: Path) -> None:
    last = run_of(tmp_path, steps=4).plan(0).batches[7].tolist()
    assert read(run_of(tmp_path, steps=4, bad=tuple(last)), first=7) == [7]


def test_a_target_runs_its_widest_batches_before_the_first_and_none_that_follows_is_wider(
    tmp_path: Path,
) -> None:
    """SpecForge's "late OOM": the order is random, so without it the widest may come after hours."""
    run, seen = run_of(tmp_path, steps=30), []

    def features(ids: torch.Tensor, _teacher: bool) -> torch.Tensor:
        seen.append(tuple(ids.shape))
        return torch.zeros(*ids.shape, 6)

    target: Any = SimpleNamespace(device=torch.device("cpu"), features=features)
    pipeline.warm_target(run, 0, TargetPass(target, last_hidden=False))
    assert 1 <= len(seen) <= 2
    read(run)
    for batch in run.taken:
        rows, tokens = batch.ids.shape
        assert rows * tokens <= max(np.prod(shape) for shape in seen)
        assert tokens <= max(shape[1] for shape in seen)
