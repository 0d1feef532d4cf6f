"""Roles by measurement: what is taken, what is only said, what a later attempt keeps, what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from remote_payload import rundir
from remote_payload.job import Job, JobError
from remote_payload.rundir import EVENTS, RecordWriter
from remote_payload.train import role_choice, role_times
from remote_payload.train.role_choice import settle_roles
from remote_payload.train.role_times import MeasuredRoles
from remote_payload.train.roles import RoleTimes
from tests.payload.trial import Trial

TWO = ["cuda:0", "cuda:1"]
TARGET: Any = object()


class Machine:
    """Two GPUs on which both sides take as long as each other, or whatever is set."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.gpus = TWO
        self.times: RoleTimes | None = RoleTimes(target_s=0.1, tokens=1000, row_s=0.1, step_s=0.0)
        self.asked: list[tuple[str, str]] = []
        self.lines: list[str] = []
        monkeypatch.setattr(role_choice, "visible_devices", lambda: self.gpus)

    def settle(self, *, resuming: bool = False, **values: Any) -> tuple[Job, Any]:
        given = {"target": "t", "dataset": "d", "mask_token_id": 1, "rows_per_step": 2, **values}
        job = Job.from_mapping(given, "test")
        events = RecordWriter(self.folder / EVENTS, attempt=1)
        loaded = settle_roles(job, self.folder, events, self.lines.append, self._measure, resuming=resuming)
        return job, loaded

    def _measure(self, first: str, last: str) -> MeasuredRoles | None:
        self.asked.append((first, last))
        return None if self.times is None else MeasuredRoles(self.times, TARGET, "graph")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def events(folder: Path) -> list[dict[str, Any]]:
    lines, _ = rundir.complete_lines((folder / EVENTS).read_bytes())
    return rundir.read_records(lines)[0]


def test_auto_takes_the_best_split_and_says_its_arithmetic(machine: Machine) -> None:
    job, loaded = machine.settle(roles="auto")
    assert (job.targets, job.drafters) == (["cuda:0"], ["cuda:1"])
    assert loaded is TARGET and machine.asked == [("cuda:0", "cuda:1")]
    (event,) = events(machine.folder)
    assert event["kind"] == "roles" and event["taken"] and event["gpus"] == TWO
    assert (event["targets"], event["drafters"]) == (["cuda:0"], ["cuda:1"])
    assert event["target_s"] == 0.1 and event["batches_per_s"] == 10.0 and event["free_gib"] is None
    said = "1 target + 1 drafter: min(1 / 0.1000, 1 / 0.1000) = 10.00 batches/s"
    assert event["arithmetic"][0] == said and f"Taken: {said}" in machine.lines
    assert any("10,000 tokens/s" in line for line in machine.lines)


def test_a_gpu_gets_both_roles_where_that_is_faster(machine: Machine) -> None:
    machine.times = RoleTimes(target_s=0.164, tokens=8192, row_s=0.1, step_s=0.004)
    job, _ = machine.settle(roles="auto")
    assert (job.targets, job.drafters) == (TWO, ["cuda:1"])
    machine.gpus = ["cuda:0"]
    job, _ = machine.settle(roles="auto")
    assert (job.targets, job.drafters) == (["cuda:0"], ["cuda:0"])


def test_propose_leaves_the_devices_as_they_are_given_and_gives_given_no_measurement(
    machine: Machine,
) -> None:
    lists: dict[str, Any] = {"targets": TWO, "drafters": TWO}
    job, loaded = machine.settle(roles="propose", **lists)
    assert (job.targets, job.drafters) == (TWO, TWO) and loaded is TARGET
    (event,) = events(machine.folder)
    assert not event["taken"] and event["targets"] == ["cuda:0"]
    assert any(line.startswith("Proposed, not taken: 1 target + 1 drafter") for line in machine.lines)
    assert machine.settle(roles="propose", resuming=True, **lists)[1] is None
    assert machine.settle(**lists)[1] is None
    assert len(machine.asked) == 1


def test_a_later_attempt_keeps_what_the_first_chose_while_it_sees_the_same_gpus(machine: Machine) -> None:
    machine.settle(roles="auto")
    machine.times = RoleTimes(target_s=0.3, tokens=1000, row_s=0.1, step_s=0.0)
    job, loaded = machine.settle(roles="auto", resuming=True)
    assert (job.targets, job.drafters) == (["cuda:0"], ["cuda:1"])
    assert loaded is None and len(machine.asked) == 1
    machine.gpus = [*TWO, "cuda:2"]
    job, _ = machine.settle(roles="auto", resuming=True)
    assert len(machine.asked) == 2 and len({*job.targets, *job.drafters}) == 3


def test_an_attempt_after_one_that_chose_nothing_measures(machine: Machine) -> None:
    machine.settle(roles="propose", targets=TWO, drafters=TWO)
    job, _ = machine.settle(roles="auto", resuming=True)
    assert len(machine.asked) == 2 and job.targets == ["cuda:0"]


def test_a_run_that_is_asked_to_stop_meanwhile_chooses_nothing(machine: Machine) -> None:
    machine.times = None
    job, loaded = machine.settle(roles="auto")
    assert loaded is None and job.targets == ["auto"] and events(machine.folder) == []


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"targets": ["cuda:0"]}, r"roles = 'auto' chooses devices .* targets = \['cuda:0'\] names them"),
        ({"drafters": TWO}, r"leave drafters out, or set roles = 'propose'"),
        ({"rows_per_step": 0}, "needs rows_per_step"),
        ({"features": "cached"}, "and features = 'cached' exclude each other"),
        ({"roles": "best"}, "roles = 'best': expected one of 'given', 'auto', 'propose'"),
    ],
)
def test_what_contradicts_a_measurement_is_refused(values: dict[str, Any], said: str) -> None:
    given = {"target": "t", "dataset": "d", "mask_token_id": 1, "rows_per_step": 2, "roles": "auto"}
    with pytest.raises(JobError, match=said):
        Job.from_mapping(given | values, "test")


@pytest.mark.slow
def test_a_side_for_which_a_gpu_has_no_memory_is_refused_by_name_whoever_found_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers = {"memory_reserved": 0, "reset_peak_memory_stats": None, "empty_cache": None}
    for name, number in numbers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, number=number: number)
    card = SimpleNamespace(total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: card)
    cublas = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    for error in (torch.OutOfMemoryError("CUDA out of memory"), cublas):
        with (
            pytest.raises(JobError, match=r"a drafter does not fit into the 80\.0 GiB of cuda:1; lower"),
            role_times._memory_for("a drafter", torch.device("cuda:1")),
        ):
            raise error
    with (
        pytest.raises(RuntimeError, match="illegal"),
        role_times._memory_for("a drafter", torch.device("cuda:1")),
    ):
        raise RuntimeError("an illegal memory access")


@pytest.mark.slow
def test_a_whole_run_measures_both_sides_of_its_one_device_and_trains_as_if_they_were_given(
    tmp_path: Path,
) -> None:
    """What was done to measure leaves no trace in the weights."""
    if torch.cuda.is_available():
        pytest.skip("this is the run on a CPU")
    changes: dict[str, Any] = {"held_out": "", "steps": 4, "rows_per_step": 2}
    auto = Trial(tmp_path, "auto", roles="auto", targets=["auto"], drafters=["auto"], **changes)
    assert auto.fork() == 0, auto.log
    (event,) = auto.events("roles")
    assert event["taken"] and event["gpus"] == event["targets"] == event["drafters"] == ["cpu"]
    assert event["target_s"] > 0 and event["row_s"] > 0 and event["step_s"] > 0
    assert event["arithmetic"][0].startswith("1 target + 1 drafter, 1 GPU shared: min(1 / ")
    assert len(auto.events("target")) == len(auto.events("ready")) == 1
    given = Trial(tmp_path, "given", **changes)
    assert given.fork() == 0, given.log
    assert not given.events("roles")
    for name, value in given.tensors(4).items():
        assert auto.tensors(4)[name].equal(value), name
    assert auto.exit["tokens"] == given.exit["tokens"]
    assert auto.fork(attempt=2) == 0, auto.log
    assert len(auto.events("roles")) == 1 and "Roles as chosen before: targets cpu" in auto.log
