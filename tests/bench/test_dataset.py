"""The dataset benchmark, on few samples: what it prints is so, and it cleans up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench import dataset as bench
from remote_payload.train.dataset import Dataset

ROOT = Path(__file__).parents[2]


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench.dataset", *arguments],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


@pytest.mark.slow
def test_one_json_object_is_printed_and_nothing_stays_behind_unless_it_is_asked_for(tmp_path: Path) -> None:
    done = run("--samples", "2500", "--keep", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    (kept,) = tmp_path.iterdir()
    assert f"kept: {kept}" in done.stderr
    dataset = Dataset.open(kept)
    assert (found["samples"], found["tokens"]) == (len(dataset), dataset.tokens) == (2500, dataset.tokens)
    assert 0 < found["index_s"] < 60 and 20 < found["rss_mib"] < 1000
    assert 2500 / 64 < found["batches"] < 2500
    again = tmp_path / "again"
    again.mkdir()
    assert run("--samples", "10", folder=again).returncode == 0
    assert list(again.iterdir()) == []


def test_what_is_written_has_the_stated_mean_and_every_sample_can_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "SHARD_ROWS", 1500)
    bench.write(tmp_path, 4000)
    dataset = Dataset.open(tmp_path)
    assert [file.name for file in dataset.files] == [f"data-{n:05d}-of-00003.arrow" for n in range(3)]
    assert abs(float(np.mean(dataset.lengths)) - bench.MEAN_TOKENS) < 12
    assert dataset.ids(0).dtype == np.int32
    assert {dataset.look(sample, bench.VOCABULARY) for sample in range(0, 4000, 97)} == {None}


def test_a_folder_that_is_no_dataset_is_refused_in_one_sentence(tmp_path: Path) -> None:
    done = run("--index", str(tmp_path / "nowhere"), folder=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "nowhere: there is no such file" in done.stderr
