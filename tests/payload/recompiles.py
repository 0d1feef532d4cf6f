"""The proof that nothing is compiled after warm-up: for a test, since in a run it would hit every thread."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def no_recompiles() -> Iterator[None]:
    """Raise at whatever is compiled inside, in any thread of the process."""
    with torch.compiler.set_stance("fail_on_recompile"):
        yield
