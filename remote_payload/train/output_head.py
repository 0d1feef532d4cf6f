"""What a target makes of its last hidden state: the logits, with every step that its family adds.

Most families stop at `hidden @ weight.T`. Some add a bias (Phi), a scale (Cohere, Granite, Falcon-H1) or a
soft cap (Gemma 2, 3n, 4). The first choice depends on weight and bias alone, since scale and cap keep the
order; the probabilities, which losses against the target's distribution need, depend on all of them. Which
of them a model has is read from its config and then proved: `check` compares with the logits of the model
itself, so a family with a step that is not known here is refused and never trained on wrong probabilities.

Shapes: n rows, D width, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from remote_payload.crash import one_line
from remote_payload.job import JobError
from remote_payload.train.fp8 import FrozenMatrix

_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
_DIVISORS = ("logits_scaling",)


@dataclasses.dataclass(frozen=True, slots=True)
class OutputHead:
    """The head's weights and what follows them; the frozen part of every loss."""

    weight: Tensor
    """[V, D]; the embedding itself in a tied model."""
    bias: Tensor | None
    """[V], or None."""
    scale: float
    """Factor of `hidden @ weight.T + bias`, above 0."""
    soft_cap: float | None
    """Scaled logits x become cap * tanh(x / cap)."""
    eight_bits: FrozenMatrix | None = None
    """The weights once more, for a drafter's own states where they are trained in fp8."""

    @classmethod
    def of(cls, model: Any, text_config: Any) -> OutputHead:
        """The head of a loaded model, by its accessors: those resolve tied weights (SpecForge #455)."""
        output = model.get_output_embeddings()
        if output is None:  # a tied model that keeps no module for its head
            output = model.get_input_embeddings()
        bias = getattr(output, "bias", None)
        scale = 1.0
        for name in _FACTORS:
            scale *= getattr(text_config, name, None) or 1.0
        for name in _DIVISORS:
            scale /= getattr(text_config, name, None) or 1.0
        caps = [cap for name in _CAPS if (cap := getattr(text_config, name, None))]
        return cls(
            weight=output.weight.detach(),
            bias=None if bias is None else bias.detach(),
            scale=float(scale),
            soft_cap=float(caps[0]) if caps else None,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, V] of final hidden states [n, D], as the target itself would have them."""
        return self._finished(F.linear(hidden.to(self.weight.dtype), self.weight, self.bias))

    def drafted(self, hidden: Tensor) -> Tensor:
        """`logits` of a drafter's hidden states in training: by 8-bit products where the head has them.

        The target's own distribution never is: it is what a drafter learns from, and no part of it.
        """
        if self.eight_bits is None:
            return self.logits(hidden)
        logits = self.eight_bits.product(hidden)
        return self._finished(logits if self.bias is None else logits + self.bias)

    def by_hidden(self, slope: Tensor, bound: Tensor) -> Tensor:
        """The gradient [..., D] by what the head was given, from that by its logits before scale and cap.

        Args:
            slope: [..., V] float32. bound: no number of it is above, scalar.
        """
        if self.eight_bits is None:
            return slope.to(self.weight.dtype) @ self.weight
        return self.eight_bits.by_input(slope, bound, self.weight.dtype)

    def by_written(self, write: Callable[[Tensor | float, torch.dtype], Tensor], bound: Tensor) -> Tensor:
        """`by_hidden` [N, D] where the slope is not there yet: `write(times, dtype)` makes it, [N, V].

        Args:
            write: gives the slope multiplied by `times`, in the type that the product takes.
        """
        if self.eight_bits is None:
            return write(1.0, self.weight.dtype) @ self.weight
        return self.eight_bits.by_written(write, bound, self.weight.dtype)

    def _finished(self, logits: Tensor) -> Tensor:
        """Logits with all that follows the product and the bias."""
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits

    def choice(self, hidden: Tensor) -> Tensor:
        """The likeliest token [n] of each row of [n, D]. Without the cap, which makes ties in 16 bits."""
        return F.linear(hidden.to(self.weight.dtype), self.weight, self.bias).argmax(-1)

    @torch.no_grad()
    def check(self, model: Any, ids: Tensor) -> None:
        """Compare with the model's own logits of `ids` [1, L]. Raises JobError naming its model_type.

        What the head is given is caught at its door, since no output of transformers is promised to be that.
        """
        kind = getattr(model.config, "model_type", type(model).__name__)
        given: list[Tensor] = []
        door = model.get_output_embeddings()
        if door is None:
            hook = model.get_decoder().register_forward_hook(lambda _m, _i, out: given.append(out[0]))
        else:
            hook = door.register_forward_pre_hook(lambda _m, inputs: given.append(inputs[0]))
        try:
            own = model(input_ids=ids, use_cache=False).logits
        except torch.OutOfMemoryError:
            raise
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise JobError(
                f"target of model_type {kind!r} cannot read plain token ids: {one_line(error)}; expected a"
                f" causal language model"
            ) from error
        finally:
            hook.remove()
        mine = self.logits(given[-1]) if given and given[-1].shape[-1] == self.weight.shape[1] else None
        if mine is None or mine.shape != own.shape or _distance(mine, own) > 0.02:
            raise JobError(
                f"target of model_type {kind!r}: its logits are not those of its head"
                f" (scale {self.scale:g}, soft cap {self.soft_cap}); this family does something to them that"
                f" is not known here, and a drafter would learn other probabilities"
            )


def _distance(mine: Tensor, own: Tensor) -> float:
    """How far apart two sets of logits are, as a share of their size."""
    difference = (mine.float() - own.float()).norm()
    return float(difference / own.float().norm().clamp(min=1e-9))
