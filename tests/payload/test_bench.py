"""The benches: that they run, and that what they count is counted right. How fast is for a quiet machine."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.pipeline import covered
from bench.reference import Reference
from bench.shapes import SHAPES
from bench.step import config_of, table
from remote_payload.train.flops import step_flops

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("name", "expected"), [("8b", 79.5), ("4b", 47.4)])
def test_the_formula_gives_the_work_of_the_reference_shapes_in_tera_operations(
    name: str, expected: float
) -> None:
    """As counted by others for these shapes; anchors spread evenly see half the context and their block."""
    shape = SHAPES[name]
    pairs = shape.queries * (shape.context / 2 + shape.block_size)
    work = step_flops(config_of(shape), shape.context, shape.anchors, pairs)
    assert work / 1e12 == pytest.approx(expected, abs=0.2)


def test_the_formula_is_the_sum_over_all_matrix_products_of_a_tiny_drafter() -> None:
    """Counted by torch itself, whose counter sees every product of an eager dense step."""
    from torch.utils.flop_counter import FlopCounterMode

    shape = SHAPES["tiny"]
    reference = Reference(shape, torch.device("cpu"))
    with FlopCounterMode(display=False) as counter:
        reference.step()
    counts = {str(op): int(count) for op, count in counter.get_flop_counts()["Global"].items()}
    products = sum(count for op, count in counts.items() if "attention" not in op)
    mine = step_flops(config_of(shape), shape.context, shape.anchors, pairs=0.0)
    # The reference computes the last layer for anchors too, as the formula does; embeddings are looked up.
    assert products == pytest.approx(mine, rel=0.02)


def test_time_covered_by_spans_that_overlap_counts_once() -> None:
    assert covered([]) == 0.0
    assert covered([(0.0, 1.0), (0.5, 2.0), (3.0, 4.0), (3.2, 3.4)]) == pytest.approx(3.0)
    assert covered([(3.0, 4.0), (0.0, 1.0)]) == pytest.approx(2.0)


def test_a_rung_that_failed_is_a_line_of_the_table_with_its_reason() -> None:
    lines = table([{"what": "graph", "failure": "RuntimeError: no"}]).splitlines()
    assert len(lines) == 2 and lines[1].split() == ["graph", "RuntimeError:", "no"]


@pytest.mark.parametrize("name", ["passes", "fp8_products"])
def test_benches_of_kernels_say_without_triton_what_they_do_and_in_one_line_what_they_need(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    for module in ("bench.passes", "bench.fp8_products", "remote_payload.train.fp8_kernels"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    bench = importlib.import_module(f"bench.{name}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == 0 and f"python -m bench.{name}" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [name])
    with pytest.raises(SystemExit, match=r"^error: this bench needs the package triton and an NVIDIA GPU"):
        bench.main()


def run(*words: str) -> str:
    """What a bench prints."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *words]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=True
    )
    return done.stdout


@pytest.mark.slow
def test_the_step_bench_runs_on_a_cpu_and_leaves_a_table_and_json(tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    words = (
        "--tiny",
        "--device",
        "cpu",
        "--rungs",
        "eager",
        "--steps",
        "2",
        "--reference",
        "--json",
        str(file),
    )
    printed = run("bench.step", *words, "--json", str(file))
    eager, plain = json.loads(file.read_text())
    assert [line.split()[0] for line in printed.splitlines()] == ["what", "eager", "reference"]
    assert eager["step_ms"] > 0 and 0 < eager["mfu"] < 1 and eager["recompiles"] == 0
    assert eager["skipped"] == 0 and plain["step_ms"] > 0
    assert eager["tokens_per_s"] == pytest.approx(512 / eager["step_ms"] * 1e3)


@pytest.mark.slow
def test_the_pipeline_bench_runs_on_a_cpu(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.json"
    words = ("--tiny", "--device", "cpu", "--execution", "eager", "--batches", "4", "--json", str(file))
    *lines, last = run("bench.pipeline", *words).splitlines()
    found = json.loads(file.read_text())
    assert json.loads(last) == found
    assert [line[:20].strip() for line in lines] == ["what", "targets alone", "drafters alone", "together"]
    for name in ("targets alone", "drafters alone", "together"):
        assert found[name]["tokens_per_s"] > 0 and 0 <= found[name]["idle"]["cpu"] < 1
        assert found[name]["recompiles"] == 0
    assert found["together"]["drafters_wait_for_features"] > 0


@pytest.mark.slow
def test_the_suite_of_two_devices_measures_every_split_beside_its_prediction() -> None:
    words = ("--suite", "two", "--tiny", "--device", "cpu", "--execution", "eager", "--batches", "4")
    found = json.loads(run("bench.pipeline", *words).splitlines()[-1])
    splits = {name: value for name, value in found.items() if "+" in name}
    sizes = [(len(split["targets"]), len(split["drafters"])) for split in splits.values()]
    assert sizes == [(1, 1), (2, 1), (2, 2)]
    assert all(split["predicted_ms"] > 0 and split["batch_ms"] > 0 for split in splits.values())
    assert found["scaling"] > 0 and found["host_step_ms"] > 0


@pytest.mark.slow
def test_the_target_bench_runs_on_a_cpu(tmp_path: Path) -> None:
    file = tmp_path / "target.json"
    assert "eager" in run("bench.target", "--tiny", "--device", "cpu", "--batches", "3", "--json", str(file))
    (tiny,) = json.loads(file.read_text())["kinds"]
    (eager,) = tiny["ways"]
    assert eager["seconds"] > 0 and 0 < eager["mfu"] < 1 and eager["apart_from_eager"] == 0
    assert 0.5 < tiny["real_share"] <= 1
