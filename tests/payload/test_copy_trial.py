"""Copies between GPUs are tried before a run trusts them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from remote_payload.job import Job, JobError
from remote_payload.train.copy_trial import prove_copies, senders

CPU = torch.device("cpu")


def job(targets: list[str], drafters: list[str]) -> Job:
    return Job.from_mapping(
        {
            "target": "model",
            "dataset": "data",
            "mask_token_id": 1,
            "targets": targets,
            "drafters": drafters,
        },
        "job.toml",
    )


def test_each_other_gpu_of_the_run_sends_to_a_replica_and_no_cpu_does() -> None:
    pairs = job(["cuda:0", "cuda:1"], ["cuda:1", "cuda:2"])
    assert senders(pairs, torch.device("cuda:1")) == [torch.device("cuda:0"), torch.device("cuda:2")]
    assert senders(job(["cuda:0"], ["cuda:0"]), torch.device("cuda:0")) == []
    assert senders(job(["cpu"], ["cpu"]), CPU) == []


def test_copies_that_arrive_are_said_nothing_about() -> None:
    prove_copies(CPU, [CPU, CPU])


def test_one_changed_number_is_refused_with_what_to_do() -> None:
    def changes_one(into: Tensor, source: Tensor) -> None:
        into.copy_(source)
        into[-1] += 1

    with pytest.raises(JobError, match=r"cpu to cpu arrive changed, 1 of 4,194,304 numbers.*iommu=pt"):
        prove_copies(CPU, [CPU], changes_one)


def test_a_copy_that_never_happens_is_not_taken_for_one_by_what_the_memory_held() -> None:
    prove_copies(CPU, [CPU])  # and its memory is given back
    with pytest.raises(JobError, match=r"4,194,304 of 4,194,304"):
        prove_copies(CPU, [CPU], lambda into, source: None)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_send_each_other_what_they_hold() -> None:
    pair = [torch.device("cuda:0"), torch.device("cuda:1")]
    for device in pair:
        prove_copies(device, senders(job([str(each) for each in pair], ["cuda:0"]), device))
