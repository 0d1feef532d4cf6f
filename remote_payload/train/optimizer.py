"""The step that all replicas take together: scale, clip, AdamW on float32 masters, and an account of it.

A gradient that is not finite changes nothing. All replicas hold the same reduced gradient, so they decide
that alike without asking each other. What happened is counted on the device, so that no step waits for it:
the host reads the account when it reports, at most once a second.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from remote_payload.job import Job
from remote_payload.train.weights import FlatWeights

EPSILON = 1e-8


def adamw(
    gradient: Tensor,
    master: Tensor,
    first: Tensor,
    second: Tensor,
    value: Tensor | None,
    numbers: Tensor,
    betas: tuple[float, float],
    decay: float,
) -> None:
    """One AdamW step over flat tensors [n] in place; compiled, it is one pass over memory.

    The arithmetic is that of torch.optim.AdamW. Of every number it reads gradient, master and two moments and
    writes the last three and the value: 30 bytes with a bfloat16 gradient.

    Args:
        gradient: in any floating type. value: the master in the compute type; None when that is float32.
        numbers: [5] float32: factor of the gradient, learning rate, 1 - beta1^t, 1 - beta2^t, and 1 or, when
            nothing may change, 0.
    """
    scale, rate, bias1, bias2, good = numbers.unbind()
    slope = gradient.float() * scale
    new_first = torch.lerp(first, slope, 1 - betas[0])
    new_second = second * betas[1] + slope * slope * (1 - betas[1])
    size = new_second.sqrt() / bias2.sqrt() + EPSILON
    new_master = master * (1 - rate * decay) - rate / bias1 * (new_first / size)
    good = good > 0
    new_master = torch.where(good, new_master, master)
    first.copy_(torch.where(good, new_first, first))
    second.copy_(torch.where(good, new_second, second))
    master.copy_(new_master)
    if value is not None:
        value.copy_(new_master)


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
        self._betas, self._decay = (job.betas[0], job.betas[1]), job.weight_decay
        self._update: Callable[..., None] | None = None if weights.plain else adamw
        cut = weights.decayed
        groups: list[dict[str, Any]] = []
        states: dict[Tensor, dict[str, Tensor]] = {}
        for part, decay in ((slice(0, cut), job.weight_decay), (slice(cut, None), 0.0)):
            master = nn.Parameter(weights.masters[part])
            master.grad = weights.total[part] if weights.plain else None
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
        slopes = self._weights.slopes()
        parts = torch._foreach_norm([slope for slope, _ in slopes], 2, torch.float32)
        norm = torch.linalg.vector_norm(torch.stack(parts)) * self._scale
        bad = ~torch.isfinite(norm)
        factor = (self._clip / (norm + 1e-6)).clamp(max=1.0) * self._scale
        if self._update is None:
            self._weights.total.mul_(factor)
            self._bad.copy_(bad)
            self._adamw.step()
            self._weights.publish()
        else:
            self._step_in_one_pass(self._update, slopes, factor, ~bad)
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

    def use(self, update: Callable[..., None] | None) -> None:
        """Take steps by `update`: `adamw`, as it is or compiled. None: by torch's own kernel."""
        assert update is not None or self._weights.plain
        self._update = update

    def rehearse(self) -> None:
        """Do all that `apply` does and change nothing, so that it is compiled and may be captured."""
        account = self._account.clone()
        self._scale.fill_(torch.nan)
        self.apply()
        self._account.copy_(account)

    def _step_in_one_pass(
        self, update: Callable[..., None], slopes: list[tuple[Tensor, slice]], factor: Tensor, good: Tensor
    ) -> None:
        weights, counts = self._weights, self._counts()
        for count in counts:
            count.add_(good)
        biases = [1 - torch.pow(beta, counts[0]) for beta in self._betas]
        numbers = torch.stack([factor, self._rate, *biases, good.float()])
        for slope, part in slopes:
            update(
                slope,
                weights.masters[part],
                self._first[part],
                self._second[part],
                None if weights.values is weights.masters else weights.values[part],
                numbers,
                self._betas,
                self._decay if part.stop <= weights.decayed else 0.0,
            )

    def _counts(self) -> list[Tensor]:
        """AdamW's count of steps, of matrices and of norms."""
        return [self._adamw.state[group["params"][0]]["step"] for group in self._adamw.param_groups]

    def read(self) -> OptimizerReading:
        """What the steps so far came to; waits for the device."""
        values = dict(zip(_ACCOUNT, self._account.tolist(), strict=True))
        norms = {name: values.pop(name) for name in ("bad_norm", "norm")}
        return OptimizerReading(**norms, **{name: int(value) for name, value in values.items()})

    def state(self) -> dict[str, Tensor]:
        """Masters, both moments, AdamW's step count and our own counts, flat, for a checkpoint.

        They are the optimizer's own tensors and not copies.
        """
        return {
            "masters": self._weights.masters,
            "exp_avg": self._first,
            "exp_avg_sq": self._second,
            "adam_step": torch.stack(self._counts()),
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
        for mine_count, count in zip(self._counts(), state["adam_step"], strict=True):
            mine_count.copy_(count)
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
