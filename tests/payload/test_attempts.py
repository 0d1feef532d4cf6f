"""Several attempts at one run: restarts by the supervisor, and `resume`, over stand-in trainers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from typing import Any

import pytest

from remote_payload.job import Job
from tests.payload import test_supervisor
from tests.payload.test_supervisor import BRISK, CALM, WORK, Place, Run, alive

place = test_supervisor.place


def restarting(script: str, **keys: Any) -> str:
    """A job.toml of a run that is restarted after crashes."""
    values = {"restart": "on-crash", "restart_wait": 1.0} | keys
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()) + (
        f"script = {json.dumps(script)}\n"
    )


FAIL_TWICE = (
    "progress(10 * attempt)\n"
    "if attempt < 3: leave('crashed', 1, error=f'boom {attempt}', step=10 * attempt); sys.exit(1)\n"
    "code = leave('finished', 0, step=30)"
)


def kinds(run: Run) -> list[tuple[int, str]]:
    return [(r["attempt"], r["kind"]) for r in run.records()]


@pytest.mark.slow
def test_a_crashed_run_is_restarted_until_it_finishes_and_every_attempt_is_told_of(place: Place) -> None:
    run = place.start(restarting(FAIL_TWICE))
    status = run.ended()
    assert (status["state"], status["attempt"], status["exit_code"]) == ("finished", 3, 0)
    assert (status["reason"], status["restart"]) == (None, None)
    assert kinds(run) == [
        *[(1, k) for k in ("start", "trainer_started", "trainer_exited", "restart")],
        *[(2, k) for k in ("start", "trainer_started", "trainer_exited", "restart")],
        *[(3, k) for k in ("start", "trainer_started", "trainer_exited", "end")],
    ]
    restarts = [r for r in run.records() if r["kind"] == "restart"]
    assert [(r["state"], r["reason"], r["exit_code"], r["count"]) for r in restarts] == [
        ("failed", "boom 1", 1, 1),
        ("failed", "boom 2", 1, 2),
    ]
    assert restarts[1]["wait_s"] == pytest.approx(2 * restarts[0]["wait_s"])


def test_between_two_attempts_the_run_says_that_it_restarts_and_why(place: Place) -> None:
    run = place.start(restarting(FAIL_TWICE, restart_wait=300.0))
    status = run.until_state("restarting")
    assert (status["attempt"], status["trainer"], status["exit_code"]) == (1, None, None)
    assert status["reason"] == "attempt 1 failed at step 10: boom 1"
    assert status["restart"]["count"] == 1 and status["restart"]["next"] > time.time()
    before = status["mono"]
    run.until(lambda: run.status()["mono"] > before)  # the heartbeat goes on
    run.ask("stop", {"by": "me"})
    status = run.ended()
    assert (status["state"], status["exit_code"], status["restart"]) == ("failed", 1, None)
    assert status["reason"] == "boom 1; asked to stop before the next attempt began"


def test_a_supervisor_that_is_told_to_end_between_two_attempts_ends_with_the_failure(place: Place) -> None:
    run = place.start(restarting(FAIL_TWICE, restart_wait=300.0))
    run.until_state("restarting")
    os.kill(run.pid, signal.SIGTERM)
    status = run.ended()
    assert (status["state"], status["exit_code"]) == ("failed", 1)
    assert status["reason"] == "boom 1; the supervisor received SIGTERM before the next attempt began"


@pytest.mark.slow
def test_a_request_made_between_two_attempts_reaches_the_next_one(place: Place) -> None:
    script = (
        "if attempt == 1: progress(5); sys.exit(1)\n"
        "signal.signal(signal.SIGUSR2, lambda *_: mark('checkpointed'))\n" + WORK
    )
    run = place.start(restarting(script, restart_wait=10.0))
    run.until(lambda: "restart" in [r["kind"] for r in run.records()])
    run.ask("checkpoint")
    run.until((run.path / "checkpointed").exists)
    run.ask("stop")
    assert run.ended()["attempt"] == 2


def test_a_killed_trainer_is_restarted_and_the_limit_ends_it(place: Place) -> None:
    script = "progress(attempt); os.kill(os.getpid(), signal.SIGKILL)"
    status = place.start(restarting(script, restart_limit=2, restart_wait=0.1)).ended()
    assert (status["state"], status["attempt"], status["signal"]) == ("killed", 3, "SIGKILL")
    assert status["reason"].endswith("; restarted 2 times already, which is the limit")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("code = leave('refused', 2, error='no such dataset')", "the job was refused"),
        ("progress(0)\nraise RuntimeError('CUDA out of memory')", "before its first step"),
    ],
)
def test_what_would_repeat_at_once_is_not_restarted(place: Place, script: str, said: str) -> None:
    status = place.start(restarting(script)).ended()
    assert (status["state"], status["attempt"]) == ("failed", 1)
    assert said in status["reason"]


def test_the_same_failure_at_the_same_step_is_tried_no_third_time(place: Place) -> None:
    status = place.start(restarting("progress(150)\nraise RuntimeError('sample 7 is bad')")).ended()
    assert status["attempt"] == 2
    assert status["reason"].startswith(
        "RuntimeError: sample 7 is bad; not restarted: it failed in the same way"
    )


def test_the_step_of_a_failure_is_the_trainers_own_word_where_progress_is_older(place: Place) -> None:
    script = "progress(140 + attempt); leave('crashed', 1, error='bad', step=150); sys.exit(1)"
    status = place.start(restarting(script)).ended()
    assert status["reason"].startswith("bad; not restarted: it failed in the same way at step 150")
    assert status["attempt"] == 2


def test_attempts_that_fail_before_they_train_are_tried_again_though_each_goes_on_from_the_same_step(
    place: Place,
) -> None:
    """A GPU that is away for a minute: each attempt reads its checkpoint's step and fails in loading."""
    script = (
        "progress(150, phase='training' if attempt == 1 else 'warming_up')\n"
        "leave('crashed', 1, error='GPU is lost', step=150); sys.exit(1)"
    )
    status = place.start(restarting(script, restart_limit=3, restart_wait=0.1)).ended()
    assert (status["attempt"], status["reason"]) == (
        4, "GPU is lost; restarted 3 times already, which is the limit"
    )  # fmt: skip


def test_a_trainer_that_could_not_be_started_for_want_of_memory_is_tried_again(place: Place) -> None:
    with (place.payload / "attempt.py").open("a") as file:
        file.write(
            "\nreal, tries = TrainerProcess, []\n"
            "def TrainerProcess(*given, **named):\n"
            "    tries.append(1)\n"
            "    if len(tries) == 2:\n"
            "        raise OSError(12, 'Cannot allocate memory')\n"
            "    return real(*given, **named)\n"
        )
    script = "progress(attempt)\nif attempt < 3: sys.exit(1)\ncode = leave('finished', 0, step=3)"
    status = place.start(restarting(script, restart_wait=0.1)).ended()
    assert (status["state"], status["attempt"]) == ("finished", 3)


def test_a_run_that_was_stopped_is_not_restarted_though_it_had_to_be_killed(place: Place) -> None:
    script = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: progress(3); time.sleep(0.01)"
    run = place.start(restarting(script), scale=BRISK)
    run.until_state("running")
    run.ask("stop", {"grace_s": 0.1})
    status = run.ended()
    assert (status["state"], status["attempt"]) == ("killed", 1)
    names = [r["name"] for r in run.records() if r["kind"] == "signal"]
    assert names == ["SIGTERM", "SIGTERM", "SIGKILL"]


@pytest.mark.slow
def test_a_child_of_the_trainer_gets_the_second_sigterm_and_may_end_well(place: Place) -> None:
    child = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(open(sys.argv[1], 'w').close()))\n"
        "print(flush=True); time.sleep(600)"
    )
    script = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}, str(run_dir / 'told')], stdout=-1)\n"
        "child.stdout.readline(); progress(1); child.wait(); code = leave('stopped', 3, step=1)"
    )
    run = place.start(script, scale=2.0)  # ten seconds from the second SIGTERM to SIGKILL
    run.until_state("running")
    run.ask("stop", {"grace_s": 0.05})
    run.ended()
    assert (run.path / "told").exists()


JOB = {"target": "t", "dataset": "d.arrow", "mask_token_id": 1}


def finished_run(place: Place, **status: Any) -> Run:
    """A run with a real job.toml; its trainer cannot read it as code, so it fails at once."""
    run = place.start(Job.from_mapping(JOB, "test").to_toml(), payload="old")
    run.ended()
    if status:
        record = run.status() | status
        (run.path / "status.json").write_text(json.dumps(record))
    return run


def resume(of: Run, **order: Any) -> dict[str, Any]:
    done = of.place.command("resume", str(of.path), stdin=json.dumps(order).encode())
    answer = json.loads(done.stdout)
    assert isinstance(answer, dict)
    if answer["ok"]:
        of.place.pids.append(answer["pid"])
        of.pid = answer["pid"]
    assert (done.returncode == 0) == answer["ok"]
    return answer


def test_a_resume_is_the_next_attempt_in_the_same_directory_with_its_own_payload(place: Place) -> None:
    run = finished_run(place)
    (run.path / "checkpoints" / "step-40").mkdir(parents=True)
    (run.path / "checkpoints" / "step-9").mkdir()
    before = (run.path / "events.jsonl").exists(), run.records()
    answer = resume(run, run={"payload": "new", "env": {"A": "b"}}, changes={"steps": 90}, by="me@laptop")
    assert answer == {
        "ok": True,
        "attempt": 2,
        "pid": run.pid,
        "changes": {"steps": [0, 90]},
        "payload_before": "old",
        "checkpoint": 40,
    }
    assert run.ended()["attempt"] == 2
    record = json.loads((run.path / "run.json").read_bytes())
    assert (record["payload"], record["env"], record["attempt"]) == ("new", {"A": "b"}, 2)
    assert record["id"] == "a-run" and record["python"]
    assert tomllib.loads((run.path / "job.toml").read_text())["steps"] == 90
    assert run.records()[: len(before[1])] == before[1]
    resumed, started = run.records()[len(before[1]) :][:2]
    assert (resumed["kind"], resumed["by"], resumed["payload_before"]) == ("resume", "me@laptop", "old")
    assert (started["kind"], started["payload"], started["attempt"]) == ("start", "new", 2)


@pytest.mark.parametrize(
    ("status", "changes", "said"),
    [
        ({}, {"seed": 4}, "this would change seed from 0 to 4. What may change: targets, "),
        ({}, {"learning_rat": 4}, "unknown key 'learning_rat'; did you mean learning_rate"),
        ({}, {"steps": "many"}, "steps = 'many': expected a whole number"),
        ({"state": "finished", "exit_code": 0}, {}, "the run has finished; to train it longer"),
        ({"state": "finished", "exit_code": 0}, {"eval_every": 5}, "the run has finished"),
    ],
)
def test_a_resume_that_would_be_another_run_is_refused_and_changes_nothing(
    place: Place, status: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    run = finished_run(place, **status)
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    answer = resume(run, changes=changes)
    assert not answer["ok"] and said in answer["error"]
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before


def test_a_resume_to_fewer_steps_than_were_saved_is_refused(place: Place) -> None:
    run = finished_run(place)
    (run.path / "checkpoints" / "step-40").mkdir(parents=True)
    answer = resume(run, changes={"steps": 39})
    assert answer["error"] == "steps = 39, but the newest checkpoint is of step 40 already"


def test_a_finished_run_is_resumed_when_it_gets_more_steps_and_a_stopped_one_always(place: Place) -> None:
    assert resume(finished_run(place, state="finished", exit_code=0), changes={"steps": 7})["ok"]


def test_a_stopped_run_is_resumed_as_it_is(place: Place) -> None:
    assert resume(finished_run(place, state="finished", exit_code=3))["ok"]


def test_a_run_that_lives_is_not_resumed(place: Place) -> None:
    run = place.start(WORK)
    run.until_state("running")
    answer = resume(run)
    assert not answer["ok"] and "the run is alive (running, supervisor" in answer["error"]


def test_a_run_whose_supervisor_was_killed_is_resumed_once_its_trainer_is_gone(place: Place) -> None:
    run = finished_run(place)
    (place.payload / "train" / "main.py").write_text(
        "import signal, time\ndef main(run_dir, attempt):\n"
        "    signal.signal(signal.SIGTERM, lambda *_: None)\n    (run_dir / 'ready').touch()\n"
        "    while not (run_dir / 'go').exists(): time.sleep(0.01)\n    return 0\n"
    )
    assert resume(run)["ok"]
    run.until((run.path / "ready").exists)
    trainer = run.status()["trainer"]["pid"]
    os.kill(run.pid, signal.SIGKILL)
    run.until(lambda: not alive(run.pid))
    refused = resume(run)
    assert not refused["ok"] and f"trainer {trainer}" in refused["error"]
    (run.path / "go").touch()
    run.until(lambda: not alive(trainer))
    assert resume(run)["attempt"] == 3
    assert run.ended()["state"] == "finished"


def test_what_is_no_run_is_not_resumed(place: Place) -> None:
    done = place.command("resume", str(place.workspace), stdin=b"{}")
    assert "there is no run (no run.json); was it removed?" in json.loads(done.stdout)["error"]


@pytest.mark.slow
def test_of_many_resumes_at_once_one_wins_and_the_others_say_why(place: Place) -> None:
    run = finished_run(place)
    (place.payload / "train" / "main.py").write_text(
        "import time\ndef main(run_dir, attempt):\n"
        "    while not (run_dir / 'go').exists(): time.sleep(0.01)\n    return 0\n"
    )
    resumes = [
        subprocess.Popen(
            [sys.executable, str(place.payload), "resume", str(run.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=place.environment(CALM),
        )
        for _ in range(4)
    ]
    answers = [json.loads(process.communicate(b"{}", timeout=100)[0]) for process in resumes]
    (run.path / "go").touch()
    assert [answer["ok"] for answer in answers].count(True) == 1
    said = {answer["error"] for answer in answers if not answer["ok"]}
    assert all("right now" in text or "the run is alive" in text for text in said)
    run.until(lambda: run.status()["state"] == "finished")
    assert [r["attempt"] for r in run.records() if r["kind"] == "start"] == [1, 2]


def test_a_request_that_nobody_took_any_more_is_not_one_to_the_resumed_run(place: Place) -> None:
    run = finished_run(place)
    (run.path / "control" / "stop").write_text('{"by": "somebody, as the run ended"}')
    (place.payload / "train" / "main.py").write_text(
        "import signal, time\ndef main(run_dir, attempt):\n    asked = []\n"
        "    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))\n"
        "    time.sleep(0.3)\n    return 3 if asked else 0\n"
    )
    assert resume(run)["ok"]
    assert run.ended()["exit_code"] == 0
    (request,) = [record for record in run.records() if record["kind"] == "request"]
    assert (request["name"], request["attempt"], request["late"]) == ("stop", 2, True)
