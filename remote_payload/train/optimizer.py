"""The step that all replicas take together: scale, clip, AdamW on float32 masters, and an account of it.

A gradient that is not finite changes nothing. All replicas hold the same reduced gradient, so they decide
that alike without asking each other. What happened is counted on the device, so that no step waits for it:
the host reads the account when it reports, at most once a second.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from remote_payload.job import Job
from remote_payload.train.weights import FlatWeights


class Optimizer:
    """AdamW over a replica's flat masters; every replica takes the same step.

    A step is `prepare`, which brings the step's two numbers to the device, and `apply`, which reads nothing
    from the host and has the same addresses every time, so that it can be captured as a graph.
    """

    def __init__(self, weights: FlatWeights, job: Job) -> None:
        self._weights = weights
        self._clip = job.clip
        device = weights.masters.device
        self._first, self._second = (torch.zeros_like(weights.masters) for _ in range(2))
        self._rate, self._scale, self._bad = (torch.zeros((), device=device) for _ in range(3))
        cut = weights.decayed
        groups: list[dict[str, Any]] = []
        states: dict[Tensor, dict[str, Tensor]] = {}
        for part, decay in ((slice(0, cut), job.weight_decay), (slice(cut, None), 0.0)):
            master = nn.Parameter(weights.masters[part])
            master.grad = weights.total[part]
            groups.append({"params": [master], "weight_decay": decay})
            states[master] = {
                "step": torch.zeros((), device=device),
                "exp_avg": self._first[part],
                "exp_avg_sq": self._second[part],
            }
        self._adamw = torch.optim.AdamW(
            groups, lr=self._rate, betas=(job.betas[0], job.betas[1]), fused=True, capturable=True
        )
        self._adamw.state.update(states)
        # The fused kernel leaves a step out when `found_inf` is set; that is how GradScaler does it too.
        self._adamw.found_inf = self._bad  # type: ignore[attr-defined]
        self._account = torch.zeros(len(_ACCOUNT), dtype=torch.float64, device=device)

    def step(self, total_weight: float, learning_rate: float) -> None:
        """One AdamW step on `total / total_weight`, clipped. Nothing here waits for the device.

        Args:
            total_weight: what the sum over all rows of the step is divided by; 0: there was nothing to learn.
            learning_rate: of this step.

        A gradient that is not finite changes nothing and is counted. All replicas hold the same reduced
        gradient, so they decide the same.
        """
        self.prepare(total_weight, learning_rate)
        self.apply()

    def prepare(self, total_weight: float, learning_rate: float) -> None:
        """Bring the numbers of a step to the device; outside of a graph."""
        self._scale.fill_(1.0 / total_weight if total_weight else 0.0)
        self._rate.fill_(learning_rate)

    def apply(self) -> None:
        """Scale, clip and take the step that was prepared."""
        total = self._weights.total
        norm = torch.linalg.vector_norm(total) * self._scale
        bad = ~torch.isfinite(norm)
        total.mul_((self._clip / (norm + 1e-6)).clamp(max=1.0) * self._scale)
        self._bad.copy_(bad)
        self._adamw.step()
        self._weights.publish()
        taken, skipped, in_row, longest, bad_step, bad_norm, _ = self._account.unbind()
        taken, in_row = taken + 1, (in_row + 1) * bad
        self._account.copy_(
            torch.stack(
                [
                    taken,
                    skipped + bad,
                    in_row,
                    torch.maximum(longest, in_row),
                    torch.where(bad, taken, bad_step),
                    torch.where(bad, norm.double(), bad_norm),
                    norm.double(),
                ]
            )
        )

    def read(self) -> OptimizerReading:
        """What the steps so far came to; waits for the device."""
        values = dict(zip(_ACCOUNT, self._account.tolist(), strict=True))
        norms = {name: values.pop(name) for name in ("bad_norm", "norm")}
        return OptimizerReading(**norms, **{name: int(value) for name, value in values.items()})

    def state(self) -> dict[str, Tensor]:
        """Masters, both moments, AdamW's step count and our own counts, flat, for a checkpoint.

        They are the optimizer's own tensors and not copies.
        """
        counts = [self._adamw.state[group["params"][0]]["step"] for group in self._adamw.param_groups]
        return {
            "masters": self._weights.masters,
            "exp_avg": self._first,
            "exp_avg_sq": self._second,
            "adam_step": torch.stack(counts),
            "counts": self._account[:_NORMS],
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over a `state`; the very next step is then that of the optimizer it came from, to the bit.

        Nothing moves in memory. Raises ValueError naming what is missing, unknown, or of another size.
        """
        mine = self.state()
        if state.keys() != mine.keys():
            raise ValueError(
                f"optimizer state has {', '.join(sorted(state))}: expected {', '.join(sorted(mine))}"
            )
        for name, tensor in state.items():
            if tensor.shape != mine[name].shape or tensor.dtype != mine[name].dtype:
                raise ValueError(
                    f"optimizer state {name!r} is {tensor.dtype} {tuple(tensor.shape)}: expected"
                    f" {mine[name].dtype} {tuple(mine[name].shape)}"
                )
        for name in ("masters", "exp_avg", "exp_avg_sq", "counts"):
            mine[name].copy_(state[name])
        for group, count in zip(self._adamw.param_groups, state["adam_step"], strict=True):
            self._adamw.state[group["params"][0]]["step"].copy_(count)
        self._account[_ACCOUNT.index("longest_in_row")] = self._account[_ACCOUNT.index("in_row")]
        self._weights.publish()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerReading:
    """Counts and norms of the steps so far, those before a resume included."""

    taken: int
    """Steps, also those that were left out."""
    skipped: int
    """Steps that were left out because their gradient was not finite."""
    in_row: int
    """How many of them were the newest steps, without one that was finite in between."""
    longest_in_row: int
    """The most of them without one that was finite in between, since the start or the resume."""
    bad_step: int
    """The newest of them, counted from 1; 0: none."""
    bad_norm: float
    """Its gradient's norm."""
    norm: float
    """The gradient's norm before clipping, of the newest step."""


_ACCOUNT = tuple(field.name for field in dataclasses.fields(OptimizerReading))
_NORMS = _ACCOUNT.index("bad_norm")
"""Where counts end and norms begin, which are of the newest steps and no state: they may be NaN."""
