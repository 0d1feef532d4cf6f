"""The trainer's main thread: start the other threads, keep the record of progress, end the run well.

    python remote_payload train RUN_DIR ATTEMPT

The main thread does no work on a device. It takes signals (SIGTERM: stop, SIGUSR2: checkpoint, SIGUSR1: dump
stacks), and after a crash it makes sure that the process ends: threads that will not are left behind by
`os._exit`, after their stacks were written, and so is NCCL.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from remote_payload import crash, job, rundir
from remote_payload.rundir import TrainerExit
from remote_payload.train.closing import closing_lines
from remote_payload.train.dataset import DataError
from remote_payload.train.devices import keep_guard
from remote_payload.train.evaluating import evaluate
from remote_payload.train.event_log import EventLog
from remote_payload.train.pipeline import read, run_target
from remote_payload.train.prepare_run import prepare
from remote_payload.train.progress import Progress, rounded
from remote_payload.train.reducing import sum_gradients
from remote_payload.train.run import Run
from remote_payload.train.run_control import Aborted, RunControl, ThreadStatus
from remote_payload.train.saver import SAVER
from remote_payload.train.tensorboard import TensorBoardSink
from remote_payload.train.training import run_drafter_replica

PROGRESS_PERIOD_S = 1.0


class Trainer:
    """One attempt of one run in this process."""

    def __init__(self, run_dir: Path, attempt: int) -> None:
        self._run_dir = run_dir
        self._attempt = attempt
        self._events = EventLog(run_dir / rundir.EVENTS, attempt=attempt, log=log)
        self._control = RunControl()
        self._failing = threading.Lock()
        self._failure: BaseException | None = None
        self._deadline: float | None = None
        self._started = time.monotonic()
        self._run: Run | None = None
        self._ended = threading.Event()

    def main(self) -> TrainerExit:
        """Run the job in the run directory to its end, and say how it ended in `exit.json`."""
        signal.signal(signal.SIGTERM, lambda *_: self._control.stop.set())
        signal.signal(signal.SIGUSR2, lambda *_: self._control.checkpoint.set())
        try:
            checked = job.load(self._run_dir / rundir.JOB)
            keep_caches(self._run_dir.parent.parent)
            set_cpu_threads(checked)
            keep_guard()
            progress = Progress(checked.bucket_edges)
            writing = functools.partial(self._write_progress, progress)
            sink = TensorBoardSink(self._run_dir, self._attempt, log) if checked.tensorboard else None
            if sink is not None:
                sink.start()
            status = ThreadStatus("progress", "progress", "cpu")
            writer = threading.Thread(target=self._guard, args=(writing, status), name="progress")
            writer.start()
            try:
                self._run = prepare(
                    checked,
                    self._run_dir,
                    self._events,
                    progress,
                    self._control,
                    log,
                    resuming=self._attempt > 1,
                )
                self._train(self._run)
            finally:
                self._ended.set()
                writer.join()
                if sink is not None:
                    sink.stop()
        except (job.JobError, DataError) as error:
            self._failure = error
        except Exception as error:
            self._fail(error, ThreadStatus("main", "main", "cpu"))
        code = self._end()
        if self._failure is not None and self._run is not None and self._run.reduction.threaded:
            os._exit(code)  # NCCL's own end would wait for a GPU whose sum another one never began
        return code

    def _train(self, run: Run) -> None:
        threads = self._threads(run)
        if self._control.stop.is_set():  # asked to end before anything began
            run.stopped = True
            return
        log(f"Loading {len(run.targets)} target model{'s' if len(run.targets) > 1 else ''}...")
        run.progress.phase = "warming_up"
        for thread in threads:
            thread.start()
        drafters = [thread for thread in threads if thread.name.startswith("drafter")]
        self._join(drafters)
        if run.evaluation is not None:
            run.progress.phase = "evaluating"
            run.to_evaluate.put(None)
        self._join(threads)
        run.progress.phase = "ended"

    def _threads(self, run: Run) -> list[threading.Thread]:
        loading = threading.Lock()
        work: list[tuple[str, str, str, Callable[[ThreadStatus], None]]] = [
            ("reader", "reader", "cpu", functools.partial(read, run, first=run.first_sequence))
        ]
        for number, device in enumerate(run.job.targets):
            target = functools.partial(run_target, run, number, loading=loading)
            work.append((f"target-{number}", "target", device, target))
        for number, device in enumerate(run.job.drafters):
            work.append(
                (f"drafter-{number}", "drafter", device, functools.partial(run_drafter_replica, run, number))
            )
        if run.reduction.threaded:
            summing = functools.partial(sum_gradients, run)
            work.append(("reduction", "reduction", run.job.drafters[0], summing))
        if run.evaluation is not None:
            work.append(("evaluator", "evaluator", run.job.targets[0], functools.partial(evaluate, run)))
        threads = []
        for name, role, device, function in work:
            status = run.progress.thread(name, role, device)
            # Each worker gets the configuration that main set, in a context of its own: from torch 2.12 on
            # dynamo's and inductor's configuration is per context, and a bare thread would see defaults.
            context = contextvars.copy_context()
            thread = threading.Thread(target=context.run, args=(self._guard, function, status), name=name)
            threads.append(thread)
        return threads

    def _guard(self, function: Callable[[ThreadStatus], None], status: ThreadStatus) -> None:
        """Run one thread's life; whatever it raises ends the run."""
        try:
            function(status)
            status.enter("ended")
        except Aborted:
            status.enter("ended")
        except BaseException as error:
            self._fail(error, status)

    def _fail(self, error: BaseException, status: ThreadStatus) -> None:
        with self._failing:
            first = self._failure is None
            if first:
                self._failure = error
        try:
            if not isinstance(error, job.JobError | DataError):
                self._record_crash(error, status, first)
        except OSError as no_room:
            log(f"{status.name} failed: {crash.one_line(error)}; crash/ could not be written: {no_room}")
        finally:  # the others must not wait for this thread for ever
            status.enter("failed")
            self._control.abort()

    def _record_crash(self, error: BaseException, status: ThreadStatus, first: bool) -> None:
        memory = memory_of(torch.device(status.device))
        if first:
            crash.dump_stacks(self._run_dir, f"{status.name} failed")
        name = crash.write_thread(
            self._run_dir,
            thread=status.name,
            role=status.role,
            device=status.device,
            step=status.step,
            bucket=status.bucket,
            samples=status.samples,
            error=error,
            first=first,
            memory=memory,
            attempt=self._attempt,
        )
        self._events.write(
            "crash",
            thread=status.name,
            role=status.role,
            device=status.device,
            step=status.step,
            bucket=status.bucket,
            error=crash.one_line(error),
            file=name,
            first=first,
        )
        log(f"{status.name} failed in {status.state!r}: {crash.one_line(error)} (see crash/{name})")

    def _join(self, threads: list[threading.Thread]) -> None:
        """Wait for `threads`; after a crash no longer than the job's grace, then leave at once.

        After a crash also for a checkpoint that is being written: the interpreter's own end would wait for
        that without a limit, and a disk may hang.
        """
        assert self._run is not None
        saver = self._run.saver
        while any(thread.is_alive() for thread in threads) or (self._control.aborted and saver.busy):
            for thread in threads:
                thread.join(0.1)
                if thread.is_alive():
                    break
            else:
                time.sleep(0.05)  # for the saver alone
            if self._control.aborted and self._deadline is None:
                self._deadline = time.monotonic() + self._run.job.crash_grace
            if self._deadline is not None and time.monotonic() > self._deadline:
                workers = {status.name for status in self._run.progress.threads}
                workers |= {f"{SAVER}_0"} if saver.busy else set()
                stuck = [thread.name for thread in threading.enumerate() if thread.name in workers]
                log(f"These threads did not end after the crash and are left behind: {', '.join(stuck)}")
                with contextlib.suppress(OSError):
                    crash.dump_stacks(self._run_dir, "threads did not end")
                os._exit(self._end())

    def _write_progress(self, progress: Progress, _status: ThreadStatus) -> None:
        path = self._run_dir / rundir.PROGRESS
        while True:
            last = self._ended.wait(PROGRESS_PERIOD_S)
            fields = {"attempt": self._attempt, **progress.snapshot()}
            with contextlib.suppress(OSError):  # a full disk must not end the thread that shows it is alive
                rundir.write_whole(path, rundir.encode(rundir.stamp("progress", fields)))
            if last:
                return

    def _end(self) -> TrainerExit:
        run, failure = self._run, self._failure
        refused = isinstance(failure, job.JobError | DataError)
        if refused:
            outcome, code = "refused", TrainerExit.REFUSED
            log(f"error: {failure}")
        elif failure is not None:
            outcome, code = "crashed", TrainerExit.CRASHED
        elif run is not None and run.stopped:
            outcome, code = "stopped", TrainerExit.STOPPED
        else:
            outcome, code = "finished", TrainerExit.FINISHED
        seconds = time.monotonic() - self._started
        if run is not None and code in (TrainerExit.FINISHED, TrainerExit.STOPPED):
            for line in closing_lines(run, seconds):
                log(line)
        self._events.write("end", outcome=outcome, step=run.step if run else 0, exit_code=int(code))
        record = {
            "attempt": self._attempt,
            "outcome": outcome,
            "exit_code": int(code),
            "error": str(failure) if refused else failure and crash.one_line(failure),
            "seconds": round(seconds, 2),
            **(summary(run) if run else {}),
        }
        try:
            rundir.write_whole(self._run_dir / rundir.EXIT, rundir.encode(rundir.stamp("exit", record)))
        except OSError as error:  # the exit code says it too
            log(f"{rundir.EXIT} could not be written: {error.strerror}")
        return code


def summary(run: Run) -> dict[str, Any]:
    """What exit.json says of the training itself."""
    reports = run.reports
    values = run.progress.values
    return {
        "step": run.step,
        "steps": run.steps,
        "loss_first": run.first_loss,
        "loss_last": run.last_loss,
        "tau_before": rounded(reports[0].tau, 4) if reports and reports[0].record["step"] == 0 else None,
        "tau_after": rounded(reports[-1].tau, 4) if reports and reports[-1].record["step"] else None,
        "execution": values["execution"],
        "tokens": run.progress.tokens,
        "tokens_per_s": rounded(run.tokens_per_s, 1),
        "eager_step_s": run.eager_step_s,
        "compiled_step_s": run.compiled_step_s,
        "checkpoint": str(run.saved.relative_to(run.run_dir)) if run.saved else None,
        "best_tau": rounded(run.best.tau, 4) if run.best else None,
        "best_step": run.best.step if run.best else None,
        "best_checkpoint": str(path.relative_to(run.run_dir)) if (path := run.best_path) else None,
    }


def keep_caches(workspace: Path) -> None:
    """Keep what inductor and Triton compile in the workspace: 24 s cold, 3 to 4 s from a warm cache."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(workspace / "cache" / "inductor"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(workspace / "cache" / "triton"))


def set_cpu_threads(checked: job.Job) -> None:
    """All cores for one operation: workers on the CPU take turns. Set before any starts, never again."""
    torch.set_num_threads(checked.cpu_threads or len(os.sched_getaffinity(0)))


def memory_of(device: torch.device) -> str | None:
    """What a GPU's memory is used for, in words, also of one that is lost; None of a CPU."""
    if device.type != "cuda":
        return None
    try:
        return torch.cuda.memory_summary(device, abbreviated=True)
    except RuntimeError as error:
        return f"not known ({crash.one_line(error)})"


def log(text: str) -> None:
    """One line of train.log, with the time. A disk without room costs the line, and not the run."""
    with contextlib.suppress(OSError):
        sys.stdout.write(f"{time.strftime('%H:%M:%S')} {text}\n")
        sys.stdout.flush()


def main(run_dir: Path, attempt: int) -> int:
    """Train the job in `run_dir`; the exit code is one of `rundir.TrainerExit`."""
    crash.install(run_dir)
    return Trainer(run_dir, attempt).main()
