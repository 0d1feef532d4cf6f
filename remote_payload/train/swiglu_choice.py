"""Whether a replica's MLPs run SwiGLU by our own kernels, decided in warm-up: where they are right.

As `logit_choice` does for the loss: output and slopes of random numbers are compared with plain operations in
float32, tile by tile, and kernels that fail, or that find something else, are left with one reason.

Shapes: N rows, F width of the MLP.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from remote_payload import crash
from remote_payload.train import swiglu
from remote_payload.train.attention_gate import rows_error
from remote_payload.train.logit_choice import BOUND, TIMES

_ROWS = 32
"""Of a trial, and as many more as a step's are above a multiple of 16: rows are computed one by one, so a few
are as good as many, but of multiples of 16 Triton makes a kernel of its own."""


def choose_swiglu(
    rows: Collection[int], ffn: int, device: torch.device, dtype: torch.dtype
) -> tuple[bool, str]:
    """Whether SwiGLU of [N, 2 `ffn`] runs by our own kernels for every N of `rows`, and the reason.

    Called on the replica's own stream, before anything is captured.
    """
    try:
        trials = [_ROWS + more for more in sorted({count % 16 for count in rows})]
        found = (refusal(count, ffn, device, dtype) for count in trials)
        refused = next(filter(None, found), None)
    except Exception as error:  # whatever Triton raises, the compiler's code still trains
        refused = f"they failed: {crash.one_line(error)}"
    if refused is not None:
        return False, f"our own are not used: {refused}"
    return True, "output and slopes of random numbers are those of plain operations"


def refusal(rows: int, ffn: int, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernels are not used for `rows` rows; None when they may be."""
    generator = torch.Generator(device).manual_seed(1)  # on a device's default one others may capture
    for times in TIMES:
        between, slope = (
            (torch.randn(rows, width, generator=generator, device=device) * by).to(dtype)
            for width, by in ((2 * ffn, times), (ffn, 1.0))
        )
        compared = {
            "output": (swiglu.forward(between), swiglu.exact(between)),
            "slopes": (swiglu.backward(between, slope), swiglu.slopes(between, slope)),
        }
        for name, (found, wanted) in compared.items():
            error = rows_error(found, wanted)
            if not error <= BOUND[16]:
                return (
                    f"a tile of {name} of numbers of {times:g} is off by {error:.1%}, and {BOUND[16]:.0%} is"
                    " allowed"
                )
    return None
