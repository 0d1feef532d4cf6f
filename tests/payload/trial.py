"""Whole runs of the trainer as processes of their own, so that signals and exit codes are real.

`Trial.command` starts the very command that the supervisor starts. Importing torch and transformers takes
seconds, so most tests fork the trainer from a server process that has imported them once (`Trial.fork`); they
may pass a fault, a function that breaks something in the child before the run begins.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

import remote_payload
from remote_payload import rundir
from remote_payload.job import Job
from tests.payload.tiny import job_values
from tests.waiting import until

Fault = Callable[[], None]
PATIENCE_S = 200.0
"""For a run of a second or two on a machine that may be busy."""


class Trial:
    """A workspace with one run directory in it, and what the run left there."""

    def __init__(self, workspace: Path, name: str = "run", **changes: Any) -> None:
        self.run_dir = workspace / "runs" / name
        self.run_dir.mkdir(parents=True)
        self.job = Job.from_mapping(job_values(workspace, **changes), "tiny")
        (self.run_dir / rundir.JOB).write_text(self.job.to_toml())
        self.patience_s = PATIENCE_S
        self._process: Any = None

    def write_job(self, text: str) -> None:
        (self.run_dir / rundir.JOB).write_text(text)

    def command(self, attempt: int = 1, **environment: str) -> int:
        """Run `python remote_payload train RUN_DIR ATTEMPT` to its end; its exit code."""
        with (self.run_dir / rundir.TRAIN_LOG).open("ab") as log:
            folder = str(Path(remote_payload.__file__).parent)
            return subprocess.run(
                [sys.executable, folder, "train", str(self.run_dir), str(attempt)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
                timeout=self.patience_s,
                check=False,
            ).returncode

    def start(self, fault: Fault | None = None, attempt: int = 1) -> None:
        """Fork the trainer from the server and let it run; for a GPU a new process, as CUDA is not forked."""
        on_gpu = any(device != "cpu" for device in (*self.job.targets, *self.job.drafters))
        context = multiprocessing.get_context("spawn" if on_gpu else "forkserver")
        context.set_forkserver_preload(
            ["remote_payload.train.main", "transformers.models.qwen3.modeling_qwen3", "tests.payload.trial"]
        )
        self._process = context.Process(target=_train, args=(self.run_dir, fault, attempt))
        self._process.start()
        atexit.register(self._process.kill)  # of a test that failed: pytest would wait for its run for ever

    def finish(self) -> int:
        """Wait for a started run; its exit code, or minus the signal that killed it."""
        self._process.join(self.patience_s)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
            raise AssertionError(f"the run did not end:\n{self.log}")
        return int(self._process.exitcode)

    def fork(self, fault: Fault | None = None, attempt: int = 1) -> int:
        """Start and finish."""
        self.start(fault, attempt)
        return self.finish()

    def signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def wait_for(self, what: Callable[[], Any]) -> None:
        """Until `what` is true; fails when the run ends before."""

        def true_while_it_lives() -> Any:
            value = what()
            assert value or self._process.is_alive() or what(), f"the run ended early:\n{self.log}"
            return value

        until(true_while_it_lives, seen=lambda: self.log, seconds=self.patience_s)

    @property
    def log(self) -> str:
        path = self.run_dir / rundir.TRAIN_LOG
        return path.read_text() if path.exists() else ""

    @property
    def last_line(self) -> str:
        return self.log.rstrip("\n").rsplit("\n", 1)[-1]

    def events(self, kind: str) -> list[dict[str, Any]]:
        path = self.run_dir / rundir.EVENTS
        lines, _ = rundir.complete_lines(path.read_bytes() if path.exists() else b"")
        records, broken = rundir.read_records(lines)
        assert broken == 0
        return [record for record in records if record["kind"] == kind]

    def whole(self, name: str) -> dict[str, Any]:
        return dict(json.loads((self.run_dir / name).read_text()))

    @property
    def exit(self) -> dict[str, Any]:
        return self.whole(rundir.EXIT)

    @property
    def progress(self) -> dict[str, Any]:
        return self.whole(rundir.PROGRESS)

    def crashes(self) -> list[dict[str, Any]]:
        folder = self.run_dir / rundir.CRASH
        return [json.loads(path.read_text()) for path in sorted(folder.glob("thread-*.json"))]

    def tensors(self, step: int, file: str = "model") -> dict[str, Tensor]:
        return load_file(self.run_dir / rundir.CHECKPOINTS / f"step-{step}" / f"{file}.safetensors")


def _train(run_dir: Path, fault: Fault | None, attempt: int) -> None:
    """In the child: the trainer as `__main__` starts it, its output in `train.log`."""
    log = os.open(run_dir / rundir.TRAIN_LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):  # torch sets them where a test compiled
        os.environ.pop(name, None)
    from remote_payload.train.main import main

    if fault:
        fault()
    sys.exit(main(run_dir, attempt))
