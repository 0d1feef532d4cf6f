"""Whether a replica's loss reads its logits by our own kernels, decided in warm-up: where they are right.

For compiled steps on a GPU. What the kernels make of random logits of the whole vocabulary, near zero and in
the thousands, is compared with plain operations in float32: loss and first choices, and the slopes tile by
tile, since what one tile got wrong would be lost in the norm of a row. Kernels that fail, or that find
something else, are left, one reason says why, and the loss is compiled from plain operations.

Shapes: n blocks, P = B - 1 places, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from remote_payload import crash
from remote_payload.train import fp8
from remote_payload.train.attention_gate import rows_error
from remote_payload.train.objective import ChunkScores, Objective, by_kernels, by_operations
from remote_payload.train.output_head import OutputHead

TIMES = (1.0, 8.0, 1000.0)
"""Standard deviations of the logits that are tried."""

BLOCKS = 2
"""Blocks of each trial: rows are computed one by one, so a few are as good as many."""

BOUND = {16: 0.03, 8: 0.15}
"""Greatest error of a tile of slopes that passes, as a share of its norm, by the bits of a slope: rounding
alone is 0.4 % and 7 %."""

LOSS_BOUND = 1e-3
"""Greatest error of a loss that passes, as a share of it."""

_TIED = 1e-4
"""Where p and q are nearer than this share, which of them is the lesser is a matter of rounding."""


class BareHead(OutputHead):
    """A head that hands the slopes of its logits back, as they would go into its product."""

    def by_hidden(self, slope: Tensor, bound: Tensor) -> Tensor:
        """The slope itself, [n, P, V]."""
        return slope.to(self.weight.dtype)

    def by_written(self, write: Callable[[Tensor | float, torch.dtype], Tensor], bound: Tensor) -> Tensor:
        """The slope itself, [n * P, V]."""
        if self.eight_bits is None:
            return write(1.0, self.weight.dtype)
        times, scale = fp8.scales_of(fp8.SLOPE, bound)
        return write(times, fp8.SLOPE).float() * scale


def choose_kernels(head: OutputHead, objective: Objective, places: int) -> tuple[bool, str]:
    """Whether the loss of blocks of P `places` is read by our own kernels, and the reason.

    Called on the replica's own stream, before anything is captured.
    """
    if head.soft_cap is not None:
        return False, "the head has a soft cap, which our own do not know"
    try:
        refused = refusal(head, objective, places)
    except Exception as error:  # whatever Triton raises, the compiler's code still trains
        refused = f"they failed: {crash.one_line(error)}"
    if refused is not None:
        return False, f"our own are not used: {refused}"
    return True, "loss, first choices and slopes of random logits are those of plain operations"


def refusal(head: OutputHead, objective: Objective, places: int) -> str | None:
    """Why the kernels are not used; None when they may be."""
    bare = BareHead(head.weight, None, head.scale, None, head.eight_bits)
    for times in TIMES:
        logits, taught, labels, weights = trial(head.weight, places, times)
        given = (logits, taught if objective.needs_teacher else None, bare, labels, weights, objective)
        found, wanted = by_kernels(*given), by_operations(*given)
        for name, one, other in (("loss", found.loss, wanted.loss), ("ce", found.ce, wanted.ce)):
            if not bool((one - other).abs() <= LOSS_BOUND * other.abs()):
                return f"{name} of logits of {times:g} is {float(one):.7g} and not {float(other):.7g}"
        if not found.hits.equal(wanted.hits):
            return f"first choices of logits of {times:g} are others"
        error, bound = (
            slope_error(found, wanted, logits, taught, objective),
            BOUND[8 if head.eight_bits else 16],
        )
        if not error <= bound:
            return (
                f"a tile of slopes of logits of {times:g} is off by {error:.1%}, and {bound:.0%} is allowed"
            )
    return None


def trial(weight: Tensor, places: int, times: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random logits of drafter and target [n, P, V], labels of which half are right, and weights [n, P].

    Random numbers come from a generator of its own: on a device's default one others may capture.
    """
    device, shape = weight.device, (BLOCKS, places, len(weight))
    generator = torch.Generator(device).manual_seed(1)

    def normal() -> Tensor:
        return torch.randn(shape, generator=generator, device=device) * times

    logits = normal().to(weight.dtype)
    taught = (logits + 0.3 * normal()).to(weight.dtype)
    labels = torch.randint(0, len(weight), shape[:2], generator=generator, device=device)
    labels[:, ::2] = logits[:, ::2].argmax(-1)
    weights = torch.exp(-torch.arange(places, device=device) / 7.0).repeat(BLOCKS, 1)
    weights[0, places // 2 :] = 0.0
    return logits, taught, labels, weights


def slope_error(
    found: ChunkScores, wanted: ChunkScores, logits: Tensor, taught: Tensor, objective: Objective
) -> float:
    """The greatest difference of a tile of slopes of a row, as a share of the tile's norm."""
    slopes = torch.stack([found.gradient.float(), wanted.gradient.float()])
    if objective.reads_overlap:
        q, p = logits.float().softmax(-1), taught.float().softmax(-1)
        slopes = slopes.masked_fill((q - p).abs() <= _TIED * p, 0.0)
    return rows_error(*slopes.flatten(1, 2))
