"""Real supervisors over stand-in trainers: each one's code is the text of its run's job.toml.

A job.toml that is TOML has the code under `script`, beside the keys that the supervisor reads.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from remote_payload import rundir
from remote_payload.attempt import Attempt, Inbox, Timing
from remote_payload.control import ControlError, place_request
from remote_payload.lock import hold
from remote_payload.rundir import State
from tests.waiting import until

ROOT = Path(__file__).parents[2]

# The stand-in for remote_payload/train/main.py: runs job.toml with a few names at hand.
STAND_IN = """
import json, os, signal, subprocess, sys, time, tomllib
from pathlib import Path

def main(run_dir: Path, attempt: int) -> int:
    from remote_payload import crash, rundir
    asked = []
    def progress(step, **fields):
        record = rundir.stamp("progress", {"attempt": attempt, "step": step, **fields})
        rundir.write_whole(run_dir / rundir.PROGRESS, rundir.encode(record))
    def leave(outcome, code, **fields):
        record = rundir.stamp("exit", {"attempt": attempt, "outcome": outcome, "exit_code": code, **fields})
        rundir.write_whole(run_dir / rundir.EXIT, rundir.encode(record))
        return code
    def wait_for(name):
        while not (run_dir / name).exists():
            time.sleep(0.005)
    def mark(name, text="x"):
        (run_dir / name).write_text(text)
    names = dict(globals(), **locals())
    text = (run_dir / "job.toml").read_text()
    try:
        text = tomllib.loads(text)["script"]
    except tomllib.TOMLDecodeError:
        pass
    exec(text, names)
    return names["code"]
"""

LISTEN = "signal.signal(signal.SIGTERM, lambda *_: asked.append(1))\n"
WORK = (
    LISTEN
    + "step = 0\nwhile not asked:\n    step += 1; progress(step); time.sleep(0.01)\n"
    + "code = leave('stopped', 3, step=step)\n"
)


BRISK = 0.02
"""A scale for what is only seen after a limit of the supervisor; its stalls and graces are a second."""
CALM = 0.2
"""A scale that leaves a busy machine more than ten seconds before silence is a stall, or a grace over."""


class Place:
    """A workspace with a payload whose trainer is the stand-in."""

    def __init__(self, path: Path) -> None:
        self.workspace = path / "workspace"
        self.payload = self.workspace / "payloads" / "0123" / "remote_payload"
        (self.payload / "train").mkdir(parents=True)
        for source in (ROOT / "remote_payload").glob("*.py"):
            shutil.copy(source, self.payload)
        (self.payload / "train" / "__init__.py").touch()
        (self.payload / "train" / "main.py").write_text(STAND_IN)
        self.bin = path / "bin"
        self.bin.mkdir()
        self.pids: list[int] = []

    def environment(self, scale: float) -> dict[str, str]:
        path = f"{self.bin}:/usr/local/bin:/usr/bin:/bin"
        return {"PATH": path, "DFLASHCTL_TIME_SCALE": str(scale), "LEAKED": "yes"}

    def command(
        self, *arguments: str, stdin: bytes = b"", scale: float = CALM
    ) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [sys.executable, str(self.payload), *arguments],
            input=stdin,
            capture_output=True,
            env=self.environment(scale),
            timeout=100,
        )

    def start(self, code: str, run_id: str = "a-run", *, scale: float = CALM, **run: Any) -> Run:
        order = {"run": {"python": sys.executable, "job": "demo", **run}, "job": code}
        done = self.command(
            "start", str(self.workspace), run_id, stdin=json.dumps(order).encode(), scale=scale
        )
        answer = json.loads(done.stdout)
        assert answer["ok"], answer
        self.pids.append(answer["pid"])
        return Run(self, Path(answer["run_dir"]), answer["pid"])


class Run:
    def __init__(self, place: Place, path: Path, pid: int) -> None:
        self.place, self.path, self.pid = place, path, pid

    def status(self) -> dict[str, Any]:
        status = json.loads((self.path / "status.json").read_bytes())
        assert isinstance(status, dict)
        return status

    def records(self, name: str = "supervisor.jsonl") -> list[dict[str, Any]]:
        try:
            return [json.loads(line) for line in (self.path / name).read_bytes().splitlines()]
        except FileNotFoundError:
            return []

    def until(self, condition: Callable[[], object]) -> None:
        until(condition, seen=lambda: (self.status(), self.records()))

    def until_state(self, *states: str) -> dict[str, Any]:
        """The status that was the first to say one of `states`."""
        seen: dict[str, Any] = {}

        def reached() -> bool:
            nonlocal seen
            seen = self.status()
            return seen["state"] in states

        self.until(reached)
        return seen

    def ended(self) -> dict[str, Any]:
        """The last status, once the supervisor itself is gone too."""
        self.until_state("finished", "failed", "killed")
        self.until(lambda: not alive(self.pid))
        return self.status()

    def ask(self, request: str, content: Any = None) -> subprocess.CompletedProcess[bytes]:
        stdin = b"" if content is None else json.dumps(content).encode()
        return self.place.command("control", str(self.path), request, stdin=stdin)


def alive(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    pids = set(place.pids)  # and those of a start that failed before it could name its own
    for status in place.workspace.glob("runs/*/status.json"):
        pids.add(json.loads(status.read_bytes())["supervisor"]["pid"])
    for pid in pids:
        if alive(pid):
            os.kill(pid, signal.SIGTERM)
            until(lambda pid=pid: not alive(pid))  # type: ignore[misc]


def test_a_run_goes_from_launching_through_running_to_finished(place: Place) -> None:
    run = place.start("wait_for('go'); progress(1); wait_for('end'); code = leave('finished', 0, step=1)")
    status = run.status()
    assert status["state"] == "launching" and status["v"] == 1 and status["attempt"] == 1
    assert status["last_progress"] is None and status["exit_code"] is None
    assert status["supervisor"]["pid"] == run.pid
    (run.path / "go").touch()
    status = run.until_state("running")
    assert status["last_progress"] == json.loads((run.path / "progress.json").read_bytes())["t"]
    assert alive(status["trainer"]["pid"]) and status["trainer"]["start_ticks"] > 0
    (run.path / "end").touch()
    status = run.ended()
    assert (status["state"], status["reason"]) == ("finished", None)
    assert (status["exit_code"], status["signal"]) == (0, None)
    records = run.records()
    kinds = [record["kind"] for record in records]
    assert kinds == ["start", "trainer_started", "trainer_exited", "end"]
    assert all(r["attempt"] == 1 and r["v"] == 1 and r["t"] > 0 and r["mono"] > 0 for r in records)
    assert records[2]["runtime_s"] > 0
    assert [r["kind"] for r in run.records("gpu.jsonl")] == ["gpu_none"]
    assert (run.path / "supervisor.err").read_bytes() == b""


def test_start_returns_at_once_and_leaves_no_descriptor_with_the_supervisor(place: Place) -> None:
    # `capture_output` waits for the end of both pipes: one inherited descriptor would hold it to its limit.
    run = place.start(WORK)
    assert alive(run.pid)
    targets = {int(link.name): str(link.readlink()) for link in Path(f"/proc/{run.pid}/fd").iterdir()}
    assert targets[0] == targets[1] == "/dev/null"
    assert targets[2] == str(run.path / "supervisor.err")
    inside = [str(run.path), "/dev/null"]
    assert all(any(t.startswith(i) for i in inside) for t in targets.values()), targets
    stat = Path(f"/proc/{run.pid}/stat").read_text().rpartition(")")[2].split()
    assert int(stat[3]) == run.pid, "it leads a session of its own"
    assert (run.path.stat().st_mode & 0o777) == 0o700


def test_of_many_starts_of_one_id_one_wins_and_the_others_say_why(place: Place) -> None:
    order = json.dumps({"run": {"python": sys.executable, "job": "demo"}, "job": WORK}).encode()
    starts = [
        subprocess.Popen(
            [sys.executable, str(place.payload), "start", str(place.workspace), "same"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=place.environment(CALM),
        )
        for _ in range(5)
    ]
    answers = [json.loads(process.communicate(order, timeout=100)[0]) for process in starts]
    won = [answer for answer in answers if answer["ok"]]
    place.pids += [answer["pid"] for answer in won]
    assert len(won) == 1
    assert all("was started before" in answer["error"] for answer in answers if not answer["ok"])
    run = Run(place, place.workspace / "runs" / "same", won[0]["pid"])
    run.until_state("running")
    assert [record["kind"] for record in run.records()].count("start") == 1


def test_of_two_launches_that_saw_the_same_gpus_free_one_wins(place: Place) -> None:
    def order(known: list[str] | None) -> bytes:
        run = {"python": sys.executable, "job": "demo"}
        return json.dumps({"run": run, "job": WORK, "known": known}).encode()

    def started(run_id: str, known: list[str] | None) -> dict[str, Any]:
        done = place.command("start", str(place.workspace), run_id, stdin=order(known))
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    assert started("one", [])["ok"]
    refused = started("two", [])
    assert refused["error"] == "another run was started meanwhile: one; launch again"
    assert not (place.workspace / "runs" / "two").exists()
    assert started("three", ["one"])["ok"] and started("four", None)["ok"]


def test_the_trainer_gets_exactly_the_promised_environment_and_place(place: Place) -> None:
    code = (
        "mark('seen', json.dumps([dict(os.environ), os.getcwd(), sys.argv[1:], os.getpgid(0) == os.getpid(),"
        " os.readlink('/proc/self/fd/0')])); code = leave('finished', 0)"
    )
    run = place.start(code, env={"HF_HOME": "/models", "LANG": "de_DE.UTF-8"})
    run.ended()
    environment, cwd, argv, leads, stdin = json.loads((run.path / "seen").read_text())
    assert set(environment) == {*("PATH", "HOME", "USER", "LANG", "LC_ALL", "PYTHONUNBUFFERED", "HF_HOME")}
    assert environment["HF_HOME"] == "/models" and environment["LANG"] == "de_DE.UTF-8"
    assert environment["LC_ALL"] == "C.UTF-8"
    assert cwd == str(place.workspace) and argv == ["train", str(run.path), "1"]
    assert leads and stdin == "/dev/null"


def test_a_refused_job_is_failed_with_the_error_line_of_exit_json(place: Place) -> None:
    run = place.start("print('noise'); code = leave('refused', 2, error='no such dataset: /x.arrow')")
    status = run.ended()
    assert (status["state"], status["exit_code"]) == ("failed", 2)
    assert status["reason"] == "no such dataset: /x.arrow"


def test_a_crash_without_a_word_is_failed_with_the_last_line_of_the_log(place: Place) -> None:
    status = place.start("progress(1)\nraise RuntimeError('boom')").ended()
    assert (status["state"], status["exit_code"]) == ("failed", 1)
    assert status["reason"] == "RuntimeError: boom"


def test_a_killed_trainer_is_killed_with_the_signal_and_a_hint(place: Place) -> None:
    run = place.start(WORK)
    os.kill(run.until_state("running")["trainer"]["pid"], signal.SIGKILL)
    status = run.ended()
    assert (status["state"], status["exit_code"], status["signal"]) == ("killed", 137, "SIGKILL")
    assert status["reason"].startswith("killed by SIGKILL: ")
    assert "memory" in status["reason"]
    exited = next(r for r in run.records() if r["kind"] == "trainer_exited")
    assert (exited["exit_code"], exited["signal"]) == (137, "SIGKILL")


def test_stop_ends_the_run_with_its_step_and_says_who_asked(place: Place) -> None:
    run = place.start(WORK)
    run.until_state("running")
    assert json.loads(run.ask("stop", {"by": "me@laptop"}).stdout) == {"ok": True}
    status = run.ended()
    step = json.loads((run.path / "exit.json").read_bytes())["step"]
    assert status["state"] == "finished" and status["exit_code"] == 3
    assert status["reason"] == f"stopped on request at step {step}"
    request = next(r for r in run.records() if r["kind"] == "request")
    assert (request["name"], request["by"]) == ("stop", "me@laptop")
    assert list((run.path / "control").iterdir()) == []
    late = run.ask("stop")
    assert late.returncode == 1
    assert "has ended (finished)" in json.loads(late.stdout)["error"]


def test_a_trainer_that_ignores_the_request_is_killed_after_the_grace_with_all_its_children(
    place: Place,
) -> None:
    code = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "daemon = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "mark('pids', f'{child.pid} {daemon.pid}')\nwhile True: progress(1); time.sleep(0.01)"
    )
    run = place.start(code, scale=BRISK)
    run.until_state("running")
    run.ask("stop", {"grace_s": 600.0})
    run.until_state("stopping")
    began = time.monotonic()
    run.ask("stop", {"grace_s": 0.3})  # a later request has the word
    status = run.ended()
    assert time.monotonic() - began > 0.3
    assert (status["state"], status["exit_code"], status["signal"]) == ("killed", 137, "SIGKILL")
    assert "did not end in time" in status["reason"]
    assert not any(alive(int(pid)) for pid in (run.path / "pids").read_text().split())


def test_a_trainer_that_even_sigkill_does_not_end_is_said_to_wait_for_the_kernel(tmp_path: Path) -> None:
    """As behind a driver or a network disk in trouble; no test can make such a process."""
    said: list[tuple[State, str]] = []
    sent: list[int] = []
    status: Any = SimpleNamespace(
        state=State.RUNNING, note=lambda *_, **__: None, enter=lambda state, why: said.append((state, why))
    )
    trainer: Any = SimpleNamespace(signal=sent.append, signal_group=sent.append)
    timing = Timing(grace=0.0, last_call=0.0)
    attempt = Attempt(tmp_path, {}, [], status=status, inbox=Inbox(), timing=timing)
    attempt._stop(trainer, "asked to stop", 0.0)
    for _ in range(3):
        attempt._press(trainer)
    assert sent == [signal.SIGTERM, signal.SIGTERM, signal.SIGKILL]
    assert said[0] == (State.STOPPING, "asked to stop") and len(said) == 2
    assert said[1][0] == State.STOPPING and "does not end" in said[1][1]


def test_what_a_finished_trainer_leaves_running_is_killed(place: Place) -> None:
    code = (
        "child = subprocess.Popen(['sleep', '600'])\n"
        "subprocess.run(['sh', '-c', 'setsid sleep 601 & echo $! > ' + str(run_dir / 'daemon')])\n"
        "mark('child', str(child.pid)); code = leave('finished', 0)"
    )
    run = place.start(code)
    assert run.ended()["state"] == "finished"
    assert not alive(int((run.path / "child").read_text()))
    assert not alive(int((run.path / "daemon").read_text()))


@pytest.mark.slow
def test_a_trainer_that_never_shows_progress_is_stalled_and_still_lives(place: Place) -> None:
    script = "mark('listens')\nwhile not asked: time.sleep(0.01)\ncode = leave('stopped', 3, step=0)"
    run = place.start(LISTEN + script, scale=0.005)
    status = run.until_state("stalled")
    assert "no first progress" in status["reason"] and alive(status["trainer"]["pid"])
    run.until((run.path / "listens").exists)  # it may be called stalled before its interpreter has come up
    run.ask("stop", {"grace_s": 60.0})
    assert run.ended()["reason"] == "stopped on request at step 0"


@pytest.mark.slow
def test_a_stalled_run_comes_back_when_news_comes(place: Place) -> None:
    code = (
        "def go_on_until(name):\n"
        "    while not (run_dir / name).exists(): progress(1); time.sleep(0.01)\n"
        "go_on_until('hush'); wait_for('go'); go_on_until('end'); code = leave('finished', 0)"
    )
    run = place.start(code, scale=BRISK)
    run.until_state("running")
    (run.path / "hush").touch()
    status = run.until_state("stalled")
    assert "no progress" in status["reason"]
    (run.path / "go").touch()
    assert run.until_state("running")["reason"] is None
    (run.path / "end").touch()
    assert run.ended()["state"] == "finished"


def test_a_supervisor_that_is_told_to_end_has_the_trainer_stop_first(place: Place) -> None:
    run = place.start(WORK)
    run.until_state("running")
    os.kill(run.pid, signal.SIGTERM)
    status = run.ended()
    assert status["state"] == "finished" and "stopped" in status["reason"]
    sent = [r for r in run.records() if r["kind"] == "signal"]
    assert [(r["name"], r["why"]) for r in sent] == [("SIGTERM", "the supervisor received SIGTERM")]


def test_a_trainer_whose_supervisor_was_killed_is_told_to_stop(place: Place) -> None:
    run = place.start(WORK)
    trainer = run.until_state("running")["trainer"]["pid"]
    os.kill(run.pid, signal.SIGKILL)
    run.until(lambda: not alive(trainer))
    assert json.loads((run.path / "exit.json").read_bytes())["outcome"] == "stopped"
    assert run.status()["state"] == "running", "nobody was left to write another"
    listed = place.command("runs", str(place.workspace))
    assert json.loads(listed.stdout)["state"] == "lost"
    refused = run.ask("stop")
    assert "supervisor is gone" in json.loads(refused.stdout)["error"]


@pytest.mark.slow
def test_the_heartbeat_goes_on_while_nvidia_smi_hangs(place: Place) -> None:
    script = place.bin / "nvidia-smi"
    script.write_text(f"#!/bin/sh\necho $$ > {place.bin}/pid.new\nmv {place.bin}/pid.new {place.bin}/pid\n"
                      "exec sleep 600\n")  # fmt: skip
    script.chmod(0o755)
    run = place.start(WORK, scale=BRISK)
    run.until_state("running")
    run.until((place.bin / "pid").exists)
    beats: dict[int, set[float]] = {}

    def enough() -> bool:
        hanging = int((place.bin / "pid").read_text())
        beat = run.status()["mono"]
        if alive(hanging):
            beats.setdefault(hanging, set()).add(beat)
        return len(beats.get(hanging, ())) > 6

    run.until(enough)
    run.until(lambda: any(r["kind"] == "gpu_problem" for r in run.records()))
    problem = next(r for r in run.records() if r["kind"] == "gpu_problem")
    assert "no answer" in problem["text"]
    run.ask("stop", {"grace_s": 60.0})
    assert run.ended()["state"] == "finished"


def test_signals_for_stacks_and_checkpoints_wait_until_the_trainer_has_handlers(
    place: Place,
) -> None:
    code = (
        "wait_for('go'); crash.install(run_dir)\n"
        "signal.signal(signal.SIGUSR2, lambda *_: mark('checkpointed'))\n" + WORK
    )
    run = place.start(code)
    for request in ("stacks", "checkpoint"):
        assert run.ask(request).returncode == 0
    run.until(lambda: [r["kind"] for r in run.records()].count("request") == 2)
    time.sleep(0.1)
    assert alive(run.status()["trainer"]["pid"])
    (run.path / "go").touch()
    run.until((run.path / "checkpointed").exists)
    dump = run.path / "crash" / "stacks-request.txt"
    run.until(lambda: b"most recent call first" in dump.read_bytes())
    assert dump.read_bytes().startswith(b"--- 20")
    assert run.until_state("running")["exit_code"] is None


def test_odd_things_in_control_are_noted_and_harm_nobody(place: Place) -> None:
    run = place.start(WORK)
    run.until_state("running")
    control = run.path / "control"
    (control / "dance").write_text("{}")
    (run.path / "elsewhere").write_text('{"by": "a link"}')
    (control / "checkpoint").symlink_to(run.path / "elsewhere")
    (control / "folder").mkdir()
    os.mkfifo(control / "pipe")
    (control / ".unfinished").write_text("x")
    run.until(lambda: {p.name for p in control.iterdir()} == {"folder", ".unfinished"})
    (control / "deep").write_text("[" * 60_000)
    run.until(lambda: not (control / "deep").exists())
    (control / "stop").write_text("this is not JSON")
    assert run.ended()["state"] == "finished"
    requests = {r["name"]: r["by"] for r in run.records() if r["kind"] == "request"}
    assert requests == dict.fromkeys(["dance", "checkpoint", "pipe", "deep", "stop"])


@pytest.mark.parametrize(
    ("request_name", "content", "named"),
    [("dance", b"", "dance"), ("stop", b"[1]", "JSON object"), ("stop", b"{", "JSON object")],
)
def test_a_wrong_request_is_refused_before_it_is_written(
    place: Place, request_name: str, content: bytes, named: str
) -> None:
    run = place.start(WORK)
    done = place.command("control", str(run.path), request_name, stdin=content)
    assert done.returncode == 1 and named in json.loads(done.stdout)["error"]
    assert list((run.path / "control").iterdir()) == []


def test_a_request_without_room_says_to_make_some(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run = place.start(WORK)
    monkeypatch.setattr(rundir, "write_whole", no_room)
    with pytest.raises(ControlError, match=r"control: .* \(No space left on device\); make room there first"):
        place_request(run.path, "stop", b"")


def test_a_status_that_cannot_be_written_is_written_later(place: Place) -> None:
    run = place.start(WORK, scale=BRISK)
    run.until_state("running")
    status = run.path / "status.json"
    status.rename(run.path / "moved")
    for _ in range(200):  # a folder in its place: a rename over it fails
        try:
            status.mkdir()
            break
        except FileExistsError:
            status.unlink()
    (status / "in-the-way").touch()
    time.sleep(0.2)
    assert alive(run.pid)
    shutil.rmtree(status)
    run.until(status.exists)
    run.until_state("running")


def test_a_trainer_that_cannot_be_started_is_failed_and_says_what_is_missing(place: Place) -> None:
    status = place.start(WORK, python="/nonexistent/python").ended()
    assert (status["state"], status["trainer"]) == ("failed", None)
    assert "/nonexistent/python" in status["reason"] and "No such file" in status["reason"]


def test_a_supervisor_whose_starter_ignored_the_end_of_children_sees_its_trainers_end(place: Place) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        folder = place.workspace / "runs" / "a-run"
        (folder / "control").mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps({"id": "a-run", "python": sys.executable}))
        (folder / "job.toml").write_text("progress(1); sys.exit(7)")
        supervisor = subprocess.Popen(
            [sys.executable, str(place.payload), "supervise", str(folder)], env=place.environment(CALM)
        )
    finally:
        signal.signal(signal.SIGCHLD, before)
    run = Run(place, folder, supervisor.pid)
    until(lambda: (folder / "status.json").exists())
    status = run.until_state("failed", "finished", "killed")
    supervisor.wait(60)
    assert (status["state"], status["exit_code"]) == ("failed", 7)


def test_a_second_attempt_is_counted_and_does_not_believe_the_first_ones_word(
    place: Place,
) -> None:
    run = place.start("progress(5); code = leave('finished', 0, step=5)")
    run.ended()
    (run.path / "job.toml").write_text("time.sleep(0.2); sys.exit(7)")
    assert place.command("supervise", str(run.path)).returncode == 7
    status = run.status()
    assert (status["attempt"], status["state"], status["exit_code"]) == (2, "failed", 7)
    assert status["last_progress"] is None
    assert [r["attempt"] for r in run.records() if r["kind"] == "end"] == [1, 2]


def test_a_run_has_one_supervisor_at_a_time(place: Place) -> None:
    run = place.start(WORK)
    run.until_state("running")
    second = place.command("supervise", str(run.path))
    assert second.returncode == 1 and b"another supervisor" in second.stderr
    assert b"Traceback" not in second.stderr
    assert run.status()["supervisor"]["pid"] == run.pid


def test_a_supervisor_that_fails_itself_says_so_and_has_the_trainer_stop(place: Place) -> None:
    with (place.payload / "attempt.py").open("a") as file:
        file.write(
            "\ndef take_requests(control):\n    if (control / 'stop').exists(): 1 / 0\n    return []\n"
        )
    run = place.start(WORK)
    run.until_state("running")
    run.ask("stop")
    status = run.ended()
    assert status["state"] == "failed"
    assert "supervisor itself failed: ZeroDivisionError" in status["reason"]
    assert json.loads((run.path / "exit.json").read_bytes())["outcome"] == "stopped"
    record = json.loads((run.path / "crash" / "thread-supervisor.json").read_bytes())
    assert "ZeroDivisionError" in record["traceback"]


@pytest.mark.parametrize(
    ("run_id", "order", "named"),
    [
        ("Upper", {"run": {"python": "p", "job": "j"}, "job": ""}, "no run id"),
        ("../x", {"run": {"python": "p", "job": "j"}, "job": ""}, "no run id"),
        ("x", {"run": {"job": "j"}, "job": ""}, "run.python"),
        ("x", {"run": {"python": "p", "job": "j", "env": {"A": 1}}, "job": ""}, "run.env"),
        ("x", {"run": {"python": "p", "job": "j"}}, "stdin"),
        ("x", ["list"], "stdin"),
    ],
)
def test_a_start_that_cannot_work_is_refused_before_anything_is_written(
    place: Place, run_id: str, order: Any, named: str
) -> None:
    done = place.command("start", str(place.workspace), run_id, stdin=json.dumps(order).encode())
    answer = json.loads(done.stdout)
    assert done.returncode == 1 and not answer["ok"] and named in answer["error"]
    assert not (place.workspace / "runs").exists() or not any((place.workspace / "runs").iterdir())


def test_a_supervisor_that_cannot_come_up_is_reported_with_its_own_last_words(place: Place) -> None:
    (place.payload / "supervisor.py").write_text("raise ImportError('broken payload')")
    order = json.dumps({"run": {"python": "p", "job": "j"}, "job": ""}).encode()
    done = place.command("start", str(place.workspace), "x", stdin=order)
    assert "broken payload" in json.loads(done.stdout)["error"]


def test_a_supervisor_that_says_nothing_in_time_is_told_to_end_and_trains_nothing_unseen(
    place: Place,
) -> None:
    start = place.payload / "start.py"
    start.write_text(re.sub(r"(?m)^_PATIENCE_S = .*$", "_PATIENCE_S = 0.5", start.read_text()))
    with (place.payload / "run_status.py").open("a") as file:
        file.write("\nRunStatus.write = lambda self: None\n")
    order = {"run": {"python": sys.executable, "job": "demo"}, "job": WORK}
    done = place.command("start", str(place.workspace), "a-run", stdin=json.dumps(order).encode())
    assert "wrote no status.json within 0.5 s, and was told to end" in json.loads(done.stdout)["error"]
    run_dir = place.workspace / "runs" / "a-run"
    descriptor = os.open(run_dir, os.O_RDONLY)

    def nobody_holds_it() -> bool:  # a supervisor does as long as it lives
        try:
            hold(descriptor)
        except BlockingIOError:
            return False
        return True

    until(nobody_holds_it)
    os.close(descriptor)
    assert not (run_dir / "progress.json").exists() or (run_dir / "exit.json").exists()


def test_runs_lists_what_the_workspace_holds_oldest_first(place: Place) -> None:
    assert place.command("runs", str(place.workspace)).stdout == b""
    for number, name in enumerate(("zebra", "ant")):
        place.start("progress(9); code = leave('finished', 0)", name, created=100.0 + number).ended()
    lines = place.command("runs", str(place.workspace)).stdout.splitlines()
    assert [json.loads(line) for line in lines] == [
        {"id": "zebra", "created": 100.0, "job": "demo", "state": "finished", "step": 9},
        {"id": "ant", "created": 101.0, "job": "demo", "state": "finished", "step": 9},
    ]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "no command"),
        (["dance"], "dance"),
        (["feed", "x"], "RUN_DIR NONCE"),
        (["start", "1", "2", "3"], "WORKSPACE RUN_ID"),
        (["train", "x", "one"], "ATTEMPT"),
    ],
)
@pytest.mark.parametrize("as_module", [False, True])
def test_a_wrong_command_line_is_one_sentence_and_exit_code_64(
    arguments: Sequence[str], named: str, as_module: bool
) -> None:
    how = ["-m", "remote_payload"] if as_module else [str(ROOT / "remote_payload")]
    done = subprocess.run([sys.executable, "-S", *how, *arguments], capture_output=True, cwd=ROOT)
    assert done.returncode == 64 and done.stdout == b""
    assert named.encode() in done.stderr and done.stderr.count(b"\n") == 1
