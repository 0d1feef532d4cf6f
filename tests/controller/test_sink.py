"""Where the bytes of a transfer go."""

import hashlib
from pathlib import Path

import pytest

from controller.sink import Sink


class Broken:
    """A hash that fails."""

    def update(self, data: memoryview) -> None:
        raise MemoryError


def test_bytes_are_in_the_file_and_in_the_hash_when_the_context_is_left(tmp_path: Path) -> None:
    digest, whole = hashlib.sha256(), bytes(range(256)) * 4096
    with (tmp_path / "f").open("wb", buffering=0) as file, Sink(file, digest) as sink:
        for start in range(0, len(whole), 1000):
            sink.put(memoryview(whole)[start : start + 1000])
    assert (tmp_path / "f").read_bytes() == whole
    assert digest.digest() == hashlib.sha256(whole).digest()


def test_what_fails_in_its_thread_is_raised_where_it_is_used_and_nobody_waits(
    tmp_path: Path,
) -> None:
    with (
        (tmp_path / "f").open("wb", buffering=0) as file,
        pytest.raises(MemoryError),
        Sink(file, Broken()) as sink,
    ):
        for _ in range(100):  # more than it lets wait
            sink.put(memoryview(b"x"))
