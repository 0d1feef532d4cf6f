"""What the bench of a real drafter says of runs: their own records, and nothing of its own."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench import train_smollm2
from remote_payload import job
from remote_payload.tools.prepare import SCHEMA, write_arrow
from remote_payload.train.dataset import Dataset

EVAL = {
    "kind": "eval",
    "step": 9,
    "tau": 2.5,
    "tau_macro": 2.6,
    "acceptance": [0.6, 0.3],
    "conditional_acceptance": [0.6, 0.5],
}


def jsonl(path: Path, *records: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def run_of(workspace: Path, name: str) -> Path:
    """A run directory of `workspace` as far as the bench reads it."""
    run_dir = workspace / "runs" / f"run-{name}"
    run_dir.mkdir(parents=True)
    steps = [
        {"kind": "step", "step": step, "epoch": step / 10, "loss": 1 / step, "tau_estimate": 3.0}
        | {"step_s": 0.06}
        for step in (1, 9)
    ]
    jsonl(run_dir / "events.jsonl", EVAL | {"step": 0, "tau": 1.0}, *steps, EVAL, {"kind": "end"})
    used = [
        {
            "kind": "gpu",
            "gpus": {"u": {"index": 1, "memory_used_gib": gib}, "v": {"index": 0, "memory_used_gib": 90.0}},
        }
        for gib in (3.0, None, 8.4, 7.0)
    ]
    jsonl(run_dir / "gpu.jsonl", {"kind": "gpu_constants"}, *used)
    (run_dir / "progress.json").write_text('{"recompiles": 0}')
    (run_dir / "exit.json").write_text('{"tokens_per_s": 416000.0, "execution": "graph"}')
    (run_dir / "job.toml").write_text('targets = ["cuda:1"]')
    (run_dir / "bench_name").write_text(name)
    return run_dir


def test_a_row_has_the_last_step_the_last_evaluation_the_peak_and_the_speed(tmp_path: Path) -> None:
    row = train_smollm2.row(run_of(tmp_path, "main"))
    assert (row["name"], row["steps"], row["epochs"], row["loss"]) == ("main", 9, 0.9, 1 / 9)
    assert (row["tau"], row["tau_macro"], row["gpu_used_gib"]) == (2.5, 2.6, 8.4)
    assert (row["tokens_per_s"], row["execution"], row["recompiles"]) == (416000.0, "graph", 0)
    assert row["evaluation"] == {key: EVAL[key] for key in EVAL if key not in ("kind", "step")}


def test_what_was_scored_on_all_held_out_prompts_counts_before_the_runs_own_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scored = run_of(tmp_path, "main")
    run_of(tmp_path, "uniform")
    (scored / "score.json").write_text(json.dumps({"tau": 2.9, "tau_macro": 3.1, "rounds": 3060}))
    (run_of(tmp_path, "killed") / "exit.json").unlink()
    assert train_smollm2.main(["--workspace", str(tmp_path), "table"]) == 0
    printed = capsys.readouterr()
    rows = {row["name"]: row for row in map(json.loads, printed.out.splitlines())}
    assert rows["main"]["tau"] == 2.9 and rows["main"]["evaluation"]["rounds"] == 3060
    assert rows["uniform"]["tau"] == 2.5
    said, *lines = printed.err.splitlines()
    assert said.startswith("killed: ") and "killed" not in rows
    table = [line.split() for line in lines]
    assert table[0][:2] == ["name", "steps"] and {line[0] for line in table[1:]} == {"main", "uniform"}
    assert all(len(line) == len(table[0]) for line in table)


def test_tau_is_told_apart_for_answers_that_never_began_to_repeat_themselves(tmp_path: Path) -> None:
    run_dir = run_of(tmp_path, "main")
    answers = {(1, 2): (8, False), (3, 4): (20, True), (5, 6): (10, True)}  # ends, token limit, cut before it
    rows = [
        {"input_ids": [*prompt, *[7] * length], "prompt_length": 2, "kind": "explain", "topic": "x"}
        | {"truncated": truncated}
        for prompt, (length, truncated) in answers.items()
    ]
    (tmp_path / "data").mkdir()
    write_arrow(tmp_path / "data" / "held_out.arrow", rows, SCHEMA, {})
    texts = [{"prompt": n, "rounds": rounds} for n, rounds in enumerate(([1, 2], [3], [16, 16]))]
    assert train_smollm2.row(run_dir)["tau_unrepeated"] is None
    (run_dir / "score.json").write_text(json.dumps({"tau": 7.6, "texts": texts}))
    assert train_smollm2.row(run_dir)["tau_unrepeated"] == 2.0


def test_a_run_is_found_by_what_launch_says_and_its_devices_are_the_benchs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two launches at once must not take each other's runs."""
    script = "import sys; print('run-x'); print(sys.argv[1:]); sys.exit(3)"
    began: list[list[str]] = []
    popen = subprocess.Popen

    def start(command: list[str], **options: Any) -> Any:
        began.append(command)
        return popen([command[0], "-c", script], **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    assert train_smollm2._launch(tmp_path, "cuda:1", ["taps=3"]) == (tmp_path / "runs" / "run-x", 3)
    words = began[0]
    changes = [word for flag, word in itertools.pairwise(words) if flag == "--set"]
    checked = job.load(train_smollm2.JOB, changes)
    assert (checked.targets, checked.drafters, checked.taps) == (["cuda:1"], ["cuda:1"], 3)


def test_the_pace_is_measured_once_and_makes_as_many_steps_as_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launched: list[list[str]] = []

    def launch(workspace: Path, device: str, changes: list[str]) -> tuple[Path, int]:
        launched.append([device, *changes])
        return run_of(workspace, f"number {len(launched)}"), 0

    monkeypatch.setattr(train_smollm2, "_launch", launch)
    for name in ("taps3", "uniform"):
        words = ["--workspace", str(tmp_path), "train", name, "--seconds", "150", "--set", "taps=3"]
        assert train_smollm2.main([*words, "--device", "cuda:1"]) == 0
    data = tmp_path / "pace.arrow"
    short = [f'dataset="{data}"', f"steps={train_smollm2.PACE_STEPS}", 'held_out=""']
    assert launched == [
        ["cuda:1", "taps=3", *short],
        *[["cuda:1", "taps=3", "steps=2500"]] * 2,
    ]
    dataset = Dataset.open(data, None, print)
    assert len(dataset) == train_smollm2.PACE_SAMPLES
    assert {dataset.look(sample, 49152) for sample in range(50)} == {None}
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["name"] == "uniform"


def test_its_job_and_the_changes_that_its_page_shows_are_a_job() -> None:
    lines = re.findall(r"(?m)^    python -m bench\.train_smollm2 (.*)$", train_smollm2.__doc__ or "")
    changes = [
        word
        for line in lines
        for flag, word in zip(shlex.split(line), shlex.split(line)[1:], strict=False)
        if flag == "--set"
    ]
    assert changes
    checked = job.load(train_smollm2.JOB, changes)
    assert checked.anchor_choice == "uniform" and checked.layers == 5
