"""A small drafter over a random target, and rows for it: what the tests on a GPU train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from remote_payload.job import Job
from remote_payload.train.batch import BatchMaker, Row, RowShape
from remote_payload.train.dataset import Dataset
from remote_payload.train.drafter import DrafterConfig
from remote_payload.train.replica import Replica
from remote_payload.train.statistics import Statistics
from remote_payload.train.target import Target
from remote_payload.train.weights import SumPlace
from tests.payload.tiny import MASK, VOCABULARY, job_values, random_samples, write_arrow, write_model

SHAPE = RowShape(token_budget=512, anchors=64, block_size=8, mask_token_id=MASK, gamma=4.0)
WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "num_attention_heads": 4}


def rows(folder: Path, count: int, seed: int = 0) -> list[tuple[Row, int]]:
    """`count` random rows of SHAPE with the real tokens of each; some slots stay empty."""
    samples, prompts = random_samples(200, seed=seed, low=8, high=120)
    dataset = Dataset.open(write_arrow(folder / f"rows{seed}.arrow", samples, prompts))
    maker = BatchMaker(dataset, SHAPE, seed=seed, vocabulary=VOCABULARY, pad_id=0)
    random = np.random.default_rng(seed)
    made = []
    for number in range(count):
        chosen = random.choice(200, int(random.integers(1, 5)), replace=False)
        batch = maker.make(chosen, 0, 0, number)
        made.append((batch.row, batch.tokens))
    return made


def make_replica(
    folder: Path, device: torch.device, dtype: str, *, place: SumPlace | None = None, **changes: Any
) -> Replica:
    """A replica of a small drafter over a random target on `device`."""
    if not (folder / "wide").exists():
        write_model(folder / "wide", **WIDE)
    target = Target.load(folder / "wide", (1, 2, 4), device=device, dtype=torch.float32)
    config = DrafterConfig.for_target(
        target.model.config, layers=2, tap_layers=(1, 2, 4), block_size=8, mask_token_id=MASK
    )
    changes.setdefault("attention", "flex")  # equal to the bit from run to run, where tests want it
    values = job_values(folder, target=str(folder / "wide"), compute_dtype=dtype, layers=2, **changes)
    job = Job.from_mapping(values, "test")
    return Replica(0, device, job, config, SHAPE, Statistics(8, 3), target, place=place)


def run_rows(
    replica: Replica, given: list[tuple[Row, int]], first: bool = True
) -> list[tuple[float, Tensor]]:
    """Loss and gradient of each row, with features that are the same for the same row."""
    out = []
    for number, (row, tokens) in enumerate(given):
        load(replica, row, tokens, number)
        replica.statistics.zero_()
        replica.run_row(row, 0, first=first or number == 0)
        loss = sum(replica.statistics[2 + 4 * (SHAPE.block_size - 1) :][:3].tolist())
        out.append((loss, torch.cat([slope.float() for slope, _ in replica.weights.slopes()])))
    return out


def load(replica: Replica, row: Row, tokens: int, number: int) -> None:
    """Load a row with features drawn for `number`."""
    replica.load(None, row)
    replica.features[tokens:].zero_()
    generator = torch.Generator(replica.device).manual_seed(number)
    replica.features[:tokens] = torch.randn(
        tokens, replica.features.shape[1], generator=generator, device=replica.device
    ).to(replica.features)
