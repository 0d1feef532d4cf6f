"""The probe: what it tries, and that a mode which crashes or hangs costs itself alone."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import remote_payload
from remote_payload import limited_command
from remote_payload.tools import probe
from remote_payload.train import execution, fp8

PAYLOAD = Path(remote_payload.__file__).parent


def test_a_gpu_is_probed_by_every_mode_with_and_without_trees_in_threads_and_main() -> None:
    found = probe.modes(cuda=True)
    assert len(set(found)) == len(found)
    for mode in ("graph", "compiled", "eager"):
        assert {m.where for m in found if m.mode == mode} == {"threads", "main"}
    graphs = {(m.trees, m.where, m.passes) for m in found if m.mode == "reduce-overhead"}
    assert graphs == {
        (trees, where, passes)
        for trees in (True, False)
        for where in ("threads", "main")
        for passes in ("forward", "forward + backward")
    }
    assert all(m.trees is None for m in found if m.mode != "reduce-overhead")


def test_a_cpu_is_probed_by_what_it_has() -> None:
    assert {m.mode for m in probe.modes(cuda=False)} == {"compiled", "eager"}


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Programs that stand in for the process of a mode, by mode."""
    programs: dict[str, str] = {}
    run = limited_command.run_within

    def stand_in(limit: float, command: list[str], **options: Any) -> Any:
        mode = json.loads(command[3])["mode"]
        limit = limit if mode == "hangs" else 60.0  # a busy machine's start is no hang
        return run(limit, [sys.executable, "-c", programs[mode]], **options)

    monkeypatch.setattr(probe, "run_within", stand_in)
    return programs


@pytest.mark.slow
def test_modes_that_crash_hang_or_say_nonsense_are_failures_and_the_others_go_on(
    answers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("killed", "hangs", "noisy", "works", "raises")
    chosen = [probe.Mode(mode, None, "main", "forward") for mode in names]
    monkeypatch.setattr(probe, "modes", lambda cuda: chosen)
    answers["killed"] = (
        "import os, sys; print('illegal memory access', file=sys.stderr, flush=True); os._exit(134)"
    )
    answers["hangs"] = "import time; time.sleep(60)"
    answers["noisy"] = "print('a library says hello')"
    answers["works"] = "print('a warning'); print('{\"step_ms\": 1.5}')"
    answers["raises"] = 'print(\'{"failure": "AssertionError: TLS"}\')'
    records = {record["mode"]: record for record in probe.probe("cpu", limit=3.0)}
    assert tuple(records) == names
    assert records["killed"]["failure"] == "the process ended with 134: illegal memory access"
    assert records["hangs"]["failure"] == "not done after 3 s"
    assert records["noisy"]["failure"] == "the process ended with 0: it said nothing"
    assert records["raises"]["failure"] == "AssertionError: TLS"
    assert [mode for mode, record in records.items() if record["works"]] == ["works"]
    assert records["works"]["step_ms"] == 1.5 and records["works"]["torch"] == torch.__version__


def test_what_training_refuses_is_tried_all_the_same_and_says_why_it_is_refused(
    answers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = [probe.Mode("reduce-overhead", True, where, "forward") for where in ("threads", "main")]
    monkeypatch.setattr(probe, "modes", lambda cuda: both)
    monkeypatch.setattr(execution, "refuse_trees", lambda: "not below torch 2.13")
    answers["reduce-overhead"] = "print('{\"step_ms\": 1.5}')"
    records = list(probe.probe("cpu"))
    assert [record["refused"] for record in records] == ["not below torch 2.13", None]
    assert all(record["works"] for record in records)


def test_the_page_about_json_has_exactly_the_keys_of_a_record(
    answers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "modes", lambda cuda: [probe.Mode("eager", None, "main", "forward")])
    answers["eager"] = "print('{\"step_ms\": 1.5}')"
    (record,) = probe.probe("cpu")
    page = (PAYLOAD.parent / "docs" / "json.md").read_text()
    section = page.partition("\n## probe\n")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert {key for cell in cells for key in re.findall(r"`(\w+)`", cell)} == record.keys()


def test_a_device_that_is_not_there_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert probe.main("cuda:99") == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is False and "cuda:99" in answer["error"]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["threads", "main"])
def test_the_real_draft_model_runs_eagerly_in_a_process_of_its_own(where: str) -> None:
    assert outcome("eager", where)["step_ms"] > 0


@pytest.mark.slow
def test_a_mode_that_steps_down_is_a_failure_with_the_reason() -> None:
    assert outcome("graph", "main") == {"failure": "RuntimeError: a CPU has no CUDA graphs"}


def outcome(mode: str, where: str) -> Any:
    """What the process of a mode says on this machine's CPU."""
    given = json.dumps({"mode": mode, "trees": None, "where": where, "passes": "forward + backward"})
    command = [sys.executable, str(PAYLOAD), "probe-mode", given, "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_8_bit_products_are_refused_where_they_cannot_run_and_an_unknown_choice_names_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert probe.main("cpu", "all") == 1
    said = json.loads(capsys.readouterr().out)
    assert said["ok"] is False and said["error"].startswith("fp8 = 'all': cpu has no 8-bit matrix units")
    assert probe.main("cpu", "heads") == 1
    assert "expected one of none, head, mlp, head+mlp, all" in json.loads(capsys.readouterr().out)["error"]


def test_every_mode_is_tried_with_the_parts_that_multiply_8_bit_numbers(
    answers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8, "refuse", lambda device: None)
    answers.update(dict.fromkeys(("compiled", "eager"), "import sys; print('{\"step_ms\": 1.5}')"))
    assert {record["fp8"] for record in probe.probe("cpu", "mlp")} == {"mlp"}
