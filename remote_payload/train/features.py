"""Target features on their way to a drafter: packed, and for small sets kept on disk after the first pass.

Shapes: B rows, L longest row, n real tokens of a batch, W = taps * width, and one width more where the
objective needs the target's last hidden states.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from remote_payload.job import JobError
from remote_payload.train.allocated_file import allocate
from remote_payload.train.batch import Batch
from remote_payload.train.contract import target_identity
from remote_payload.train.dataset import Dataset
from remote_payload.train.drafter import DrafterConfig

CACHED = torch.bfloat16
"""The type in which features are kept on disk."""


@dataclasses.dataclass(slots=True)
class Features:
    """One batch with its features, on the target's device; those from the disk in main memory."""

    batch: Batch
    packed: Tensor
    """Features of the batch's real tokens in the order of the row, [n, W]."""
    ready: torch.cuda.Event | None
    """Recorded after they were computed; a drafter on another stream waits for it."""


def pack(features: Tensor, lengths: list[int]) -> Tensor:
    """Drop the padding of `features` [B, L, W]: [n, W]."""
    longest = features.shape[1]
    index = torch.cat([torch.arange(n) + row * longest for row, n in enumerate(lengths)])
    return features.flatten(0, 1)[fetched(index, features.device)]


def fetched(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor`, of the host, on `device`; on a GPU by way of page-locked memory.

    A copy from ordinary memory would wait until the GPU has done all that was asked of it before.
    """
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # kept by its allocator until the copy is done
    return tensor.to(device, non_blocking=True)


class FeatureCache:
    """Features of a whole dataset in one memory-mapped file of bfloat16, filled as batches come by.

    What is read back is what training sees from the first pass on, so a run does not depend on whether an
    earlier one filled the cache. A sample counts as present only after its features were written.
    """

    def __init__(self, folder: Path, dataset: Dataset, width: int) -> None:
        """Open or create the cache in `folder`; `width` is W. Raises JobError when the disk is too small."""
        self._offsets = np.concatenate([[0], np.cumsum(dataset.lengths)])
        size = int(self._offsets[-1]) * width
        path = folder / "features.bin"
        present = folder / "present.bin"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            missing = 2 * size - (512 * path.stat().st_blocks if path.exists() else 0)
            free = shutil.disk_usage(folder).free
            if missing > free:
                raise JobError(
                    f"features = 'cached' needs {missing / 2**30:.1f} GiB in {folder}, and"
                    f" {free / 2**30:.1f} GiB are free; use features = 'online'"
                )
            allocate(path, 2 * size)
            allocate(present, len(dataset))
        except OSError as error:
            raise JobError(
                f"features = 'cached': {2 * size / 2**30:.1f} GiB cannot be had in {folder}"
                f" ({error.strerror}); use features = 'online'"
            ) from error
        self.path = path
        self._features = torch.from_file(str(path), shared=True, size=size, dtype=CACHED).view(-1, width)
        self._present = torch.from_file(str(present), shared=True, size=len(dataset), dtype=torch.uint8)

    @staticmethod
    def key(
        dataset: Sequence[Path], target: Path, config: DrafterConfig, dtype: torch.dtype, last_hidden: bool
    ) -> str:
        """Names a cache by all that its content depends on; reads the dataset's files once.

        The mask token is of it: a sample whose answer holds that is kept as one of pads.
        """
        digest = hashlib.sha256()
        for path in dataset:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        depends = (target_identity(target), config.tap_layers, config.mask_token_id, last_hidden)
        digest.update(repr((depends, str(dtype), torch.__version__)).encode())
        return digest.hexdigest()[:16]

    @property
    def present_share(self) -> float:
        """Share of the samples whose features are there."""
        return float(self._present.float().mean())

    def read(self, samples: list[int], *, pinned: bool = False) -> Tensor | None:
        """Packed features of `samples`, or None unless all of them are there.

        `pinned`: in page-locked memory, from where a GPU fetches them while it works.
        """
        if not bool(self._present[samples].all()):
            return None
        parts = [self._features[self._offsets[s] : self._offsets[s + 1]] for s in samples]
        if not pinned:
            return torch.cat(parts)
        rows = sum(len(part) for part in parts)
        whole = torch.empty(rows, self._features.shape[1], dtype=CACHED, pin_memory=True)
        return torch.cat(parts, out=whole)

    def store(self, samples: list[int], lengths: list[int], packed: Tensor) -> None:
        """Keep `packed` [n, W] of `samples`; what is there already stays, since others have trained on it."""
        for sample, part in zip(samples, packed.split(lengths), strict=True):
            if self._present[sample]:
                continue
            self._features[self._offsets[sample] : self._offsets[sample + 1]] = part.to("cpu", CACHED)
            self._present[sample] = 1
