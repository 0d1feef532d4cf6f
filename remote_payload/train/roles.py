"""How many of N equal GPUs get a target and how many a drafter: arithmetic on times measured in warm-up.

T targets, M drafter replicas and C GPUs that have one of each make

    r = min(M / d, T / (t + d C / M))      batches a second
    d = row + step M / R                   seconds of a replica for a row, with its part of the step

where t is what a target takes for a batch alone on its GPU, `row` forward and backward of a row, `step` the
optimizer, R the rows of a step. Replicas take turns, r / M rows a second each, and can do no more than 1 / d.
Targets take whatever batch comes next. A GPU with both gives its target what its drafter leaves (its stream
comes first: `devices.DRAFTERS_FIRST`), so that all targets together have T - C r d / M of a GPU's time, which
r t of it fill. With C = 0 that is min(T / t, M / d), with both on all GPUs N / (t + d): no split makes more,
since a batch takes t + d of GPU time wherever it runs.

That sharing costs nothing but time was measured on one H200 (`bench/NOTES.md`: together 0.6 % less than the
sum). What it costs in memory is checked here. Left out is the reduction between replicas, so that among
splits that are about as fast the one with the fewest shared GPUs is taken, then that with fewest replicas.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from remote_payload.job import JobError

TIE = 0.03
"""Share of the rate by which two splits may differ and count as equal: what measuring twice differs by."""

KEPT_FREE = 0.05
"""Share of a GPU's memory that a plan leaves alone: fragments, and what grows a little."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RoleTimes:
    """What one target and one drafter took on one GPU each; memory is None on a CPU."""

    target_s: float
    """t: seconds of a forward pass, in the mean over batches."""
    tokens: float
    """Real tokens of such a batch."""
    row_s: float
    step_s: float
    target_gib: float | None = None
    """Most that a target needs: weights, the widest batch."""
    drafter_gib: float | None = None
    features_gib: float = 0.0
    """Features of a full queue, which lie on the targets' GPUs."""
    free_gib: float | None = None
    """Of a GPU on which nothing of ours lies."""

    def drafter_s(self, drafters: int, rows_per_step: int) -> float:
        """d: seconds of one of `drafters` replicas for a row."""
        return self.row_s + self.step_s * drafters / rows_per_step


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """One way to use N GPUs, and how fast that would be."""

    targets: int
    drafters: int
    shared: int
    """GPUs that have one of each."""
    batches_per_s: float
    arithmetic: str

    def devices(self, gpus: Sequence[str]) -> tuple[list[str], list[str]]:
        """Those of the targets, from the first on, and those of the drafters, up to the last."""
        return list(gpus[: self.targets]), list(gpus[len(gpus) - self.drafters :])


def splits(gpus: int, times: RoleTimes, rows_per_step: int) -> list[Split]:
    """Every split of `gpus` that uses all of them and fits into memory, the one to take first.

    Args:
        gpus: N, at least 1.
        times: measured on one of them.
        rows_per_step: R; replicas must divide it.

    Raises:
        JobError: nothing fits, with what would be needed.
    """
    found = [
        _split(targets, drafters, targets + drafters - gpus, times, rows_per_step)
        for targets in range(1, gpus + 1)
        for drafters in range(max(1, gpus - targets), gpus + 1)
        if rows_per_step % drafters == 0
    ]
    fitting = [split for split in found if fits(split, times)]
    if not fitting:
        raise JobError(_nothing_fits(gpus, times, rows_per_step))
    best = max(split.batches_per_s for split in fitting)

    def rank(split: Split) -> tuple[bool, float, int, int]:
        behind = split.batches_per_s < (1 - TIE) * best
        return behind, -split.batches_per_s if behind else split.shared, split.drafters, split.targets

    return sorted(fitting, key=rank)


def fits(split: Split, times: RoleTimes) -> bool:
    """Whether the memory of the split's GPUs suffices; True where it is not known."""
    if times.free_gib is None or times.target_gib is None or times.drafter_gib is None:
        return True
    room = (1 - KEPT_FREE) * times.free_gib
    target = times.target_gib + times.features_gib * split.drafters / split.targets
    if split.shared:
        return target + times.drafter_gib <= room
    return max(target, times.drafter_gib) <= room


def _split(targets: int, drafters: int, shared: int, times: RoleTimes, rows_per_step: int) -> Split:
    t, d = times.target_s, times.drafter_s(drafters, rows_per_step)
    rate = min(drafters / d, targets / (t + d * shared / drafters))
    both = f", {shared} GPU{'s' * (shared > 1)} shared" if shared else ""
    of_shared = f"({t:.4f} + {d:.4f} x {shared}/{drafters})" if shared else f"{t:.4f}"
    return Split(
        targets,
        drafters,
        shared,
        rate,
        f"{targets} target{'s' * (targets > 1)} + {drafters} drafter{'s' * (drafters > 1)}{both}:"
        f" min({drafters} / {d:.4f}, {targets} / {of_shared}) = {rate:.2f} batches/s",
    )


def _nothing_fits(gpus: int, times: RoleTimes, rows_per_step: int) -> str:
    sizes = (
        f"a target needs {times.target_gib or 0:.1f} GiB and {times.features_gib:.1f} GiB of features, a"
        f" drafter {times.drafter_gib or 0:.1f}, a GPU has {times.free_gib or 0:.1f} free"
    )
    if gpus == 1:
        return f"roles = 'auto': target and drafter do not fit on the one GPU: {sizes}; lower token_budget"
    return (
        f"roles = 'auto': no split of {gpus} GPUs fits, with replicas that divide rows_per_step ="
        f" {rows_per_step}: {sizes}; lower token_budget"
    )
