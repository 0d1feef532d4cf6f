"""Where a later attempt goes on from, and what it refuses, without a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from remote_payload import rundir
from remote_payload.job import JobError
from remote_payload.train.contract import ContractError
from remote_payload.train.resume import FORMAT, Resume, check_resume, earlier_reports, find_resume
from tests.payload.test_checkpoint import save

CONTRACT = {"drafter.mask_token_id": 96, "seed": 0}


def resume_of(**record: object) -> Resume:
    return Resume(Path("checkpoints/step-9"), 9, {"format": FORMAT, "contract": CONTRACT, **record})


def test_without_a_checkpoint_there_is_nothing_to_go_on_from(tmp_path: Path) -> None:
    assert find_resume(tmp_path, print) is None


def test_the_newest_is_taken_and_what_a_killed_attempt_left_half_is_swept(tmp_path: Path) -> None:
    for step in (5, 9, 10):
        save(tmp_path, step)
    half = tmp_path / "checkpoints" / ".step-12.99"
    half.mkdir()
    found = find_resume(tmp_path, print)
    assert found is not None
    assert (found.step, found.path.name, found.record["step"]) == (10, "step-10", 10)
    assert not half.exists()


def test_damaged_ones_are_named_and_set_aside_once_an_older_one_is_found_whole(tmp_path: Path) -> None:
    for step in (5, 9, 10):
        save(tmp_path, step)
    (tmp_path / "checkpoints/step-9/model.safetensors").unlink()
    (tmp_path / "checkpoints/step-10/training.json").write_text("{}")
    said: list[str] = []
    found = find_resume(tmp_path, said.append)
    assert found is not None and found.step == 5
    assert [line.split(" is damaged")[0] for line in said] == ["checkpoints/step-10", "checkpoints/step-9"]
    assert "model.safetensors: No such file or directory" in said[1]
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-10.damaged", "step-5", "step-9.damaged"]
    save(tmp_path, 10)  # damaged again: the earlier one makes room
    (tmp_path / "checkpoints/step-10/training.json").unlink()
    found = find_resume(tmp_path, said.append)
    assert found is not None and found.step == 5 and rundir.checkpoint_steps(tmp_path) == [5]


def test_when_all_are_damaged_they_stay_and_the_run_is_refused(tmp_path: Path) -> None:
    for step in (5, 9):
        save(tmp_path, step)
        (tmp_path / f"checkpoints/step-{step}/manifest.json").unlink()
    for _ in range(2):
        with pytest.raises(
            JobError, match=r"no checkpoint there is whole \(step-9: .*; step-5: .*\). Remove"
        ):
            find_resume(tmp_path, print)
    assert rundir.checkpoint_steps(tmp_path) == [5, 9]


def test_what_is_of_another_run_format_or_of_a_later_step_is_refused(tmp_path: Path) -> None:
    check_resume(resume_of(), dict(CONTRACT), 9)
    with pytest.raises(ContractError, match=r"drafter.mask_token_id is 96 in the checkpoint and 95 now"):
        check_resume(resume_of(), {**CONTRACT, "drafter.mask_token_id": 95}, 9)
    for other in (None, FORMAT + 1):
        with pytest.raises(JobError, match=rf"is of format {other}, and this version goes on from {FORMAT}"):
            check_resume(resume_of(format=other), dict(CONTRACT), 9)
    with pytest.raises(
        JobError, match=r"steps = 8, but checkpoints/step-9 is of step 9; set steps to 9 or more"
    ):
        check_resume(resume_of(), dict(CONTRACT), 8)


def test_the_first_and_the_last_evaluation_up_to_the_step_are_remembered_from_the_events(
    tmp_path: Path,
) -> None:
    events = rundir.RecordWriter(tmp_path / rundir.EVENTS, attempt=1)
    for step in (0, 10, 20, 30):
        events.write("step", step=step, note='"eval"')
        events.write("eval", step=step, tau=1 + step / 10, prompts=4)
    with (tmp_path / rundir.EVENTS).open("ab") as file:
        file.write(b'{"kind":"eval","step":25,"ta')  # cut off by a kill
    found = earlier_reports(tmp_path, 25)
    assert [(report.record["step"], report.tau) for report in found] == [(0, 1.0), (20, 3.0)]
    assert [report.record["step"] for report in earlier_reports(tmp_path, 5)] == [0]
