from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from remote_payload import lock


def opened(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY)


def test_a_lock_keeps_everybody_else_out_until_it_is_let_go(tmp_path: Path) -> None:
    first, second = opened(tmp_path), opened(tmp_path)
    lock.hold(first)
    with pytest.raises(BlockingIOError):
        lock.hold(second)
    os.close(first)
    lock.hold(second)
    os.close(second)


def test_a_file_system_without_locks_keeps_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(_descriptor: int, _how: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    descriptor = opened(tmp_path)
    lock.hold(descriptor)
    os.close(descriptor)
