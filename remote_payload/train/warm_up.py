"""What a replica's warm-up came to: the rung of the ladder, its times, and every rung that was left."""

from __future__ import annotations

import dataclasses

from remote_payload.train import execution


@dataclasses.dataclass(frozen=True, slots=True)
class StepDown:
    """One rung of the ladder left for a lower one."""

    old: str
    new: str
    reason: str


@dataclasses.dataclass(slots=True)
class WarmUp:
    """What warm-up decided, and what it measured."""

    execution: str
    reason: str
    seconds: float = 0.0
    step_s: dict[str, float] = dataclasses.field(default_factory=dict)
    """Seconds of a forward and backward pass by rung, of those that were tried and worked."""
    steps_down: list[StepDown] = dataclasses.field(default_factory=list)
    attention: str = "dense"
    """By which kernels: `flash`, `flex`, or `dense` masks."""
    attention_reason: str = "no tiles"
    loss_kernels: bool = False
    """Whether the loss reads its logits by our own kernels."""
    loss_kernels_reason: str = "not compiled for a GPU"
    swiglu_kernels: bool = False
    """Whether the MLPs run SwiGLU by our own kernels."""
    swiglu_kernels_reason: str = "not compiled for a GPU"

    @property
    def eager_step_s(self) -> float | None:
        """Seconds of an eager pass, where it was timed."""
        return self.step_s.get(execution.EAGER)

    @property
    def compiled_step_s(self) -> float | None:
        """Seconds of a compiled pass, where it was timed."""
        return self.step_s.get(execution.COMPILED)

    def down(self, new: str, reason: str) -> None:
        """Leave the rung for a lower one."""
        self.steps_down.append(StepDown(self.execution, new, reason))
        self.execution, self.reason = new, reason
