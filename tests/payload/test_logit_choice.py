"""Own kernels for the loss are taken where they are right, and what is wrong in them is found and told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from remote_payload.train import execution, fp8, logit_passes
from remote_payload.train.devices import on_device
from remote_payload.train.logit_choice import choose_kernels
from remote_payload.train.output_head import OutputHead
from tests.payload.small_replica import make_replica, rows, run_rows
from tests.payload.test_logit_passes import ALL, of

WIDTH = 1200
"""Nine tiles and a rest."""


def head_of(dtype: torch.dtype = torch.bfloat16, eight_bits: bool = False, **options: Any) -> OutputHead:
    weight = torch.randn(WIDTH, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    small = fp8.FrozenMatrix.of(weight) if eight_bits else None
    return OutputHead(weight, None, options.get("scale", 1.0), options.get("soft_cap"), small)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("dtype", "eight_bits"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
def test_passes_that_are_right_are_taken_for_every_objective(
    name: str, dtype: torch.dtype, eight_bits: bool
) -> None:
    for places in (1, 7, 15):
        assert choose_kernels(head_of(dtype, eight_bits, scale=0.3), of(name), places)[0]


def test_a_head_with_a_soft_cap_is_left_to_the_compiler() -> None:
    taken, reason = choose_kernels(head_of(soft_cap=30.0), of("ce"), 7)
    assert not taken and reason == "the head has a soft cap, which our own do not know"


def a_tile_of_zeros(made: Tensor) -> Tensor:
    made[1, 640:768] = 0.0
    return made


def a_last_token_left_out(made: Tensor) -> Tensor:
    made[:, -1] = made.abs().amax()
    return made


def no_number(made: Tensor) -> Tensor:
    made[0, 5] = torch.nan
    return made


@pytest.mark.parametrize("name", ["ce", "forward_kl", "lk"])
@pytest.mark.parametrize("fault", [a_tile_of_zeros, a_last_token_left_out, no_number])
@pytest.mark.parametrize("eight_bits", [False, True])
def test_slopes_that_are_wrong_in_one_tile_of_one_row_are_refused(
    name: str, fault: Callable[[Tensor], Tensor], eight_bits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = logit_passes._plain_slopes
    monkeypatch.setattr(logit_passes, "_plain_slopes", lambda *given: fault(right(*given)))
    taken, reason = choose_kernels(head_of(eight_bits=eight_bits), of(name), 7)
    assert not taken and "our own are not used: a tile of slopes of logits of" in reason


@pytest.mark.parametrize(
    ("name", "number", "told"),
    [
        ("ce", 0, "loss of logits of 1 is"),
        ("dpace", 0, "loss of logits of 1 is"),
        ("forward_kl", 0, "loss of logits of 1 is"),
        ("ce", 3, "a tile of slopes"),
        ("forward_kl", 4, "loss of logits of 8 is"),
        ("forward_kl", 6, "a tile of slopes"),
        ("lk", 0, "ce of logits of 1 is"),
        ("lk", 4, "loss of logits of 1 is"),
    ],
)
def test_a_scan_that_is_wrong_by_a_twentieth_is_refused(
    name: str, number: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = logit_passes._plain_scan

    def wrong(*given: Any) -> list[Tensor]:
        made = right(*given)
        made[number] = made[number] * 1.05
        return made

    monkeypatch.setattr(logit_passes, "_plain_scan", wrong)
    taken, reason = choose_kernels(head_of(), of(name), 7)
    assert not taken and told in reason


def test_other_first_choices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = logit_passes._plain_scan

    def wrong(*given: Any) -> list[Tensor]:
        made = right(*given)
        made[1][2] = ~made[1][2]
        return made

    monkeypatch.setattr(logit_passes, "_plain_scan", wrong)
    assert choose_kernels(head_of(), of("ce"), 7) == (
        False,
        "our own are not used: first choices of logits of 1 are others",
    )


def test_passes_that_fail_are_left_with_their_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_given: Any) -> Any:
        raise RuntimeError("no such instruction\nand a dump")

    monkeypatch.setattr(logit_passes, "_plain_scan", fails)
    taken, reason = choose_kernels(head_of(), of("forward_kl"), 7)
    assert not taken and reason == "our own are not used: they failed: RuntimeError: no such instruction"


@pytest.fixture
def worker() -> Iterator[torch.device]:
    """What a worker thread lives in on a GPU."""
    device = torch.device("cuda:0")
    with on_device(device):
        yield device


gpu = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # what torch warns of while it compiles is no failed compilation
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(300),
]


@pytest.mark.parametrize("name", [pytest.param(name, marks=gpu) for name in ("ce", "forward_kl", "lk")])
def test_a_replica_proves_its_kernels_and_trains_on_without_them_where_they_are_wrong(
    name: str, tmp_path: Path, worker: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = rows(tmp_path, 3)
    ours = make_replica(tmp_path, worker, "bfloat16", objective=name)
    result = ours.warm_up("graph")
    assert (result.execution, result.loss_kernels) == (execution.GRAPH, True), result
    from remote_payload.train import logit_kernels

    right = logit_kernels.slopes

    def wrong(*arguments: Any) -> None:
        right(*arguments)
        arguments[6][2, -60:] = 0.0

    monkeypatch.setattr(logit_kernels, "slopes", wrong)
    plain = make_replica(tmp_path, worker, "bfloat16", objective=name)
    result = plain.warm_up("graph")
    assert (result.execution, result.loss_kernels) == (execution.GRAPH, False), result
    assert "a tile of slopes" in result.loss_kernels_reason
    monkeypatch.undo()
    for (loss, slope), (other, expected) in zip(run_rows(ours, given), run_rows(plain, given), strict=True):
        assert loss == pytest.approx(other, rel=1e-3)
        assert float(torch.cosine_similarity(slope, expected, dim=0)) > 0.999
