"""FlashAttention-4's own kernels on a Hopper GPU: proved, captured, and in whole steps of a replica."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from remote_payload.train import execution
from remote_payload.train.attention_choice import flash_errors
from remote_payload.train.attention_gate import Trial, refusal
from remote_payload.train.devices import on_device
from remote_payload.train.drafter import attend
from remote_payload.train.flash_attention import unavailable
from remote_payload.train.row_mask import FLASH, FLEX, AttentionSizes, RowMask
from tests.payload.recompiles import no_recompiles
from tests.payload.small_replica import make_replica, rows, run_rows

DEVICE = torch.device("cuda:0")
MISSING = unavailable(DEVICE, torch.bfloat16, 128) if torch.cuda.is_available() else "needs an NVIDIA GPU"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
    pytest.mark.timeout(300),
]


def sizes(**changes: int) -> AttentionSizes:
    given = {"context": 1024, "anchors": 64, "block_size": 16, "heads": 8, "kv_heads": 2, "head_dim": 128}
    return AttentionSizes(**given | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"head_dim": 64, "heads": 9, "kv_heads": 3},
        {"head_dim": 96},
        {"block_size": 8, "anchors": 128, "heads": 4, "kv_heads": 4},
        {"context": 8192, "anchors": 512},
    ],
)
def test_output_and_gradients_are_right_in_every_launch(changes: dict[str, int]) -> None:
    with on_device(DEVICE):
        assert refusal(flash_errors(sizes(**changes), DEVICE, torch.bfloat16, launches=50)) is None


def test_a_captured_pass_follows_masks_that_are_refilled_in_place() -> None:
    """In a worker thread; a replay of another row is as right as the pass that was captured."""
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with on_device(DEVICE):
                trial, other = (Trial(sizes(), DEVICE, torch.bfloat16, documents=n) for n in (1, 5))
                row_mask = RowMask(other.starts, other.anchors, sizes(), FLASH)
                inputs = (other.queries, other.keys, other.values)
                found: list[torch.Tensor] = []

                def passes() -> None:
                    out = attend(*inputs, row_mask.make())
                    found[:] = (out.detach(), *torch.autograd.grad(out, inputs, other.slope))

                wanted_starts, wanted_anchors = other.starts.clone(), other.anchors.clone()
                other.starts.copy_(trial.starts)
                other.anchors.copy_(trial.anchors)
                passes()
                graph = execution.Graph(passes, DEVICE)
                other.starts.copy_(wanted_starts)
                other.anchors.copy_(wanted_anchors)
                for _ in range(20):
                    graph.replay()
                    errors = [
                        float((one.float() - exact).norm() / exact.norm())
                        for one, exact in zip(found, other.exact, strict=True)
                    ]
                    assert max(errors) < 0.01, errors
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failures, failures


def test_steps_by_either_kernel_are_the_same_within_rounding(tmp_path: Path) -> None:
    given = rows(tmp_path, 8)
    with on_device(DEVICE):
        results = []
        for kind in (FLEX, FLASH):
            replica = make_replica(tmp_path, DEVICE, "bfloat16", attention=kind)
            warm = replica.warm_up("graph")
            assert (warm.execution, warm.attention) == ("graph", kind), warm
            with no_recompiles():
                results.append(run_rows(replica, given))
    for (loss, slope), (other, other_slope) in zip(*results, strict=True):
        assert loss == pytest.approx(other, rel=2e-2)
        assert float((slope - other_slope).norm() / slope.norm()) < 5e-2
