"""A target and drafters at work together: how many tokens a second, and who waits for whom.

    python -m bench.pipeline [--shape 8b|4b|tiny] [--targets cuda:0,...] [--drafters cuda:0,...] [--batches N]
                             [--rows B] [--json FILE]

Targets (at random, Qwen3 of the shape's width and depth) turn batches into features, replicas take them in
order as in a training run: `Target`, `Replica`, `OrderedQueue` and `Reduction` are the trainer's own, each in
a thread and a stream. First each side is timed alone, on features that lie ready and for features that nobody
takes. Then both run together. A side's idle share is the time in which it had no work on its device; a GPU's
is the time in which none of those on it had any. On a CPU the sides take turns: the numbers only show life.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from bench.shapes import SHAPES, Shape
from bench.step import config_of
from remote_payload.job import Job
from remote_payload.tools.synthetic import random_rows
from remote_payload.train import execution
from remote_payload.train.batch import Batch, RowShape
from remote_payload.train.devices import on_device, turn
from remote_payload.train.features import Features, pack
from remote_payload.train.fused_norms import fuse_norms
from remote_payload.train.replica import Replica
from remote_payload.train.run_control import OrderedQueue, RunControl
from remote_payload.train.statistics import Statistics
from remote_payload.train.sync import Contribution, Reduction
from remote_payload.train.target import Target

QUEUE_DEPTH = 4


class Busy:
    """When one worker had work on its device: from its first to its last operation for each batch."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: list[Any] = []

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        """Around the work for a batch, on the worker's stream."""
        self._mark()
        yield
        self._mark()

    def _mark(self) -> None:
        if self.device.type != "cuda":
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def spans(self) -> list[tuple[float, float]]:
        """Beginning and end of each batch in seconds, on the clock of the device."""
        if self.device.type != "cuda":
            times = self._marks
        else:
            torch.cuda.synchronize(self.device)
            times = [BASE[self.device].elapsed_time(event) / 1e3 for event in self._marks]
        return list(zip(times[::2], times[1::2], strict=True))


BASE: dict[torch.device, torch.cuda.Event] = {}
"""An event on each GPU that its clock starts from."""


@dataclasses.dataclass(slots=True)
class Parts:
    """All that the sides are made of."""

    shape: Shape
    targets: list[Target]
    replicas: list[Replica]
    batches: list[Batch]


def random_target(shape: Shape, device: torch.device, taps: tuple[int, ...]) -> Target:
    """A Qwen3 with random weights, made on `device`; main thread only, since it sets torch's default type."""
    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.target_layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=True,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
    try:
        with torch.device(device):
            model: Any = Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    if device.type == "cuda":
        fuse_norms(model)  # as `Target.load` does
    return Target(model.to(device), taps)


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


def compute(target: Target, batch: Batch) -> Features:
    """What a target's thread does for a batch."""
    with turn(target.device):
        packed = pack(target.features(batch.ids.to(target.device, non_blocking=True)), batch.lengths)
    if target.device.type != "cuda":
        return Features(batch, packed, None)
    ready = torch.cuda.Event()
    ready.record()
    return Features(batch, packed, ready)


def run(parts: Parts, count: int, *, targets: bool, drafters: bool) -> dict[str, list[Busy]]:
    """`count` batches through both sides, or through one of them."""
    control = RunControl()
    replicas = parts.replicas
    queues = [OrderedQueue[Features](QUEUE_DEPTH, control) for _ in replicas]
    reduction = Reduction([replica.device for replica in replicas], control)
    busy = {
        "targets": [Busy(target.device) for target in parts.targets] if targets else [],
        "drafters": [Busy(replica.device) for replica in replicas] if drafters else [],
    }
    ready = [compute(parts.targets[0], batch) for batch in parts.batches[:2]]
    for device in {busy.device for side in busy.values() for busy in side if busy.device.type == "cuda"}:
        torch.cuda.synchronize(device)
        with torch.cuda.device(device):
            BASE[device] = torch.cuda.Event(enable_timing=True)
            BASE[device].record()

    def target_work(number: int) -> None:
        target = parts.targets[number]
        held: collections.deque[Features] = collections.deque(maxlen=QUEUE_DEPTH)
        for sequence in range(number, count, len(parts.targets)):
            with busy["targets"][number].work():
                features = compute(target, parts.batches[sequence % len(parts.batches)])
            held.append(features)
            if drafters:
                queues[sequence % len(replicas)].put(sequence // len(replicas), features)
            elif len(held) == QUEUE_DEPTH and held[0].ready is not None:
                held[0].ready.synchronize()  # as a full queue would make it wait

    def drafter_work(number: int) -> None:
        replica = replicas[number]
        for turn_number in range(count // len(replicas)):
            features = queues[number].get() if targets else ready[turn_number % 2]
            assert features is not None
            if features.ready is not None:
                features.ready.wait()
            with busy["drafters"][number].work():
                with turn(replica.device):
                    replica.load(features, features.batch.row)
                    replica.run_row(features.batch.row, 0, first=True)
                agreed, _ = reduction.reduce(
                    number, Contribution(replica.weights, replica.statistics, features.batch.weight)
                )
                replica.step(agreed.weight, 1e-4)

    work: list[tuple[torch.device, Callable[[int], None], int]] = []
    if targets:
        work += [(target.device, target_work, n) for n, target in enumerate(parts.targets)]
    if drafters:
        work += [(replica.device, drafter_work, n) for n, replica in enumerate(replicas)]
    with reduction.serving():
        in_threads(work, control)
    return busy


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


def measure(parts: Parts, count: int) -> dict[str, Any]:
    """Both sides alone and together."""
    numbers: dict[str, Any] = {}
    for name, sides in (
        ("warm", {"targets": True, "drafters": True}),
        ("targets alone", {"targets": True, "drafters": False}),
        ("drafters alone", {"targets": False, "drafters": True}),
        ("together", {"targets": True, "drafters": True}),
    ):
        busy = run(parts, len(parts.replicas) * 2 if name == "warm" else count, **sides)
        spans = {side: [each.spans() for each in workers] for side, workers in busy.items()}
        every = [span for workers in spans.values() for worker in workers for span in worker]
        whole = max(end for _, end in every) - min(begin for begin, _ in every)
        numbers[name] = {
            "batch_ms": whole / count * 1e3,
            "tokens_per_s": parts.shape.context * count / whole,
            "idle": {
                side: [1 - sum(end - begin for begin, end in worker) / whole for worker in workers]
                for side, workers in spans.items()
                if workers
            },
        }
        by_device: dict[str, list[tuple[float, float]]] = {}
        for side, workers in busy.items():
            for each, worker in zip(workers, spans[side], strict=True):
                by_device.setdefault(str(each.device), []).extend(worker)
        numbers[name]["idle"] |= {device: 1 - covered(on) / whole for device, on in by_device.items()}
    del numbers["warm"]
    return numbers


def covered(spans: list[tuple[float, float]]) -> float:
    """Seconds in which at least one of the spans is going on."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "cuda:0" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--shape", choices=list(SHAPES), default="4b")
    parser.add_argument("--tiny", action="store_const", dest="shape", const="tiny", help="--shape tiny")
    parser.add_argument("--device", help="of one target and one drafter")
    parser.add_argument("--targets", default=default, help="devices, separated by commas")
    parser.add_argument("--drafters", default=default, help="devices, separated by commas")
    parser.add_argument("--execution", default="auto", help="rung of the ladder for the drafters")
    parser.add_argument("--batches", type=int, default=24)
    parser.add_argument("--rows", type=int, default=4, help="documents in a batch")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.device:
        arguments.targets = arguments.drafters = arguments.device
    shape = SHAPES[arguments.shape]
    targets, drafters = (names.split(",") for names in (arguments.targets, arguments.drafters))
    config = config_of(shape)
    row_shape = RowShape(
        token_budget=shape.context,
        anchors=shape.anchors,
        block_size=shape.block_size,
        mask_token_id=config.mask_token_id,
        gamma=7.0,
    )
    values = {"target": "random", "dataset": "random", "mask_token_id": config.mask_token_id}
    job = Job.from_mapping(values | {"targets": targets, "drafters": drafters}, "bench")
    parts = Parts(
        shape,
        [random_target(shape, torch.device(name), config.tap_layers) for name in targets],
        [],
        random_batches(shape, row_shape, arguments.rows),
    )
    made: dict[int, Replica] = {}
    rungs: list[str] = []

    def build(number: int) -> None:
        device = torch.device(drafters[number])
        near = next((t for t in parts.targets if t.device == device), parts.targets[0])
        with execution.WARM_UP_LOCK:
            replica = Replica(
                number,
                device,
                job,
                config,
                row_shape,
                Statistics(shape.block_size, 1),
                near,
                place=reduction.place(number),
            )
            rungs.append(replica.warm_up(arguments.execution).execution)
        made[number] = replica

    control = RunControl()
    reduction = Reduction([torch.device(name) for name in drafters], control)
    with reduction.serving() as summed:
        in_threads([(torch.device(name), build, number) for number, name in enumerate(drafters)], control)
    parts.replicas += [made[number] for number in range(len(drafters))]
    result = {"shape": arguments.shape, "targets": targets, "drafters": drafters, "execution": rungs}
    result |= {"reduction": summed.way}
    result |= {"torch": torch.__version__, "batches": arguments.batches} | measure(parts, arguments.batches)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + os.linesep)
    print(f"{'what':<16}{'batch ms':>10}{'tokens/s':>11}  idle")
    for name in ("targets alone", "drafters alone", "together"):
        found = result[name]
        idle = ", ".join(
            f"{key} {' '.join(f'{share:.0%}' for share in (value if isinstance(value, list) else [value]))}"
            for key, value in found["idle"].items()
        )
        print(f"{name:<16}{found['batch_ms']:>10.1f}{found['tokens_per_s']:>11,.0f}  {idle}")


if __name__ == "__main__":
    main()
