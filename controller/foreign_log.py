"""What the log of a trainer that we did not start says, line by line, as the records that our runs write.

Such a log is all there is of its run: no events, no progress, no status. Its lines about dataset, buckets,
targets, replicas and steps are those of the trainer that this project's own descends from, with whatever a
logging library puts before them. A line that is none of these is no record; nothing here raises.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, Final

from controller.run_records import BOUND, Record

# One way to match and one place to begin: a line of digits without an end must not cost its length squared.
_NUMBER: Final = r"((?<![\d.,_])[-+]?(?:\d[\d,_]*+(?:\.\d*+)?+|\.\d++)(?:[eE][-+]?\d++)?+|nan|-?inf)"
_LONGEST: Final = 1000
"""Characters of a line that are looked at."""
_SAMPLES = re.compile(r"\b([\d,_]+) samples loaded\b")
_BATCHES = re.compile(r"\bBatches per epoch: ([\d,_]+)(?: \(min=(\d+) max=(\d+) avg=([\d.]+)\))?")
_BUCKET = re.compile(
    r"\bBucket (\d+) +\[ *(\d+), *(\d+) *[)\]]: *([\d,_]+) batch(?:es)?(?: *\( *([\d.]+) *%\))?"
)
_LOADING = re.compile(r"\bLoading (\d+) target models?\b")
_TARGET = re.compile(r"\bTarget (\d+) on ([A-Za-z]+(?::\d+)?)(?:\.\.\.(?: *([\d.]+) *s\b)?)?")
_REPLICA = re.compile(r"\b(?:[Rr]eplica|[Dd]rafter) (\d+)(?: ready)? on ([A-Za-z]+(?::\d+)?)")
_STEP = re.compile(r"\bstep[ :=]*(\d+)(?: */ *(\d+))?", re.IGNORECASE)
_LOSS = re.compile(rf"\bloss[ :=]*{_NUMBER}", re.IGNORECASE)
_MORE = {
    "tau_estimate": re.compile(rf"\btau~?[ :=]*{_NUMBER}", re.IGNORECASE),
    "learning_rate": re.compile(rf"\b(?:lr|learning[ _]rate)[ :=]*{_NUMBER}", re.IGNORECASE),
    "gradient_norm": re.compile(rf"\bgrad(?:[ _]?norm)?[ :=]*{_NUMBER}", re.IGNORECASE),
    "step_s": re.compile(rf"{_NUMBER} ?s(?:ec)?/(?:step|it)\b", re.IGNORECASE),
    "epoch": re.compile(rf"\bepoch[ :=]*{_NUMBER}", re.IGNORECASE),
}
_RATE = re.compile(rf"{_NUMBER} ?([kM]?) ?tok(?:en)?s?/s", re.IGNORECASE)


def parse(line: str) -> Record | None:
    """The record in one line (`dataset`, `bucket`, `targets`, `target`, `ready`, `step`), or None."""
    if not any(character.isdigit() for character in line[:_LONGEST]):
        return None
    for recognise in _KINDS:
        record = recognise(line[:_LONGEST])
        if record is not None:
            number = record.get(_NUMBERED_BY.get(record["kind"], ""), 0)
            return None if number is None else record  # beyond all bounds
    return None


def _dataset(line: str) -> Record | None:
    if found := _SAMPLES.search(line):
        return {"kind": "dataset", "samples": _whole(found[1])}
    if found := _BATCHES.search(line):
        record: dict[str, Any] = {"kind": "dataset", "batches": _whole(found[1])}
        if found[2] is not None:
            record |= {"batch_min": _whole(found[2]), "batch_max": _whole(found[3])}
            record["batch_mean"] = _number(found[4])
        return record
    return None


def _bucket(line: str) -> Record | None:
    found = _BUCKET.search(line)
    if not found:
        return None
    number, low, high, batches = (_whole(found[group]) for group in range(1, 5))
    share = None if found[5] is None else _number(found[5])
    return {
        "kind": "bucket", "bucket": number, "low": low, "high": high, "batches": batches,
        "share": None if share is None else share / 100,
    }  # fmt: skip


def _targets(line: str) -> Record | None:
    found = _LOADING.search(line)
    return {"kind": "targets", "count": _whole(found[1])} if found else None


def _target(line: str) -> Record | None:
    found = _TARGET.search(line)
    if not found:
        return None
    load_s = None if found[3] is None else _number(found[3])
    return {"kind": "target", "target": _whole(found[1]), "device": found[2], "load_s": load_s}


def _replica(line: str) -> Record | None:
    found = _REPLICA.search(line)
    return {"kind": "ready", "replica": _whole(found[1]), "device": found[2]} if found else None


def _step(line: str) -> Record | None:
    step, loss = _STEP.search(line), _LOSS.search(line)
    if not step or not loss:
        return None
    record: dict[str, Any] = {"kind": "step", "step": _whole(step[1]), "loss": _number(loss[1])}
    if step[2] is not None:
        record["steps"] = _whole(step[2])
    for name, pattern in _MORE.items():
        if found := pattern.search(line):
            record[name] = _number(found[1])
    if found := _RATE.search(line):
        rate = _number(found[1])
        factor = {"": 1, "k": 1e3, "m": 1e6}[found[2].lower()]
        record["tokens_per_s"] = None if rate is None else rate * factor
    return record


_NUMBERED_BY: Final = {"bucket": "bucket", "target": "target", "ready": "replica", "step": "step"}
_KINDS: tuple[Callable[[str], Record | None], ...] = (_bucket, _step, _target, _replica, _dataset, _targets)


def _whole(digits: str) -> int | None:
    value = _number(digits)
    return None if value is None or value > 2**53 else int(value)


def _number(digits: str) -> float | None:
    """None for what a record of a run cannot be either."""
    try:
        value = float(digits.replace(",", ""))
    except ValueError:
        return None
    return value if abs(value) <= BOUND else None


class ForeignRun:
    """What the lines so far say in all: the new records, each once, and a `progress.json` drawn from them."""

    def __init__(self) -> None:
        self._dataset: dict[str, Any] = {}
        self._buckets: dict[int, Record] = {}
        self._devices: dict[str, list[str]] = {}
        self._step: dict[str, Any] = {}
        self._told: set[tuple[object, ...]] = set()

    def take(self, lines: Iterable[str], *, steps: bool = True) -> list[Record]:
        """Records that `lines` add; `steps` False: of what they say without an order only, since the lines
        may be older than others that were taken.
        """
        records = []
        for record in filter(None, map(parse, lines)):
            kind = record["kind"]
            if kind == "step":
                if steps and (record["step"] or 0) > (self._step.get("step") or -1):
                    self._step |= record
                    records.append(record)
                continue
            key = tuple(record.items())
            if key in self._told:
                continue
            self._told.add(key)
            if kind == "dataset":
                self._dataset |= record
                record = dict(self._dataset)
                if "batches" not in record:
                    continue  # the samples' line comes first; one event says both
            elif kind == "targets":
                continue
            elif kind == "bucket":
                self._buckets[record["bucket"]] = record
            else:
                role = "target" if kind == "target" else "drafter"
                roles = self._devices.setdefault(record["device"], [])
                if role not in roles:
                    roles.append(role)
            records.append(record)
        return records

    def progress(self, written: float | None) -> Record | None:
        """The record that a run of ours would have in `progress.json`; None before any line was understood.

        `written`: when the log was last written, Unix seconds of the container.
        """
        if not (self._dataset or self._buckets or self._devices or self._step):
            return None
        step = self._step
        return {
            "kind": "progress",
            "t": written,
            "phase": "training" if step else "loading",
            **{name: step.get(name) for name in ("step", "steps", "loss", "epoch", *_KEPT)},
            "buckets": [
                {
                    "bucket": number, "low": b["low"], "high": b["high"], "planned": b["batches"],
                    "planned_share": b["share"],
                }
                for number, b in sorted(self._buckets.items())
            ],
            "devices": [{"device": device, "roles": roles} for device, roles in self._devices.items()],
        }  # fmt: skip


_KEPT: Final = ("tau_estimate", "learning_rate", "gradient_norm", "step_s", "tokens_per_s")
