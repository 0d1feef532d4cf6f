"""What a pipeline is measured with: targets at random, replicas, batches, all the trainer's own."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench.random_target import qwen3_config, random_target
from bench.shapes import Shape
from bench.step import config_of
from remote_payload.job import Job, parse_change
from remote_payload.tools.synthetic import random_rows
from remote_payload.train import execution
from remote_payload.train.batch import Batch, RowShape
from remote_payload.train.devices import DRAFTERS_FIRST, on_device
from remote_payload.train.flops import ForwardWork
from remote_payload.train.replica import Replica
from remote_payload.train.run_control import RunControl
from remote_payload.train.statistics import Statistics
from remote_payload.train.sync import Reduction
from remote_payload.train.target_layout import Layout, Packed, Padded
from remote_payload.train.target_pass import TargetPass
from remote_payload.train.target_shapes import PackedShape, PaddedShape


@dataclasses.dataclass(slots=True)
class Parts:
    """All that the sides are made of; a measurement takes some of the targets, and one set of replicas."""

    shape: Shape
    row_shape: RowShape
    batches: list[Batch]
    targets: list[TargetPass]
    work: ForwardWork
    """Of a target's pass."""


def make_parts(
    shape: Shape, devices: Sequence[torch.device], rows: int, target_execution: str = "auto"
) -> Parts:
    """A target on each of `devices`, warm, and batches of `rows` documents."""
    config = config_of(shape)
    row_shape = RowShape(
        token_budget=shape.context,
        anchors=shape.anchors,
        block_size=shape.block_size,
        mask_token_id=config.mask_token_id,
        gamma=7.0,
    )
    dtypes = [torch.bfloat16 if device.type == "cuda" else torch.float32 for device in devices]
    targets = [
        TargetPass(random_target(qwen3_config(shape), device, dtype, config.tap_layers), False)
        for device, dtype in zip(devices, dtypes, strict=True)
    ]
    longest = shape.context // rows
    layouts: list[Layout[Any]] = [
        Packed([PackedShape(shape.context, rows, longest)]),
        Padded([PaddedShape(rows, longest)]),
    ]

    def warm(number: int) -> None:
        with execution.WARM_UP_LOCK:
            targets[number].warm_up(target_execution, layouts)

    in_threads([(device, warm, number) for number, device in enumerate(devices)], RunControl())
    work = ForwardWork.of(targets[0].target)
    return Parts(shape, row_shape, random_batches(shape, row_shape, rows), targets, work)


def random_batches(shape: Shape, row_shape: RowShape, rows: int) -> list[Batch]:
    """Eight batches of `rows` documents that fill the token budget; a row of blocks to each."""
    generator = torch.Generator().manual_seed(1)
    length = shape.context // rows
    made = []
    for number, row in enumerate(random_rows(row_shape, shape.vocabulary, 8)):
        ids = torch.randint(0, shape.vocabulary - 1, (rows, length), generator=generator)
        made.append(
            Batch(
                sequence=number,
                epoch=0,
                bucket=0,
                samples=[],
                ids=ids,
                lengths=[length] * rows,
                row=row,
                weight=float(row.weights.sum()),
                supervised=shape.anchors,
                drawn=shape.anchors,
                documents=rows,
                covered=rows,
            )
        )
    return made


def make_replicas(
    parts: Parts, devices: Sequence[torch.device], wanted: str, changes: Sequence[str] = ()
) -> tuple[list[Replica], list[str], str]:
    """Warm replicas on `devices` that go in lockstep; their rungs, and how gradients are added up.

    `changes` are `key=value` for the job.
    """
    config = config_of(parts.shape)
    named = {
        "targets": [str(forward.target.device) for forward in parts.targets],
        "drafters": [str(device) for device in devices],
    }
    values: dict[str, Any] = dict(map(parse_change, changes))
    values |= {"target": "random", "dataset": "random", "mask_token_id": config.mask_token_id, **named}
    job = Job.from_mapping(values, "bench")
    made: dict[int, tuple[Replica, str]] = {}

    def build(number: int) -> None:
        device = devices[number]
        all_targets = [forward.target for forward in parts.targets]
        near = next((target for target in all_targets if target.device == device), all_targets[0])
        with on_device(device, priority=DRAFTERS_FIRST), execution.WARM_UP_LOCK:
            replica = Replica(
                number,
                device,
                job,
                config,
                parts.row_shape,
                Statistics(parts.shape.block_size, 1),
                near,
                place=reduction.place(number),
            )
            made[number] = replica, replica.warm_up(wanted).execution
            replica.synchronise()

    control = RunControl()
    reduction = Reduction(list(devices), control, job.reduction)
    with reduction.serving() as summed:
        in_threads([(device, build, number) for number, device in enumerate(devices)], control)
    replicas, rungs = zip(*(made[number] for number in range(len(devices))), strict=True)
    return list(replicas), list(rungs), summed.way


def in_threads(work: list[tuple[torch.device, Callable[[int], None], int]], control: RunControl) -> None:
    """Run each piece of work in a thread on its device; raises the first of their errors."""
    errors: list[BaseException] = []

    def guarded(device: torch.device, function: Callable[[int], None], number: int) -> None:
        try:
            with on_device(device):
                function(number)
                if device.type == "cuda":
                    torch.cuda.current_stream(device).synchronize()
        except BaseException as error:
            errors.append(error)
            control.abort()

    threads = [threading.Thread(target=guarded, args=each) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
