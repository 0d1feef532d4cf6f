"""The columns of a dataset: what they are called, and which Arrow types they may have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from remote_payload.train.unusable import DataError

IDS = "input_ids"
LOSS_MASK = "loss_mask"
PROMPT_LENGTH = "prompt_length"
KIND = "kind"

READ = (IDS, LOSS_MASK, PROMPT_LENGTH, KIND)
"""Everything the trainer reads; a converted copy holds no more."""


def supervision(path: Path, schema: pa.Schema) -> str:
    """LOSS_MASK or PROMPT_LENGTH, whichever says what is supervised in `path`; the mask where both do.

    Raises DataError when a column is missing or has a type that cannot be read.
    """
    _check(path, schema, IDS, "lists of integers", _lists_of_integers)
    found = next((name for name in (LOSS_MASK, PROMPT_LENGTH) if name in schema.names), None)
    if found is None:
        raise DataError(
            f"{path}: no column says which tokens are the answer; expected {LOSS_MASK!r} (0 or 1 a token) or"
            f" {PROMPT_LENGTH!r} (tokens before it), found {', '.join(schema.names)}"
        )
    if found == LOSS_MASK:
        _check(path, schema, LOSS_MASK, "lists of 0 and 1 (integers or booleans)", _lists_of_flags)
    else:
        _check(path, schema, PROMPT_LENGTH, "integers", pa.types.is_integer)
    return found


def _check(
    path: Path, schema: pa.Schema, name: str, expected: str, fits: Callable[[pa.DataType], bool]
) -> None:
    count = schema.names.count(name)
    if count == 0:
        raise DataError(
            f"{path}: no column {name!r}; expected {expected}, found {', '.join(schema.names) or 'none'}"
        )
    if count > 1:
        raise DataError(f"{path}: column {name!r} is there {count} times; expected one of {expected}")
    if not fits(schema.field(name).type):
        raise DataError(f"{path}: column {name}: expected {expected}, found {schema.field(name).type}")


def _lists_of_integers(kind: pa.DataType) -> bool:
    return _is_list(kind) and bool(pa.types.is_integer(kind.value_type))


def _lists_of_flags(kind: pa.DataType) -> bool:
    return _lists_of_integers(kind) or (_is_list(kind) and bool(pa.types.is_boolean(kind.value_type)))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))
