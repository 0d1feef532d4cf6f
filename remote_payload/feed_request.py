"""What a reader asks of a feed: one line of JSON, checked (`docs/rundir.md`). Standard library only."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from remote_payload.growing_file import Have, whole


class FeedError(Exception):
    """What the reader is told in an `error` frame, before the feed ends."""


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """A line from the reader: what it has, how much of the log's end it wants at first, and holes to fill
    (by file: a generation, and ranges from, to).
    """

    have: dict[str, Have]
    log_tail: int | None
    fill: dict[str, tuple[int, list[tuple[int, int]]]]


def parse_request(line: bytes) -> Request:
    """The request in a line from the reader; raises FeedError that says what is wrong with it."""
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise FeedError(f"the request is not JSON: {error}") from error
    if not isinstance(request, dict):
        raise FeedError("the request is not a JSON object")
    tail = request.get("log_tail")
    try:
        return Request(
            have={name: Have.from_mapping(name, value) for name, value in _object(request, "have").items()},
            log_tail=None if tail is None else whole(tail, "log_tail", 0, 2**53),
            fill={name: _holes(name, value) for name, value in _object(request, "fill").items()},
        )
    except ValueError as error:
        raise FeedError(str(error)) from error


def _object(request: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = request.get(key) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{key} = {value!r}: expected an object")
    return value


def _holes(name: str, value: Any) -> tuple[int, list[tuple[int, int]]]:
    where = f"fill.{name}"
    ranges = value.get("ranges") if isinstance(value, dict) else None
    if not isinstance(ranges, list) or not all(isinstance(r, list) and len(r) == 2 for r in ranges):
        raise ValueError(f'{where} = {value!r}: expected {{"generation": N, "ranges": [[from, to], ...]}}')
    found = []
    for start, stop in ranges:
        low = whole(start, f"{where}.ranges", 0, 2**53)
        found.append((low, whole(stop, f"{where}.ranges", low, 2**53)))
    return whole(value.get("generation"), f"{where}.generation", 1, 2**53), found
