"""By which kernels a replica's steps run on a GPU: each kind is proved in warm-up, and left where it fails.

Attention has kernels of others (`attention_choice`); the loss over logits and SwiGLU have our own
(`logit_choice`, `swiglu_choice`). Whatever a proof says, steps have another way to be run. What was proved
alone may still fail in a whole compiled step; then it is given up before compiled steps are.
"""

from __future__ import annotations

import torch

from remote_payload.train import execution
from remote_payload.train.attention_choice import choose_attention
from remote_payload.train.batch import RowShape
from remote_payload.train.drafter import DrafterConfig
from remote_payload.train.logit_choice import choose_kernels
from remote_payload.train.objective import Objective
from remote_payload.train.output_head import OutputHead
from remote_payload.train.row_mask import FLASH, FLEX, AttentionSizes
from remote_payload.train.swiglu_choice import choose_swiglu
from remote_payload.train.warm_up import WarmUp


class Kernels:
    """The kernels of one replica; before anything is proved FlexAttention and the compiler's own."""

    def __init__(self, wanted: str, config: DrafterConfig, shape: RowShape, fp8_mlp: bool) -> None:
        """`wanted` is the job's `attention`; `fp8_mlp`: whether MLPs multiply 8-bit numbers."""
        self._wanted, self._config, self._shape, self._fp8_mlp = wanted, config, shape, fp8_mlp
        self.sizes = AttentionSizes.of(shape, config)
        self.attention = FLEX
        """Of compiled steps, where tiles fit."""
        self.loss = False
        """Whether compiled steps read their logits by our own."""
        self.swiglu = False
        """Whether our own for SwiGLU are right here; see `runs_swiglu`."""

    def runs_swiglu(self, rung: str) -> bool:
        """Whether SwiGLU runs by our own on a rung: a compiled one, or of an MLP in 8 bits any."""
        return self.swiglu and (rung != execution.EAGER or self._fp8_mlp)

    def prove(self, result: WarmUp, head: OutputHead, objective: Objective, dtype: torch.dtype) -> None:
        """Find out which are right, of those that the rung of `result` would run; the reasons go there.

        Called on the replica's own stream, on its device, before anything is captured. Raises JobError for
        an `attention` that the job insists on.
        """
        device, blocks, places = head.weight.device, self._shape.anchors, self._shape.block_size - 1
        compiled = result.execution != execution.EAGER
        if compiled or self._fp8_mlp:
            rows = [blocks * (places + 1), blocks * places]  # of the last layer nobody reads the anchors
            self.swiglu, result.swiglu_kernels_reason = choose_swiglu(rows, self._config.ffn, device, dtype)
        if not compiled:
            return
        self.loss, result.loss_kernels_reason = choose_kernels(head, objective, places)
        if self.sizes.tiles_fit:
            self.attention, result.attention_reason = choose_attention(
                self._wanted, self.sizes, device, dtype
            )

    def give_up(self, result: WarmUp, first: WarmUp) -> bool:
        """Leave kernels with which a compiled step failed as `result` says; False: there are none to leave.

        The reasons go into `first`, from which the next try begins.
        """
        if not result.steps_down:
            return False
        failed = result.steps_down[0].reason
        if self.attention == FLASH and self._wanted == "auto":
            self.attention, first.attention_reason = FLEX, f"not FlashAttention-4: {failed}"
            return True
        if result.execution != execution.EAGER or not (self.loss or self.swiglu):
            return False
        if self.loss:
            self.loss, first.loss_kernels_reason = False, f"our own are not used: {failed}"
        if self.swiglu:
            self.swiglu, first.swiglu_kernels_reason = False, f"our own are not used: {failed}"
        return True
