from __future__ import annotations

import re
from pathlib import Path

from controller.issue_report import issue_report
from controller.run_reader import RunReader
from controller.run_state import RunState
from tests.tui import golden


def state_of(run: golden.Run, folder: Path) -> RunState:
    return RunReader(run.write(folder), scale=1.0).poll(golden.NOW)


def test_a_report_says_what_died_where_why_and_with_which_job_and_names_nobody(tmp_path: Path) -> None:
    run = golden.dead_thread()
    run.crashes[0]["memory"] = "| allocated 70 GiB |"
    run.supervisor.insert(0, {"kind": "resume", "attempt": 1, "by": "ada@laptop", "t": golden.NOW - 9000})
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "job.toml").write_text(
        'target = "/home/ada/models/q"\ntoken_budget = 4096\nlayers = 5\n'
    )
    state = state_of(run, tmp_path / "run")
    text = issue_report(state, ["HF_TOKEN=hf_abcdefghijklmnopqrstuv", "ada said [x](http://10.1.2.6/) ```"])
    for part in (
        "# AssertionError", "FAILED rc=1", "CUDA graph trees",
        "First failure: drafter-1 (cuda:7), step 12,345",
        "remote_payload/train/execution.py", "allocated 70 GiB", "Then: drafter-0", "8 x NVIDIA H200",
        "token_budget = 4096", 'target = "~/models/q"', "HF_TOKEN=<removed>", "<user> said", "<host>",
    ):  # fmt: skip
        assert part in text, part
    for secret in ("hf_abc", "ada", "laptop", "10.1.2.6", "/root", "gpu1"):
        assert secret not in text, secret


def test_nothing_of_the_container_leaves_its_fence(tmp_path: Path) -> None:
    state = state_of(golden.dead_thread(), tmp_path)
    text = issue_report(state, ["a ``` b", "# not a heading", "@everyone"])
    outside = re.sub(r"(?ms)^(`{3,})text\n.*?^\1$", "", text)
    assert "not a heading" not in outside
    assert "@everyone" not in outside
    assert "Traceback" not in outside


def test_a_run_that_was_killed_has_a_report_too(tmp_path: Path) -> None:
    text = issue_report(state_of(golden.killed(), tmp_path))
    assert "KILLED SIGKILL" in text
    assert "the trainer was killed by SIGKILL" in text


def test_hosts_stay_when_they_are_wanted(tmp_path: Path) -> None:
    assert "10.1.2.6" in issue_report(state_of(golden.killed(), tmp_path), ["from 10.1.2.6"], hosts=True)
