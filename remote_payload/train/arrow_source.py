"""Where a dataset's samples lie: the Arrow files behind a path, memory-mapped one by one.

A path is a folder that Hugging Face's `save_to_disk` wrote (its `state.json` names the shards in order), a
folder of Arrow files (by name), one Arrow IPC file or stream, or Parquet (a file or a folder). Parquet, and
Arrow whose buffers are compressed, cannot be read in place, and Arrow in very many small record batches (a
writer that wrote each sample by itself) costs as much memory as it saves: `converted.py` writes them once
into the workspace's cache, and what it wrote is mapped instead.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from remote_payload.train.unusable import DataError

IPC_MAGIC = b"ARROW1"
"""What an Arrow IPC file begins with, and a stream does not."""

PARQUET_MAGIC = b"PAR1"

ARROW_ENDINGS = (".arrow", ".ipc", ".feather")
PARQUET_ENDINGS = (".parquet", ".parq")

MANY_BATCHES = 20_000
FEW_ROWS = 100
"""More record batches of fewer rows on average than these are not mapped: each costs 10 kB and 50 us."""

Log = Callable[[str], None]


class Shard:
    """One memory-mapped Arrow file."""

    def __init__(self, path: Path) -> None:
        """Map `path`. Raises DataError when it is absent, empty or no complete Arrow."""
        self.path = path
        try:
            with path.open("rb") as file:
                self._pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._pages.madvise(mmap.MADV_RANDOM)  # offsets lie apart: reading ahead would read everything
        except ValueError as error:  # what mmap says of a file without a byte
            raise DataError(f"{path}: is empty; write it again") from error
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from error
        self._source = pa.py_buffer(self._pages)
        try:
            self.schema: pa.Schema = self._reader().schema
            self.columns: list[str] = self.schema.names  # decodes them
            self.batches: list[pa.RecordBatch] = []
            self.obstacle = self._map()
            """Why the file should not be read in place, in a word or two; None where all of it is mapped."""
        except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
            raise DataError(
                f"{path}: is no complete Arrow IPC file or stream ({error}); write it again"
            ) from error
        self._forget()

    def stream(self) -> Iterator[pa.RecordBatch]:
        """The record batches one after the other, none of them kept; for what cannot be mapped."""
        self._pages.madvise(mmap.MADV_SEQUENTIAL)
        for batch in self._read():
            yield batch
            self._forget()

    def indexed(self) -> None:
        """Note that offsets were read and samples come next: what lies near one will be wanted too."""
        self._forget()
        self._pages.madvise(mmap.MADV_NORMAL)

    def _forget(self) -> None:
        """Give back the pages read so far, which count as this process's memory.

        They are mapped again when they are touched.
        """
        self._pages.madvise(mmap.MADV_DONTNEED)

    def _reader(self) -> Any:
        source = pa.BufferReader(self._source)
        is_file = self._pages[: len(IPC_MAGIC)] == IPC_MAGIC
        return (pa.ipc.open_file if is_file else pa.ipc.open_stream)(source)

    def _read(self) -> Iterator[pa.RecordBatch]:
        reader = self._reader()
        if isinstance(reader, pa.ipc.RecordBatchFileReader):
            batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
        else:
            batches = iter(reader)
        for batch in batches:
            batch.validate()  # that every buffer is as long as its column says; costs nothing
            if batch.num_rows:
                yield batch

    def _map(self) -> str | None:
        """Fill `batches`, as far as there is no obstacle; what it is."""
        rows = 0
        for batch in self._read():
            self.batches.append(batch)
            rows += batch.num_rows
            if len(self.batches) == 1 and not self._maps(batch):
                return "compressed"
            if len(self.batches) > MANY_BATCHES and rows < FEW_ROWS * len(self.batches):
                return "in small record batches"
        return None

    def _maps(self, batch: pa.RecordBatch) -> bool:
        """Whether the buffers of `batch` lie in the mapped file, as those of compressed ones do not."""
        low, high = self._source.address, self._source.address + self._source.size
        buffers = [buffer for column in batch.columns for buffer in column.buffers() if buffer]
        return all(low <= buffer.address < high or buffer.size == 0 for buffer in buffers)


def data_files(path: Path) -> list[Path]:
    """The files that hold the samples of `path`, in order. Raises DataError when there are none."""
    try:
        return _data_files(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def _data_files(path: Path) -> list[Path]:
    if not path.exists():
        raise DataError(f"{path}: there is no such file; check the job's dataset and held_out")
    if not path.is_dir():
        if not path.is_file():
            raise DataError(f"{path}: is neither a file nor a folder")
        return [path]
    if (path / "dataset_dict.json").exists():
        splits = _read_json(path / "dataset_dict.json").get("splits")
        names = [name for name in splits if isinstance(name, str)] if isinstance(splits, list) else []
        named = ", ".join(names) or "see its folders"
        raise DataError(
            f"{path}: is a DatasetDict with the splits {named}; name one of them, such as"
            f" {path / (names[0] if names else 'train')}"
        )
    if (path / "state.json").exists():
        return _saved_shards(path)
    inside = sorted(file for file in path.iterdir() if file.is_file())
    arrow, parquet = (
        [file for file in inside if file.suffix in endings] for endings in (ARROW_ENDINGS, PARQUET_ENDINGS)
    )
    if arrow and parquet:
        raise DataError(
            f"{path}: holds both Arrow ({arrow[0].name}) and Parquet ({parquet[0].name}) files; name one"
            f" file, or a folder of one kind"
        )
    if not arrow and not parquet:
        raise DataError(
            f"{path}: is a folder without data; expected state.json and its shards (save_to_disk), *.arrow or"
            f" *.parquet"
        )
    return arrow or parquet


def is_parquet(path: Path) -> bool:
    """Whether the file begins as Parquet does."""
    try:
        with path.open("rb") as file:
            return file.read(len(PARQUET_MAGIC)) == PARQUET_MAGIC
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def _saved_shards(folder: Path) -> list[Path]:
    """The shards that the `state.json` of Hugging Face's `save_to_disk` names."""
    state = _read_json(folder / "state.json")
    if state.get("_indices_data_files"):
        raise DataError(
            f"{folder}: was saved with an index over its rows by an old version of datasets; load it there"
            f" and save it again after flatten_indices()"
        )
    listed = state.get("_data_files")
    names = [entry.get("filename") for entry in listed if isinstance(entry, dict)] if listed else []
    if not names or not all(isinstance(name, str) for name in names):
        raise DataError(f"{folder / 'state.json'}: names no shards; expected _data_files with filenames")
    files = [folder / str(name) for name in names]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise DataError(
            f"{folder}: {len(absent)} of its {len(files)} shards are not there, the first is {absent[0]};"
            f" copy the folder again"
        )
    return files


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise DataError(f"{path}: is no JSON ({error}); copy the folder again") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: expected a JSON object; copy the folder again")
    return content
