"""The jobs that come with the payload: each is a job, says what it is for, and fits the GPU it names."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from remote_payload import job
from remote_payload.train.mask import tiles_fit

JOBS = sorted((Path(job.__file__).parent / "jobs").glob("*.toml"))


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_a_job_that_comes_with_the_payload_is_checked_and_begins_with_what_it_is_for(path: Path) -> None:
    checked = job.load(path)
    assert checked.held_out and checked.held_out != checked.dataset
    text = path.read_text()
    assert text.startswith("# ") and len(text.split("\n\n")[0]) > 100
    given = tomllib.loads(text)
    lines = {line.split(" = ")[0]: line for line in text.splitlines() if " = " in line and line[0] != "#"}
    assert lines.keys() == given.keys()
    explained = sum("# " in line for line in lines.values())
    assert explained >= len(given) / 2  # the others say the same as their names


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_rows_of_a_job_for_a_gpu_can_be_cut_into_tiles(path: Path) -> None:
    """Otherwise attention falls back to a dense mask, many times slower and without an error."""
    checked = job.load(path)
    if checked.drafters == ["cpu"]:
        return
    assert tiles_fit(checked.token_budget, checked.anchors, checked.block_size)


def test_there_are_jobs() -> None:
    assert {"demo", "qwen3_8b", "smollm2_code"} <= {path.stem for path in JOBS}
