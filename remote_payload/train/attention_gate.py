"""Whether kernels for the training mask compute what they should: the proof that a replica asks in warm-up.

Kernels for new GPUs have been silently wrong, some of them in one launch of hundreds (flash-attention #2756).
So output and all three gradients of a random row, in the very shape that training has, are compared with
exact ones in float32, over many launches. They are compared tile by tile: what one tile got wrong would be
lost in the norm of a whole tensor.

Shapes: C context tokens, A anchor slots, B block size, Q = A*B queries, K = C + Q keys, h heads, g key/value
heads, d head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from remote_payload.train.mask import TILE, dense_mask
from remote_payload.train.row_mask import AttentionSizes

LAUNCHES = 100
"""In warm-up: what is wrong once in a hundred launches passes with a chance of a third."""

BOUND = 0.03
"""Greatest error of a tile that passes, as a share of its norm: 16-bit kernels stay below a third of it, and
what a race spoils differs by as much as it is."""

_SMALL = 0.05
"""Tiles whose norm is less than this share of the mean are measured as if it were this."""

_AT_ONCE = 512
"""Queries whose exact scores are in memory at once."""

NAMES = ("output", "gradient of queries", "gradient of keys", "gradient of values")

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries [Q, h, d], keys and values [K, g, d] to output [Q, h, d]."""


class Trial:
    """A random row with its exact output and gradients."""

    def __init__(
        self, sizes: AttentionSizes, device: torch.device, dtype: torch.dtype, documents: int = 3
    ) -> None:
        """`documents` in the row; a sixteenth of the slots is empty, and so is the end of the context.

        Random numbers come from generators of its own: on a device's default one others may capture.
        """
        self.starts, self.anchors = (t.to(device) for t in random_anchors(sizes, documents))
        generator = torch.Generator(device).manual_seed(1)

        def normal(count: int, heads: int) -> Tensor:
            shape = (count, heads, sizes.head_dim)
            return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

        self.queries = normal(sizes.queries, sizes.heads).requires_grad_()
        self.keys = normal(sizes.context + sizes.queries, sizes.kv_heads).requires_grad_()
        self.values = normal(sizes.context + sizes.queries, sizes.kv_heads).requires_grad_()
        self.slope = normal(sizes.queries, sizes.heads)
        mask = dense_mask(self.starts, self.anchors, sizes.context, sizes.block_size)
        with torch.no_grad():
            self.exact = exact(self.queries, self.keys, self.values, self.slope, mask)

    def errors(self, attend: Attend, launches: int = LAUNCHES) -> list[float]:
        """The greatest error of a tile in any launch, by `NAMES`; infinite where something is not finite."""
        worst = torch.zeros(len(NAMES), device=self.slope.device)
        inputs = (self.queries, self.keys, self.values)
        for _ in range(launches):
            out = attend(*inputs)
            found = (out.detach(), *torch.autograd.grad(out, inputs, self.slope))
            shares = [tile_error(one, other) for one, other in zip(found, self.exact, strict=True)]
            worst = torch.maximum(worst, torch.stack(shares))
        return worst.tolist()


def refusal(errors: list[float]) -> str | None:
    """Why kernels with these errors are not used; None when they may be."""
    error, name = max(zip(errors, NAMES, strict=True))
    if error <= BOUND:
        return None
    return f"a tile of its {name} differs from the exact one by {error:.1%}, and {BOUND:.0%} is allowed"


def random_anchors(sizes: AttentionSizes, documents: int) -> tuple[Tensor, Tensor]:
    """Starts and anchors [A] as a row has them, on the CPU: sorted, empty slots (C and 0) at the end."""
    generator = torch.Generator().manual_seed(1)
    used = max(1, sizes.context * 15 // 16)
    cuts = torch.randperm(used, generator=generator)[: documents - 1].sort().values
    begins = torch.cat([torch.zeros(1, dtype=torch.int64), cuts])
    count = min(used, max(1, sizes.anchors * 15 // 16))
    places = torch.randperm(used, generator=generator)[:count].sort().values
    starts = torch.full((sizes.anchors,), sizes.context, dtype=torch.int64)
    anchors = torch.zeros(sizes.anchors, dtype=torch.int64)
    anchors[:count] = places
    starts[:count] = begins[torch.searchsorted(begins, places, right=True) - 1]
    return starts, anchors


def exact(
    queries: Tensor, keys: Tensor, values: Tensor, slope: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output and gradients of queries, keys and values in float32, by the formulas, a few queries at a time.

    `mask` [Q, K] bool; `slope` [Q, h, d] is the output's gradient.
    """
    heads, group = queries.shape[1], queries.shape[1] // keys.shape[1]
    scale = 1 / math.sqrt(queries.shape[2])
    out, by_queries = (torch.empty(queries.shape, device=queries.device) for _ in range(2))
    by_keys, by_values = (torch.zeros(keys.shape, device=keys.device) for _ in range(2))
    for head in range(heads):
        k, v = (t[:, head // group].float() for t in (keys, values))
        for first in range(0, len(queries), _AT_ONCE):
            some = slice(first, first + _AT_ONCE)
            q, do = (t[some, head].float() for t in (queries, slope))
            p = (q @ k.T * scale).masked_fill_(~mask[some], -torch.inf).softmax(1)
            o = p @ v
            ds = p * (do @ v.T - (do * o).sum(1, keepdim=True)) * scale
            out[some, head], by_queries[some, head] = o, ds @ k
            by_keys[:, head // group] += ds.T @ q
            by_values[:, head // group] += p.T @ do
    return out, by_queries, by_keys, by_values


def rows_error(found: Tensor, wanted: Tensor) -> float:
    """`tile_error` of rows [N, V], in tiles of TILE numbers of one row."""
    padded = F.pad(torch.stack([found.float(), wanted.float()]), (0, -wanted.shape[-1] % TILE))
    one, other = padded.transpose(1, 2)[..., None]
    return float(tile_error(one, other))


def tile_error(found: Tensor, wanted: Tensor) -> Tensor:
    """The greatest difference of a tile [TILE, d] of a head, as a share of the tile's norm; a scalar.

    Both are [N, heads, d] with whole tiles in N.
    """
    differing, norm = (
        torch.linalg.vector_norm(t.unflatten(0, (-1, TILE)), dim=(1, 3))
        for t in (found.float() - wanted, wanted)
    )
    shares: Tensor = differing / norm.maximum(_SMALL * norm.mean()).clamp(min=1e-12)
    return shares.nan_to_num(torch.inf).max()
