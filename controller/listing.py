"""The runs that this laptop knows, as one table: by what their mirrors hold, asking nobody."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import TextIO

from controller import figures
from controller.glance import Glance, glance
from controller.health import Health, age_text
from controller.paths import KnownRun, known_runs
from controller.run_records import whole
from controller.text import aligned, safe_line


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One run; the field names are the keys of `runs --json`."""

    run: str
    host: str
    job: str
    created: float
    """Unix seconds of the laptop."""
    state: str
    exit_code: int | None
    attempt: int
    step: int | None
    steps: int | None
    news_age_s: float | None
    directory: str


def print_runs(out: TextIO, *, as_json: bool) -> None:
    """Print all known runs, newest first. Raises LocalStateError."""
    now = time.time()
    seen = [(run, glance(run.directory, now)) for run in known_runs()]
    rows = [(_row(run, one), one.health) for run, one in seen]
    if as_json:
        for row, _ in rows:
            print(json.dumps(dataclasses.asdict(row)), file=out)
        return
    table = [("RUN", "STATE", "NEWS", "STEP", "LAUNCHED", "HOST", "JOB")]
    for row, health in rows:
        step = "" if row.step is None else f"{row.step}/{row.steps}" if row.steps else f"{row.step}"
        launched = figures.clock(row.created, "%Y-%m-%d %H:%M")
        table.append((row.run, _state(health), _news(health), step, launched, row.host, row.job))
    print("\n".join(aligned(table)), file=out)


def _state(health: Health) -> str:
    """With how it ended, or what was known before there was no news."""
    if health.word.no_news and health.written:
        return f"{health.word}, was {safe_line(health.written)}"
    return safe_line(health.headline) if health.word.ended else str(health.word)


def _news(health: Health) -> str:
    return "none yet" if health.news_age_s is None else f"{age_text(health.news_age_s)} ago"


def _row(run: KnownRun, seen: Glance) -> Row:
    health, progress = seen.health, seen.progress
    return Row(
        run=run.run_id,
        host=run.host,
        job=safe_line(run.job_name),
        created=run.created,
        state=str(health.word),
        exit_code=health.exit_code if health.word.ended else None,
        attempt=seen.attempt,
        step=whole(progress, "step"),
        steps=whole(progress, "steps"),
        news_age_s=None if health.news_age_s is None else round(health.news_age_s, 1),
        directory=str(run.directory),
    )
