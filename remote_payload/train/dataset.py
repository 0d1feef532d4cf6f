"""The dataset: token ids in an Arrow file, memory-mapped, looked at sample by sample.

Lengths come from the Arrow offsets, so that opening a file costs the same whatever its samples hold; the
ids themselves are read when a batch needs them. What makes a sample unusable is found here as far as
lengths can tell, and in `batch.py` when its ids are first touched; it is counted by reason and never ends
a run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

IDS = "input_ids"
PROMPT_LENGTH = "prompt_length"
LOSS_MASK = "loss_mask"

EMPTY = "empty"
TOO_SHORT = "shorter than the first bucket"
TOO_LONG = "longer than the largest bucket or the token budget"
NO_ANSWER = "no two supervised tokens in a row (a prompt without an answer)"
OUTSIDE_VOCABULARY = "ids outside the vocabulary"

FILE_MAGIC = b"ARROW1"
"""What an Arrow IPC file begins with, and a stream does not."""

NAMED = 10
"""How many samples of each reason are named."""


class DataError(ValueError):
    """A dataset that cannot be used; the text names the file, what was expected and what to do."""


@dataclasses.dataclass(slots=True)
class Skipped:
    """Samples left out, by reason: how many, and the first few by number."""

    count: dict[str, int] = dataclasses.field(default_factory=dict)
    first: dict[str, list[int]] = dataclasses.field(default_factory=dict)

    def add(self, reason: str, samples: Sequence[int]) -> None:
        """Count `samples` under `reason`."""
        if not len(samples):
            return
        self.count[reason] = self.count.get(reason, 0) + len(samples)
        named = self.first.setdefault(reason, [])
        named += [int(sample) for sample in samples[: NAMED - len(named)]]


class Dataset:
    """Samples of one Arrow IPC file (or stream): ids, and which tokens are supervised."""

    def __init__(self, path: Path, table: pa.Table) -> None:
        self.path = path
        self._ids = [_list_values(path, chunk, IDS) for chunk in table.column(IDS).chunks]
        self._first = np.cumsum([0] + [len(offsets) - 1 for offsets, _ in self._ids])
        diffs = [np.diff(offsets) for offsets, _ in self._ids]
        self.lengths: npt.NDArray[np.int64] = np.concatenate(diffs or [np.zeros(0, np.int64)])
        """Tokens of each sample, [samples]."""
        self.prompt_lengths: npt.NDArray[np.int64] | None = None
        self._masks: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.generic]]] | None = None
        if PROMPT_LENGTH in table.column_names:
            column = table.column(PROMPT_LENGTH)
            if not pa.types.is_integer(column.type):
                raise DataError(f"{path}: column {PROMPT_LENGTH}: expected integers, found {column.type}")
            # Where it is not known, nothing counts as the answer: the sample is left out and counted.
            unknown = pa.scalar(np.iinfo(np.int64).max, pa.int64())
            self.prompt_lengths = column.cast(pa.int64()).fill_null(unknown).to_numpy()
        elif LOSS_MASK in table.column_names:
            self._masks = [_list_values(path, c, LOSS_MASK) for c in table.column(LOSS_MASK).chunks]
            mask_lengths = np.concatenate([np.diff(offsets) for offsets, _ in self._masks])
            wrong = np.flatnonzero(mask_lengths != self.lengths)
            if len(wrong):
                raise DataError(
                    f"{path}: {LOSS_MASK} and {IDS} differ in length in {len(wrong)} samples,"
                    f" the first is sample {wrong[0]}"
                )
        else:
            raise DataError(
                f"{path}: no column says which tokens are the answer; expected {PROMPT_LENGTH!r} (tokens"
                f" before it) or {LOSS_MASK!r} (0 or 1 a token), found {', '.join(table.column_names)}"
            )
        self._table = table  # keeps the memory map alive

    @classmethod
    def open(cls, path: Path) -> Dataset:
        """Memory-map the Arrow file `path`. Raises DataError when it is absent, corrupt or empty."""
        table = read_table(path)
        if IDS not in table.column_names:
            raise DataError(f"{path}: no column {IDS!r}; found {', '.join(table.column_names) or 'none'}")
        if table.num_rows == 0:
            raise DataError(f"{path}: holds no samples; write some, e.g. with remote_payload.tools.prepare")
        return cls(path, table)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Tokens of all samples together."""
        return int(self.lengths.sum())

    def ids(self, sample: int) -> npt.NDArray[np.generic]:
        """Token ids of `sample`, a view of the memory map, [tokens]."""
        chunk, row = self._place(sample)
        offsets, values = self._ids[chunk]
        return values[offsets[row] : offsets[row + 1]]

    def supervised(self, sample: int) -> npt.NDArray[np.bool_]:
        """Which tokens of `sample` the target wrote and the drafter learns from, [tokens]."""
        if self.prompt_lengths is not None:
            mask: npt.NDArray[np.bool_] = np.arange(self.lengths[sample]) >= self.prompt_lengths[sample]
            return mask
        assert self._masks is not None
        chunk, row = self._place(sample)
        offsets, values = self._masks[chunk]
        return values[offsets[row] : offsets[row + 1]].astype(bool)

    def texts(self, column: str) -> list[str] | None:
        """A column of strings (such as `kind`), or None where the file has none of that name.

        Raises DataError when it is damaged: Arrow reads wherever a string's offsets point.
        """
        if column not in self._table.column_names:
            return None
        values = self._table.column(column)
        try:
            values.validate(full=True)
        except pa.ArrowException as error:
            raise DataError(f"{self.path}: column {column}: is damaged ({error}); write it again") from error
        return [str(value) for value in values.to_pylist()]

    def usable(self, shortest: int, longest: int, skipped: Skipped) -> npt.NDArray[np.bool_]:
        """Which samples can be trained on as far as lengths tell, [samples]; counts the others.

        `shortest` and `longest` are the fewest and most tokens a sample may have.
        """
        empty = self.lengths == 0
        too_short = ~empty & (self.lengths < shortest)
        too_long = self.lengths > longest
        answer = np.full(len(self), 2, np.int64)
        if self.prompt_lengths is not None:
            answer = self.lengths - np.maximum(self.prompt_lengths, 0)
        outside = empty | too_short | too_long
        no_answer = ~outside & (answer < 2)
        reasons = ((EMPTY, empty), (TOO_SHORT, too_short), (TOO_LONG, too_long), (NO_ANSWER, no_answer))
        for reason, which in reasons:
            skipped.add(reason, np.flatnonzero(which).tolist())
        good: npt.NDArray[np.bool_] = ~(outside | no_answer)
        return good

    def _place(self, sample: int) -> tuple[int, int]:
        chunk = int(np.searchsorted(self._first, sample, side="right")) - 1
        return chunk, sample - int(self._first[chunk])


def read_table(path: Path) -> pa.Table:
    """The Arrow table in `path`, memory-mapped; IPC file or stream. Raises DataError."""
    try:
        source = pa.memory_map(str(path))
    except FileNotFoundError as error:
        raise DataError(f"{path}: there is no such file; check the job's dataset and held_out") from error
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: cannot be mapped: {error}") from error
    is_file = source.read(len(FILE_MAGIC)) == FILE_MAGIC
    source.seek(0)
    try:
        table = (pa.ipc.open_file if is_file else pa.ipc.open_stream)(source).read_all()
        table.validate()  # that every buffer is as long as its column says; costs nothing
        table.column_names  # noqa: B018 - decodes them
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: is no complete Arrow IPC file or stream ({error}); write it again"
        ) from error
    return table


def _list_values(
    path: Path, chunk: pa.Array, column: str
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.generic]]:
    """Offsets [rows + 1] and flat values of a list column's chunk, both without a copy of the values."""
    if not (pa.types.is_list(chunk.type) or pa.types.is_large_list(chunk.type)):
        raise DataError(f"{path}: column {column}: expected lists of integers, found {chunk.type}")
    if not (pa.types.is_integer(chunk.type.value_type) or pa.types.is_boolean(chunk.type.value_type)):
        raise DataError(f"{path}: column {column}: expected lists of integers, found {chunk.type}")
    if chunk.values.null_count:
        raise DataError(f"{path}: column {column}: {chunk.values.null_count} values are null")
    offsets = chunk.offsets.to_numpy().astype(np.int64)
    if len(offsets) and (offsets[-1] > len(chunk.values) or np.any(np.diff(offsets) < 0)):
        raise DataError(f"{path}: column {column}: its offsets are corrupt; write the file again")
    flat = pa.types.is_boolean(chunk.type.value_type)
    return offsets, chunk.values.to_numpy(zero_copy_only=not flat)
