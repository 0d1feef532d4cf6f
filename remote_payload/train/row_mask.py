"""The mask of the row that lies in a replica's buffers, in the form that its attention takes.

Shapes: C context tokens, A anchor slots, B block size, Q = A*B queries.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from remote_payload.train.batch import RowShape
from remote_payload.train.drafter import DrafterConfig, Mask
from remote_payload.train.flash_attention import FlashMask
from remote_payload.train.folded import fold_mask, folded_rule
from remote_payload.train.mask import block_mask, dense_mask, mask_mod, tiles_fit

FLASH, FLEX, DENSE = "flash", "flex", "dense"
"""FlashAttention-4, FlexAttention, and torch's attention with a dense mask."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSizes:
    """C, A, B, query heads, key/value heads and their size."""

    context: int
    anchors: int
    block_size: int
    heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, shape: RowShape, config: DrafterConfig) -> AttentionSizes:
        """Those of a drafter over rows of a shape."""
        return cls(
            context=shape.token_budget,
            anchors=shape.anchors,
            block_size=shape.block_size,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
        )

    @property
    def queries(self) -> int:
        """Q."""
        return self.anchors * self.block_size

    @property
    def tiles_fit(self) -> bool:
        """Whether the mask can be cut into tiles."""
        return tiles_fit(self.context, self.anchors, self.block_size)


class RowMask:
    """Makes the mask anew for every row; its rules are made once, since a new one would be compiled anew."""

    def __init__(self, starts: Tensor, anchors: Tensor, sizes: AttentionSizes, kind: str = DENSE) -> None:
        """`starts` and `anchors` [A] as in `dense_mask`, in memory that stays and is refilled in place."""
        self.kind = kind
        """FLASH, FLEX or DENSE; the first two where tiles fit."""
        self.sizes = sizes
        self._starts, self._anchors = starts, anchors
        self._rule = mask_mod(starts, anchors, sizes.context, sizes.block_size)
        self._folded_rule = folded_rule(self._rule, sizes.queries, sizes.heads, sizes.kv_heads)

    def make(self) -> Mask:
        """That of the row that is there now; fixed shapes, and no wait for the device."""
        sizes, starts, anchors = self.sizes, self._starts, self._anchors
        if self.kind == DENSE:
            return dense_mask(starts, anchors, sizes.context, sizes.block_size)
        tiles = block_mask(starts, anchors, sizes.context, sizes.block_size, self._rule)
        folded = fold_mask(tiles, sizes.heads, sizes.kv_heads, self._folded_rule)
        if self.kind == FLEX:
            return folded
        numbers = (sizes.context, sizes.block_size, sizes.heads, sizes.kv_heads)
        return FlashMask.of(folded, starts, anchors, numbers)
