"""How much of what its GPUs can do a run puts to use: MFU, of both sides together.

    mfu = useful work of targets and drafters / (seconds x what matrix products reach x GPUs in use)

Useful work is counted by `flops.py`: what is padded, recomputed or masked counts nothing. What products reach
is measured on each GPU of the run before anything else runs there, and stands beside a card's data sheet as
0.75 to 0.8 of it (an H200: 740 to 790 of 989 TFLOP/s). On a CPU nothing is measured: workers take turns.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterable

import torch

from remote_payload.train.devices import aside, on_device, out_of_memory, synchronise


def matmul_ceiling(device: torch.device) -> float:
    """FLOP/s of a bfloat16 (on a CPU float32) product of random matrices, 8192 (on a CPU 1024) each side.

    Draws from a generator of its own: the device's must rest while anybody captures a graph there.
    """
    cuda = device.type == "cuda"
    side, dtype, repeats = (8192, torch.bfloat16, 20) if cuda else (1024, torch.float32, 3)
    dice = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(side, side, device=device, dtype=dtype, generator=dice) for _ in "ab")
    for _ in range(3):
        a @ b
    synchronise(device)
    start = time.perf_counter()
    for _ in range(repeats):
        a @ b
    synchronise(device)
    return 2 * side**3 * repeats / (time.perf_counter() - start)


def ceiling_of(devices: Iterable[str]) -> float | None:
    """What products reach on all these devices together, FLOP/s; None where one is a CPU or has no room.

    Each counts once, however many roles it has.
    """
    total = 0.0
    for name in sorted(set(devices)):
        device = torch.device(name)
        if device.type != "cuda":
            return None
        try:
            total += aside(functools.partial(_ceiling, device))
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            return None
    torch.cuda.empty_cache()
    return total


def _ceiling(device: torch.device) -> float:
    with on_device(device):
        return matmul_ceiling(device)


class UsefulWork:
    """Counts the work of all threads, and tells the share from one question to the next."""

    def __init__(self, ceiling: float | None = None) -> None:
        """`ceiling`: FLOP/s of all GPUs in use, or None where it is not known."""
        self.ceiling = ceiling
        self._lock = threading.Lock()
        self._flops = 0.0
        self._asked = time.monotonic()

    def add(self, flops: float) -> None:
        """Count operations that were asked of a device."""
        with self._lock:
            self._flops += flops

    def share(self) -> float | None:
        """MFU since the last question; None where the ceiling is not known."""
        with self._lock:
            now = time.monotonic()
            flops, seconds = self._flops, now - self._asked
            self._flops, self._asked = 0.0, now
        return None if self.ceiling is None or seconds <= 0 else flops / (seconds * self.ceiling)
