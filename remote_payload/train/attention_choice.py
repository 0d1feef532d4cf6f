"""Which kernels a replica's attention runs by, decided in warm-up: the fastest whose proof passes here.

FlexAttention works on any GPU that compiles. FlashAttention-4 is taken where its package is, the GPU and the
heads are those that it is made for, and `attention_gate` finds its output and gradients right; else one
reason says why not. Dense masks are for eager steps, and for shapes that tiles do not fit.
"""

from __future__ import annotations

import torch

from remote_payload import crash
from remote_payload.job import JobError
from remote_payload.train.attention_gate import LAUNCHES, Trial, refusal
from remote_payload.train.drafter import attend
from remote_payload.train.flash_attention import unavailable
from remote_payload.train.row_mask import FLASH, FLEX, AttentionSizes, RowMask


def choose_attention(
    wanted: str, sizes: AttentionSizes, device: torch.device, dtype: torch.dtype
) -> tuple[str, str]:
    """FLASH or FLEX for a job's `attention`, and the reason; for compiled steps on a GPU where tiles fit.

    Takes a few seconds where FlashAttention-4 is tried. Called on the replica's own stream, before anything
    is captured. Raises JobError for `flash` where that cannot run or is wrong.
    """
    if wanted == FLEX:
        return FLEX, "the job says so"
    refused = unavailable(device, dtype, sizes.head_dim)
    errors = [0.0]
    if refused is None:
        try:
            errors = flash_errors(sizes, device, dtype)
            refused = refusal(errors)
        except Exception as error:  # whatever a package of another version raises, FlexAttention trains
            refused = f"it failed: {crash.one_line(error)}"
    if refused is None:
        return FLASH, f"in {LAUNCHES} launches no tile was off by more than {max(errors):.1%} of its norm"
    if wanted == FLASH:
        raise JobError(f"attention = {FLASH!r}: {refused}; set {FLEX!r} or 'auto'")
    return FLEX, f"not FlashAttention-4: {refused}"


def flash_errors(
    sizes: AttentionSizes, device: torch.device, dtype: torch.dtype, launches: int = LAUNCHES
) -> list[float]:
    """What `Trial.errors` finds of FlashAttention-4."""
    trial = Trial(sizes, device, dtype)
    mask = RowMask(trial.starts, trial.anchors, sizes, FLASH).make()
    return trial.errors(lambda q, k, v: attend(q, k, v, mask), launches)
