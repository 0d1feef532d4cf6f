"""The proof of an export: read back from the disk, it is the checkpoint's drafter, logit by logit.

A fresh drafter is built from the folder alone, and from the checkpoint's own weights another; both read the
same random features and blocks. In the export's number type their logits are equal to the bit, since nothing
but bytes went through the disk. Where the checkpoint has more digits than the export, the rounded drafter is
compared with the unrounded one in float32 as well: what rounding moves is measured and bounded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from remote_payload.job import JobError
from remote_payload.train.devices import dtype_name
from remote_payload.train.drafter import DrafterConfig
from remote_payload.train.evaluation import drafter_with
from remote_payload.train.released import CONFIG, WEIGHTS, expected_shapes, read_released

CONTEXTS = (1, 17, 64, 200)
"""Context tokens before each block."""

MOST_ROUNDED = {torch.bfloat16: 0.05, torch.float16: 0.01}
"""Share of the logits' size by which rounding the weights may move them.

Measured: 0.1 to 1.1 % in bfloat16 and a tenth of that in float16, for random drafters and trained ones, of 1
to 5 layers and widths of 24 to 576. One wrong matrix moved them by 6 to 140 %.
"""

_ROWS = 4096
"""Most rows of the random head."""


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """What was compared."""

    tensors: int
    logits: int
    """Equal to the bit in the export's number type."""
    rounding: float | None
    """Share of the logits' size by which rounding moved them; None: nothing was rounded."""
    most_rounding: float | None
    sentence: str


@torch.no_grad()
def check_export(
    folder: Path,
    config: DrafterConfig,
    stored: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    device: torch.device,
) -> Check:
    """Compare the export in `folder` with its checkpoint. Raises JobError naming what differs.

    Args:
        config: the checkpoint's sizes.
        stored: its tensors by name, as it has them.
        weights: the same in the export's number type.
        device: where both compute.
    """
    dtype = next(iter(weights.values())).dtype
    _check_names(folder, config, dtype)
    written, tensors = read_released(folder)
    if written != config:
        parts = [
            f.name for f in dataclasses.fields(config) if getattr(written, f.name) != getattr(config, f.name)
        ]
        raise JobError(
            f"{folder / CONFIG}: says another {', '.join(parts)} than the checkpoint; not exported"
        )
    wrong = sorted(name for name, value in weights.items() if not tensors[name].equal(value))
    if wrong:
        raise JobError(f"{folder / WEIGHTS}: {wrong[0]} is not what was written; is the disk at fault?")
    found = _logits(config, tensors, device, dtype)
    if not found.equal(_logits(config, weights, device, dtype)):
        raise JobError(f"{folder}: its logits are not the checkpoint's; not exported")
    if not found.isfinite().all():
        raise JobError(
            f"{folder}: its logits are not finite in {dtype}; export another --dtype or checkpoint"
        )
    rounding = most = None
    if any(value.dtype != dtype for value in stored.values()):
        exact = _logits(config, stored, device, torch.float32)
        rounded = _logits(config, tensors, device, torch.float32)
        rounding, most = float((rounded - exact).norm() / exact.norm()), MOST_ROUNDED[dtype]
        if not rounding < most:
            raise JobError(
                f"{folder}: rounding to {dtype} moves its logits by {rounding:.1%}, more than {most:.0%};"
                " export it as float32"
            )
    sentence = (
        f"{len(tensors)} tensors, complete; {found.numel():,} logits of {len(CONTEXTS)} blocks after"
        f" {CONTEXTS[0]} to {CONTEXTS[-1]} context tokens equal the checkpoint's to the bit"
    )
    if rounding is not None:
        sentence += f"; rounding to {dtype_name(dtype)} moves them by {rounding:.2%} (bound {most:.0%})"
    return Check(len(tensors), found.numel(), rounding, most, sentence)


def _check_names(folder: Path, config: DrafterConfig, dtype: torch.dtype) -> None:
    """The file's own header: 11 tensors a layer and 3 more, no prefix, shapes and number type."""
    wanted = expected_shapes(config)
    assert len(wanted) == 11 * config.layers + 3
    kinds = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float16: "F16"}
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        found = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    if found != {name: (shape, kinds[dtype]) for name, shape in wanted.items()}:
        odd = sorted(
            name for name in {*wanted, *found} if found.get(name) != (wanted.get(name), kinds[dtype])
        )
        raise JobError(f"{folder / WEIGHTS}: {odd[0]} and {len(odd) - 1} more are missing or not as expected")


def _logits(
    config: DrafterConfig, tensors: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Logits [blocks * B, rows] of a drafter of `tensors`, of random features, blocks and head."""
    drafter = drafter_with(config, tensors, device, dtype)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    features = len(config.tap_layers) * config.width
    head = random(min(config.vocabulary, _ROWS), config.width) / config.width**0.5
    found = []
    for context in CONTEXTS:
        positions = torch.arange(context + config.block_size, device=device)
        before = drafter.context(random(context, features), positions[:context])
        hidden = drafter.blocks(random(config.block_size, config.width), positions[context:], before, None)
        found.append(hidden @ head.T)
    return torch.cat(found).float()
