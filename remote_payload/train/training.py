"""The life of a drafter replica's thread: build, warm up in turn, then train in lockstep with the others.

Replica 0 leads: it reads the device's numbers for everybody at most once a second, writes checkpoints and
hands snapshots to the evaluator. What all must do together travels with the gradient.
"""

from __future__ import annotations

import dataclasses
import time

import torch
from torch import Tensor

from remote_payload.train import execution
from remote_payload.train.batch import Batch, empty_row
from remote_payload.train.bottleneck import Waiting
from remote_payload.train.copy_trial import prove_copies, senders
from remote_payload.train.devices import DRAFTERS_FIRST, on_device, turn
from remote_payload.train.evaluating import evaluator_takes, offer_snapshot
from remote_payload.train.flops import step_flops
from remote_payload.train.nonfinite import say_nonfinite
from remote_payload.train.progress import rounded
from remote_payload.train.reducing import say_choice
from remote_payload.train.replica import Replica
from remote_payload.train.resume import restore
from remote_payload.train.row_mask import DENSE
from remote_payload.train.run import Run
from remote_payload.train.run_control import ThreadStatus
from remote_payload.train.saving import save
from remote_payload.train.schedule import learning_rate
from remote_payload.train.step_clock import StepClock
from remote_payload.train.sync import Contribution
from remote_payload.train.warm_up import StepDown


def run_drafter_replica(run: Run, number: int, status: ThreadStatus) -> None:
    """A drafter replica: build, warm up in turn, then train step by step in lockstep with the others."""
    device = torch.device(status.device)
    with on_device(device, priority=DRAFTERS_FIRST):
        status.enter("waiting for the targets to load")
        # All of them: while transformers loads a model, what it patches in torch is patched for every thread.
        targets = [target.wait() for target in run.targets]
        target = next((t for t in targets if t.device == device), targets[0])
        status.enter("waiting for NCCL's trial")
        place = run.reduction.place(number)
        if number == 0:
            say_choice(run, run.reduction.choice())
        status.enter("building")
        replica = Replica(
            number,
            device,
            run.job,
            run.config,
            run.shape,
            run.statistics,
            target,
            init_from=run.init_from,
            place=place,
        )
        status.enter("waiting for its turn to warm up")
        with execution.WARM_UP_LOCK:
            run.control.check()
            status.enter("warming up")
            with execution.CAPTURE_LOCK:  # it waits for both devices
                prove_copies(device, senders(run.job, device))
            warm_up(run, replica)
        if run.resume_from is not None:  # after the warm-up, whatever that did to the optimizer
            status.enter("loading")
            restore(replica, run.resume_from)
        run.ready[number].give(True)
        for other in run.ready:
            other.wait()
        if number == 0:
            run.progress.phase = "training"
            begin(run, replica, status)
        train(run, replica, status)
    run.reduction.close()
    if run.stopped:
        run.batches.close()
    run.features[number].close()


def begin(run: Run, replica: Replica, status: ThreadStatus) -> None:
    """What the leading replica does before the first step: the evaluation that is still owed.

    Of a new run, that before training. Of a resumed one, that of its checkpoint: a kill may have cut it off.
    """
    left = run.steps - run.first_step
    run.log(f"Training {left} steps of {run.rows_per_step} rows" if left else "No step is left to train")
    if run.resume_from is None:
        if run.init_from is not None and run.evaluates(0) and run.checkpoints.keeps_best:
            status.enter("saving")
            save(run, replica, 0, last=False, awaited=True)
        offer_snapshot(run, replica, 0)
    elif run.evaluates(run.first_step) and run.checkpoints.tau(run.first_step) is None:
        run.checkpoints.expect(run.first_step)
        offer_snapshot(run, replica, run.first_step)


def warm_up(run: Run, replica: Replica) -> None:
    """Warm one replica up, and say what was decided and why."""
    result = replica.warm_up(run.job.execution)
    run.eager_step_s, run.compiled_step_s = result.eager_step_s, result.compiled_step_s
    run.progress.update(execution=result.execution)
    run.events.write(
        "compile",
        replica=replica.number,
        execution=result.execution,
        reason=result.reason,
        warmup_s=round(result.seconds, 2),
        eager_step_s=result.eager_step_s,
        compiled_step_s=result.compiled_step_s,
        graph_step_s=result.step_s.get(execution.GRAPH),
        attention=result.attention,
        attention_reason=result.attention_reason,
        loss_kernels=result.loss_kernels,
        loss_kernels_reason=result.loss_kernels_reason,
        swiglu_kernels=result.swiglu_kernels,
        swiglu_kernels_reason=result.swiglu_kernels_reason,
        fp8=run.job.fp8,
    )
    for down in result.steps_down:
        say_step_down(run, replica, down)
    run.events.write(
        "ready",
        replica=replica.number,
        device=str(replica.device),
        parameters=replica.parameters,
        warmup_s=round(result.seconds, 2),
    )
    times = [f"{rung} {seconds:.3f} s" for rung, seconds in result.step_s.items()]
    if result.attention != DENSE:
        run.log(f"Replica {replica.number}: {result.attention} attention ({result.attention_reason})")
    if replica.device.type == "cuda" and result.execution != execution.EAGER:
        for what, ours, why in (
            ("the loss", result.loss_kernels, result.loss_kernels_reason),
            ("SwiGLU", result.swiglu_kernels, result.swiglu_kernels_reason),
        ):
            ways = "our own kernels" if ours else "the compiler's"
            run.log(f"Replica {replica.number}: {what} by {ways} ({why})")
    small = "" if run.job.fp8 == "none" else f", fp8 = {run.job.fp8!r}"
    run.log(
        f"Replica {replica.number}: {result.execution} ({result.reason}){small}; a step: {', '.join(times)}"
    )
    run.log(
        f"Replica {replica.number} ready on {replica.device}: {replica.parameters:,} parameters,"
        f" warm-up {result.seconds:.1f} s"
    )


def train(run: Run, replica: Replica, status: ThreadStatus) -> None:
    """All steps of one replica."""
    clock = StepClock(run.first_step, run.progress.tokens)
    if replica.number == 0:
        run.useful.share()  # the next answer is of the steps alone
    graphs = execution.compiled_graphs()
    reported = run.first_step
    leads = replica.number == 0
    began = time.monotonic() - run.training_s
    for step in range(run.first_step, run.steps):
        rows, weight = run_rows(run, replica, status, step)
        run.trained.extend((step + 1, batch) for batch, _ in rows)
        started = time.perf_counter()
        status.enter("waiting for the other replicas", step=step)
        agreed, statistics = run.reduction.reduce(
            replica.number,
            Contribution(
                replica.weights,
                replica.statistics,
                weight,
                stop=run.control.stop.is_set(),
                checkpoint=leads and run.control.checkpoint.is_set(),
                report=leads and (clock.due() or step in (run.first_step, run.steps - 1)),
            ),
        )
        status.enter("step", step=step)
        rate = learning_rate(step, run.steps, run.job)
        replica.step(agreed.weight, rate)
        done = step + 1
        if agreed.report or agreed.stop:
            replica.statistics.zero_()
        if leads:
            run.step, run.training_s = done, time.monotonic() - began
            run.progress.update(step=done, epoch=round(done * run.rows_per_step / run.batches_per_epoch, 4))
        for batch, seconds in rows:
            run.progress.row_done(batch, seconds + (time.perf_counter() - started) / len(rows))
            run.useful.add(step_flops(run.config, batch.tokens, batch.drawn, batch.pairs))
        if leads and (agreed.report or agreed.stop):
            report(run, replica, status, statistics, clock, rate, done - reported, rows)
            reported = done
            count_recompiles(run, replica, graphs)
        leave_compiled(run, replica, graphs)
        if leads:
            for request, made in (("stop", agreed.stop), ("checkpoint", agreed.checkpoint)):
                if made:
                    run.events.write("request", request=request, step=done)
        last = agreed.stop or done == run.steps
        every = run.job.checkpoint_every
        evaluates = leads and run.evaluates(done) and not agreed.stop and evaluator_takes(run, done)
        due = last or agreed.checkpoint or (bool(every) and done % every == 0)
        if leads and (due or (evaluates and run.checkpoints.keeps_best)):
            status.enter("saving")
            run.control.checkpoint.clear()
            save(run, replica, done, last=last, awaited=evaluates)
        if leads and evaluates:
            run.watch.mark(done)
            offer_snapshot(run, replica, done)
        if agreed.stop and done != run.steps:
            run.stopped = True
            return


def run_rows(
    run: Run, replica: Replica, status: ThreadStatus, step: int
) -> tuple[list[tuple[Batch, float]], float]:
    """This replica's rows of one step: the batches with their seconds, and the sum of their loss weights."""
    rows: list[tuple[Batch, float]] = []
    weight = 0.0
    for number in range(run.rows_per_step // run.replicas):
        status.enter("waiting for features", step=step)
        features = run.features[replica.number].get()
        started = time.perf_counter()
        if features is None:
            batch, row = None, empty_row(run.shape)
        else:
            batch, row = features.batch, features.batch.row
            status.enter("forward and backward", bucket=batch.bucket, samples=batch.samples)
        with turn(replica.device):
            replica.load(features, row)
            replica.run_row(row, batch.bucket if batch else 0, first=number == 0)
        if batch is not None:
            weight += replica.objective.weight_of(batch)
            rows.append((batch, time.perf_counter() - started))
    return rows, weight


def report(
    run: Run,
    replica: Replica,
    status: ThreadStatus,
    statistics: Tensor,
    clock: StepClock,
    rate: float,
    steps: int,
    rows: list[tuple[Batch, float]],
) -> None:
    """Read the device's numbers once, and put them into the log, the events and the progress."""
    reading = run.statistics.read(statistics)
    taken = replica.optimizer.read()
    if run.first_loss is None:
        run.first_loss = reading.loss
    run.last_loss = reading.loss
    run.watch.read(reading.tau_estimate, steps)
    run.progress.read(reading, steps)
    rates = clock.report(run.step, run.steps, run.progress.tokens)
    rates["mfu_share"] = rounded(run.useful.share(), 4)
    batch = rows[-1][0] if rows else None
    say_nonfinite(run, taken, status)
    while run.trained and run.trained[0][0] <= run.step:
        run.trained.popleft()
    run.progress.update(gradient_norm=taken.norm, learning_rate=rate, **rates)
    run.events.write(
        "step",
        step=run.step,
        epoch=run.progress.values["epoch"],
        loss=reading.loss,
        ce=reading.ce,
        tau_estimate=reading.tau_estimate,
        accuracy=reading.accuracy,
        conditional_accuracy=reading.conditional_accuracy,
        gradient_norm=taken.norm,
        learning_rate=rate,
        **run.progress.coverage(),
        tokens_per_s=rates["tokens_per_s"],
        step_s=rates["step_s"],
        mfu_share=rates["mfu_share"],
        queues=run.progress.queue_depths(),
        bucket=batch.bucket if batch else None,
    )
    if not (clock.log_due() or run.step == run.steps):
        return
    loss, tau = _shown(reading.loss, 3), _shown(reading.tau_estimate, 2)
    run.log(
        f"step {run.step:>5}/{run.steps}  loss {loss}  tau~ {tau}  grad {taken.norm:.2f}  lr {rate:.1e}"
        f"  {rates['tokens_per_s']:,.0f} tokens/s  {rates['step_s']:.3f} s/step"
    )
    if run.says_bottleneck.due() or run.step == run.steps:
        say_bottleneck(run)


def say_bottleneck(run: Run) -> None:
    """Say which side of the pipeline holds up the other."""
    waiting = Waiting.of(run.progress.threads)
    run.events.write(
        "pipeline",
        step=run.step,
        **dataclasses.asdict(waiting),
        queues=run.progress.queue_depths(),
        bottleneck=waiting.bottleneck,
    )
    run.log(f"step {run.step}: {waiting.words()}")


def say_step_down(run: Run, replica: Replica, down: StepDown) -> None:
    """A replica runs on a lower rung of the ladder from now on."""
    run.events.write("step_down", replica=replica.number, old=down.old, new=down.new, reason=down.reason)
    run.log(f"Replica {replica.number}: {down.old} given up for {down.new}: {down.reason}")


def leave_compiled(run: Run, replica: Replica, graphs: int) -> None:
    """Step down when more was compiled since warm-up than a single function may have had compiled."""
    more = execution.compiled_graphs() - graphs
    if more > execution.RECOMPILES_ALLOWED and replica.rung == execution.COMPILED:
        down = replica.step_down(f"{more} graphs compiled after warm-up, each of which stops training")
        say_step_down(run, replica, down)
        if replica.number == 0:
            run.progress.update(execution=down.new)


def count_recompiles(run: Run, replica: Replica, graphs: int) -> None:
    """Notice graphs that were compiled after warm-up."""
    more = execution.compiled_graphs() - graphs
    if more > run.progress.values["recompiles"]:
        run.progress.update(recompiles=more)
        run.events.write("recompile", replica=replica.number, reason=f"{more} graphs compiled after warm-up")
        run.log(f"step {run.step}: recompiled after warm-up ({more} graphs so far)")


def _shown(value: float | None, places: int) -> str:
    return "-" if value is None else f"{value:.{places}f}"
