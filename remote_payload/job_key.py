"""One key of the job: its default, what it says, which values it takes, and its value in TOML.

`job.py` has the table of all keys; here is what each row of it is made of. Standard library only.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import tomllib
from collections.abc import Callable, Sequence
from typing import Any, get_args, get_origin

REQUIRED = dataclasses.MISSING
"""The default of a key that has none."""


MOST = 10**9
"""More than anybody means by any number that has no bound of its own: steps, tokens, seconds."""

_MOST_SHOWN = 200


class JobError(ValueError):
    """A job that cannot be run; the text names the source, the key, what was expected and what to do."""


Check = Callable[[Any], str | None]
"""What a value should have been, in words; None: it is right."""


def at_least(low: float, most: float = MOST) -> Check:
    """From `low` to `most`, both included; what is said is the end that was passed."""

    def check(value: float) -> str | None:
        return f"at least {low:g}" if value < low else f"at most {most:,}" if value > most else None

    return check


def above(low: float, most: float = MOST) -> Check:
    """More than `low`, and no more than `most`."""

    def check(value: float) -> str | None:
        return f"more than {low:g}" if value <= low else f"at most {most:,}" if value > most else None

    return check


def within(low: float, high: float) -> Check:
    """From `low` to `high`, both included."""
    return lambda value: None if low <= value <= high else f"between {low:,} and {high:,}"


def one_of(*names: str) -> Check:
    """One of `names`."""
    return lambda value: None if value in names else "one of " + ", ".join(map(repr, names))


def not_empty(value: Any) -> str | None:
    """A text or a list with something in it."""
    return None if value else "not empty"


def rising(value: Sequence[int]) -> str | None:
    """Bucket edges."""
    rises = len(value) >= 2 and all(a < b for a, b in itertools.pairwise(value))
    good = rises and value[0] >= 0 and value[-1] <= MOST
    return None if good else f"two or more rising whole numbers, from 0 to {MOST:,}"


def layer_numbers(value: Sequence[int]) -> str | None:
    """Layers of a model, as far as that can be said without it."""
    return None if all(0 <= number < 1000 for number in value) else "numbers of layers, from 0 to 999"


def devices(value: Sequence[str]) -> str | None:
    """Devices by torch's names, or "auto"."""

    def known(name: str) -> bool:
        return re.fullmatch(r"auto|cpu|cuda:[0-9]{1,4}", name) is not None

    good = bool(value) and all(map(known, value))
    return None if good else "a list of devices such as ['cuda:0', 'cuda:1'], ['cpu'] or ['auto']"


def fractions(value: Sequence[float]) -> str | None:
    """The two decays of AdamW."""
    return None if len(value) == 2 and all(0 <= v < 1 for v in value) else "two numbers from 0 to below 1"


def ratio(value: float) -> str | None:
    """How many times one number may be another; 0: any."""
    return None if value == 0 or 1 <= value <= MOST else f"0, or from 1 to {MOST:,}"


def key(default: Any, text: str, check: Check | None = None, *, resumable: bool = False) -> Any:
    """A key of the job; `resumable`: a resumed run may have another value than its earlier attempts."""
    metadata = {"text": text, "check": check, "resumable": resumable}
    if default is REQUIRED:
        return dataclasses.field(metadata=metadata)
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def parse_change(text: str) -> tuple[str, Any]:
    """Split `key=value`; the value is TOML (`3e-4`, `true`, `["cuda:0"]`), or else a plain string.

    Raises JobError when there is no `=` or no key.
    """
    name, equals, value = text.partition("=")
    name, value = name.strip(), value.strip()
    if not equals or not name:
        raise JobError(f"--set {text!r}: expected key=value")
    try:
        parsed = tomllib.loads(f"value = {value}")
    except ValueError:  # no TOML; or a number of more digits than Python reads
        return name, value
    # A second line would be a second key of the document: then the text is no value but a string.
    return (name, parsed["value"]) if parsed.keys() == {"value"} else (name, value)


def shown(value: Any) -> str:
    """A value as an error text can hold it."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no number of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 1] + "…"


def typed(value: Any, wanted: Any, where: str) -> Any:
    """`value` as the type `wanted`; whole numbers pass for floats, and nothing else is converted.

    `where` says where it stands, in the JobError of another type.
    """
    if get_origin(wanted) is list:
        if not isinstance(value, list):
            raise JobError(f"{where} = {shown(value)}: expected a list")
        (inner,) = get_args(wanted)
        return [typed(item, inner, where) for item in value]
    if wanted is float and type(value) is int and abs(value) <= MOST:
        return float(value)
    if wanted is float and (type(value) is int or (type(value) is float and not math.isfinite(value))):
        raise JobError(f"{where} = {shown(value)}: expected a finite number, no larger than {MOST:,}")
    if type(value) is not wanted:
        names = {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}
        raise JobError(f"{where} = {shown(value)}: expected {names[wanted]}")
    return value


def toml(value: Any) -> str:
    """`value` as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):  # JSON's escapes are TOML's, but for DEL, which TOML wants escaped
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return repr(value)
