"""Parquet, and Arrow that is compressed or in tiny pieces, written once as plain Arrow into the workspace.

None of them can be read well in place. The copy is named after all that it depends on (path, size, time and
row groups of each file), so that a changed dataset is converted again and an unchanged one never; it is
written beside and renamed, and a record batch at a time, so that one larger than memory can be converted.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from remote_payload.leftovers import left_behind
from remote_payload.train.arrow_source import Log, Shard, is_parquet
from remote_payload.train.columns import READ, supervision
from remote_payload.train.unusable import DataError

BATCH_ROWS = 1024
"""Rows of a record batch that is read from Parquet: a few MiB of ids."""

ABANDONED_S = 3600.0
"""A half-written copy that nobody wrote to for so long belongs to a process that was killed."""


def converted(path: Path, files: Sequence[Path], cache: Path, log: Log) -> Path:
    """The plain Arrow copy of `files`, the data of `path`, in the folder `cache`; made when it is not there.

    Raises DataError for a file or a column that cannot be read, and when the disk is too small.
    """
    stamps = [_stamp(file) for file in files]
    family = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    state = hashlib.sha256(repr((stamps, READ)).encode()).hexdigest()[:12]
    copy = cache / f"{family}-{state}.arrow"
    if copy.exists():
        log(f"{path} was converted to Arrow earlier: {copy}")
        return copy
    for file in files:
        supervision(file, _schema(file))
    start = time.monotonic()
    part = copy.with_suffix(f".{uuid.uuid4().hex[:8]}.part")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _remove_outdated(cache, family, copy)
        _check_space(path, files, cache)
        log(f"Converting {path} ({len(files)} files) to Arrow, once...")
        samples = _write(part, files)
        part.replace(copy)
    except OSError as error:
        raise DataError(f"{path}: cannot be converted to Arrow in {cache}: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
    log(f"Converted {samples} samples in {time.monotonic() - start:.1f} s: {copy}")
    return copy


def _write(part: Path, files: Sequence[Path]) -> int:
    """Write the samples of all `files` to `part`, synced; how many they are."""
    schema = _common_schema(files)
    samples = 0
    with part.open("wb") as sink:
        with pa.ipc.new_file(sink, schema) as writer:
            for file in files:
                for batch in _batches(file, schema.names):
                    writer.write_batch(_as(batch, schema))
                    samples += batch.num_rows
        sink.flush()
        os.fsync(sink.fileno())
    return samples


def _batches(file: Path, columns: list[str]) -> Iterator[pa.RecordBatch]:
    try:
        if not is_parquet(file):
            yield from _regrouped(batch.select(columns) for batch in Shard(file).stream())
            return
        with pq.ParquetFile(file, pre_buffer=False) as source:
            yield from source.iter_batches(BATCH_ROWS, columns=columns)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{file}: cannot be read ({error}); write it again") from error


def _regrouped(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """`batches` joined to ones of at least BATCH_ROWS rows, but for the last."""
    held: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        held.append(batch)
        rows += batch.num_rows
        if rows >= BATCH_ROWS:
            yield from pa.Table.from_batches(held).combine_chunks().to_batches()
            held, rows = [], 0
    if held:
        yield from pa.Table.from_batches(held).combine_chunks().to_batches()


def _as(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """`batch` with the columns of `schema`, in its order and types."""
    columns = [batch.column(field.name).cast(field.type) for field in schema]
    return pa.record_batch(columns, schema=schema)


def _common_schema(files: Sequence[Path]) -> pa.Schema:
    """The columns that are read, each as the widest of its types in `files`."""
    common = pa.schema([])
    for file in files:
        schema = _schema(file)
        found = pa.schema([schema.field(name).remove_metadata() for name in READ if name in schema.names])
        if common.names and found.names != common.names:
            raise DataError(
                f"{file}: has other columns than {files[0].name}; expected {', '.join(common.names)}, found"
                f" {', '.join(found.names)}"
            )
        try:
            common = pa.unify_schemas([common, found], promote_options="permissive")
        except pa.ArrowException as error:
            raise DataError(f"{file}: its columns do not fit those of {files[0].name} ({error})") from error
    return common


def _schema(file: Path) -> pa.Schema:
    if not is_parquet(file):
        return Shard(file).schema
    try:
        return pq.read_schema(file)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{file}: is no complete Parquet file ({error}); write it again") from error


def _stamp(file: Path) -> tuple[str, int, int, int]:
    """What a copy of `file` depends on: path, size, time of change in ns, row groups (0 of Arrow)."""
    groups = 0
    if is_parquet(file):
        try:
            groups = int(pq.read_metadata(file).num_row_groups)
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{file}: is no complete Parquet file ({error}); write it again") from error
    stat = file.stat()
    return str(file.resolve()), stat.st_size, stat.st_mtime_ns, groups


def _check_space(path: Path, files: Sequence[Path], cache: Path) -> None:
    """Raise DataError when the copy will not fit: it takes about what the files' columns do, decompressed."""
    needed = 0
    for file in files:
        if is_parquet(file):
            needed += _uncompressed(pq.read_metadata(file))
        else:
            needed += file.stat().st_size
    free = shutil.disk_usage(cache).free
    if needed > free:
        raise DataError(
            f"{path}: its Arrow copy in {cache} needs about {needed / 2**30:.1f} GiB, and"
            f" {free / 2**30:.1f} GiB are free; make room, or write the dataset as uncompressed Arrow"
        )


def _uncompressed(metadata: pq.FileMetaData) -> int:
    """Bytes of the columns that are read, decompressed (encodings of Parquet may still make them smaller)."""
    chunks = (
        metadata.row_group(group).column(column)
        for group in range(metadata.num_row_groups)
        for column in range(metadata.num_columns)
    )
    return sum(c.total_uncompressed_size for c in chunks if c.path_in_schema.split(".")[0] in READ)


def _remove_outdated(cache: Path, family: str, copy: Path) -> None:
    """Remove copies of what the same path held before, and what a killed process left half written."""
    copies, parts = (cache.glob(f"{family}-*{ending}") for ending in (".arrow", ".part"))
    for old in (*copies, *left_behind(parts, ABANDONED_S)):
        if old != copy:  # which another process may just have made
            old.unlink(missing_ok=True)
