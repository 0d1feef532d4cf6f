"""A replica asks its device for the same memory whatever row it runs (SpecForge's "late OOM").

Varied rows fragment an allocator until, hours later, a request does not fit any more. That peak memory is
flat follows from every operation making tensors of the same shapes in the same order, which a CPU can show.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from remote_payload.train import execution, objective
from remote_payload.train.batch import empty_row
from remote_payload.train.objective import FROM_DISTRIBUTIONS, FROM_LABELS
from remote_payload.train.replica import Replica
from tests.payload.small_replica import SHAPE, load, make_replica, rows

CPU = torch.device("cpu")


class Shapes(TorchDispatchMode):
    """Notes the shape and type of every tensor that an operation makes, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, tuple[int, ...], torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, tuple | list) else [result]:
            if isinstance(made, Tensor):
                self.made.append((func.overloadpacket.__name__, tuple(made.shape), made.dtype))
        return result


@pytest.fixture
def replica(tmp_path: Path, request: pytest.FixtureRequest) -> Replica:
    made = make_replica(tmp_path, CPU, "bfloat16", objective=getattr(request, "param", "ce"))
    made.use(execution.EAGER)
    return made


def test_a_step_makes_the_same_tensors_for_a_short_a_long_and_an_empty_row(
    tmp_path: Path, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objective, "MOST_ROWS", 70)  # seven chunks of logits
    given = rows(tmp_path, 6)
    assert len({tokens for _, tokens in given}) > 3
    made = []
    for number, (row, tokens) in enumerate([*given, (empty_row(SHAPE), 0)]):
        load(replica, row, tokens, number)
        with Shapes() as shapes:
            replica._forward_backward()  # as compiled and captured: without the host's word on slots in use
            replica.weights.collect(replica._gradients, first=True)
            replica.step(100.0, 1e-3)
        made.append(shapes.made)
    assert len(made[0]) > 400 and all(other == made[0] for other in made)


@pytest.mark.parametrize("replica", [*FROM_LABELS, *FROM_DISTRIBUTIONS], indirect=True)
def test_forward_and_backward_of_a_whole_replica_read_no_value(replica: Replica) -> None:
    """TorchSpec #74 for the whole row, from the embedding to the statistics."""
    before = replica.statistics.clone()
    with FakeTensorMode(allow_non_fake_inputs=True):
        replica._forward_backward()
        with pytest.raises(DataDependentOutputException):  # the measure: reading one does raise
            bool(replica._gradients[0].sum())
    assert replica.statistics.equal(before)  # nothing was computed
