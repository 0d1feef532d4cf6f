"""Features on their way to a drafter: packing, and the cache on disk."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from remote_payload.job import JobError
from remote_payload.train.allocated_file import allocate
from remote_payload.train.dataset import Dataset
from remote_payload.train.drafter import DrafterConfig
from remote_payload.train.features import FeatureCache, pack
from remote_payload.train.target import read_config
from tests.payload.test_target import write_target
from tests.payload.tiny import random_samples, write_arrow

WIDTH = 6


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_packing_drops_the_padding_and_keeps_row_after_row(lengths: list[int]) -> None:
    longest = max(lengths) + 1
    padded = torch.arange(len(lengths) * longest * 2).view(len(lengths), longest, 2)
    rows = [padded[row, place].tolist() for row, n in enumerate(lengths) for place in range(n)]
    assert pack(padded, lengths).tolist() == rows


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    samples, prompts = random_samples(5)
    return Dataset.open(write_arrow(tmp_path / "a.arrow", samples, prompts))


def random_features(dataset: Dataset, samples: list[int], seed: int = 0) -> torch.Tensor:
    n = sum(int(dataset.lengths[s]) for s in samples)
    return torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(seed))


def test_what_was_stored_comes_back_in_any_order_also_after_opening_it_again(
    tmp_path: Path, dataset: Dataset
) -> None:
    cache = FeatureCache(tmp_path / "cache", dataset, WIDTH)
    given_ = random_features(dataset, [3, 0])
    first = int(dataset.lengths[3])
    cache.store([3, 0], dataset.lengths[[3, 0]].tolist(), given_)
    expected = given_.to(torch.bfloat16)
    for opened in (cache, FeatureCache(tmp_path / "cache", dataset, WIDTH)):
        found = opened.read([0, 3])
        assert found is not None
        assert found.equal(torch.cat([expected[first:], expected[:first]]))
        assert opened.present_share == pytest.approx(2 / 5)


def test_what_is_there_already_stays_when_a_batch_with_it_is_computed_again(
    tmp_path: Path, dataset: Dataset
) -> None:
    cache = FeatureCache(tmp_path / "cache", dataset, WIDTH)
    first, again = random_features(dataset, [1]), random_features(dataset, [1, 2], seed=1)
    n = int(dataset.lengths[1])
    cache.store([1], [n], first)
    cache.store([1, 2], dataset.lengths[[1, 2]].tolist(), again)
    found = cache.read([1, 2])
    assert found is not None
    assert found.equal(torch.cat([first, again[n:]]).to(torch.bfloat16))


def test_a_batch_with_one_sample_missing_is_not_read(tmp_path: Path, dataset: Dataset) -> None:
    cache = FeatureCache(tmp_path / "cache", dataset, WIDTH)
    assert cache.present_share == 0.0
    cache.store([1], [int(dataset.lengths[1])], random_features(dataset, [1]))
    assert cache.read([1]) is not None
    assert cache.read([1, 2]) is None


def test_a_disk_that_is_too_small_is_refused_before_anything_is_computed(
    tmp_path: Path, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(JobError, match=r"features = 'cached' needs .* use features = 'online'"):
        FeatureCache(tmp_path / "cache", dataset, WIDTH)
    assert not (tmp_path / "cache" / "features.bin").exists()


def test_the_cache_has_its_room_on_the_disk_at_once_so_that_a_full_disk_is_an_error_and_no_signal(
    tmp_path: Path, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = FeatureCache(tmp_path / "cache", dataset, WIDTH)
    assert 512 * cache.path.stat().st_blocks >= 2 * dataset.tokens * WIDTH

    def full(*_arguments: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(JobError, match=r"cannot be had in .* \(No space left on device\); use features"):
        FeatureCache(tmp_path / "other", dataset, WIDTH)
    assert list((tmp_path / "other").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(JobError, match=r"cannot be had in .*file/below \(Not a directory\); use features"):
        FeatureCache(tmp_path / "file" / "below", dataset, WIDTH)


def test_what_a_longer_file_held_stays_when_it_is_allocated_again(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    allocate(path, 5)
    assert path.read_bytes() == b"abc\0\0"
    allocate(path, 2)
    assert path.read_bytes() == b"abc\0\0"


def test_a_cache_is_named_by_all_that_its_content_depends_on(tmp_path: Path, dataset: Dataset) -> None:
    model = write_target(tmp_path / "model")
    other = write_target(tmp_path / "other", hidden_size=32)
    samples, prompts = random_samples(5, seed=1)
    second = write_arrow(tmp_path / "b.arrow", samples, prompts)

    def key(
        data: Path = dataset.path,
        target: Path = model,
        taps: tuple[int, ...] = (1, 3),
        mask_token_id: int = 66,
        dtype: torch.dtype = torch.float32,
        last_hidden: bool = False,
    ) -> str:
        config = DrafterConfig.for_target(
            read_config(target), layers=1, tap_layers=taps, block_size=4, mask_token_id=mask_token_id
        )
        return FeatureCache.key([data], target, config, dtype, last_hidden)

    first = key()
    assert key() == first == key(target=shutil.copytree(model, tmp_path / "copy"))
    changed = [
        *(key(second), key(target=other), key(taps=(1, 2)), key(dtype=torch.bfloat16)),
        key(last_hidden=True),
        key(mask_token_id=65),  # a sample whose answer holds the mask token is kept as one of pads
    ]
    assert len({first, *changed}) == 7


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_features_of_a_target_that_was_changed_in_place_are_not_taken_for_its_own(
    tmp_path: Path, dataset: Dataset, file: str
) -> None:
    model = write_target(tmp_path / "model")
    config = DrafterConfig.for_target(
        read_config(model), layers=1, tap_layers=(1,), block_size=4, mask_token_id=66
    )
    before = FeatureCache.key([dataset.path], model, config, torch.float32, False)
    times = (model / file).stat()
    content = bytearray((model / file).read_bytes())
    at = content.index(b"10000") if file == "config.json" else len(content) - 1
    content[at] ^= 1  # another rotary base, another weight
    (model / file).write_bytes(content)
    os.utime(model / file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert FeatureCache.key([dataset.path], model, config, torch.float32, False) != before
