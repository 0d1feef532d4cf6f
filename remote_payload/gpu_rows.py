"""What `nvidia-smi --query-gpu` prints, read cell by cell: a value, or null and the reason.

Drivers differ in the fields they know and answer an unknown one by failing the whole query, on stdout and
with exit status 2; a cell without a value holds its reason in brackets (`[N/A]`, `[Not Supported]`,
`[Unknown Error]`, `[Insufficient Permissions]`). Everything that is not a row is a sentence. Pure;
standard library only.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any, Final

NO_DEVICES: Final = "No devices were found"
"""What is said of an index that is past the last GPU, or where there is none."""
MOST_GPUS: Final = 32
"""More than a machine has; up to it indices are counted."""

_BAD_FIELD = re.compile(r'Field "([^"]*)" is not a valid field')
_ONE_GPU = re.compile(r"Unable to determine the device handle for GPU|GPU is lost", re.IGNORECASE)


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """One key of a record, the names nvidia-smi may know it by (newest first), and its unit's change."""

    key: str
    queries: tuple[str, ...]
    convert: Callable[[str], Any]
    constant: bool = False


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _gib(text: str) -> float:
    return round(_number(text) / 1024, 4)


def _share(text: str) -> float:
    return round(_number(text) / 100, 4)


def _hexadecimal(text: str) -> str:
    return hex(int(text, 16))


FIELDS: Final = (
    Field("name", ("name",), str, constant=True),
    Field("driver", ("driver_version",), str, constant=True),
    Field("memory_total_gib", ("memory.total",), _gib, constant=True),
    Field("power_limit_w", ("power.limit",), _number, constant=True),
    Field("mig", ("mig.mode.current",), str, constant=True),
    Field("memory_used_gib", ("memory.used",), _gib),
    Field("utilization_share", ("utilization.gpu",), _share),
    Field("power_w", ("power.draw",), _number),
    Field("temperature_c", ("temperature.gpu",), _number),
    Field("sm_clock_mhz", ("clocks.sm",), _number),
    # Drivers before 535 know the older name only.
    Field("throttle", ("clocks_event_reasons.active", "clocks_throttle_reasons.active"), _hexadecimal),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One GPU at one time: every key of `FIELDS`, null where not known, with the reasons in `why`."""

    index: str
    uuid: str | None
    values: dict[str, Any]
    why: dict[str, str]

    def constants(self, uuid: str) -> dict[str, Any]:
        """The GPU's entry in a `gpu_constants` record."""
        return {"uuid": uuid, **self._part(constant=True)}

    def sample(self) -> dict[str, Any]:
        """The GPU's entry in a `gpu` record."""
        return self._part(constant=False)

    def _part(self, *, constant: bool) -> dict[str, Any]:
        keys = [field.key for field in FIELDS if field.constant is constant]
        part: dict[str, Any] = {"index": int(self.index)} | {key: self.values[key] for key in keys}
        why = {key: self.why[key] for key in keys if key in self.why}
        return part | {"why": why} if why else part


class Query:
    """The fields to ask for, fewer whenever the driver refuses one."""

    def __init__(self) -> None:
        self._names = {field.key: list(field.queries) for field in FIELDS}

    def text(self) -> str:
        """The value of `--query-gpu`."""
        return ",".join(["index", "uuid", *(names[0] for names in self._names.values() if names)])

    def drop(self, answer: str) -> bool:
        """Take the field that `answer` refuses out, or its older name in; False when it refuses none."""
        found = _BAD_FIELD.search(answer)
        for names in self._names.values():
            if found and names and names[0] == found[1]:
                del names[0]
                return True
        return False

    def row(self, line: str) -> Row | None:
        """The row in one line of the answer, or None when the line is a sentence."""
        asked = [field for field in FIELDS if self._names[field.key]]
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 2 + len(asked) or not cells[0].isdecimal():
            return None
        values: dict[str, Any] = dict.fromkeys(field.key for field in FIELDS)
        why = {field.key: "not a field of this nvidia-smi" for field in FIELDS if field not in asked}
        for field, cell in zip(asked, cells[2:], strict=True):
            reason = _reason(cell)
            if reason is None:
                try:
                    values[field.key] = field.convert(cell)
                except ValueError:
                    reason = f"unexpected text {cell[:40]!r}"
            if reason is not None:
                why[field.key] = reason
        uuid = cells[1] if _reason(cells[1]) is None else None
        return Row(cells[0], uuid, values, why)


def unknown(index: str, reason: str) -> Row:
    """The row of a GPU that gave no answer, for one reason."""
    keys = [field.key for field in FIELDS]
    return Row(index, None, dict.fromkeys(keys), dict.fromkeys(keys, reason))


def names_one_gpu(answer: str) -> bool:
    """Whether the sentence blames a single GPU, so that asking the others by themselves may work."""
    return _ONE_GPU.search(answer) is not None


def _reason(cell: str) -> str | None:
    if cell.startswith("[") and cell.endswith("]"):
        return cell[1:-1].strip() or "empty"
    if cell in ("N/A", "ERR!", ""):
        return cell or "empty"
    return None
