"""A run's job as a table: every key with its value, its default and whether it differs, and its text."""

from __future__ import annotations

import dataclasses
import json

from controller.run_records import Record
from remote_payload.job import Job


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobKey:
    """One key of `job.toml`; values as TOML would write them."""

    name: str
    value: str
    default: str
    changed: bool
    text: str
    """What the key means; empty for one that this version does not know."""


def job_table(job: Record) -> list[JobKey]:
    """The keys of `job` (the content of job.toml), in the order of the reference, unknown ones last.

    A key that has no default, a path say, counts as changed.
    """
    known = {field.name: field for field in dataclasses.fields(Job)}
    found = []
    for name in [*(name for name in known if name in job), *(name for name in job if name not in known)]:
        field = known.get(name)
        default = dataclasses.MISSING
        text = ""
        if field is not None:
            text = str(field.metadata.get("text", ""))
            if field.default is not dataclasses.MISSING:
                default = field.default
            elif field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
        found.append(
            JobKey(
                name=name,
                value=_written(job[name]),
                default="" if default is dataclasses.MISSING else _written(default),
                changed=default is dataclasses.MISSING or _plain(default) != _plain(job[name]),
                text=text,
            )
        )
    return found


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _written(value: object) -> str:
    try:
        return json.dumps(_plain(value), ensure_ascii=False)
    except (TypeError, ValueError):  # a date, in somebody else's file
        return str(value)
