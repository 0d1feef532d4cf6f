"""The state of one run as every view shows it: a pure function of its records and of the time.

    reduce(state, news, now) -> state

`News` is what one look at the mirror found, `RunState` is frozen and complete: a view takes one and
needs nothing else, no file and no clock. History (curves, events) is kept in bounded form, so a state
costs the same after a night as after a minute. `run_reader` does the reading. A state is of one host of
a run; `rank` says which.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from controller import attempts, run_events, run_records
from controller.attempts import Attempt
from controller.diagnose import SILENT, Diagnosis, diagnose_text
from controller.gpu_state import Gpu, GpuTable
from controller.health import Health, Limits, Word, judge
from controller.run_events import Dataset, Evaluation, Event
from controller.run_records import Crash, Progress, Record, number, numbers, text, whole
from controller.series import Ema, Series
from remote_payload import rundir

CURVES = (
    "loss", "loss_ema", "tau", "tau_estimate", "tokens_per_s", "gradient_norm", "learning_rate",
    "step_s", "queue_batches", "queue_features",
)  # fmt: skip
"""Curves over the step number that a state holds."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What one look found. A small file is None when it is absent; lists hold only new records."""

    run: Record | None = None
    job: Record | None = None
    status: Record | None = None
    progress: Record | None = None
    exit: Record | None = None
    mirror: Record | None = None
    events: tuple[Record, ...] = ()
    gpu: tuple[Record, ...] = ()
    supervisor: tuple[Record, ...] = ()
    crashes: tuple[Crash, ...] = ()
    """All of `crash/`, not only the new ones."""
    stacks: tuple[str, ...] = ()
    last_words: tuple[str, ...] = ()
    """The last lines of the log, read only when the run has ended."""
    unparsable: Mapping[str, int] = dataclasses.field(default_factory=dict)
    restarted: frozenset[str] = frozenset()
    """Files that were truncated or replaced: what came of them before is void."""
    unread_bytes: int = 0
    total_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What of `events.jsonl` is kept."""

    curves: Mapping[str, Series] = dataclasses.field(
        default_factory=lambda: {name: Series() for name in CURVES}
    )
    ema: Ema = dataclasses.field(default_factory=Ema)
    last_step: float = 0.0
    accuracy: tuple[float | None, ...] = ()
    """Accuracy by position of the block, from the newest step event."""
    conditional_accuracy: tuple[float | None, ...] = ()
    """The same of those labels before which all were right."""
    dataset: Dataset | None = None
    evaluations: tuple[Evaluation, ...] = ()
    events: tuple[Event, ...] = ()
    nonfinite: int = 0
    last_t: float | None = None
    records: int = 0

    def updated(self, records: Iterable[Record]) -> History:
        """The history after these records."""
        records = list(records)
        if not records:
            return self
        points: dict[str, list[tuple[float, float | None]]] = {name: [] for name in CURVES}
        ema, dataset, last_step = self.ema, self.dataset, self.last_step
        newest: Record = {}
        evaluations = list(self.evaluations)
        nonfinite = self.nonfinite
        for record in records:
            kind, step = text(record, "kind"), number(record, "step")
            if kind == "step" and step is not None:
                loss = number(record, "loss")
                ema = ema.updated(loss, step - last_step)
                last_step = step
                points["loss_ema"].append((step, ema.value))
                for name in _STEP_CURVES:
                    points[name].append((step, number(record, name)))
                queues = record.get("queues")
                if isinstance(queues, Mapping):  # absent before the payload wrote them: no points, no gap
                    points["queue_batches"].append((step, number(queues, "batches")))
                    points["queue_features"].append((step, number(queues, "features")))
                newest = record
            elif kind == "eval":
                again = run_events.evaluation(record)
                evaluations = [e for e in evaluations if e.attempt == again.attempt or _before(e, again)]
                evaluations.append(again)
                if step is not None:
                    points["tau"].append((step, number(record, "tau")))
            elif kind == "dataset":
                dataset = run_events.dataset(record)
            elif kind == "nonfinite":
                nonfinite += 1
                if step is not None:
                    points["loss"].append((step, None))
        return History(
            curves={name: series.extended(points[name]) for name, series in self.curves.items()},
            ema=ema,
            last_step=last_step,
            accuracy=numbers(newest, "accuracy") or self.accuracy,
            conditional_accuracy=numbers(newest, "conditional_accuracy") or self.conditional_accuracy,
            dataset=dataset,
            evaluations=tuple(evaluations[-100:]),
            events=(*self.events, *run_events.events(records))[-run_events.KEPT :],
            nonfinite=nonfinite,
            last_t=number(records[-1], "t") or self.last_t,
            records=self.records + len(records),
        )


def _before(older: Evaluation, newer: Evaluation) -> bool:
    """Whether an earlier attempt's evaluation is of a step that the later one did not train again."""
    return older.step is None or newer.step is None or older.step < newer.step


_STEP_CURVES = ("loss", "tau_estimate", "tokens_per_s", "gradient_norm", "learning_rate", "step_s")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ages:
    """Seconds since each source last wrote, clock difference removed; None: it never wrote."""

    news: float | None = None
    status: float | None = None
    progress: float | None = None
    gpu: float | None = None
    events: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Everything a view shows of one run on one host."""

    now: float = 0.0
    """Unix seconds of the laptop this state is of."""
    clock_difference_s: float = 0.0
    """Container's clock minus the laptop's."""
    run_id: str = ""
    job_name: str = ""
    place: str = ""
    host: str = ""
    rank: int = 0
    hosts: int = 1
    """Hosts that the run has; this state is of the one with `rank`."""
    attempt: int = 1
    attempts: tuple[Attempt, ...] = ()
    """All attempts so far, this one included, oldest first."""
    created: float | None = None
    health: Health = dataclasses.field(default_factory=Health)
    ages: Ages = Ages()
    progress: Progress | None = None
    history: History = History()
    supervisor_events: tuple[Event, ...] = ()
    gpu_table: GpuTable = dataclasses.field(default_factory=GpuTable)
    crashes: tuple[Crash, ...] = ()
    stacks: tuple[str, ...] = ()
    diagnosis: Diagnosis | None = None
    """What is known of its end, by the first crash or the log's end; or of who of it lives and is silent."""
    last_words: tuple[str, ...] = ()
    outcome: Record | None = None
    """exit.json of this attempt."""
    job: Record = dataclasses.field(default_factory=dict)
    unparsable: Mapping[str, int] = dataclasses.field(default_factory=dict)
    unread_bytes: int = 0
    """Bytes of history not yet read: poll again soon."""
    total_bytes: int = 0
    tries: int = 0
    connection: str = ""
    connection_error: str = ""

    @property
    def state(self) -> str:
        """The state's word: LIVE, STALE, RECONNECTING, FAILED, KILLED, FINISHED, LOST, ..."""
        return str(self.health.word)

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self.health.word.ended

    @property
    def exit_code(self) -> int | None:
        """What a command that waits for this run exits with; None while it goes on."""
        return self.health.exit_code if self.ended else None

    @property
    def news_age_s(self) -> float | None:
        """Seconds since the newest frame of the container arrived; None before the first."""
        return self.health.news_age_s

    @property
    def has_crash(self) -> bool:
        """Whether there is something to show of how it died."""
        return bool(self.crashes) or self.health.word.died

    @property
    def first_crash(self) -> Crash | None:
        """The thread that failed first."""
        return self.crashes[0] if self.crashes else None

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs of this host."""
        return self.gpu_table.gpus

    @property
    def events(self) -> tuple[Event, ...]:
        """Events of trainer and supervisor, oldest first."""
        both = (*self.supervisor_events, *self.history.events)
        return tuple(sorted(both, key=lambda e: e.t or 0.0))

    @property
    def curves(self) -> Mapping[str, Series]:
        """The curves over the step number, by name (`CURVES`)."""
        return self.history.curves

    def here(self, t: float | None) -> float | None:
        """The container's time `t` by this machine's clock."""
        return None if t is None else t - self.clock_difference_s

    def container_age(self, t: float | None) -> float | None:
        """Seconds since the container's time `t`, by its own clock; never negative."""
        return None if t is None else max(0.0, self.now + self.clock_difference_s - t)


def reduce(state: RunState, news: News, now: float, limits: Limits | None = None) -> RunState:
    """The state after `news`, at the laptop's Unix time `now`. Pure; nothing in `news` raises."""
    limits = limits or Limits()
    mirror, status, run = news.mirror or {}, news.status or {}, news.run or {}
    difference = number(mirror, "clock_difference_s") or 0.0
    attempt = max(whole(record, "attempt") or 1 for record in (status, news.progress or {}, news.exit or {}))
    progress = run_records.progress(news.progress) if news.progress else None
    if progress is not None and progress.attempt != attempt:
        progress = None  # of the attempt before
    outcome = news.exit if news.exit and (whole(news.exit, "attempt") or 1) == attempt else None
    health = judge(
        status=news.status,
        exit_record=outcome,
        mirror=news.mirror,
        progress_t=progress.t if progress else None,
        now=now,
        limits=limits,
    )
    history = History() if rundir.EVENTS in news.restarted else state.history
    history = history.updated(news.events)
    gpus = GpuTable() if rundir.GPU in news.restarted else state.gpu_table
    training = progress is not None and progress.phase == "training" and not health.word.ended
    gpus = gpus.updated(news.gpu).with_roles(progress.devices if progress else (), training=training)
    anew = rundir.SUPERVISOR_LOG in news.restarted
    told = () if anew else state.supervisor_events
    crashes = tuple(
        sorted(
            (c for c in news.crashes if c.attempt == attempt),
            key=lambda c: (not c.first, c.t or 0.0),
        )
    )
    unparsable = {name: n for name, n in state.unparsable.items() if name not in news.restarted}
    for name, count in news.unparsable.items():
        if count:
            unparsable[name] = unparsable.get(name, 0) + count
    container_now = now + difference

    def age(t: float | None) -> float | None:
        return None if t is None else max(0.0, container_now - t)

    return RunState(
        now=now,
        clock_difference_s=difference,
        run_id=text(run, "id"),
        job_name=text(run, "job"),
        place=text(run, "place"),
        host=text(run, "host"),
        rank=_rank(run),
        hosts=max(1, len(_hosts(run))),
        attempt=attempt,
        attempts=attempts.updated(() if anew else state.attempts, news.supervisor),
        created=number(run, "created"),
        health=health,
        ages=Ages(
            news=health.news_age_s,
            status=age(number(status, "t")),
            progress=age(progress.t if progress else None),
            gpu=age(gpus.t),
            events=age(history.last_t),
        ),
        progress=progress,
        history=history,
        supervisor_events=(*told, *run_events.events(news.supervisor))[-run_events.KEPT :],
        gpu_table=gpus,
        crashes=crashes,
        stacks=news.stacks,
        diagnosis=_diagnosis(health, crashes, news.last_words),
        last_words=news.last_words,
        outcome=outcome,
        job=news.job or {},
        unparsable=unparsable,
        unread_bytes=news.unread_bytes,
        total_bytes=news.total_bytes,
        tries=whole(mirror, "tries") or 0,
        connection=text(mirror, "state"),
        connection_error=text(mirror, "error"),
    )


def _hosts(run: Record) -> list[str]:
    hosts = run.get("hosts")
    return [str(host) for host in hosts] if isinstance(hosts, list) else []


def _rank(run: Record) -> int:
    """What the record says, or the place of its host among those of the run (they stand in rank order)."""
    said, host = whole(run, "rank"), text(run, "host")
    if said is not None:
        return said
    hosts = _hosts(run)
    return hosts.index(host) if host in hosts else 0


def _diagnosis(health: Health, crashes: tuple[Crash, ...], last_words: tuple[str, ...]) -> Diagnosis | None:
    if crashes:
        first = crashes[0]
        return diagnose_text(f"{first.traceback}\n{first.error}\n{first.memory}")
    if health.silent:
        return SILENT[health.silent]
    if health.word is Word.KILLED:
        return diagnose_text(f"killed by {health.extra} {health.detail}\n" + "\n".join(last_words))
    if health.word in (Word.FAILED, Word.LOST):
        return diagnose_text(f"{health.detail}\n" + "\n".join(last_words))
    return None
