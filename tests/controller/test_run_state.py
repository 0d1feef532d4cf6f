from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.health import Limits, Word, age_text, judge
from controller.run_state import News, RunState, reduce
from controller.series import segments
from tests.tui.golden import AHEAD, BOOT, NOW

Record = dict[str, Any]


def status(state: str = "running", *, age: float = 1.0, **changes: Any) -> Record:
    return {"kind": "status", "t": NOW + AHEAD - age, "attempt": 1, "state": state, "reason": None,
            "boot_id": BOOT, "exit_code": None, "signal": None, **changes}  # fmt: skip


def mirror(
    state: str = "connected", *, heard: float | None = 1.0, supervisor: str = "alive",
    trainer: str = "alive", boot: str = BOOT, written: float = 1.0, **changes: Any,
) -> Record:  # fmt: skip
    beat = None
    if heard is not None:
        beat = {"t": NOW + AHEAD - heard, "boot_id": boot, "supervisor": supervisor, "trainer": trainer}
    return {"kind": "mirror", "t": NOW - written, "state": state, "tries": 0, "next_try": None,
            "error": None, "hint": None, "last_heard": None if heard is None else NOW - heard,
            "beat": beat, "clock_difference_s": AHEAD, "files": {}, **changes}  # fmt: skip


def progress(age: float = 1.0, **changes: Any) -> Record:
    return {"kind": "progress", "t": NOW + AHEAD - age, "attempt": 1, "phase": "training", "step": 5,
            **changes}  # fmt: skip


def state_of(now: float = NOW, **news: Any) -> RunState:
    return reduce(RunState(), News(**news), now)


GONE = {"supervisor": "gone", "trainer": "gone"}

HEADLINES: list[tuple[str, Record]] = [
    ("UNKNOWN", {}),
    ("CONNECTING", {"mirror": mirror("connecting", heard=None)}),
    ("UNKNOWN", {"mirror": mirror("connecting", heard=None, written=60)}),
    ("LAUNCHING", {"mirror": mirror()}),
    ("LAUNCHING", {"mirror": mirror(), "status": status("launching")}),
    ("LIVE", {"mirror": mirror(), "status": status(), "progress": progress()}),
    ("STALE 40s", {"mirror": mirror(heard=40, written=40), "status": status(age=40)}),
    ("STALE 40s", {"mirror": mirror(heard=40), "status": status(age=40)}),
    # This machine's clock was set back by an hour since.
    ("STALE 1h00m", {"mirror": mirror(heard=-3600, written=-3600), "status": status(age=-3600)}),
    ("STALE 1h00m",
     {"mirror": mirror("reconnecting", heard=-3600, written=-3600), "status": status(age=-3600)}),
    ("RECONNECTING #3 next 8s",
     {"mirror": mirror("reconnecting", heard=20, tries=3, next_try=NOW + 8), "status": status(age=20)}),
    ("RECONNECTING #1 now",
     {"mirror": mirror("reconnecting", heard=2, tries=1, next_try=NOW - 1), "status": status()}),
    ("REFUSED", {"mirror": mirror("refused", heard=None, error="schema 9")}),
    ("STALLED 75s", {"mirror": mirror(), "status": status("stalled"), "progress": progress(75)}),
    ("STALLED 75s", {"mirror": mirror(), "status": status(), "progress": progress(75)}),
    ("STALLED 30s", {"mirror": mirror(), "status": status(age=30), "progress": progress()}),
    ("STOPPING", {"mirror": mirror(), "status": status("stopping")}),
    ("RESTARTING 2/5 in 8s",
     {"mirror": mirror(trainer="none"), "status": status("restarting", restart={
         "next": NOW + AHEAD + 8, "count": 2, "limit": 5})}),
    ("ENDING", {"mirror": mirror(trainer="gone"), "status": status()}),
    ("ENDING", {"mirror": mirror(supervisor="gone"), "status": status(age=9)}),
    ("FINISHED", {"mirror": mirror(**GONE), "status": status("finished", exit_code=0)}),
    ("STOPPED", {"mirror": mirror(**GONE), "status": status("finished", exit_code=3)}),
    ("FAILED rc=1", {"mirror": mirror(**GONE), "status": status("failed", exit_code=1)}),
    ("KILLED SIGKILL",
     {"mirror": mirror(**GONE), "status": status("killed", exit_code=137, signal="SIGKILL")}),
    ("LOST", {"mirror": mirror(**GONE), "status": status(age=9)}),
    ("LOST", {"mirror": mirror(supervisor="reused", trainer="none"), "status": status(age=9)}),
    ("LOST", {"mirror": mirror(boot="another boot", **GONE), "status": status(age=90)}),
]  # fmt: skip


@pytest.mark.parametrize(("headline", "news"), HEADLINES)
def test_each_situation_has_its_headline(headline: str, news: Record) -> None:
    assert state_of(**news).health.headline == headline


def test_dead_and_no_news_never_share_a_word_or_a_shape() -> None:
    from controller.tui.palette import STATES

    dead = {Word.FAILED, Word.KILLED, Word.LOST, Word.ENDING}
    silent = {word for word in Word if word.no_news}
    assert not dead & silent
    assert not {STATES[word][0] for word in dead} & {STATES[word][0] for word in silent}
    assert set(STATES) == set(Word)


@pytest.mark.parametrize("state", ["finished", "failed", "killed"])
def test_what_has_ended_stays_ended_however_old_the_news(state: str) -> None:
    found = state_of(
        mirror=mirror("reconnecting", heard=90_000, tries=9, written=90_000),
        status=status(state, age=90_000, exit_code=1, signal=None),
    )
    assert found.ended
    assert not found.health.word.no_news


def test_a_lost_connection_never_ends_a_run() -> None:
    found = state_of(mirror=mirror("reconnecting", heard=3600, tries=40), status=status(age=3600))
    assert (found.ended, found.exit_code, found.health.written) == (False, None, "running")


def test_gone_is_believed_only_when_the_last_status_had_time_to_arrive() -> None:
    early = state_of(mirror=mirror(**GONE), status=status(age=2))
    late = state_of(mirror=mirror(**GONE), status=status(age=9))
    assert (early.ended, early.state) == (False, "ENDING")
    assert (late.state, late.exit_code) == ("LOST", 74)


def test_the_trainers_own_last_word_counts_when_its_supervisor_left_none() -> None:
    own = {"kind": "exit", "attempt": 1, "outcome": "finished", "exit_code": 0}
    found = state_of(mirror=mirror(**GONE), status=status(age=60), exit=own)
    assert (found.state, found.exit_code) == ("FINISHED", 0)
    of_before = own | {"attempt": 1}
    found = state_of(mirror=mirror(**GONE), status=status(age=60, attempt=2), exit=of_before)
    assert (found.state, found.outcome) == ("LOST", None)


@pytest.mark.parametrize(
    ("news", "code"),
    [
        (status("finished", exit_code=0), 0),
        (status("finished", exit_code=3), 3),
        (status("failed", exit_code=2), 2),
        (status("failed", exit_code=None), 1),
        (status("killed", exit_code=137, signal="SIGKILL"), 137),
        (status("killed", exit_code=139, signal="SIGSEGV"), 139),
        (status("running"), None),
    ],
)
def test_the_exit_code_is_the_trainers_own_or_128_and_the_signal(news: Record, code: int) -> None:
    assert state_of(mirror=mirror(), status=news).exit_code == code


@pytest.mark.parametrize("difference", [-3600.0, 0.0, 7.5, 86_400.0])
def test_ages_do_not_depend_on_the_difference_of_the_clocks(difference: float) -> None:
    t = NOW + difference - 2.0
    found = state_of(
        mirror=mirror(clock_difference_s=difference),
        status=status(t=t),
        progress=progress(t=t),
        gpu=({"kind": "gpu_none", "t": t, "reason": ""},),
        events=({"kind": "ready", "t": t},),
    )
    assert found.state == "LIVE"
    ages = dataclasses.astuple(found.ages)
    assert ages == pytest.approx((1.0, 2.0, 2.0, 2.0, 2.0))


def test_the_curves_hold_losses_their_average_and_decoded_tau() -> None:
    steps = tuple({"kind": "step", "step": s, "loss": 4.0, "tokens_per_s": 10.0} for s in range(1, 9))
    found = state_of(events=(*steps, {"kind": "eval", "step": 8, "tau": 1.25, "prompts": 4}))
    assert found.curves["loss"].last == 4.0
    assert found.curves["loss_ema"].last == pytest.approx(4.0)
    assert found.curves["tau"].last == 1.25
    assert found.history.evaluations[-1].prompts == 4
    assert [event.kind for event in found.events] == ["eval"]


def test_a_loss_that_is_no_number_is_a_gap_an_event_and_a_word() -> None:
    events = (
        {"kind": "step", "step": 1, "loss": 2.0},
        {"kind": "step", "step": 2, "loss": None, "nonfinite": ["loss"]},
        {"kind": "nonfinite", "step": 3, "bucket": 1, "samples": [7]},
        {"kind": "step", "step": 4, "loss": 2.0},
    )
    found = state_of(events=events, progress=progress(loss=None, nonfinite=["loss"]))
    assert len(segments(found.curves["loss"].all_points)) == 2
    assert "not finite at step 3" in found.events[-1].line
    assert found.progress is not None
    assert found.progress.loss_is_nan


def test_a_file_that_began_anew_voids_what_came_of_it() -> None:
    first = state_of(events=({"kind": "step", "step": 900, "loss": 1.0},))
    again = reduce(first, News(events=({"kind": "step", "step": 1, "loss": 9.0},),
                               restarted=frozenset({"events.jsonl"})), NOW)  # fmt: skip
    assert again.curves["loss"].points == ((1.0, 9.0),)


def test_figures_of_the_attempt_before_are_not_shown_as_this_ones() -> None:
    found = state_of(mirror=mirror(), status=status("launching", attempt=2), progress=progress())
    assert (found.attempt, found.progress) == (2, None)


def test_the_reducer_changes_nothing_it_was_given() -> None:
    before = state_of(events=({"kind": "step", "step": 1, "loss": 1.0},))
    kept = dataclasses.replace(before)
    reduce(before, News(events=({"kind": "step", "step": 2, "loss": 2.0},)), NOW)
    assert before == kept


def test_events_and_last_words_are_bounded() -> None:
    many = tuple({"kind": "recompile", "t": float(i), "replica": i} for i in range(2000))
    assert len(state_of(events=many).events) == 300


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(
    ["kind", "t", "attempt", "state", "step", "loss", "beat", "files", "threads", "buckets", "queues",
     "wait", "devices", "gpus", "skipped", "samples", "nonfinite", "exit_code", "signal", "last_heard",
     "clock_difference_s", "next_try", "tries", "by_kind", "acceptance", "accuracy", "checkpoint", "reason",
     "changes", "restart", "next", "count", "limit", "wait_s", "payload", "from_step"]
)  # fmt: skip
KINDS = st.sampled_from(
    ["step", "eval", "dataset", "bucket", "target", "compile", "ready", "start", "checkpoint", "nonfinite",
     "recompile", "request", "crash", "end", "gpu", "gpu_none", "gpu_constants", "trainer_exited",
     "restart", "resume", "odd"]
)  # fmt: skip
RECORD = st.builds(lambda kind, rest: rest | {"kind": kind}, KINDS, st.dictionaries(KEYS, JSON, max_size=6))


@settings(max_examples=60, deadline=None)
@given(st.lists(RECORD, max_size=4), RECORD, RECORD, RECORD, RECORD)
def test_no_record_of_another_version_or_of_a_broken_writer_breaks_the_reader(
    records: list[Record], one: Record, two: Record, three: Record, four: Record
) -> None:
    news = News(status=one, progress=two, exit=three, mirror=four, run=one, events=tuple(records),
                gpu=tuple(records), supervisor=tuple(records))  # fmt: skip
    found = reduce(RunState(), news, NOW)
    reduce(found, news, NOW + 1)
    assert found.state in set(Word)


def test_counts_beyond_all_bounds_break_no_line() -> None:
    huge = int("9" * 4299)
    event = {"kind": "dataset", "skipped": {str(number): huge for number in range(20)}}
    assert len(state_of(events=(event,)).events) == 1


def test_limits_shrink_together_for_tests_of_time() -> None:
    fast = Limits().scaled(0.1)
    silent = mirror(heard=1.0)
    seen = judge(status=status(), exit_record=None, mirror=silent, progress_t=None, now=NOW, limits=fast)
    assert seen.word is Word.STALE


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.24, "1.2s"), (40, "40s"), (185, "3m05s"), (7800, "2h10m"), (273_600, "3d04h")],
)
def test_ages_are_short(seconds: float, text: str) -> None:
    assert age_text(seconds) == text


def of_attempt(attempt: int, kind: str, **fields: Any) -> Record:
    return {"kind": kind, "attempt": attempt, "t": NOW + attempt, **fields}


HISTORY = (
    of_attempt(1, "start", payload="aa", pid=1),
    of_attempt(1, "trainer_exited", exit_code=1, signal=None, step=150, runtime_s=9.0),
    of_attempt(
        1, "restart", state="failed", reason="boom", exit_code=1, signal=None, wait_s=10, count=1, limit=5
    ),
    of_attempt(2, "start", payload="aa", pid=1),
    of_attempt(2, "trainer_exited", exit_code=3, signal=None, step=170, runtime_s=9.0),
    of_attempt(2, "end", state="finished", reason="stopped on request", exit_code=3, signal=None),
    of_attempt(3, "resume", by="me@laptop", payload="bb", payload_before="aa", changes={"steps": [200, 900]}),
    of_attempt(3, "start", payload="bb", pid=2),
)


def test_every_attempt_is_known_with_how_it_began_and_ended() -> None:
    found = state_of(mirror=mirror(), status=status(attempt=3), supervisor=HISTORY).attempts
    told = [(a.number, a.begun_by, a.payload, a.state, a.exit_code, a.step, a.reason) for a in found]
    assert told == [
        (1, "launch", "aa", "failed", 1, 150, "boom"),
        (2, "restart", "aa", "finished", 3, 170, "stopped on request"),
        (3, "resume", "bb", "", None, None, ""),
    ]
    assert (found[2].by, found[2].changes) == ("me@laptop", {"steps": [200, 900]})


def test_attempts_come_out_the_same_however_their_records_are_cut() -> None:
    whole = state_of(supervisor=HISTORY).attempts
    state = RunState()
    for record in HISTORY:
        state = reduce(state, News(supervisor=(record,)), NOW)
    assert state.attempts == whole
    again = reduce(state, News(supervisor=HISTORY[:1], restarted=frozenset({"supervisor.jsonl"})), NOW)
    assert [attempt.number for attempt in again.attempts] == [1]


def test_a_later_attempts_steps_replace_equal_and_higher_ones_of_earlier_attempts() -> None:
    first = [of_attempt(1, "step", step=s, loss=1.0) for s in range(1, 151)]
    second = [of_attempt(2, "step", step=s, loss=2.0) for s in range(101, 121)]
    evaluations = [of_attempt(1, "eval", step=s, tau=1.0) for s in (0, 100, 150)]
    found = state_of(events=(*first, *evaluations, *second, of_attempt(2, "eval", step=120, tau=2.0)))
    loss = dict(found.curves["loss"].all_points)
    assert (loss[100], loss[101], loss[120], max(loss)) == (1.0, 2.0, 2.0, 120)
    assert [(e.attempt, e.step) for e in found.history.evaluations] == [(1, 0), (1, 100), (2, 120)]


def test_the_word_of_an_older_attempt_ends_nothing() -> None:
    own = {"kind": "exit", "attempt": 1, "outcome": "finished", "exit_code": 0}
    found = judge(status=status(age=60, attempt=2), exit_record=own, mirror=mirror(**GONE),
                  progress_t=None, now=NOW, limits=Limits())  # fmt: skip
    assert found.word is Word.LOST
