"""The runs that this machine knows, as rows of the picker: one for each host of each run.

A row is read from the small files of its mirror alone (`glance`), so that a hundred runs cost milliseconds.
What one reads is as old as its mirror: while the picker is open, mirrors of the newest runs that have not
ended are kept up to date (`picker`), the others say how old their news is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from controller import figures, run_records
from controller.diagnose import alarms
from controller.glance import glance
from controller.health import Health, Word, age_text
from controller.paths import known_runs
from controller.run_records import number, text, whole
from controller.tui.lines import line, remote
from controller.tui.palette import LABEL, PLAIN, STATES, VALUE, WARN
from remote_payload import rundir


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """One run on one host."""

    directory: Path
    run_id: str
    host: str
    place: str
    job: str
    created: float
    rank: int
    hosts: int
    health: Health
    attempt: int
    step: int | None
    steps: int | None
    loss: float | None
    tau: float | None
    alarm: bool
    """Whether something goes wrong in it, although it goes on."""


def run_rows(now: float) -> list[RunRow]:
    """All known runs, newest first, hosts of one run in rank order. Raises LocalStateError."""
    rows = []
    for known in known_runs():
        seen = glance(known.directory, now)
        run = rundir.read_whole(known.directory / rundir.RUN) or {}
        addresses = run.get("hosts")
        hosts = [str(host) for host in addresses] if isinstance(addresses, list) else []
        rank = whole(run, "rank")
        if rank is None:
            rank = hosts.index(known.host) if known.host in hosts else 0
        rows.append(
            RunRow(
                directory=known.directory,
                run_id=known.run_id,
                host=known.host,
                place=text(run, "place"),
                job=known.job_name or text(run, "job"),
                created=number(run, "created") or known.created,
                rank=rank,
                hosts=max(1, len(hosts)),
                health=seen.health,
                attempt=seen.attempt,
                step=whole(seen.progress, "step"),
                steps=whole(seen.progress, "steps"),
                loss=number(seen.progress, "loss"),
                tau=number(seen.progress, "tau"),
                alarm=bool(seen.progress and alarms(run_records.progress(seen.progress))),
            )
        )
    newest: dict[str, float] = {}
    for row in rows:
        newest[row.run_id] = max(row.created, newest.get(row.run_id, 0.0))
    return sorted(rows, key=lambda row: (-newest[row.run_id], row.run_id, row.rank, row.host))


COLUMNS = (
    ("state", 20, "the state, and how old the news of it is; ! something goes wrong"),
    ("run", 19, "its id; `host 2/2` is the second of two hosts of one run"),
    ("place", 8, "where it trains"),
    ("step", 11, "steps made, and their share of all"),
    ("loss", 5, "of the newest step"),
    ("tau", 4, "by real decoding, at the newest evaluation"),
    ("launched", 11, "by this machine's clock"),
)
"""Name, width and meaning; a narrow terminal leaves out the last ones."""


def run_table(rows: Sequence[RunRow], width: int) -> tuple[Text, list[Text]]:
    """The line of names, and a line a run."""
    columns = list(COLUMNS)
    while len(columns) > 2 and sum(wide + 1 for _, wide, _ in columns) > width:
        columns.pop()
    widths = {name: wide for name, wide, _ in columns}
    left = max(0, width - sum(wide + 1 for wide in widths.values()))
    for name, most in (("run", 20), ("place", 12)):
        if name in widths:
            widths[name] += min(left, most)
            left -= min(left, most)
    names = line((" ".join(f"{name:<{wide}}" for name, wide in widths.items()), LABEL))
    return names, [_row(row, widths) for row in rows]


def _row(row: RunRow, columns: dict[str, int]) -> Text:
    shape, style = STATES[row.health.word]
    text_ = line()
    for name, wide in columns.items():
        if name == "state":
            cell = line((f" {shape} {row.health.word} ", style))
            cell.append_text(_age(row.health))
            if row.alarm and not (row.health.word.ended or row.health.word.no_news):
                cell.append(" !", style=WARN)
        elif name == "run":
            cell = remote(row.run_id, VALUE)
            if row.hosts > 1:
                cell.append(f" host {row.rank + 1}/{row.hosts}", style=WARN)
            elif row.attempt > 1:
                cell.append(f" #{row.attempt}", style=LABEL)
        elif name == "place":
            cell = remote(row.place or row.host, PLAIN)
        elif name == "step":
            cell = line((figures.count(row.step), VALUE))
            if row.step is not None and row.steps:
                cell.append(f" {row.step / row.steps:.0%}", style=LABEL)
        elif name == "loss":
            cell = line((figures.decimal(row.loss, 2), PLAIN))
        elif name == "tau":
            cell = line((figures.decimal(row.tau, 2), PLAIN))
        else:
            cell = line((figures.clock(row.created, "%m-%d %H:%M"), LABEL))
        cell.truncate(wide, overflow="ellipsis")
        cell.pad_right(wide + 1 - cell.cell_len)
        text_.append_text(cell)
    return text_


def _age(health: Health) -> Text:
    """How old the news is; of a run that has ended it does not matter."""
    age = health.news_age_s
    if health.word.ended or age is None:
        return line()
    old = health.word.no_news and health.word is not Word.CONNECTING
    return line((f" {age_text(age)}", WARN if old else LABEL))
