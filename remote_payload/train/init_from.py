"""Begin with the weights of a released drafter: the same method, the same sizes, or not at all.

Only weights are taken. A drafter with other taps, another mask token or another rotary base would load and
then have to unlearn what it knows, and nothing would say so; each difference is refused by name (NeMo #2461,
#2824: another mask id, which was the end-of-text id besides).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from remote_payload.job import JobError
from remote_payload.job_key import toml
from remote_payload.train.drafter import Drafter, DrafterConfig
from remote_payload.train.released import CONFIG, read_config, read_released

_FROM_JOB = {
    "layers": "layers",
    "tap_layers": "tap_layers",
    "block_size": "block_size",
    "mask_token_id": "mask_token_id",
}
"""Sizes that the job decides, with the key that does; all others are the target's."""

_MAY_DIFFER = ("max_positions",)
"""How long texts may be says nothing about the weights: positions are rotations."""


def check_initial(path: Path, config: DrafterConfig) -> None:
    """Refuse the drafter in `path` unless it is built as `config` says. Raises JobError by name."""
    given = read_config(path)
    said = []
    for field in dataclasses.fields(DrafterConfig):
        theirs, ours = getattr(given, field.name), getattr(config, field.name)
        if theirs == ours or field.name in _MAY_DIFFER:
            continue
        key = _FROM_JOB.get(field.name)
        what_to_do = f"set {key} = {_toml(theirs)}" if key else "it is of another target"
        said.append(f"{field.name} is {_toml(theirs)} there and {_toml(ours)} in this run ({what_to_do})")
    if said:
        raise JobError(f"init_from = {str(path)!r}: {path / CONFIG} is of another drafter: {'; '.join(said)}")


@torch.no_grad()
def load_initial(drafter: Drafter, path: Path) -> None:
    """Copy the weights of the released drafter in `path` into `drafter`. Raises JobError.

    What does not fit is refused, by the names of its tensors.
    """
    _, tensors = read_released(path)
    drafter.load_state_dict({name: value.float() for name, value in tensors.items()})


def _toml(value: object) -> str:
    return toml(list(value) if isinstance(value, tuple) else value)
