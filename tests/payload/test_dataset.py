"""The Arrow dataset: what is read, what is left out, and what is refused before anything reads it."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from remote_payload.train.dataset import Dataset
from remote_payload.train.unusable import (
    EMPTY,
    MASK_TOKEN,
    NO_ANSWER,
    NO_MASK,
    NULL,
    OTHER_LENGTH,
    OUTSIDE_VOCABULARY,
    TOO_LONG,
    TOO_SHORT,
    DataError,
    Skipped,
)
from tests.payload.tiny import random_samples, write_arrow


def write_table(path: Path, *tables: pa.Table, stream: bool = False) -> Path:
    """Write `tables`, a record batch each, as an Arrow IPC file or stream."""
    opener = pa.ipc.new_stream if stream else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as sink, opener(sink, tables[0].schema) as writer:
        for table in tables:
            writer.write_table(table)
    return path


def table_of(samples: list[list[int]], kind: pa.DataType, **columns: pa.Array) -> pa.Table:
    return pa.table({"input_ids": pa.array(samples, kind), **columns})


@pytest.mark.parametrize("stream", [False, True], ids=["file", "stream"])
@pytest.mark.parametrize("kind", [pa.list_(pa.int32()), pa.large_list(pa.int64()), pa.list_(pa.uint16())])
def test_samples_come_back_as_written_from_every_kind_of_list_in_several_record_batches(
    tmp_path: Path, kind: pa.DataType, stream: bool
) -> None:
    samples, prompts = random_samples(23)
    whole = table_of(samples, kind, prompt_length=pa.array(prompts, pa.int16()))
    parts = [whole.slice(0, 5), whole.slice(5, 1), whole.slice(6)]
    dataset = Dataset.open(write_table(tmp_path / "a.arrow", *parts, stream=stream))
    assert len(dataset) == len(samples) and dataset.tokens == sum(map(len, samples))
    assert dataset.lengths.tolist() == [len(sample) for sample in samples]
    for number, (sample, prompt) in enumerate(zip(samples, prompts, strict=True)):
        assert dataset.ids(number).tolist() == sample
        assert dataset.supervised(number).tolist() == [place >= prompt for place in range(len(sample))]


@pytest.mark.parametrize("kind", [pa.list_(pa.bool_()), pa.list_(pa.int8())])
def test_a_loss_mask_says_token_by_token_what_is_supervised(tmp_path: Path, kind: pa.DataType) -> None:
    masks = [[0, 1, 1, 0, 1], [1], [], [0, 0, 1]]
    samples = [list(range(len(mask))) for mask in masks]
    column = pa.array([[bool(v) if kind == pa.list_(pa.bool_()) else v for v in m] for m in masks], kind)
    dataset = Dataset.open(
        write_table(tmp_path / "a.arrow", table_of(samples, pa.list_(pa.int32()), loss_mask=column))
    )
    assert [dataset.supervised(i).astype(int).tolist() for i in range(len(masks))] == masks


def test_ids_are_views_of_the_memory_map_and_not_copies(tmp_path: Path) -> None:
    samples, prompts = random_samples(4)
    dataset = Dataset.open(write_arrow(tmp_path / "a.arrow", samples, prompts))
    assert all(not dataset.ids(number).flags["OWNDATA"] for number in range(4))
    assert not dataset.ids(0).flags["WRITEABLE"]


def test_what_lengths_show_to_be_unusable_is_counted_once_by_reason_and_the_first_ten_are_named(
    tmp_path: Path,
) -> None:
    long, short = [[5] * 41] * 12, [[5] * 6] * 3
    samples = [*long, [], *short, [5] * 6, [5] * 40, [5] * 4, [5] * 5]
    prompts = [0] * 12 + [0] + [5, 6, 99] + [4, 0] + [0, 3]
    dataset = Dataset.open(write_arrow(tmp_path / "a.arrow", samples, prompts))
    skipped = Skipped()
    usable = dataset.usable(5, 40, skipped)
    assert np.flatnonzero(usable).tolist() == [16, 17, 19]
    assert skipped.count == {TOO_LONG: 12, EMPTY: 1, NO_ANSWER: 3, TOO_SHORT: 1}
    assert skipped.first == {
        TOO_LONG: list(range(10)),
        EMPTY: [12],
        NO_ANSWER: [13, 14, 15],
        TOO_SHORT: [18],
    }


def test_a_sample_whose_prompt_length_is_null_is_left_out_and_never_trained_on_whole(tmp_path: Path) -> None:
    prompts = pa.array([None, 2], pa.int32())
    table = table_of([[5] * 9, [6] * 9], pa.list_(pa.int32()), prompt_length=prompts)
    dataset = Dataset.open(write_table(tmp_path / "a.arrow", table))
    skipped = Skipped()
    assert dataset.usable(0, 40, skipped).tolist() == [False, True]
    assert skipped.count == {NULL: 1} and not dataset.supervised(0).any()


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.arrow: there is no such file"):
        Dataset.open(tmp_path / "absent.arrow")


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"ids": pa.array([[1]])}, r"no column 'input_ids'; expected lists of integers, found ids"),
        ({"input_ids": pa.array([[1]])}, r"no column says which tokens are the answer"),
        ({"input_ids": pa.array([["a"]]), "prompt_length": pa.array([0])}, r"expected lists of integers"),
        ({"input_ids": pa.array([1]), "prompt_length": pa.array([0])}, r"expected lists of integers"),
        (
            {"input_ids": pa.array([[1]]), "prompt_length": pa.array([0.5])},
            r"prompt_length: expected integers",
        ),
        (
            {"input_ids": pa.array([[1]]), "loss_mask": pa.array([[0.5]])},
            r"loss_mask: expected lists of 0 and 1 .*, found list<item: double>",
        ),
        (
            {"input_ids": pa.array([], pa.list_(pa.int32())), "prompt_length": pa.array([], pa.int32())},
            r"holds no samples",
        ),
    ],
)
def test_a_file_that_is_no_dataset_is_refused_with_its_name_and_what_was_found(
    tmp_path: Path, columns: dict[str, pa.Array], expected: str
) -> None:
    with pytest.raises(DataError, match=expected) as refused:
        Dataset.open(write_table(tmp_path / "bad.arrow", pa.table(columns)))
    assert str(tmp_path / "bad.arrow") in str(refused.value)


@pytest.mark.parametrize("content", [b"", b"A", b"ARROW1", b"not arrow at all" * 100, bytes(64), b"\xff" * 8])
def test_a_file_that_is_no_arrow_is_refused_as_such(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.arrow"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"bad\.arrow"):
        Dataset.open(path)


def test_a_damaged_file_is_refused_or_read_but_never_brings_the_process_down(tmp_path: Path) -> None:
    samples, prompts = random_samples(12)
    good = write_arrow(tmp_path / "good.arrow", samples, prompts, ["one", "two"] * 6).read_bytes()
    dice = random.Random(4)
    refused = 0
    for number in range(150):
        damaged = bytearray(good)
        if number % 3 == 0:
            del damaged[dice.randrange(len(good)) :]
        else:
            for _ in range(dice.choice((1, 2, 8))):
                damaged[dice.randrange(len(good))] = dice.randrange(256)
        path = tmp_path / f"{number}.arrow"
        path.write_bytes(damaged)
        try:
            dataset = Dataset.open(path)
            for sample in np.flatnonzero(dataset.usable(0, 10**9, Skipped())):
                assert len(dataset.ids(int(sample))) == len(dataset.supervised(int(sample)))
            dataset.texts("kind")
        except DataError as error:
            refused += 1
            assert str(path) in str(error)
        path.unlink()
    assert 30 < refused < 150


# What only content tells


def opened(path: Path, **columns: pa.Array) -> Dataset:
    return Dataset.open(write_table(path / "a.arrow", pa.table(columns)))


@pytest.mark.parametrize(
    ("ids", "mask", "reason"),
    [
        ([5, 6, 7], [0, 1, 1], None),
        ([5, 6, 7], [1, 1, 0], None),
        ([5, 6, 7], [1, 0, 1], NO_ANSWER),
        ([5], [1], NO_ANSWER),
        ([], [], EMPTY),
        (None, [1, 1], NULL),
        ([5, 6], None, NULL),
        ([5, None], [1, 1], NULL),
        ([5, 6], [1, None], NULL),
        ([5, 6, 7], [1, 1], OTHER_LENGTH),
        ([5, 6], [1, 1, 1], OTHER_LENGTH),
        ([5, 97], [1, 1], OUTSIDE_VOCABULARY),
        ([-1, 5], [1, 1], OUTSIDE_VOCABULARY),
        ([5, 6], [1, 2], NO_MASK),
        ([5, 6], [-100, 1], NO_MASK),
    ],
)
def test_looking_at_a_sample_tells_why_it_cannot_be_used(
    tmp_path: Path, ids: list[int] | None, mask: list[int] | None, reason: str | None
) -> None:
    good, good_mask = [8, 9, 10], [0, 1, 1]
    dataset = opened(
        tmp_path,
        input_ids=pa.array([good, ids, good], pa.list_(pa.int32())),
        loss_mask=pa.array([good_mask, mask, good_mask], pa.list_(pa.int8())),
    )
    assert [dataset.look(sample, 97) for sample in range(3)] == [None, reason, None]
    assert len(dataset.ids(1)) == len(dataset.supervised(1)) == dataset.lengths[1]
    assert dataset.ids(2).tolist() == good and dataset.supervised(2).tolist() == [False, True, True]


def test_the_mask_token_may_stand_in_a_prompt_and_in_no_answer(tmp_path: Path) -> None:
    dataset = opened(
        tmp_path,
        input_ids=pa.array([[9, 5, 6], [5, 6, 9], [5, 6, 7]], pa.list_(pa.int32())),
        loss_mask=pa.array([[0, 1, 1]] * 3, pa.list_(pa.int8())),
    )
    assert [dataset.look(sample, 97, mask_token_id=9) for sample in range(3)] == [None, MASK_TOKEN, None]
    assert [dataset.look(sample, 97) for sample in range(3)] == [None] * 3  # to prompt with, all will do


def test_what_lengths_tell_of_masks_and_nulls_is_told_before_content_is_touched(tmp_path: Path) -> None:
    dataset = opened(
        tmp_path,
        input_ids=pa.array([[5] * 9, None, [6] * 9, [7] * 9, [8]]),
        loss_mask=pa.array([[1] * 9, [1] * 9, [1] * 8, None, [1]]),
    )
    skipped = Skipped()
    assert dataset.usable(0, 40, skipped).tolist() == [True, False, False, False, False]
    assert skipped.first == {NULL: [1, 3], OTHER_LENGTH: [2], NO_ANSWER: [4]}


def test_the_mask_counts_where_there_is_a_prompt_length_too(tmp_path: Path) -> None:
    dataset = opened(
        tmp_path,
        input_ids=pa.array([[5, 6, 7, 8]]),
        prompt_length=pa.array([0]),
        loss_mask=pa.array([[0, 0, 1, 1]]),
    )
    assert dataset.supervised(0).tolist() == [False, False, True, True]


@pytest.mark.parametrize("kind", [pa.int8(), pa.uint32(), pa.uint64()])
def test_every_integer_type_of_ids_and_prompt_lengths_is_read(tmp_path: Path, kind: pa.DataType) -> None:
    dataset = opened(
        tmp_path, input_ids=pa.array([[5, 6, 7]], pa.list_(kind)), prompt_length=pa.array([1], kind)
    )
    assert dataset.look(0, 97) is None
    assert dataset.ids(0).tolist() == [5, 6, 7] and dataset.supervised(0).tolist() == [False, True, True]


def test_ids_too_large_for_any_vocabulary_are_outside_it(tmp_path: Path) -> None:
    ids = pa.array([[5, 2**64 - 1, 6]], pa.list_(pa.uint64()))
    assert opened(tmp_path, input_ids=ids, prompt_length=pa.array([0])).look(0, 97) == OUTSIDE_VOCABULARY


@pytest.mark.parametrize("kind", [pa.list_(pa.int32()), pa.large_list(pa.int64())])
def test_sliced_arrays_are_read_from_where_they_begin(tmp_path: Path, kind: pa.DataType) -> None:
    """Arrow writes a slice with offsets that begin at 0 again; in memory they do not."""
    samples, prompts = random_samples(30)
    masks = [[int(k >= p) for k in range(len(s))] for s, p in zip(samples, prompts, strict=True)]
    whole = table_of(samples, kind, loss_mask=pa.array(masks, pa.list_(pa.int8())))
    shard = Dataset.open(write_table(tmp_path / "a.arrow", whole))._shards[0]
    for begin, end in ((0, 30), (7, 22), (29, 30)):
        shard.batches = [shard.batches[0].slice(begin, end - begin)] if begin or end < 30 else shard.batches
        sliced = Dataset(tmp_path, [shard])
        assert [sliced.ids(sample).tolist() for sample in range(len(sliced))] == samples[begin:end]
        assert [s.tolist() for s in map(sliced.supervised, range(len(sliced)))] == [
            [bool(value) for value in mask] for mask in masks[begin:end]
        ]
        shard = Dataset.open(write_table(tmp_path / "a.arrow", whole))._shards[0]


def test_many_small_record_batches_and_empty_ones_are_numbered_through(tmp_path: Path) -> None:
    samples, prompts = random_samples(60)
    whole = table_of(samples, pa.list_(pa.int32()), prompt_length=pa.array(prompts, pa.int32()))
    nothing = whole.slice(0, 0).to_batches() or [
        pa.record_batch([pa.array([], f.type) for f in whole.schema], schema=whole.schema)
    ]
    path = tmp_path / "a.arrow"
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, whole.schema) as writer:
        for number in range(60):
            writer.write_batch(whole.slice(number, 1).combine_chunks().to_batches()[0])
            writer.write_batch(nothing[0])
    dataset = Dataset.open(path)
    assert [dataset.ids(sample).tolist() for sample in range(60)] == samples


def test_a_fingerprint_changes_with_any_length_and_not_with_how_the_samples_are_stored(
    tmp_path: Path,
) -> None:
    samples, prompts = random_samples(9)
    whole = table_of(samples, pa.list_(pa.int32()), prompt_length=pa.array(prompts))
    wide = table_of(samples, pa.large_list(pa.int64()), prompt_length=pa.array(prompts))
    shorter = table_of(
        [*samples[:-1], samples[-1][:-1]], pa.list_(pa.int32()), prompt_length=pa.array(prompts)
    )
    prompts[3] += 1
    other = table_of(samples, pa.list_(pa.int32()), prompt_length=pa.array(prompts))
    marks = []
    for number, table in enumerate((whole, wide, shorter, other)):
        marks.append(Dataset.open(write_table(tmp_path / f"{number}.arrow", table)).fingerprint)
    assert marks[0] == marks[1] and len(set(marks)) == 3
