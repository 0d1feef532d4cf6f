"""What is said of a job before a model is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from remote_payload.job import Job
from remote_payload.rundir import EVENTS
from remote_payload.train.event_log import EventLog
from remote_payload.train.prepare_run import prepare
from remote_payload.train.progress import Progress
from remote_payload.train.run_control import RunControl
from tests.payload.tiny import job_values, random_samples, write_model


@pytest.mark.parametrize(("positions", "longer"), [(32, True), (59, False)])
def test_samples_that_are_longer_than_the_target_is_made_for_are_counted_in_the_log(
    tmp_path: Path, positions: int, longer: bool
) -> None:
    write_model(tmp_path / "model", max_position_embeddings=positions)
    job = Job.from_mapping(job_values(tmp_path, held_out=""), "tiny")
    run_dir = tmp_path / "runs" / "run"
    run_dir.mkdir(parents=True)
    said: list[str] = []
    events = EventLog(run_dir / EVENTS, attempt=1, log=said.append)
    prepare(job, run_dir, events, Progress(job.bucket_edges), RunControl(), said.append, resuming=False)
    events.close()
    count = sum(len(sample) > positions for sample in random_samples(24)[0])
    found = [line for line in said if "longer than" in line]
    assert bool(count) == longer == bool(found)
    assert all(line.startswith(f"{count} samples are longer than the {positions} tokens") for line in found)
