"""What holds for tests of the payload."""

from __future__ import annotations

import os
import sys

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_kernels(tmp_path_factory: pytest.TempPathFactory) -> None:
    """On a GPU each of pytest-xdist's workers keeps inductor's kernels for itself.

    Inductor measures which kernel is the fastest and keeps that on disk. From a folder that several processes
    fill, two replicas of one process may take different ones, and be equal but for rounding.
    """
    torch = sys.modules.get("torch")  # without it nothing is compiled
    if "PYTEST_XDIST_WORKER" in os.environ and torch is not None and torch.cuda.is_available():
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path_factory.mktemp("inductor"))


@pytest.fixture(scope="session", autouse=True)
def one_guard() -> None:
    """As the trainer's main thread does for the threads that compile, one after the other."""
    if "torch" in sys.modules:
        from remote_payload.train.devices import keep_guard

        keep_guard()


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Torch's global generator begins anew: what else this process ran before plays no part."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)
