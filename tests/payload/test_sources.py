"""Where samples may lie: saved Hugging Face folders, Arrow, Parquet; and what is refused."""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from remote_payload.train import arrow_source
from remote_payload.train import converted as conversion
from remote_payload.train.dataset import Dataset
from remote_payload.train.unusable import DataError
from tests.payload.tiny import random_samples

SAMPLES, PROMPTS = random_samples(23, seed=4)


INT32 = pa.list_(pa.int32())


def table_of(begin: int = 0, end: int = 23, kind: pa.DataType = INT32) -> pa.Table:
    """Samples begin..end-1 with a loss_mask and a column that nobody reads."""
    samples = SAMPLES[begin:end]
    masks = [
        [int(place >= prompt) for place in range(len(sample))]
        for sample, prompt in zip(samples, PROMPTS[begin:end], strict=True)
    ]
    return pa.table(
        {
            "text": pa.array([f"text {number}" for number in range(begin, end)]),
            "input_ids": pa.array(samples, kind),
            "loss_mask": pa.array(masks, pa.list_(pa.int8())),
            "kind": pa.array(["even" if number % 2 else "odd" for number in range(begin, end)]),
        }
    )


def write_ipc(
    path: Path, table: pa.Table, *, stream: bool = True, rows: int = 4, codec: str | None = None
) -> Path:
    options = pa.ipc.IpcWriteOptions(compression=codec)
    opener = pa.ipc.new_stream if stream else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as sink, opener(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


def save_to_disk(folder: Path, cuts: tuple[int, ...] = (0, 9, 10, 23)) -> Path:
    """Write all samples as Hugging Face's `Dataset.save_to_disk` lays them out, without dataset_info.json."""
    folder.mkdir(parents=True)
    shards = len(cuts) - 1
    names = [f"data-{number:05d}-of-{shards:05d}.arrow" for number in range(shards)]
    for name, begin, end in zip(names, cuts, cuts[1:], strict=False):
        write_ipc(folder / name, table_of(begin, end))
    state = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": "0123456789abcdef",
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": "train",
    }
    (folder / "state.json").write_text(json.dumps(state, indent=2))
    return folder


def arrow_folder(folder: Path) -> Path:
    folder.mkdir()
    write_ipc(folder / "part-1.arrow", table_of(9, 23, pa.large_list(pa.uint16())), stream=False)
    write_ipc(folder / "part-0.arrow", table_of(0, 9))
    (folder / "README.md").write_text("not data")
    return folder


def parquet_file(path: Path) -> Path:
    pq.write_table(table_of(), path, row_group_size=5)
    return path


def parquet_folder(folder: Path) -> Path:
    folder.mkdir()
    pq.write_table(table_of(0, 9), folder / "train-00000-of-00002.parquet", compression="zstd")
    pq.write_table(table_of(9, 23, pa.list_(pa.int64())), folder / "train-00001-of-00002.parquet")
    return folder


def compressed(path: Path) -> Path:
    return write_ipc(path, table_of(), stream=False, codec="zstd")


def feather_file(path: Path) -> Path:
    feather.write_feather(table_of(), path)  # lz4 by default
    return path


SOURCES: dict[str, Callable[[Path], Path]] = {
    "save_to_disk": save_to_disk,
    "folder of arrow": arrow_folder,
    "file": lambda path: write_ipc(path, table_of(), stream=False),
    "stream": lambda path: write_ipc(path, table_of()),
    "parquet": parquet_file,
    "folder of parquet": parquet_folder,
    "compressed arrow": compressed,
    "feather": feather_file,
}
CONVERTED = ["parquet", "folder of parquet", "compressed arrow", "feather"]


@pytest.mark.parametrize("source", SOURCES)
def test_samples_come_back_as_written_from_every_source(tmp_path: Path, source: str) -> None:
    dataset = Dataset.open(SOURCES[source](tmp_path / "data"), tmp_path / "cache")
    assert dataset.lengths.tolist() == [len(sample) for sample in SAMPLES]
    for number, (sample, prompt) in enumerate(zip(SAMPLES, PROMPTS, strict=True)):
        assert dataset.ids(number).tolist() == sample
        assert dataset.supervised(number).tolist() == [place >= prompt for place in range(len(sample))]
    assert dataset.texts("kind") == ["even" if number % 2 else "odd" for number in range(23)]


def test_a_folder_that_hugging_faces_own_library_saved_is_read() -> None:
    """Written by `Dataset.from_dict(...).save_to_disk(..., num_shards=3)` of datasets 5.2.0."""
    dice = random.Random(5)
    samples = [[dice.randrange(2, 96) for _ in range(dice.randrange(5, 30))] for _ in range(25)]
    dataset = Dataset.open(Path(__file__).parent / "data" / "saved_by_datasets")
    assert len(dataset.files) == 3
    assert [dataset.ids(number).tolist() for number in range(25)] == samples
    assert all(
        dataset.supervised(number).tolist() == [place >= 3 for place in range(len(sample))]
        for number, sample in enumerate(samples)
    )
    assert dataset.texts("kind") == ["a" if number % 2 else "b" for number in range(25)]


@pytest.mark.parametrize("source", SOURCES)
def test_no_source_is_read_into_memory(tmp_path: Path, source: str) -> None:
    path, cache = SOURCES[source](tmp_path / "data"), tmp_path / "cache"
    Dataset.open(path, cache)
    gc.collect()  # what is left of another test may go at any time
    before = pa.total_allocated_bytes()
    dataset = Dataset.open(path, cache)
    ids = [dataset.ids(number) for number in range(len(dataset))]
    assert pa.total_allocated_bytes() <= before
    assert not any(sample.flags["OWNDATA"] or sample.flags["WRITEABLE"] for sample in ids)


@pytest.mark.parametrize("source", CONVERTED)
def test_a_conversion_is_made_once_and_both_times_the_log_says_where(tmp_path: Path, source: str) -> None:
    path, cache, log = SOURCES[source](tmp_path / "data"), tmp_path / "cache", []
    Dataset.open(path, cache, log.append)
    (copy,) = cache.iterdir()
    written = copy.stat().st_mtime_ns
    assert log[0].startswith(f"Converting {path}") and "once" in log[0]
    assert log[1].startswith("Converted 23 samples in ") and log[1].endswith(str(copy))
    Dataset.open(path, cache, log.append)
    assert log[2:] == [f"{path} was converted to Arrow earlier: {copy}"]
    assert list(cache.iterdir()) == [copy] and copy.stat().st_mtime_ns == written
    with pa.memory_map(str(copy)) as file:
        assert pa.ipc.open_file(file).schema.names == ["input_ids", "loss_mask", "kind"]


def test_a_changed_file_is_converted_again_and_the_old_copy_goes(tmp_path: Path) -> None:
    path, cache = tmp_path / "data.parquet", tmp_path / "cache"
    pq.write_table(table_of(0, 5), path)
    Dataset.open(path, cache)
    (first,) = cache.iterdir()
    os.utime(path, ns=(1, 1))  # of the same size, but written at another time
    Dataset.open(path, cache)
    (second,) = cache.iterdir()
    assert second != first
    pq.write_table(table_of(5, 9), path)
    assert Dataset.open(path, cache).ids(0).tolist() == SAMPLES[5]
    assert len(list(cache.iterdir())) == 1


def test_a_conversion_that_fails_half_way_leaves_nothing_and_the_next_one_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cache = parquet_file(tmp_path / "data.parquet"), tmp_path / "cache"
    real = conversion._as
    left = [2]

    def full(*arguments: Any) -> pa.RecordBatch:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        return real(*arguments)

    monkeypatch.setattr(conversion, "BATCH_ROWS", 4)
    monkeypatch.setattr(conversion, "_as", full)
    with pytest.raises(DataError, match=r"data\.parquet: cannot be converted.*No space left"):
        Dataset.open(path, cache)
    assert list(cache.iterdir()) == []
    left[0] = 10**6
    assert len(Dataset.open(path, cache)) == 23


def test_a_disk_that_is_too_small_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cache = parquet_file(tmp_path / "data.parquet"), tmp_path / "cache"
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(conversion.shutil, "disk_usage", lambda _path: usage._replace(free=10))
    with pytest.raises(DataError, match=r"data\.parquet: its Arrow copy in .* needs about .* GiB are free"):
        Dataset.open(path, cache)
    assert list(cache.iterdir()) == []


def test_what_a_killed_conversion_left_is_removed_once_it_is_old_and_another_ones_work_is_not(
    tmp_path: Path,
) -> None:
    path, cache = tmp_path / "data.parquet", tmp_path / "cache"
    pq.write_table(table_of(), path)
    Dataset.open(path, cache)
    (copy,) = cache.iterdir()
    old, fresh = copy.with_suffix(".aaaa.part"), copy.with_suffix(".bbbb.part")
    other = cache / "0123456789ab-0123456789ab.arrow"  # of another path
    for file in (old, fresh, other):
        file.write_bytes(b"half")
    copy.with_suffix(".cccc.part").symlink_to("as one that another process renames meanwhile")
    hours_ago = time.time() - 2 * conversion.ABANDONED_S
    os.utime(old, (hours_ago, hours_ago))
    pq.write_table(table_of(0, 4), path)
    Dataset.open(path, cache)
    assert not old.exists() and fresh.exists() and other.exists()


def test_conversion_reads_a_record_batch_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row group of 6 MiB of ids, read 16 rows at a time."""
    ids = pa.array([list(range(1000, 1512))] * 3072, pa.list_(pa.int32()))
    path = tmp_path / "data.parquet"
    pq.write_table(pa.table({"input_ids": ids, "prompt_length": pa.array([5] * 3072)}), path)
    del ids
    monkeypatch.setattr(conversion, "BATCH_ROWS", 16)
    most, real = [0], conversion._as

    def watched(*arguments: Any) -> pa.RecordBatch:
        most[0] = max(most[0], pa.total_allocated_bytes() - before)
        return real(*arguments)

    monkeypatch.setattr(conversion, "_as", watched)
    gc.collect()
    before = pa.total_allocated_bytes()
    assert Dataset.open(path, tmp_path / "cache").tokens == 3072 * 512
    assert 0 < most[0] < 2 << 20


@pytest.mark.parametrize(
    "kinds", [(pa.int8(), pa.int64()), (pa.int64(), pa.int8()), (pa.uint32(), pa.int32())]
)
def test_files_of_several_integer_types_are_converted_to_the_widest(
    tmp_path: Path, kinds: tuple[pa.DataType, pa.DataType]
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    most = [2 ** (kind.bit_width - 1) - 1 for kind in kinds]
    for number, kind in enumerate(kinds):
        table = pa.table({"input_ids": pa.array([[1, most[number]]], pa.list_(kind)), "prompt_length": [0]})
        pq.write_table(table, folder / f"{number}.parquet")
    dataset = Dataset.open(folder, tmp_path / "cache")
    assert [dataset.ids(sample).tolist() for sample in range(2)] == [[1, most[0]], [1, most[1]]]


def test_arrow_of_one_sample_a_record_batch_is_rewritten_once_where_there_are_very_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cache = write_ipc(tmp_path / "a.arrow", table_of(), rows=1), tmp_path / "cache"
    assert len(Dataset.open(path, cache)) == 23 and not cache.exists()  # 23 are not many
    monkeypatch.setattr(arrow_source, "MANY_BATCHES", 20)
    monkeypatch.setattr(conversion, "BATCH_ROWS", 10)
    dataset = Dataset.open(path, cache)
    assert [dataset.ids(sample).tolist() for sample in range(23)] == SAMPLES
    (copy,) = cache.iterdir()
    with pa.memory_map(str(copy)) as file:
        reader = pa.ipc.open_file(file)
        assert [reader.get_batch(n).num_rows for n in range(reader.num_record_batches)] == [10, 10, 3]
    assert "is in small record batches" in refused(path)


# What is refused


def refused(path: Path, cache: Path | None = None) -> str:
    with pytest.raises(DataError) as error:
        Dataset.open(path, cache)
    text = str(error.value)
    assert "\n" not in text
    return text


def test_a_dataset_dict_is_refused_and_its_splits_are_named(tmp_path: Path) -> None:
    save_to_disk(tmp_path / "all" / "train")
    (tmp_path / "all" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    text = refused(tmp_path / "all")
    assert "is a DatasetDict with the splits train, test" in text
    assert f"such as {tmp_path / 'all' / 'train'}" in text
    assert len(Dataset.open(tmp_path / "all" / "train")) == 23


@pytest.mark.parametrize("content", ["", "[]", "{", '{"splits": 3}', '{"splits": []}'])
def test_a_damaged_dataset_dict_is_refused_all_the_same(tmp_path: Path, content: str) -> None:
    (tmp_path / "dataset_dict.json").write_text(content)
    assert str(tmp_path) in refused(tmp_path)


def test_a_shard_that_is_missing_is_named(tmp_path: Path) -> None:
    folder = save_to_disk(tmp_path / "data")
    (folder / "data-00001-of-00003.arrow").unlink()
    assert "1 of its 3 shards are not there, the first is data-00001-of-00003.arrow" in refused(folder)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", "is no JSON"),
        ("[]", "expected a JSON object"),
        ("{}", "names no shards"),
        ('{"_data_files": []}', "names no shards"),
        ('{"_data_files": [{"file": "a"}]}', "names no shards"),
        ('{"_data_files": "a.arrow"}', "names no shards"),
        (
            '{"_data_files": [{"filename": "a"}], "_indices_data_files": [{"filename": "i"}]}',
            "flatten_indices",
        ),
    ],
)
def test_a_state_that_does_not_name_shards_is_refused(tmp_path: Path, content: str, expected: str) -> None:
    (tmp_path / "state.json").write_text(content)
    assert expected in refused(tmp_path)


def test_shards_of_other_columns_are_refused_by_file(tmp_path: Path) -> None:
    folder = save_to_disk(tmp_path / "data")
    odd = pa.table({"input_ids": pa.array([[1, 2]]), "prompt_length": pa.array([0])})
    write_ipc(folder / "data-00001-of-00003.arrow", odd)
    assert "data-00001-of-00003.arrow: has other columns than data-00000-of-00003.arrow" in refused(folder)
    write_ipc(folder / "data-00001-of-00003.arrow", table_of(9, 10).drop(["input_ids"]))
    assert "data-00001-of-00003.arrow: no column 'input_ids'" in refused(folder)


def test_parquet_files_of_other_columns_are_refused_by_file(tmp_path: Path) -> None:
    folder = parquet_folder(tmp_path / "data")
    pq.write_table(table_of(0, 3).drop(["kind"]), folder / "train-00001-of-00002.parquet")
    assert "train-00001-of-00002.parquet: has other columns" in refused(folder, tmp_path / "cache")
    wrong = table_of(0, 3).drop(["loss_mask"])
    pq.write_table(wrong, folder / "train-00001-of-00002.parquet")
    text = refused(folder, tmp_path / "cache")
    assert "train-00001-of-00002.parquet: no column says which tokens are the answer" in text
    assert not list((tmp_path / "cache").glob("*.part"))


def test_a_folder_of_both_kinds_and_one_of_none_are_refused(tmp_path: Path) -> None:
    folder = arrow_folder(tmp_path / "data")
    pq.write_table(table_of(), folder / "more.parquet")
    assert "holds both Arrow (part-0.arrow) and Parquet (more.parquet) files" in refused(folder)
    (tmp_path / "nothing").mkdir()
    assert "is a folder without data" in refused(tmp_path / "nothing")


@pytest.mark.parametrize("content", [b"PAR1", b"PAR1" + bytes(40) + b"PAR1", b"PAR1 and more"])
def test_a_damaged_parquet_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.parquet").write_bytes(content)
    assert "bad.parquet: is no complete Parquet file" in refused(tmp_path / "bad.parquet", tmp_path / "cache")


def test_a_parquet_file_whose_pages_are_damaged_is_refused_by_name_and_leaves_nothing(tmp_path: Path) -> None:
    path = parquet_file(tmp_path / "bad.parquet")
    content = bytearray(path.read_bytes())
    content[4:400] = bytes(396)
    path.write_bytes(content)
    assert "bad.parquet: cannot be read" in refused(path, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_what_cannot_be_mapped_is_refused_where_there_is_no_cache(tmp_path: Path) -> None:
    assert "is Parquet; expected Arrow" in refused(parquet_file(tmp_path / "a.parquet"))
    assert "is compressed; expected Arrow" in refused(feather_file(tmp_path / "a.feather"))


def test_a_path_that_cannot_even_be_looked_for_is_refused_as_such(tmp_path: Path) -> None:
    """As below a folder that the user may not enter; of a name that no disk takes, root is told the same."""
    with pytest.raises(DataError, match=r"cannot be read \(File name too long\)"):
        Dataset.open(tmp_path / ("n" * 300))


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "is neither a file nor a folder" in refused(tmp_path / "pipe")
