"""Whole runs over the datasets that people have: what the run says of them, and that it trains."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.payload.test_resume import killed_after, report_every_step
from tests.payload.test_sources import save_to_disk
from tests.payload.tiny import VOCABULARY, random_samples
from tests.payload.trial import Trial

pytestmark = pytest.mark.slow


def parquet(path: Path, **columns: Any) -> str:
    pq.write_table(pa.table(columns), path)
    return str(path)


def test_a_saved_folder_trains_and_parquet_prompts_evaluate_and_every_number_of_coverage_is_there(
    tmp_path: Path,
) -> None:
    samples, prompts = random_samples(4, seed=9)
    held = parquet(tmp_path / "held.parquet", input_ids=samples, prompt_length=prompts, kind=["a", "b"] * 2)
    folder = save_to_disk(tmp_path / "train")
    trial = Trial(tmp_path, dataset=str(folder), held_out=held, steps=30)
    assert trial.fork() == 0, trial.log
    (event,) = trial.events("dataset")
    assert (event["path"], event["samples"], event["usable"]) == (str(folder), 23, 23)
    assert "23 samples loaded" in trial.log and f"Converting {held}" in trial.log
    assert len(list((tmp_path / "cache" / "datasets").glob("*.arrow"))) == 1
    assert [step["prompts"] for step in trial.events("eval")] == [4, 4]
    last = trial.events("step")[-1]
    assert 0 < last["anchor_coverage_share"] < 1  # 16 slots for up to 4 documents of up to 60 tokens
    assert last["document_coverage_share"] == 1.0
    assert last["anchor_coverage_share"] == trial.progress["anchor_coverage_share"]
    shares = [bucket["anchor_coverage_share"] for bucket in trial.progress["buckets"]]
    assert all(share is None or 0 < share <= 1 for share in shares) and any(shares)


def test_uniform_anchors_train_too_and_cover_less(tmp_path: Path) -> None:
    shares = {}
    for choice in ("random", "uniform"):
        trial = Trial(tmp_path, choice, anchor_choice=choice, steps=24, held_out="", anchors=64)
        assert trial.fork() == 0, trial.log
        assert trial.exit["loss_last"] < trial.exit["loss_first"]
        assert trial.progress["document_coverage_share"] == 1.0
        shares[choice] = trial.progress["anchor_coverage_share"]
    assert shares["uniform"] < 0.4 < shares["random"]  # blocks of 4: about every fourth place


def test_what_content_gives_away_is_an_event_by_sample_and_counted_once_over_many_epochs(
    tmp_path: Path,
) -> None:
    samples, prompts = random_samples(20)
    samples[6][2] = VOCABULARY
    masks: list[list[int] | None] = [
        [int(place >= prompt) for place in range(len(ids))]
        for ids, prompt in zip(samples, prompts, strict=True)
    ]
    masks[7] = [3] * len(samples[7])
    masks[8] = None
    masks[9] = [0, 1] * (len(samples[9]) // 2) + [0] * (len(samples[9]) % 2)
    path = parquet(tmp_path / "mixed.parquet", input_ids=samples, loss_mask=masks)
    trial = Trial(tmp_path, dataset=path, steps=40, held_out="")
    assert trial.fork() == 0, trial.log
    (event,) = trial.events("dataset")
    assert [entry["first"] for entry in event["skipped"].values()] == [[8]] and event["usable"] == 19
    found = {event["sample"]: event["reason"] for event in trial.events("unusable")}
    assert sorted(found) == [6, 7, 9]
    assert "vocabulary" in found[6] and "other values than 0 and 1" in found[7] and "supervised" in found[9]
    assert trial.progress["epoch"] > 2 and set(trial.progress["skipped"].values()) == {1}
    assert sum(trial.progress["skipped"].values()) == 4
    assert len(list(trial.run_dir.glob("samples-*.seen"))) == 1


def test_a_killed_run_goes_on_with_the_very_next_batch_and_counts_as_if_it_had_never_been_killed(
    tmp_path: Path,
) -> None:
    samples, prompts = random_samples(24)
    for number in range(0, 24, 5):
        samples[number][3] = VOCABULARY
    path = parquet(tmp_path / "mixed.parquet", input_ids=samples, prompt_length=prompts)
    changes = {"dataset": path, "steps": 16, "held_out": "", "max_batch": 2, "checkpoint_every": 3}
    whole, killed = (Trial(tmp_path, name, **changes) for name in ("whole", "killed"))
    assert whole.fork(report_every_step) == 0, whole.log
    assert killed.fork(killed_after(7)) == -signal.SIGKILL
    assert killed.fork(report_every_step, attempt=2) == 0, killed.log
    assert killed.progress["skipped"] == whole.progress["skipped"]
    for name in ("anchors", "anchor_coverage_share", "document_coverage_share", "tokens", "epoch"):
        assert killed.progress[name] == whole.progress[name], name
    buckets = [[b["anchor_coverage_share"] for b in run.progress["buckets"]] for run in (killed, whole)]
    assert buckets[0] == buckets[1]
    named = [{event["sample"] for event in run.events("unusable")} for run in (killed, whole)]
    assert named[0] == named[1] and len(named[0]) >= 4
