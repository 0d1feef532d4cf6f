"""The dataset: token ids in Arrow files, memory-mapped, looked at sample by sample.

Lengths come from the Arrow offsets, so that opening costs the same whatever the samples hold: a million of
them in well under a second. The ids themselves are read when a batch needs them. Samples are numbered through
all files in order, and a sample keeps its number whether it can be used or not.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from remote_payload.train.arrow_source import Log, Shard, data_files, is_parquet
from remote_payload.train.columns import IDS, LOSS_MASK, PROMPT_LENGTH, supervision
from remote_payload.train.converted import converted
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

__all__ = ["DataError", "Dataset", "Skipped"]

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def _quiet(_line: str) -> None:
    """No log."""


@dataclasses.dataclass(frozen=True, slots=True)
class Lists:
    """A list column of one record batch: offsets [rows + 1] and flat values, both in the mapped file."""

    offsets: npt.NDArray[np.integer]
    values: pa.Array
    flat: npt.NDArray[np.generic] | None
    """The values as they lie there; None where some are null, or booleans, of which each is a bit."""

    @classmethod
    def of(cls, column: pa.Array) -> Lists:
        """The lists of `column`."""
        values = column.values
        plain = not values.null_count and not pa.types.is_boolean(values.type)
        return cls(column.offsets.to_numpy(), values, values.to_numpy() if plain else None)

    def row(self, row: int) -> npt.NDArray[np.generic]:
        """The values of `row`: integers as they are, booleans as 0 and 1, -1 for a null."""
        begin, end = int(self.offsets[row]), int(self.offsets[row + 1])
        if self.flat is not None:
            return self.flat[begin:end]
        values = self.values.slice(begin, end - begin).cast(pa.int64(), safe=False)
        numbers: npt.NDArray[np.generic] = values.fill_null(-1).to_numpy()
        return numbers

    def has_null(self, row: int) -> bool:
        """Whether a value of `row` is null."""
        begin, end = int(self.offsets[row]), int(self.offsets[row + 1])
        return self.flat is None and bool(self.values.slice(begin, end - begin).null_count)


class Dataset:
    """Samples of one dataset: ids, and which tokens are supervised."""

    def __init__(self, path: Path, shards: Sequence[Shard]) -> None:
        """Index `shards`, the files of `path`: lengths, and where each sample lies."""
        self.path = path
        self.files = [shard.path for shard in shards]
        self._shards = shards  # keeps the memory maps alive
        self._ids: list[Lists] = []
        self._masks: list[Lists] = []
        self.by_prompt_length = supervision(shards[0].path, shards[0].schema) == PROMPT_LENGTH
        parts: list[tuple[Ints, Ints, Bools]] = []
        for shard in shards:
            if (supervision(shard.path, shard.schema) == PROMPT_LENGTH) != self.by_prompt_length:
                raise DataError(f"{shard.path}: has other columns than {shards[0].path.name}; write it again")
            if shard.batches:
                parts.append(self._index(shard))
            shard.indexed()
        if not parts:
            raise DataError(f"{path}: holds no samples; write some, e.g. with remote_payload.tools.prepare")
        lengths, answers, nulls = zip(*parts, strict=True)
        self.lengths: Ints = np.concatenate(lengths)
        """Tokens of each sample, [samples]."""
        self._answers: Ints = np.concatenate(answers)
        self._null: Bools = np.concatenate(nulls)
        rows = (batch.num_rows for shard in shards for batch in shard.batches)
        self._first = [0, *itertools.accumulate(rows)]

    @classmethod
    def open(cls, path: Path, cache: Path | None = None, log: Log = _quiet) -> Dataset:
        """Memory-map the dataset at `path`, a file or a folder (`arrow_source.py` says which).

        `cache` is a folder for the Arrow copy of what cannot be mapped (Parquet, compressed Arrow); `log`
        hears of it. Raises DataError when the dataset is absent, corrupt, empty or without the columns it
        needs.
        """
        return cls(path, open_shards(path, cache, log))

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Tokens of all samples together."""
        return int(self.lengths.sum())

    @property
    def fingerprint(self) -> str:
        """Tells datasets apart by the lengths of their samples and prompts, in order; 16 hex digits.

        Costs no look at the content, so a change of ids that leaves every length as it was goes unnoticed.
        """
        digest = hashlib.sha256(self.lengths.astype("<i8").tobytes())
        digest.update(self._answers.astype("<i8").tobytes())
        return digest.hexdigest()[:16]

    def ids(self, sample: int) -> npt.NDArray[np.generic]:
        """Token ids of `sample`, a view of the memory map, [tokens]; -1 where one is null."""
        chunk, row = self._place(sample)
        return self._ids[chunk].row(row)

    def supervised(self, sample: int) -> Bools:
        """Which tokens of `sample` the target wrote and the drafter learns from, [tokens].

        None of them where that is not known (null, or a mask of another length).
        """
        length = int(self.lengths[sample])
        if self._null[sample]:
            return np.zeros(length, np.bool_)
        if self.by_prompt_length:
            supervised: Bools = np.arange(length) >= length - self._answers[sample]
            return supervised
        chunk, row = self._place(sample)
        mask = self._masks[chunk].row(row)
        return mask == 1 if len(mask) == length else np.zeros(length, np.bool_)

    def look(self, sample: int, vocabulary: int, mask_token_id: int | None = None) -> str | None:
        """Look at the content of `sample`: why it cannot be trained on, None when it can.

        `vocabulary` is the number of ids that exist. An answer that holds `mask_token_id` would teach the
        drafter to draft it, and to take an anchor for a place that is still to be filled.
        """
        chunk, row = self._place(sample)
        if self._null[sample] or self._ids[chunk].has_null(row):
            return NULL
        ids = self._ids[chunk].row(row)
        if not len(ids):
            return EMPTY
        if ids.min() < 0 or ids.max() >= vocabulary:
            return OUTSIDE_VOCABULARY
        if not self.by_prompt_length:
            if self._masks[chunk].has_null(row):
                return NULL
            mask = self._masks[chunk].row(row)
            if len(mask) != len(ids):
                return OTHER_LENGTH
            if mask.min() < 0 or mask.max() > 1:
                return NO_MASK
        supervised = self.supervised(sample)
        if not np.any(supervised[:-1] & supervised[1:]):
            return NO_ANSWER
        masked = mask_token_id is not None and np.any((ids == mask_token_id) & supervised)
        return MASK_TOKEN if masked else None

    def texts(self, column: str) -> list[str] | None:
        """A column of strings (such as `kind`), or None where no file has one of that name.

        Raises DataError when it is damaged: Arrow reads wherever a string's offsets point.
        """
        found: list[str] = []
        for shard in self._shards:
            if column not in shard.columns:
                return None
            for batch in shard.batches:
                values = batch.column(column)
                try:
                    values.validate(full=True)
                except pa.ArrowException as error:
                    raise DataError(
                        f"{shard.path}: column {column}: is damaged ({error}); write it again"
                    ) from error
                found += [str(value) for value in values.to_pylist()]
        return found

    def usable(self, shortest: int, longest: int, skipped: Skipped) -> Bools:
        """Which samples can be trained on as far as lengths tell, [samples]; counts the others.

        `shortest` and `longest` are the fewest and most tokens a sample may have.
        """
        bad = np.zeros(len(self), np.bool_)
        other = np.zeros(len(self), np.bool_) if self.by_prompt_length else self._answers != self.lengths
        no_answer = self._answers < 2 if self.by_prompt_length else self.lengths < 2
        reasons: tuple[tuple[str, Callable[[], Bools]], ...] = (
            (NULL, lambda: self._null),
            (EMPTY, lambda: self.lengths == 0),
            (TOO_SHORT, lambda: self.lengths < shortest),
            (TOO_LONG, lambda: self.lengths > longest),
            (OTHER_LENGTH, lambda: other),
            (NO_ANSWER, lambda: no_answer),
        )
        for reason, which in reasons:
            fresh = which() & ~bad
            skipped.add(reason, np.flatnonzero(fresh))
            bad |= fresh
        return ~bad

    def _index(self, shard: Shard) -> tuple[Ints, Ints, Bools]:
        """Lengths, supervised lengths (of the answer, or of the mask) and nulls of a shard, [rows]."""
        columns = {IDS: self._ids} if self.by_prompt_length else {IDS: self._ids, LOSS_MASK: self._masks}
        lengths = {}
        for name, lists in columns.items():
            found = [Lists.of(batch.column(name)) for batch in shard.batches]
            lengths[name] = _lengths(shard.path, name, found)
            lists += found
        read = (IDS, PROMPT_LENGTH if self.by_prompt_length else LOSS_MASK)
        null = np.concatenate([_nulls(batch, read) for batch in shard.batches])
        if not self.by_prompt_length:
            return lengths[IDS], lengths[LOSS_MASK], null
        prompts = [batch.column(PROMPT_LENGTH).fill_null(0).to_numpy() for batch in shard.batches]
        prompt = np.clip(np.concatenate(prompts).astype(np.int64), 0, lengths[IDS])
        return lengths[IDS], lengths[IDS] - prompt, null

    def _place(self, sample: int) -> tuple[int, int]:
        """The record batch of `sample`, and its row there."""
        chunk = bisect.bisect_right(self._first, sample) - 1
        return chunk, sample - self._first[chunk]


def open_shards(path: Path, cache: Path | None = None, log: Log = _quiet) -> list[Shard]:
    """The files of `path`, memory-mapped; of what cannot be mapped, its copy in the folder `cache`."""
    files = data_files(path)
    parquet = any(map(is_parquet, files))
    shards = [] if parquet else [Shard(file) for file in files]
    obstacle = "Parquet" if parquet else next((shard.obstacle for shard in shards if shard.obstacle), None)
    if obstacle is None:
        return shards
    if cache is None:
        raise DataError(
            f"{path}: is {obstacle}; expected Arrow that can be memory-mapped: uncompressed, in record"
            f" batches of a thousand rows or so"
        )
    return [Shard(converted(path, files, cache, log))]


def _lengths(path: Path, name: str, lists: Sequence[Lists]) -> Ints:
    """Values of each row of all `lists`, [rows]. Raises DataError when offsets point outside their values."""
    offsets = np.concatenate([each.offsets for each in lists]).astype(np.int64)
    ends = np.cumsum([len(each.offsets) for each in lists])
    lengths = np.delete(np.diff(offsets), ends[:-1] - 1)  # what lies between two record batches is no row
    outside = offsets[ends - 1] > [len(each.values) for each in lists]
    if lengths.min() < 0 or offsets[ends - [len(each.offsets) for each in lists]].min() < 0 or outside.any():
        raise DataError(f"{path}: column {name}: its offsets are corrupt; write the file again")
    return lengths


def _nulls(batch: pa.RecordBatch, names: Sequence[str]) -> Bools:
    """Which rows of `batch` are null in one of the columns `names`, [rows]."""
    null = np.zeros(batch.num_rows, np.bool_)
    for name in names:
        column = batch.column(name)
        if column.null_count:
            null |= column.is_null().to_numpy(zero_copy_only=False)
    return null
