"""A target's ends and packed rows at random: what a replica needs to run without a model or a dataset.

For the probe and the benches; nothing here trains anything.
"""

from __future__ import annotations

import dataclasses
from typing import cast

import torch
from torch import nn

from remote_payload.train.batch import Row, RowShape, empty_row
from remote_payload.train.drafter import DrafterConfig
from remote_payload.train.output_head import OutputHead
from remote_payload.train.target import Target


@dataclasses.dataclass(slots=True)
class _FrozenEnds:
    embedding: nn.Embedding
    output: OutputHead
    device: torch.device


def random_ends(config: DrafterConfig, device: torch.device, dtype: torch.dtype) -> Target:
    """What a replica borrows of a target, at random: an embedding and a head for drafters of `config`."""
    made = [torch.randn(config.vocabulary, config.width, device=device, dtype=dtype) * 0.02 for _ in range(2)]
    embedding = nn.Embedding.from_pretrained(made[0])
    return cast(Target, _FrozenEnds(embedding, OutputHead(made[1], None, 1.0, None), device))


def random_rows(shape: RowShape, vocabulary: int, count: int) -> list[Row]:
    """`count` rows of one document each, with anchors anywhere and every label counted."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    later = torch.arange(1, shape.block_size)
    for _ in range(count):
        ids = torch.randint(0, vocabulary - 1, (shape.token_budget,), generator=generator)
        places = torch.randperm(shape.token_budget - shape.block_size, generator=generator)
        drawn = places[: shape.anchors].sort().values
        row = empty_row(shape)
        row.positions.copy_(torch.arange(shape.token_budget))
        row.starts.zero_()
        row.anchors.copy_(drawn)
        row.block_tokens[:, 0] = ids[drawn]
        row.block_positions += drawn[:, None]
        row.labels.copy_(ids[drawn[:, None] + later])
        row.weights += torch.from_numpy(shape.block_weights)
        rows.append(row)
    return rows
