"""Is the run alive, and how do we know: one word from what was written, what was heard, and when.

Two facts must never look alike. *The trainer is dead* is something the container said: FAILED, KILLED,
LOST, ENDING. *There is no news* is something the laptop noticed: STALE, RECONNECTING, UNKNOWN. A lost
connection is never a failed run, so what was last written survives it and stands beside the word; and
what has ended stays ended, however old the news.

Ages of what the container wrote are taken in its own clock, with the difference that the beats showed;
the age of the news is taken in the laptop's alone.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Final, Literal

from controller.errors import RunLostError
from controller.run_records import Record, number, table, text, whole
from remote_payload.rundir import ENDED, TRAIN_LOG, State, TrainerExit


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Ages in seconds at which silence gets its name; `scale` shortens all of them for tests."""

    stale_s: float = 8.0
    """Beats come every 2 s: this is four missed ones."""
    silent_supervisor_s: float = 20.0
    """The supervisor writes its status every 2 s."""
    gone_s: float = 6.0
    """A beat that says "gone" may overtake the last status by one heartbeat."""
    stalled_s: float = 60.0
    """The trainer writes its progress every second."""
    mirror_s: float = 10.0
    """The mirror's writer rewrites mirror.json every 2 s."""

    def scaled(self, scale: float) -> Limits:
        """All limits times `scale`."""
        return Limits(**{f.name: getattr(self, f.name) * scale for f in dataclasses.fields(self)})


class Word(enum.StrEnum):
    """The state of a run as a reader sees it."""

    UNKNOWN = "UNKNOWN"
    CONNECTING = "CONNECTING"
    LAUNCHING = "LAUNCHING"
    LIVE = "LIVE"
    STOPPING = "STOPPING"
    RESTARTING = "RESTARTING"
    ENDING = "ENDING"
    STALLED = "STALLED"
    STALE = "STALE"
    RECONNECTING = "RECONNECTING"
    REFUSED = "REFUSED"
    FINISHED = "FINISHED"
    STOPPED = "STOPPED"
    FAILED = "FAILED"
    KILLED = "KILLED"
    LOST = "LOST"

    @property
    def no_news(self) -> bool:
        """The laptop does not know: nothing recent was heard."""
        return self in (
            Word.UNKNOWN,
            Word.CONNECTING,
            Word.STALE,
            Word.RECONNECTING,
            Word.REFUSED,
        )

    @property
    def ended(self) -> bool:
        """Nothing more will come of this attempt."""
        return self in (Word.FINISHED, Word.STOPPED) or self.died

    @property
    def died(self) -> bool:
        """It ended otherwise than it was to."""
        return self in (Word.FAILED, Word.KILLED, Word.LOST)


SHAPES: Final[Mapping[Word, str]] = {
    Word.LIVE: "●",
    Word.LAUNCHING: "◔",
    Word.CONNECTING: "◌",
    Word.STOPPING: "◧",
    Word.RESTARTING: "⟳",
    Word.ENDING: "◧",
    Word.STALLED: "▲",
    Word.STALE: "○",
    Word.RECONNECTING: "↻",
    Word.REFUSED: "⊘",
    Word.UNKNOWN: "?",
    Word.FINISHED: "✓",
    Word.STOPPED: "■",
    Word.FAILED: "✗",
    Word.KILLED: "✗",
    Word.LOST: "†",
}
"""A mark of each state; round open ones are "no news", crosses are "dead"."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The word, the rest of its headline (`#3 next 8s`, `rc=1`), a sentence, and the exit code."""

    word: Word = Word.UNKNOWN
    extra: str = ""
    detail: str = ""
    exit_code: int | None = None
    written: str = ""
    """The state last written by the container, `running` say, however old."""
    news_age_s: float | None = None
    """Seconds since the newest frame arrived here; None before the first."""
    silent: Literal["", "trainer", "supervisor"] = ""
    """Of STALLED: who lives and writes nothing; of a log that is no run's nobody is known."""

    @property
    def headline(self) -> str:
        """Word and rest: `RECONNECTING #3 next 8s`."""
        return f"{self.word} {self.extra}".strip()


def judge(
    *, status: Record | None, exit_record: Record | None, mirror: Record | None,
    progress_t: float | None, now: float, limits: Limits,
) -> Health:  # fmt: skip
    """The health of a run from its newest records; `now` is the laptop's Unix time in seconds."""
    mirror = mirror or {}
    status = status or {}
    if exit_record and (whole(exit_record, "attempt") or 1) != (whole(status, "attempt") or 1):
        exit_record = None  # the word of an older attempt
    last_heard = number(mirror, "last_heard")
    # A clock that was set back since makes old news look new: news of an hour ahead is an hour old at least.
    news_age = None if last_heard is None else abs(now - last_heard)
    container_now = now + (number(mirror, "clock_difference_s") or 0.0)
    written = text(status, "state")
    ended = _ended(status, exit_record, mirror, limits)
    if ended is not None:
        return dataclasses.replace(ended, written=written, news_age_s=news_age)
    health = _connection(mirror, news_age, now, limits)
    if health is None:
        health = _alive(status, mirror, progress_t, container_now, limits)
    return dataclasses.replace(health, written=written, news_age_s=news_age)


def _ended(status: Record, exit_record: Record | None, mirror: Record, limits: Limits) -> Health | None:
    state = text(status, "state")
    reason = text(status, "reason")
    if state in ENDED:
        return _written_end(status, exit_record, reason)
    beat = table(mirror, "beat")
    if not beat or not status:
        return None
    gone = text(beat, "supervisor") in ("gone", "reused", "none")
    nobody = gone and text(beat, "trainer") != "alive"
    rebooted = bool(
        text(beat, "boot_id") and text(status, "boot_id") and text(beat, "boot_id") != text(status, "boot_id")
    )
    written, heard = number(status, "t"), number(beat, "t")
    settled = written is None or heard is None or heard - written >= limits.gone_s
    if not (nobody or rebooted) or not settled:
        return None
    if exit_record:
        return _written_end({"state": "", "attempt": status.get("attempt")}, exit_record, reason)
    why = (
        "the container was restarted under the run" if rebooted else
        "neither supervisor nor trainer exists any more, and neither wrote an end"
    )  # fmt: skip
    return Health(word=Word.LOST, detail=why, exit_code=RunLostError.exit_code)


def _written_end(status: Record, exit_record: Record | None, reason: str) -> Health:
    own = exit_record or {}
    signal = text(status, "signal")
    code = whole(status, "exit_code")
    if code is None:
        code = whole(own, "exit_code")
    detail = reason or text(own, "error")
    if text(status, "state") == State.KILLED or (signal and code != TrainerExit.STOPPED):
        return Health(word=Word.KILLED, extra=signal, detail=detail, exit_code=code)
    if code == TrainerExit.STOPPED:
        return Health(word=Word.STOPPED, detail=detail or "stopped on request", exit_code=code)
    if code == TrainerExit.FINISHED and text(status, "state") != State.FAILED:
        return Health(word=Word.FINISHED, detail=detail, exit_code=code)
    if code is None and text(status, "state") == State.FINISHED:
        return Health(word=Word.FINISHED, detail=detail, exit_code=0)
    shown = "?" if code is None else str(code)
    return Health(word=Word.FAILED, extra=f"rc={shown}", detail=detail, exit_code=code or 1)


def _connection(mirror: Record, news_age: float | None, now: float, limits: Limits) -> Health | None:
    """The health when there is no recent news, else None."""
    state, error = text(mirror, "state"), text(mirror, "error")
    hint = text(mirror, "hint")
    said = ". ".join(filter(None, (error.rstrip("."), hint)))
    written_at = number(mirror, "t")
    watched = written_at is not None and abs(now - written_at) <= limits.mirror_s
    if watched and state == "refused":
        return Health(word=Word.REFUSED, detail=said or "the feed refuses")
    if watched and state == "reconnecting":
        tries, next_try = whole(mirror, "tries"), number(mirror, "next_try")
        extra = f"#{tries}" if tries else ""
        if next_try is not None:
            wait = next_try - now
            extra += f" next {wait:.0f}s" if wait > 0 else " now"
        return Health(word=Word.RECONNECTING, extra=extra.strip(), detail=said)
    if news_age is None:
        if watched and state in ("connecting", "connected"):
            return Health(word=Word.CONNECTING, detail=said)
        return Health(word=Word.UNKNOWN, detail=said or "nothing was heard of this run yet")
    if news_age > limits.stale_s:
        nobody = "" if watched else "nobody on this machine is connected to the run"
        return Health(word=Word.STALE, extra=age_text(news_age), detail=said or nobody)
    return None


def _alive(
    status: Record, mirror: Record, progress_t: float | None, container_now: float, limits: Limits
) -> Health:
    """The health while beats arrive."""
    if text(table(mirror, "beat"), "source") == "log":
        return _written(table(mirror, "beat"), container_now, limits)
    if not status:
        return Health(word=Word.LAUNCHING, detail="the supervisor has written nothing yet")
    beat, state, reason = table(mirror, "beat"), text(status, "state"), text(status, "reason")
    supervisor, trainer = text(beat, "supervisor"), text(beat, "trainer")
    if supervisor in ("gone", "reused", "none"):
        detail = "the supervisor is gone; " + (
            "the trainer was told to checkpoint and end" if trainer == "alive" else "so is all else"
        )
        return Health(word=Word.ENDING, detail=detail)
    if state == State.STOPPING:
        return Health(word=Word.STOPPING, detail=reason)
    if state == State.RESTARTING:
        return Health(
            word=Word.RESTARTING, extra=_until(table(status, "restart"), container_now), detail=reason
        )
    if trainer in ("gone", "reused") and state in (State.RUNNING, State.STALLED):
        return Health(word=Word.ENDING, detail="the trainer is gone; its supervisor says how, soon")
    if state == State.LAUNCHING:
        return Health(word=Word.LAUNCHING, detail=reason)
    if state == State.STALLED:
        return _silent_trainer(progress_t, container_now, reason)
    written = number(status, "t")
    if written is not None and container_now - written > limits.silent_supervisor_s:
        age = age_text(container_now - written)
        return Health(
            word=Word.STALLED, extra=age, detail="the supervisor writes no status", silent="supervisor"
        )
    if progress_t is not None and container_now - progress_t > limits.stalled_s:
        return _silent_trainer(progress_t, container_now, "the trainer lives but writes no progress")
    return Health(word=Word.LIVE, detail=reason)


def _silent_trainer(progress_t: float | None, container_now: float, detail: str) -> Health:
    since = _since(progress_t, container_now)
    return Health(word=Word.STALLED, extra=since, detail=detail, silent="trainer")


def _until(restart: Record, now: float) -> str:
    """`2/5 in 8s`: which restart of how many, and when."""
    count, limit, begins = whole(restart, "count"), whole(restart, "limit"), number(restart, "next")
    if count is None or limit is None or begins is None:
        return ""
    return f"{count}/{limit} " + (f"in {begins - now:.0f}s" if begins > now else "now")


def _written(beat: Record, container_now: float, limits: Limits) -> Health:
    """The health of a log that is no run's: whether it grows is all that is known of its program."""
    t = number(table(table(beat, "files"), TRAIN_LOG), "written")
    if t is None:
        return Health(word=Word.STALLED, detail="the log file is not there at the moment")
    if container_now - t > limits.stalled_s:
        return Health(
            word=Word.STALLED, extra=_since(t, container_now), detail="nothing is written to the log"
        )
    return Health(word=Word.LIVE, detail="its log grows; nothing else is known of this program")


def _since(t: float | None, now: float) -> str:
    return "" if t is None else age_text(max(0.0, now - t))


def age_text(seconds: float) -> str:
    """A short age: `1.2s`, `40s`, `3m05s`, `2h10m`, `3d04h`."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    if seconds < 100:
        return f"{seconds:.0f}s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours}h{minutes:02d}m"
    days, hours = divmod(hours, 24)
    return f"{days}d{hours:02d}h"
