"""The dataset: token ids in Arrow files, memory-mapped, looked at sample by sample.

Lengths come from the Arrow offsets, so that opening costs the same whatever the samples hold: a million of
them in well under a second. The ids themselves are read when a batch needs them. Samples are numbered through
all files in order, and a sample keeps its number whether it can be used or not.
"""

from __future__ import annotations

import dataclasses
import hashlib
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

    @classmethod
    def of(cls, path: Path, column: pa.Array, name: str) -> Lists:
        """The lists of `column`. Raises DataError when its offsets point outside its values."""
        offsets = column.offsets.to_numpy()
        values = column.values
        if offsets[0] < 0 or offsets[-1] > len(values) or np.any(offsets[1:] < offsets[:-1]):
            raise DataError(f"{path}: column {name}: its offsets are corrupt; write the file again")
        return cls(offsets, values)

    @property
    def lengths(self) -> Ints:
        """Values of each row, [rows]."""
        return np.diff(self.offsets).astype(np.int64)

    def row(self, row: int) -> pa.Array:
        """The values of `row`."""
        begin, end = int(self.offsets[row]), int(self.offsets[row + 1])
        return self.values.slice(begin, end - begin)


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
            parts += [self._index(shard.path, batch) for batch in shard.batches]
            shard.forget()
        lengths, answers, nulls = zip(*parts, strict=True) if parts else ([], [], [])
        if not parts:
            raise DataError(f"{path}: holds no samples; write some, e.g. with remote_payload.tools.prepare")
        self.lengths: Ints = np.concatenate(lengths)
        """Tokens of each sample, [samples]."""
        self._answers: Ints = np.concatenate(answers)
        self._null: Bools = np.concatenate(nulls)
        self._first = np.cumsum([0] + [len(part) for part in lengths])

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
        return _numbers(self._list(self._ids, sample))

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
        mask = _numbers(self._list(self._masks, sample))
        return mask == 1 if len(mask) == length else np.zeros(length, np.bool_)

    def look(self, sample: int, vocabulary: int) -> str | None:
        """Look at the content of `sample`: why it cannot be trained on, None when it can.

        `vocabulary` is the number of ids that exist.
        """
        ids = self._list(self._ids, sample)
        if self._null[sample] or ids.null_count:
            return NULL
        numbers = _numbers(ids)
        if not len(numbers):
            return EMPTY
        if numbers.min() < 0 or numbers.max() >= vocabulary:
            return OUTSIDE_VOCABULARY
        if not self.by_prompt_length:
            mask = self._list(self._masks, sample)
            if mask.null_count:
                return NULL
            if len(mask) != len(ids):
                return OTHER_LENGTH
            values = _numbers(mask)
            if values.min() < 0 or values.max() > 1:
                return NO_MASK
        supervised = self.supervised(sample)
        return None if bool(np.any(supervised[:-1] & supervised[1:])) else NO_ANSWER

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

    def _index(self, path: Path, batch: pa.RecordBatch) -> tuple[Ints, Ints, Bools]:
        """Lengths, supervised lengths (of the answer, or of the mask) and nulls of a record batch, [rows]."""
        column = batch.column(IDS)
        ids = Lists.of(path, column, IDS)
        lengths = ids.lengths
        null = _nulls(column)
        if self.by_prompt_length:
            prompts = batch.column(PROMPT_LENGTH)
            null = null | _nulls(prompts)
            known = prompts.fill_null(0) if prompts.null_count else prompts
            answers = lengths - np.clip(known.to_numpy().astype(np.int64), 0, lengths)
        else:
            column = batch.column(LOSS_MASK)
            masks = Lists.of(path, column, LOSS_MASK)
            null = null | _nulls(column)
            answers = masks.lengths
            self._masks.append(masks)
        self._ids.append(ids)
        return lengths, answers, null

    def _list(self, columns: list[Lists], sample: int) -> pa.Array:
        chunk = int(np.searchsorted(self._first, sample, side="right")) - 1
        return columns[chunk].row(sample - int(self._first[chunk]))


def open_shards(path: Path, cache: Path | None = None, log: Log = _quiet) -> list[Shard]:
    """The files of `path`, memory-mapped; of what cannot be mapped, its copy in the folder `cache`."""
    files = data_files(path)
    parquet = any(map(is_parquet, files))
    shards = [] if parquet else [Shard(file) for file in files]
    if not parquet and not any(shard.compressed for shard in shards):
        return shards
    if cache is None:
        what = "Parquet" if parquet else "compressed"
        raise DataError(f"{path}: is {what}; expected Arrow that can be memory-mapped (uncompressed)")
    return [Shard(converted(path, files, cache, log))]


def _nulls(column: pa.Array) -> Bools:
    if not column.null_count:
        return np.zeros(len(column), np.bool_)
    return np.asarray(column.is_null().to_numpy(zero_copy_only=False), np.bool_)


def _numbers(values: pa.Array) -> npt.NDArray[np.generic]:
    """Integers as they are (booleans as 0 and 1), -1 for a null."""
    if pa.types.is_boolean(values.type):
        values = values.cast(pa.int8())
    if values.null_count:
        values = values.cast(pa.int64(), safe=False).fill_null(-1)
    numbers: npt.NDArray[np.generic] = values.to_numpy()
    return numbers
