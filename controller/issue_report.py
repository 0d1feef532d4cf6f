"""A report for an issue tracker: how a run died and what it ran, with what is private removed. Pure.

Markdown that a person can read and cut before it is sent; everything that came from the container is inside
fences, so that none of it becomes a link, a mention or an image.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence

from controller import __version__
from controller.health import age_text
from controller.job_table import job_table
from controller.paths import home
from controller.redaction import redacted
from controller.run_records import Crash, Thread
from controller.run_state import RunState
from controller.text import safe_line, safe_lines

LOG_LINES = 40
NOTE = "dflashctl removed what it knows as secrets, homes, users and hosts; read it before you publish it"


def issue_report(
    state: RunState, log: Sequence[str] = (), *, users: Iterable[str] = (), hosts: bool = False
) -> str:
    """The report on the run in `state`; `log`: its last lines. `hosts` keeps host names and addresses.

    `users`: names to remove wherever they stand, as those of whoever started an attempt are.
    """
    users = {*users, *(attempt.by.partition("@")[0] for attempt in state.attempts)}
    private = {state.host, state.place, state.place.partition("/")[0]}
    private |= {attempt.by.partition("@")[2] for attempt in state.attempts}
    text = "\n".join(_lines(state, log))
    return redacted(text, users=users, hosts=None if hosts else private)


def local_users() -> set[str]:
    """The names under which this machine's user may stand in paths."""
    return {os.environ.get("USER", ""), os.environ.get("LOGNAME", ""), home().name} - {""}


def _lines(state: RunState, log: Sequence[str]) -> list[str]:
    crash, diagnosis, progress = state.first_crash, state.diagnosis, state.progress
    health = state.health
    title = crash.error if crash else health.detail or health.headline
    lines = [f"# {_one_line(title) or health.headline}", "", f"<!-- {NOTE} -->"]
    about = [
        ("state", f"{health.headline}" + (f": {health.detail}" if health.detail else "")),
        ("run", f"{state.job_name or '?'}, attempt {state.attempt}"),
        ("dflashctl", __version__),
        ("payload", next((a.payload[:12] for a in reversed(state.attempts) if a.payload), "")),
        (
            "step",
            f"{progress.step:,} of {progress.steps:,}"
            if progress and progress.step and progress.steps
            else "",
        ),
        ("execution", progress.execution if progress else ""),
        ("GPUs", _gpus(state)),
    ]
    lines += [f"- {name}: {_one_line(value)}" for name, value in about if value]
    if diagnosis is not None:
        lines += [
            "",
            "## Diagnosis",
            f"- what: {diagnosis.what}",
            f"- why: {diagnosis.why}",
            f"- do: {diagnosis.do}",
        ]
    for number, one in enumerate(state.crashes):
        lines += ["", f"## {'First failure' if not number else 'Then'}: {_one_line(_where(one))}"]
        lines += _fenced(safe_lines(one.traceback) or [one.error])
        if one.memory:
            lines += ["", "GPU memory at that moment"]
            lines += _fenced(safe_lines(one.memory))
    if progress is not None and progress.threads:
        lines += ["", "## Threads", *_fenced([_thread(state, thread) for thread in progress.threads])]
    changed = [f"{key.name} = {key.value}" for key in job_table(state.job) if key.changed]
    if changed:
        lines += ["", "## Job (keys that are not the default)", *_fenced(changed)]
    if log:
        lines += ["", "## Log", *_fenced(list(log)[-LOG_LINES:])]
    return lines


def _where(crash: Crash) -> str:
    where = " ".join(filter(None, (crash.thread, crash.where and f"({crash.where})")))
    step = "" if crash.step is None else f", step {crash.step:,}"
    bucket = "" if crash.bucket is None else f", bucket {crash.bucket}"
    return f"{where}{step}{bucket}"


def _thread(state: RunState, thread: Thread) -> str:
    age = state.container_age(thread.last_sign)
    step, bucket = ("-" if value is None else value for value in (thread.step, thread.bucket))
    sign = "-" if age is None else age_text(age)
    named = f"{thread.name:<14} {thread.device:<8} {thread.state:<22}"
    return safe_line(f"{named} step {step}  bucket {bucket}  last sign {sign}")


def _gpus(state: RunState) -> str:
    names = [gpu.name for gpu in state.gpus if gpu.name]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _one_line(text: str) -> str:
    return " ".join(part for line in safe_lines(text) for part in line.split()).replace("`", "'")


def _fenced(lines: Sequence[str]) -> list[str]:
    longest = max((len(run) for line in lines for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}text", *lines, fence]
