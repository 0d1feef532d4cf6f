"""The threads of a run and what flows between them.

    reader -> [batches] -> target 0..N-1 -> [features] -> drafter replica 0..M-1
                                 evaluator (beside target 0)

Each function here is the life of one thread. Queues are bounded and ordered, so that a run is a function of
its seed; replica r takes the batches whose number is r modulo M, in order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from typing import Any

import torch

from remote_payload.train import execution
from remote_payload.train.batch import Batch
from remote_payload.train.dataset import DataError
from remote_payload.train.devices import compute_dtype, dtype_name, on_device, turn
from remote_payload.train.features import Features
from remote_payload.train.flops import ForwardWork
from remote_payload.train.objective import needs_teacher
from remote_payload.train.progress import gib
from remote_payload.train.run import Run
from remote_payload.train.run_control import ThreadStatus
from remote_payload.train.target import Target
from remote_payload.train.target_layout import Packed, Padded
from remote_payload.train.target_pass import TargetPass
from remote_payload.train.warm_up import WarmUp


def read(run: Run, status: ThreadStatus, first: int = 0) -> None:
    """The reader: batches from number `first` of the run on, as many as it has steps for.

    Raises DataError when a whole epoch, or all that the run has steps for, holds nothing to learn from.
    """
    status.enter("reading")
    skipped = run.maker.skipped
    named = {reason: len(samples) for reason, samples in skipped.first.items()}
    left = max(0, run.steps * run.rows_per_step - first)
    judged = run.batches_per_epoch if first else min(left, run.batches_per_epoch)
    drawn = 0
    batches = run.maker.batches_from(
        run.plan, first, lambda plan: run.progress.set_plan(plan.counts(len(run.progress.buckets)))
    )
    for number, batch in enumerate(itertools.islice(batches, left), 1):
        name_unusable(run, named)
        drawn += batch.drawn
        if not drawn and number == judged:
            raise DataError(f"{run.job.dataset}: none of its samples can be used: {skipped}")
        status.enter("waiting for the targets", bucket=batch.bucket)
        run.batches.put(batch.sequence, batch)
        status.enter("reading")
        if run.stopped:
            break
    run.batches.close()


def name_unusable(run: Run, named: dict[str, int]) -> None:
    """Say which samples content gave away since `named` (how many of each reason were said) was updated."""
    skipped = run.maker.skipped
    for reason, samples in skipped.first.items():
        for sample in samples[named.get(reason, 0) :]:
            run.log(f"Left out sample {sample}: {reason}")
            run.events.write("unusable", sample=sample, reason=reason)
        named[reason] = len(samples)
    run.progress.update(skipped=dict(skipped.count))


def run_target(
    run: Run, number: int, status: ThreadStatus, loading: contextlib.AbstractContextManager[Any]
) -> None:
    """A target: load, then turn batches into features until there are no more.

    `loading` lets one target load at a time, so that host memory holds one copy and not N, and nobody
    captures or compiles while transformers loads a model, which patches torch for every thread.
    """
    device = torch.device(status.device)
    with on_device(device):
        status.enter("waiting for its turn to load")
        with loading:
            run.control.check()
            status.enter("loading")
            target = load_target(run, number, device)
            forward = TargetPass(target, needs_teacher(run.job), number)
            work = ForwardWork.of(target, needs_teacher(run.job))
            if run.cache is None:
                status.enter("waiting for its turn to warm up")
                with execution.WARM_UP_LOCK:
                    status.enter("warming up")
                    warm_target(run, number, forward)
        run.targets[number].give(target)  # only now, so that no replica is ready before all targets are
        status.enter("waiting for batches")
        while (batch := run.batches.get()) is not None and not run.stopped:
            status.enter(
                "forward",
                step=batch.sequence // run.rows_per_step,
                bucket=batch.bucket,
                samples=batch.samples,
            )
            features = compute_features(run, forward, work, batch)
            status.enter("waiting for the drafters")
            replica, place = batch.sequence % run.replicas, batch.sequence // run.replicas
            run.features[replica].put(place, features)
            status.enter("waiting for batches")


def load_target(run: Run, number: int, device: torch.device) -> Target:
    """Load one target and say so."""
    start = time.perf_counter()
    dtype = compute_dtype(run.job.target_dtype, device)
    run.log(f"Target {number} on {device}...")
    if run.loaded is not None and run.loaded.device == device:
        target, run.loaded = run.loaded, None
    else:
        target = Target.load(
            run.model,
            run.config.tap_layers,
            device=device,
            dtype=dtype,
            attention=run.job.target_attention,
            trust_remote_code=run.job.trust_remote_code,
        )
    if number == 0 and run.evaluation is not None:
        run.evaluation.check(target)
    if needs_teacher(run.job):
        target.check_last_hidden()
    run.events.write(
        "target",
        target=number,
        device=str(device),
        model=str(run.model),
        layers=run.config.target_layers,
        width=run.config.width,
        vocabulary=run.config.vocabulary,
        taps=list(run.config.tap_layers),
        dtype=dtype_name(dtype),
        attention=target.attention,
        load_s=round(time.perf_counter() - start, 2),
    )
    return target


def warm_target(run: Run, number: int, forward: TargetPass) -> None:
    """Capture the target's graphs, and run its widest batches: what does not fit is known now.

    The order is random, so the widest batch may come late, after hours (SpecForge's "late OOM").
    """
    device, plan = forward.target.device, run.plan(0)
    packed, padded = run.maker.target_shapes(plan, run.job.max_batch)
    result = forward.warm_up(run.job.target_execution, [Packed(packed), Padded(padded)], run.control.check)
    say_target_ready(run, number, forward, result)
    for rows, tokens in run.maker.widest(plan, run.job.max_batch):
        run.control.check()
        with turn(device):
            forward.packed(torch.zeros((rows, tokens), dtype=torch.int64), [tokens] * rows)


def say_target_ready(run: Run, number: int, forward: TargetPass, result: WarmUp) -> None:
    """What a target's warm-up decided, and why."""
    run.events.write(
        "target_ready",
        target=number,
        execution=result.execution,
        reason=result.reason,
        warmup_s=round(result.seconds, 2),
        eager_pass_s=result.eager_step_s,
        graph_pass_s=result.step_s.get(result.execution) if forward.layout else None,
        layout=forward.layout and forward.layout.name,
        shapes=[dataclasses.asdict(shape) for shape in forward.layout.shapes] if forward.layout else [],
        graphs_gib=forward.gib,
        apart=forward.apart,
    )
    for down in result.steps_down:
        run.events.write("step_down", target=number, old=down.old, new=down.new, reason=down.reason)
        run.log(f"Target {number}: {down.old} given up for {down.new}: {down.reason}")
    line = f"Target {number}: {result.execution} ({result.reason}); warm-up {result.seconds:.1f} s"
    if forward.layout is not None:
        times = ", ".join(f"{rung} {seconds:.3f} s" for rung, seconds in result.step_s.items())
        line += f"; {len(forward.layout.shapes)} graphs of {forward.layout.name} documents, {forward.gib} GiB"
        line += f"; the widest pass: {times}"
    run.log(line)


def compute_features(run: Run, forward: TargetPass, work: ForwardWork, batch: Batch) -> Features:
    """The features of a batch, from the cache where it has them; `work` is what a pass takes."""
    device = forward.target.device
    cuda = device.type == "cuda"
    pinned = any(name.startswith("cuda") for name in run.job.drafters)
    if run.cache is not None and (kept := run.cache.read(batch.samples, pinned=pinned)) is not None:
        return Features(batch, kept, None)
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    with turn(device):
        packed = forward.packed(batch.ids, batch.lengths)
    run.useful.add(work.flops(batch.lengths))
    if run.cache is not None:
        run.cache.store(batch.samples, batch.lengths, packed)
        kept = run.cache.read(batch.samples, pinned=pinned)
        assert kept is not None
        return Features(batch, kept, None)
    if not cuda:
        return Features(batch, packed, None)
    ready = torch.cuda.Event()
    ready.record()
    run.progress.target_peak(batch.bucket, gib(torch.cuda.max_memory_allocated(device)))
    return Features(batch, packed, ready)
