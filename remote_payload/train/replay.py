"""Whether a captured step computes what the compiled one does, told so that a reader knows where to look."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

BOUND = 1e-2
"""How far, as a share, a replayed step may be from the compiled one it was captured from: only rounding."""


def difference(names: Sequence[str], compiled: Sequence[Tensor], replayed: Sequence[Tensor]) -> str | None:
    """How far a replay's gradients are from those of a compiled pass; None within `BOUND`.

    By the worst leaf; what is not finite on either side is worse than any distance.
    """
    for name, one, other in zip(names, compiled, replayed, strict=True):
        whose = [who for who, t in (("compiled", one), ("replayed", other)) if not bool(t.isfinite().all())]
        if whose:
            return f"the gradient of {name} is not finite in the {' and the '.join(whose)} step"
    shares = [
        float((other - one).float().norm() / one.float().norm().clamp(min=1e-12))
        for one, other in zip(compiled, replayed, strict=True)
    ]
    share, name = max(zip(shares, names, strict=True))
    if share <= BOUND:
        return None
    return f"a replayed step differs from the compiled one by {share:.1%} in the gradient of {name}"
