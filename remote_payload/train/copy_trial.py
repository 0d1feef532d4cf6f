"""Whether what a GPU sends arrives at another one: tried first, for a wrong copy raises nothing.

CUDA supports no direct copies between PCIe GPUs of a machine whose IOMMU translates addresses, as a host for
virtual machines often has it (CUDA C++ Programming Guide, "IOMMU on Linux"). They arrive changed, or not at
all. A drafter would train on such features and learn nothing, and no number would say why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from remote_payload.job import Job, JobError

COUNT = 2**22
"""int32 numbers: 16 MiB, many times what a driver stages at once."""


def senders(job: Job, device: torch.device) -> list[torch.device]:
    """The other GPUs from which a replica of `job`, its devices resolved, gets features or gradients."""
    if device.type != "cuda":
        return []
    others = map(torch.device, dict.fromkeys([*job.targets, *job.drafters]))
    return [other for other in others if other.type == "cuda" and other != device]


def prove_copies(
    device: torch.device,
    sources: Iterable[torch.device],
    copy: Callable[[Tensor, Tensor], object] = Tensor.copy_,
) -> None:
    """Copy known numbers to `device` from each of `sources`. Raises JobError where they arrive changed."""
    for source in sources:
        expected = torch.arange(COUNT, dtype=torch.int32, device=device)
        arrived = torch.full_like(expected, -1)  # memory that is used again may hold the right ones
        copy(arrived, torch.arange(COUNT, dtype=torch.int32, device=source))
        changed = int(arrived.ne(expected).sum())
        if changed:
            raise JobError(
                f"copies from {source} to {device} arrive changed, {changed:,} of {COUNT:,} numbers:"
                " mostly by the host's IOMMU. Boot it with iommu=pt or without one, or run on one GPU:"
                " targets = ['cuda:0'], drafters = ['cuda:0']"
            )
