"""A data set that several processes made, each from its share of the prompts, put together.

Every file says in its metadata which share it is, so that a missing one is noticed and none counts twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

FILES = ("train.arrow", "held_out.arrow")
SHARD = "shard"
"""Key of the metadata: `I/N`."""
COMMAND = "command"


def write_table(path: Path, table: pa.Table, metadata: dict[str, str]) -> None:
    """Write a table as one Arrow IPC file, complete or not at all; `metadata` is the schema's.

    Raises ValueError when the disk refuses it.
    """
    table = table.replace_schema_metadata(metadata)
    partial = path.with_name(f".{path.name}.partial")
    try:
        with pa.OSFile(str(partial), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        partial.replace(path)
    except OSError as error:
        raise ValueError(f"{path}: cannot be written ({error.strerror or error})") from error
    finally:
        partial.unlink(missing_ok=True)


def make_folder(out: Path) -> None:
    """Make the folder of a data set. Raises ValueError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {out}: {error.strerror}") from error


def merge(folders: Sequence[Path], out: Path, command: str) -> dict[str, int]:
    """Write the files of all `folders` as one data set into `out`; rows by file.

    Raises ValueError naming the file that cannot be read, is of another target, tokenizer or template, or
    whose share is missing or there twice.
    """
    rows = {}
    tables = {name: [_read(folder / name) for folder in folders] for name in FILES}
    for name, found in tables.items():
        about = [_about(table) for table in found]
        commands = [each.pop(COMMAND, "") for each in about]
        shards = [each.pop(SHARD, "0/1") for each in about]
        for folder, table, each in zip(folders, found, about, strict=True):
            if table.schema.remove_metadata() != found[0].schema.remove_metadata():
                raise ValueError(f"{folder / name}: has other columns than {folders[0] / name}")
            for key in about[0].keys() | each.keys():
                if each.get(key) != about[0].get(key):
                    raise ValueError(
                        f"{folder / name}: its {key} is {each.get(key)!r}, that of {folders[0] / name} is"
                        f" {about[0].get(key)!r}; expected shares of one data set"
                    )
        count = shards[0].partition("/")[2]
        wanted = [f"{number}/{count}" for number in range(int(count))]
        if sorted(shards) != sorted(wanted):
            raise ValueError(
                f"{name}: the shares are {', '.join(shards)}; expected each of {', '.join(wanted)} once"
            )
        table = pa.concat_tables(found).combine_chunks()
        make_folder(out)
        write_table(out / name, table, about[0] | {COMMAND: " && ".join([*commands, command])})
        rows[name] = table.num_rows
    return rows


def _read(path: Path) -> pa.Table:
    try:
        with pa.memory_map(str(path)) as source:
            return pa.ipc.open_file(source).read_all()
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{path}: cannot be read as an Arrow file: {error}") from error


def _about(table: pa.Table) -> dict[str, str]:
    return {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
