"""Where a replica keeps its row: one piece of memory on its device, refilled in place by one copy.

Compiled functions and graphs read the row at addresses that stay. The fields lie in one buffer, so that the
host prepares them in page-locked memory and the device fetches them in one piece, without waiting for each
other: a copy from ordinary memory would wait until the step before it has ended.
"""

from __future__ import annotations

import torch
from torch import Tensor

from remote_payload.train.batch import Row, RowShape, empty_row

ALIGNMENT = 16
"""Bytes that every field begins at a multiple of; compiled kernels count on it."""


class RowBuffer:
    """One row on a device."""

    def __init__(self, shape: RowShape, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        empty = empty_row(shape)
        self._fields: dict[str, tuple[int, torch.dtype, torch.Size]] = {}
        size = 0
        for name, tensor in empty.tensors().items():
            self._fields[name] = (size, tensor.dtype, tensor.shape)
            size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        self._bytes = torch.zeros(size, dtype=torch.uint8, device=device)
        self.row = Row(**self._views(self._bytes))
        """The row on the device; its tensors stay where they are."""
        self.fill(empty)

    def fill(self, row: Row) -> None:
        """Replace the row by one on the CPU, in the order of the current stream."""
        staged = torch.empty(len(self._bytes), dtype=torch.uint8, pin_memory=self._pinned)
        views = self._views(staged)
        for name, tensor in row.tensors().items():
            views[name].copy_(tensor)
        # The allocator of page-locked memory keeps `staged` until the copy is done.
        self._bytes.copy_(staged, non_blocking=True)

    def _views(self, flat: Tensor) -> dict[str, Tensor]:
        return {
            name: flat[begin : begin + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for name, (begin, dtype, shape) in self._fields.items()
        }
