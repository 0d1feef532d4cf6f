"""The evaluator: a thread that decodes held-out prompts beside training, and what that costs the drafters.

The drafters stop for a copy of their weights on their own device and for nothing else; the copy is taken by
the evaluator's stream when it is done. When snapshots come faster than they are evaluated, those in between
are left out and named, since each holds a drafter's memory; the last one never is.

Evaluation shares a device with target 0, and on one GPU with a drafter. What drafters lose by it is measured
by their pace: how much longer their steps took than those between evaluations.

It is also the one thing whose memory no warm-up has tried, and that a run can do without for a while. So one
that the GPU has no memory for is left out, with an alarm that says what to do, and the next one is tried like
any other. The last one begins when the drafters have ended and their memory is free.
"""

from __future__ import annotations

import contextlib
import gc
import queue
import time
from typing import Any

import torch
from torch import Tensor

from remote_payload import crash
from remote_payload.train import execution
from remote_payload.train.alarm import OUT_OF_MEMORY
from remote_payload.train.checkpoint import on_host
from remote_payload.train.devices import on_cores, on_device, out_of_memory
from remote_payload.train.evaluation import Report, drafter_with
from remote_payload.train.replica import Replica
from remote_payload.train.run import Run, Snapshot
from remote_payload.train.run_control import ThreadStatus
from remote_payload.train.target import Target
from remote_payload.train.verdict import judge, leave_unjudged

MOST_WAITING = 2
"""Snapshots that may wait for the evaluator; only the one of the last step may come on top."""

FEWEST_STEPS = 3
"""Steps between two evaluations that make a pace to compare with."""


def evaluator_takes(run: Run, step: int) -> bool:
    """Whether the evaluator has room for the drafter after `step`; says so when it has none."""
    if run.to_evaluate.qsize() < MOST_WAITING or step == run.steps:
        return True
    run.log(f"Step {step} is not evaluated: {MOST_WAITING} earlier ones still wait; raise eval_every")
    run.events.write("eval_skipped", step=step, waiting=MOST_WAITING)
    return False


def offer_snapshot(run: Run, replica: Replica, step: int) -> None:
    """Copy the drafter's weights after `step` for the evaluator; in main memory where the device is full."""
    if run.evaluation is None:
        return
    start = time.perf_counter()
    weights: dict[str, Tensor] = {}
    with contextlib.suppress(torch.OutOfMemoryError):
        weights = replica.snapshot()
    weights, ready = weights or on_host(replica.weights.named(replica.weights.values)), None
    if replica.device.type == "cuda":
        ready = torch.cuda.Event()
        ready.record()
    seconds = time.perf_counter() - start
    run.to_evaluate.put(Snapshot(step, weights, ready, seconds, run.progress.values["tau_estimate"]))


def evaluate(run: Run, status: ThreadStatus) -> None:
    """The evaluator's life: decode the held-out prompts with every snapshot it is given, until None comes.

    A run that is asked to stop does not wait for an evaluation.
    """
    device = torch.device(status.device)
    status.enter("waiting for the target to load")
    target = run.targets[0].wait()
    status.enter("waiting for a drafter")
    with on_device(device):
        _evaluate_snapshots(run, status, target)


def _evaluate_snapshots(run: Run, status: ThreadStatus, target: Target) -> None:
    pace, device = Pace(run), torch.device(status.device)
    while (snapshot := _next_snapshot(run)) is not None:
        last = snapshot.step == run.steps
        if last:
            status.enter("waiting for the drafters to end")
            _next_snapshot(run)  # None: after the last step nobody else works
            _give_back(device)
        pace.begin()
        report, refused = None, None
        with on_cores(target.device, None if last else 1):
            try:
                report = _decode_prompts(run, status, target, snapshot)
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                refused = crash.one_line(error)
        lost = pace.lost_s()
        if refused is not None:  # and the error is gone, whose frames hold what was decoded
            target.forget_taps()
            _give_back(device)
            _leave_out(run, snapshot.step, f"{device} has no memory for it ({refused})")
        elif report is None:
            run.log(f"Evaluation of step {snapshot.step} given up: the run was asked to stop")
            return
        else:
            report.record["drafter_wait_s"] = None if lost is None else round(lost + snapshot.seconds, 3)
            report.record["tau_estimate"] = snapshot.tau_estimate
            _take_in(run, snapshot.step, report)
        if last:
            return
        status.enter("waiting for a drafter")


def _take_in(run: Run, step: int, report: Report) -> None:
    """Say what an evaluation found, and judge it."""
    record = report.record
    run.reports.append(report)
    run.events.write("eval", **record)
    run.progress.update(tau=round(report.tau, 4), tau_step=step)
    run.log(evaluation_line(record))
    if report.not_lossless:
        run.events.write(
            "alarm", reason="not_lossless", step=step, texts=len(report.not_lossless),
            detail=report.not_lossless[0],
        )  # fmt: skip
        run.log(not_lossless_line(step, report))
    judge(run, report)


def _leave_out(run: Run, step: int, why: str) -> None:
    """Count an evaluation that had no memory, and say what to do."""
    run.unevaluated += 1
    run.events.write("alarm", reason=OUT_OF_MEMORY, step=step, skipped=run.unevaluated, detail=why)
    run.log(
        f"ALARM: step {step} is not evaluated, {why}; training goes on, and the next evaluation is tried"
        f" ({run.unevaluated} left out so far). Where it stays so: a lower eval_max_new_tokens, shorter or"
        " fewer held-out prompts (held_out, eval_prompts), or another GPU first in targets; a resumed run may"
        " change all of these"
    )
    leave_unjudged(run, step)


def _give_back(device: torch.device) -> None:
    """Give unused memory back to the device, where others can have it."""
    gc.collect()
    if device.type == "cuda":
        with execution.CAPTURE_LOCK:  # it waits for the devices, as entering a capture does
            torch.cuda.empty_cache()


def evaluation_line(record: dict[str, Any]) -> str:
    """One evaluation for the log, with what it cost."""
    lost = record["drafter_wait_s"]
    cost = "" if lost is None else f", of which the drafters lost {lost:.1f} s"
    tied = record["diverged_allowed"]
    ties = f", {tied} of them but for ties" if tied else ""
    return (
        f"Evaluation of step {record['step']}: tau {record['tau']:.3f} (macro {record['tau_macro']:.3f}) on"
        f" {record['prompts']} held-out prompts, {record['text_equal'] + tied} texts the target's own{ties};"
        f" {record['tokens_per_s']:.1f} tokens/s (plain decoding {record['plain_tokens_per_s']:.1f});"
        f" took {record['eval_s']:.1f} s{cost}"
    )


def not_lossless_line(step: int, report: Report) -> str:
    """What it means when a text is not the target's own, for the log."""
    count = len(report.not_lossless)
    return (
        f"ALARM at step {step}: decoding is not lossless, {count} of {report.record['prompts']} texts are not"
        f" the target's own. The first: {report.not_lossless[0]}. tau counts tokens that serving would"
        " refuse; this is a fault of the code or of transformers' cache for this target, not of the drafter"
    )


class Pace:
    """Seconds a step of training takes, between evaluations and during one; of the leading replica."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._end = self._begin = self._now()
        self._usual: float | None = None

    def begin(self) -> None:
        """An evaluation begins: the steps since the last one ended were undisturbed."""
        self._begin = self._now()
        seconds, steps = self._since(self._end)
        if steps >= FEWEST_STEPS:
            self._usual = seconds / steps

    def lost_s(self) -> float | None:
        """It ended: seconds that the steps meanwhile took too long; None without a pace to compare with."""
        seconds, steps = self._since(self._begin)
        self._end = self._now()
        if not steps:
            return 0.0 if self._run.step in (0, self._run.steps) else None
        return None if self._usual is None else max(0.0, seconds - steps * self._usual)

    def _now(self) -> tuple[float, int]:
        return self._run.training_s, self._run.step

    def _since(self, then: tuple[float, int]) -> tuple[float, int]:
        seconds, step = self._now()
        return seconds - then[0], step - then[1]


def _decode_prompts(run: Run, status: ThreadStatus, target: Target, snapshot: Snapshot) -> Report | None:
    """One evaluation of a snapshot; None when the run was asked to stop meanwhile."""

    def go_on(done: int, of: int) -> bool:
        status.enter(f"evaluating {done}/{of}", step=snapshot.step)
        run.control.check()
        return not run.control.stop.is_set()

    assert run.evaluation is not None
    run.log(f"Evaluating step {snapshot.step} on held-out prompts...")
    status.enter("evaluating", step=snapshot.step)
    if snapshot.ready is not None:
        snapshot.ready.synchronize()
    try:
        drafter = drafter_with(run.config, snapshot.weights, target.device, target.dtype)
        if snapshot.ready is not None:  # the snapshot's memory goes back to a stream that is not this one
            torch.cuda.current_stream(target.device).synchronize()
    finally:
        snapshot.weights.clear()
    return run.evaluation.run(target, drafter, snapshot.step, go_on)


def _next_snapshot(run: Run) -> Snapshot | None:
    while not run.control.stop.is_set():
        run.control.check()
        with contextlib.suppress(queue.Empty):
            return run.to_evaluate.get(timeout=0.5)
    return None
