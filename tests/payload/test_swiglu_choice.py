"""Own kernels for SwiGLU are taken where they are right, and what is wrong in them is found and told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from remote_payload.train import execution, swiglu
from remote_payload.train.devices import on_device
from remote_payload.train.drafter import Drafter
from remote_payload.train.swiglu_choice import choose_swiglu
from tests.payload.small_replica import make_replica, rows, run_rows
from tests.payload.test_drafter import CONFIG

CPU = torch.device("cpu")


def choose(counts: tuple[int, ...] = (119,), ffn: int = 300) -> tuple[bool, str]:
    return choose_swiglu(counts, ffn, CPU, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ffn", [1, 128, 1001])
def test_operators_that_are_right_are_taken(ffn: int, dtype: torch.dtype) -> None:
    assert choose_swiglu([119, 7680], ffn, CPU, dtype)[0]


def test_rows_are_tried_as_many_above_a_multiple_of_16_as_a_step_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton makes a kernel of its own for multiples of 16, and a rest of rows has a mask."""
    right, tried = swiglu.forward, []
    monkeypatch.setattr(swiglu, "forward", lambda between: tried.append(len(between)) or right(between))
    assert choose((8192, 7680))[0] and set(tried) == {32}
    tried.clear()
    assert choose((8192, 119, 135))[0] and set(tried) == {32, 39}


def a_tile_of_zeros(made: Tensor) -> None:
    made[1, 128:256] = 0.0


def a_last_row_left_out(made: Tensor) -> None:
    made[-1] = 0.0


def no_number(made: Tensor) -> None:
    made[0, 5] = torch.nan


@pytest.mark.parametrize(("name", "what"), [("forward", "output"), ("backward", "slopes")])
@pytest.mark.parametrize("fault", [a_tile_of_zeros, a_last_row_left_out, no_number])
def test_what_is_wrong_in_one_tile_of_one_row_is_refused(
    name: str, what: str, fault: Callable[[Tensor], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(swiglu, name)

    def wrong(*given: Tensor) -> Tensor:
        made: Tensor = right(*given)
        fault(made)
        return made

    monkeypatch.setattr(swiglu, name, wrong)
    taken, reason = choose()
    assert not taken and f"our own are not used: a tile of {what} of numbers of 1 is off by" in reason


def test_operators_that_fail_are_left_with_their_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_given: Any) -> Any:
        raise RuntimeError("no such instruction\nand a dump")

    monkeypatch.setattr(swiglu, "backward", fails)
    assert choose() == (False, "our own are not used: they failed: RuntimeError: no such instruction")


def test_a_drafter_leaves_nothing_to_kernels_before_it_is_told_to() -> None:
    drafter = Drafter(CONFIG)
    assert not any(layer.mlp.kernels for layer in drafter._layers())
    drafter.run_swiglu(True)
    assert all(layer.mlp.kernels for layer in drafter._layers())


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # what torch warns of while it compiles is no failed compilation
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.timeout(300)
def test_a_replica_proves_swiglu_s_kernels_and_trains_on_without_them_where_they_are_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, given = torch.device("cuda:0"), rows(tmp_path, 3)
    with on_device(device):
        ours = make_replica(tmp_path, device, "bfloat16")
        result = ours.warm_up("graph")
        assert (result.execution, result.swiglu_kernels) == (execution.GRAPH, True), result
        from remote_payload.train import swiglu_kernels

        right = swiglu_kernels.backward

        def wrong(between: Tensor, slope: Tensor, slopes: Tensor) -> None:
            right(between, slope, slopes)
            slopes[2, -60:] = 0.0

        monkeypatch.setattr(swiglu_kernels, "backward", wrong)
        plain = make_replica(tmp_path, device, "bfloat16")
        result = plain.warm_up("graph")
        assert (result.execution, result.swiglu_kernels) == (execution.GRAPH, False), result
        assert "a tile of slopes" in result.swiglu_kernels_reason
        monkeypatch.undo()
        for (loss, slope), (other, expected) in zip(
            run_rows(ours, given), run_rows(plain, given), strict=True
        ):
            assert loss == pytest.approx(other, rel=1e-3)
            assert float(torch.cosine_similarity(slope, expected, dim=0)) > 0.999
