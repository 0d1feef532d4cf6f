"""Bad input of whole runs: refused in one sentence, or counted, named and left out; never a crash."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from remote_payload import rundir
from tests.payload.test_resume import report_every_step
from tests.payload.tiny import VOCABULARY, random_samples, write_arrow
from tests.payload.trial import Trial

pytestmark = pytest.mark.slow


def table(path: Path, **columns: Any) -> str:
    content = pa.table({name: pa.array(values) for name, values in columns.items()})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, content.schema) as writer:
        writer.write_table(content)
    return str(path)


def file_of(content: bytes) -> Callable[[Path], dict[str, Any]]:
    def write(folder: Path) -> dict[str, Any]:
        (folder / "bad.arrow").write_bytes(content)
        return {"dataset": str(folder / "bad.arrow")}

    return write


def arrow_of(**columns: Any) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: {"dataset": table(folder / "bad.arrow", **columns)}


def truncated(folder: Path) -> dict[str, Any]:
    samples, prompts = random_samples(5)
    whole = write_arrow(folder / "whole.arrow", samples, prompts).read_bytes()
    return file_of(whole[: len(whole) // 2])(folder)


def parquet_of(**columns: Any) -> Callable[[Path], dict[str, Any]]:
    def write(folder: Path) -> dict[str, Any]:
        pq.write_table(pa.table(columns), folder / "bad.parquet")
        return {"dataset": str(folder / "bad.parquet")}

    return write


def dataset_dict(folder: Path) -> dict[str, Any]:
    (folder / "all").mkdir()
    (folder / "all" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    return {"dataset": str(folder / "all")}


def held_out_of(**columns: Any) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: {"held_out": table(folder / "bad.arrow", **columns)}


def of(**changes: Any) -> Callable[[Path], dict[str, Any]]:
    return lambda _folder: changes


REFUSED: dict[str, tuple[Callable[[Path], dict[str, Any]], str]] = {
    "dataset dict": (dataset_dict, r"all: is a DatasetDict with the splits train, test; name one of them"),
    "parquet without ids": (parquet_of(tokens=[[1]]), r"bad\.parquet: no column 'input_ids'"),
    "missing dataset": (of(dataset="nowhere.arrow"), r"nowhere\.arrow: there is no such file"),
    "empty file": (file_of(b""), r"bad\.arrow"),
    "no arrow": (file_of(b"hello " * 50), r"bad\.arrow: is no complete Arrow IPC file"),
    "truncated arrow": (truncated, r"bad\.arrow: is no complete Arrow IPC file"),
    "no samples": (
        arrow_of(input_ids=pa.array([], pa.list_(pa.int32())), prompt_length=pa.array([], pa.int32())),
        r"bad\.arrow: holds no samples",
    ),
    "no prompt length": (arrow_of(input_ids=[[1, 2, 3]]), r"no column says which tokens are the answer"),
    "no ids": (
        arrow_of(tokens=[[1, 2, 3]]),
        r"no column 'input_ids'; expected lists of integers, found tokens",
    ),
    "all too long": (
        arrow_of(input_ids=[[5] * 500] * 3, prompt_length=[1] * 3),
        r"none of its 3 samples can be used: 3 longer than the largest bucket",
    ),
    "no answers": (
        arrow_of(input_ids=[[5] * 30] * 3, prompt_length=[30] * 3),
        r"none of its 3 samples can be used: 3 no two supervised tokens",
    ),
    "no answers by mask": (
        arrow_of(input_ids=[[5] * 30] * 3, loss_mask=[[0, 1] * 15] * 3),
        r"none of its samples can be used: 3 no two supervised tokens",
    ),
    "all outside the vocabulary": (
        arrow_of(input_ids=[[5, VOCABULARY] * 15] * 3, prompt_length=[3] * 3),
        r"none of its samples can be used: 3 ids outside the vocabulary",
    ),
    "mask is eos": (of(mask_token_id=1), r"mask_token_id = 1 is the target's eos_token_id \(1\)"),
    "mask is pad": (of(mask_token_id=0), r"mask_token_id = 0 is the target's pad_token_id \(0\)"),
    "mask outside": (of(mask_token_id=VOCABULARY), r"mask_token_id = 97: the target's embedding has 97 rows"),
    "no such gpu": (of(targets=["cuda:99"]), r"device 'cuda:99' is not there"),
    "no such model": (of(target="no/such/folder/at/all"), r"target 'no/such/folder/at/all'"),
    "tap outside": (of(tap_layers=[1, 6]), r"tap_layers = \[1, 6\]: the target has layers 0 to 5"),
    "tap twice": (of(tap_layers=[1, 3, 1]), r"tap_layers = \[1, 3, 1\]: names a layer twice"),
    "too many taps": (of(taps=5), r"taps = 5: a target of 6 layers has too few"),
    "layer to copy outside": (of(init_from_target=[17]), r"init_from_target names layer 17"),
    "no held-out file": (of(held_out="nowhere.arrow"), r"nowhere\.arrow: there is no such file"),
    "held out is what is trained on": (
        lambda folder: {"held_out": str(folder / "train.arrow")},
        r"train\.arrow: held_out has the very samples of dataset",
    ),
    "held out is a copy of what is trained on": (
        lambda folder: {"held_out": str(write_arrow(folder / "copy.arrow", *random_samples(24)))},
        r"copy\.arrow: held_out has the very samples of dataset",
    ),
    "no held-out prompts": (
        held_out_of(input_ids=[[5] * 9], prompt_length=[0]),
        r"bad\.arrow: no sample has a prompt",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_used_is_refused_in_one_sentence(tmp_path: Path, case: str) -> None:
    changes, expected = REFUSED[case]
    trial = Trial(tmp_path, **changes(tmp_path))
    assert trial.fork() == 2, trial.log
    assert re.search(expected, trial.last_line), trial.last_line
    assert re.match(r"\d\d:\d\d:\d\d error: ", trial.last_line)
    end = trial.exit
    assert (end["outcome"], end["exit_code"]) == ("refused", 2)
    assert trial.last_line.endswith(end["error"]) and "\n" not in end["error"]
    assert trial.events("end")[0]["outcome"] == "refused"
    assert "Traceback" not in trial.log and trial.crashes() == [] and not trial.events("crash")
    assert not (trial.run_dir / rundir.CHECKPOINTS).exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("steps = ", r"job\.toml: is not TOML"),
        ("stepz = 3", r"job\.toml: unknown key 'stepz'; did you mean steps"),
        ("layers = 0", r"job\.toml: layers = 0: expected at least 1"),
        ('targets = ["tpu"]', r"targets = \['tpu'\]: expected a list of devices"),
    ],
)
def test_a_job_file_that_was_spoilt_on_the_way_is_refused_too(
    tmp_path: Path, text: str, expected: str
) -> None:
    trial = Trial(tmp_path)
    key = text.split(" = ")[0]
    trial.write_job(re.sub(rf"(?m)^{key} = .*$", "", trial.job.to_toml()) + f"\n{text}\n")
    assert trial.fork() == 2
    assert re.search(expected, trial.last_line) and trial.exit["outcome"] == "refused"
    assert "Traceback" not in trial.log


def test_a_refusal_by_the_real_command_has_its_exit_code_too(tmp_path: Path) -> None:
    trial = Trial(tmp_path, dataset="nowhere.arrow")
    assert trial.command() == 2
    assert "nowhere.arrow: there is no such file" in trial.last_line


def test_samples_that_cannot_be_used_are_counted_and_named_and_the_rest_is_trained_on(tmp_path: Path) -> None:
    samples, prompts = random_samples(20)
    samples[3] = [5] * 200  # too long
    samples[4], prompts[4] = [], 0
    prompts[5] = len(samples[5])  # a prompt without an answer
    samples[6][2] = VOCABULARY
    samples[7][0] = -1
    path = write_arrow(tmp_path / "mixed.arrow", samples, prompts)
    trial = Trial(tmp_path, dataset=str(path), steps=30)
    assert trial.fork() == 0, trial.log
    (event,) = trial.events("dataset")
    assert (event["samples"], event["usable"]) == (20, 17)
    by_length = {reason: entry["first"] for reason, entry in event["skipped"].items()}
    assert sorted(by_length.values()) == [[3], [4], [5]]
    assert sorted(trial.progress["skipped"].values()) == [1, 1, 1, 2]
    assert trial.progress["skipped"]["ids outside the vocabulary"] == 2
    for number in (3, 4, 5):
        assert re.search(rf"Left out 1 samples: .*the first: \[{number}\]", trial.log)
    for number in (6, 7):
        assert trial.log.count(f"Left out sample {number}: ids outside the vocabulary") == 1
    assert trial.exit["loss_last"] is not None


def test_a_batch_without_a_single_anchor_is_a_step_like_any_other(tmp_path: Path) -> None:
    """Model-Optimizer #2342: with two replicas, the one that has nothing to learn from still takes part."""
    samples = [[5] * 30, [6] * 30]
    path = table(tmp_path / "half.arrow", input_ids=samples, loss_mask=[[0] * 30, [0] * 10 + [1] * 20])
    trial = Trial(
        tmp_path, dataset=path, max_batch=1, steps=8, drafters=["cpu"] * 2, held_out="", rows_per_step=2
    )
    assert trial.fork() == 0, trial.log
    assert trial.exit["loss_last"] < trial.exit["loss_first"]
    assert trial.progress["skipped"] == {"no two supervised tokens in a row (a prompt without an answer)": 1}


def test_a_step_to_which_no_replica_brings_an_anchor_divides_by_nothing_and_the_next_ones_learn(
    tmp_path: Path,
) -> None:
    masks = [[0] * 30, [0] * 10 + [1] * 20]
    path = table(tmp_path / "half.arrow", input_ids=[[5] * 30, [6] * 30], loss_mask=masks)
    trial = Trial(tmp_path, dataset=path, max_batch=1, steps=10, held_out="")
    assert trial.fork(report_every_step) == 0, trial.log
    steps = trial.events("step")
    nothing, learned = ([s for s in steps if (s["loss"] is None) is empty] for empty in (True, False))
    assert len(nothing) == len(learned) == 5
    assert all(step["gradient_norm"] == 0 for step in nothing)
    assert learned[-1]["loss"] < learned[0]["loss"] and trial.progress["nonfinite_steps"] == 0
    assert trial.progress["document_coverage_share"] == 1.0  # of the documents that can draw any


def test_held_out_samples_that_cannot_prompt_are_left_out(tmp_path: Path) -> None:
    held = table(
        tmp_path / "mixed.arrow",
        input_ids=[[], [5, VOCABULARY, 7], [9, 10, 11, 12]],
        prompt_length=[0, 2, 2],
    )
    trial = Trial(tmp_path, held_out=held, steps=2)
    assert trial.fork() == 0, trial.log
    assert [event["prompts"] for event in trial.events("eval")] == [1, 1]
