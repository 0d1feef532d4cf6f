"""The terminal view measured on a real pseudo-terminal, as a user starts it.

    python -m bench.tui [--seconds N] [--events N]

`dflashctl tui RUN` watches a run directory on this machine that is written as a trainer writes one: progress,
a step and a line of the log once a second. The view, its mirror and a real feed (a process of its own, not
counted) are those of daily use. CPU is that of the view's process, by the scheduler's count; bytes are those
that reach the terminal.

- idle: a run that has ended, so nothing changes but its age
- 1 Hz: a run that goes on, at 80x24 and 160x48; bytes are of 160x48
- key: from a key to the last byte of the tab that it shows, while 100,000 lines a second arrive
- quit: from `q` to the end of the process
- first screen: from the start of the process to the step's number on the screen, the mirror holding --events

JSON on stdout, a table on stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import signal
import statistics
import subprocess
import sys
import tempfile
import termios
import threading
import time
from pathlib import Path
from typing import Any

from controller import paths
from controller.inventory import Host
from controller.run_place import RunPlace
from tests.dflashctl import command
from tests.tui import golden

ROOT = Path(__file__).resolve().parents[1]
AIMS = {
    "idle_core_pct": 0.2, "hz1_80x24_core_pct": 2.0, "hz1_160x48_core_pct": 2.5, "kib_s": 50.0,
    "key_ms_p95": 100.0, "quit_s": 0.5, "first_screen_s": 0.7,
}  # fmt: skip
LINES_A_SECOND = 100_000
KEYS = 30


class Trainer:
    """A run directory in `folder`, written like a trainer's; times are of now."""

    def __init__(self, folder: Path, events: int) -> None:
        self.directory = folder
        self.run = golden.healthy()
        run = self.run
        shift = time.time() - golden.NOW - golden.AHEAD
        self.run.run |= {"created": time.time() - 11_000}
        for records in (run.events, run.gpu, run.supervisor):
            for record in records:
                record["t"] += shift
        assert run.status is not None and run.progress is not None
        ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
        identity = {"pid": os.getpid(), "start_ticks": int(ticks)}
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        run.status |= {"boot_id": boot, "supervisor": identity, "trainer": identity}
        run.mirror = None
        run.write(folder)
        self.step = run.step
        self.tick()
        newest = next(record for record in reversed(run.events) if record["kind"] == "step")
        head, tail = golden._line(newest).decode().split(f'"step":{newest["step"]},', 1)
        with (folder / "events.jsonl").open("a", encoding="utf-8") as file:
            for _ in range(max(0, events - len(run.events))):
                self.step += 1
                file.write(f'{head}"step":{self.step},{tail}')
        self.tick()

    def tick(self, *, ended: bool = False) -> None:
        """A second has passed."""
        self.step += 1
        now = time.time()
        run = self.run
        assert run.progress is not None and run.status is not None
        run.progress |= {"step": self.step, "steps": self.step * 4, "loss": 2.2 + (self.step % 7) / 100,
                         "tokens_per_s": 123_000 + self.step % 900}  # fmt: skip
        for thread in run.progress["threads"]:
            thread["last_sign"] = now - 0.3
        for bucket in run.progress["buckets"]:
            bucket["batches"] += 1
        if ended:
            nobody = {"pid": 1 << 22, "start_ticks": 1}
            run.status |= {"state": "finished", "exit_code": 0, "reason": None, "trainer": None,
                           "supervisor": nobody}  # fmt: skip
        self._replace("progress.json", {"t": now, **run.progress})
        self._replace("status.json", {"t": now, **run.status, "last_progress": now})
        step = {
            "kind": "step", "t": now, "step": self.step, "loss": run.progress["loss"], "epoch": 0.2,
            "tau_estimate": 3.4, "gradient_norm": 0.8, "learning_rate": 3e-4, "step_s": 0.8,
            "tokens_per_s": run.progress["tokens_per_s"], "queues": {"batches": 3, "features": 1},
        }  # fmt: skip
        self._append("events.jsonl", golden._line(step))
        self._append("train.log", f"step {self.step:>6}  loss 2.250  123k tokens/s\n".encode())
        if self.step % 5 == 0:
            gpus = run.gpu[-1]["gpus"]
            for sample in gpus.values():
                sample["utilization_share"] = 0.9 + self.step % 10 / 100
            self._append("gpu.jsonl", golden._line({"kind": "gpu", "t": now, "gpus": gpus}))

    def _replace(self, name: str, record: dict[str, Any]) -> None:
        beside = self.directory / f".{name}.new"
        beside.write_bytes(golden._line(record))
        beside.rename(self.directory / name)

    def _append(self, name: str, data: bytes) -> None:
        with (self.directory / name).open("ab", buffering=0) as file:
            file.write(data)

    def flood(self, stop: threading.Event) -> None:
        """100,000 lines a second into the log until `stop`."""
        number = 0
        began = time.monotonic()
        with (self.directory / "train.log").open("ab", buffering=0) as file:
            while not stop.is_set():
                due = int((time.monotonic() - began) * LINES_A_SECOND)
                if due > number:
                    file.write(b"".join(b"line %d of a chatty trainer, 60 characters or so\n" % n
                                        for n in range(number, due)))  # fmt: skip
                    number = due
                stop.wait(0.02)


class Terminal:
    """`dflashctl tui RUN` on a pseudo-terminal."""

    def __init__(self, run_id: str, columns: int, rows: int) -> None:
        self.master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (rows, columns))
        self.began = time.monotonic()
        self.child = subprocess.Popen(
            command("tui", run_id), stdin=slave, stdout=slave, stderr=slave,
            env=os.environ | {"TERM": "xterm-256color", "COLORTERM": "truecolor"}, cwd=ROOT,
            start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        self.received = 0
        self._output = b""
        self._news = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self.master, 1 << 16)
            except OSError:
                return
            if not data:
                return
            with self._news:
                self.received += len(data)
                self._output = (self._output + data)[-(1 << 20) :]
                self._news.notify_all()

    def forget(self) -> None:
        with self._news:
            self._output = b""

    def wait_for(self, text: bytes, timeout: float = 60.0) -> float:
        """Seconds (monotonic) at which `text` was there."""
        with self._news:
            if not self._news.wait_for(lambda: text in self._output, timeout):
                raise TimeoutError(f"{text!r} did not appear: {self._output[-500:]!r}")
        return time.monotonic()

    def press(self, key: bytes) -> None:
        os.write(self.master, key)

    def cpu_s(self) -> float:
        """Of all threads that live; none of them ends while we measure."""
        threads = Path(f"/proc/{self.child.pid}/task").iterdir()
        return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9

    def quit(self) -> float:
        began = time.monotonic()
        self.press(b"q")
        self.child.wait(20)
        os.close(self.master)
        return time.monotonic() - began

    def kill(self) -> None:
        if self.child.poll() is None:
            os.kill(self.child.pid, signal.SIGKILL)
            self.child.wait()


class Bench:
    """All measurements on one run directory."""

    def __init__(self, folder: Path, seconds: float, events: int) -> None:
        self.seconds = seconds
        self.folder, self.events = folder, events
        self.quits: list[float] = []

    def trainer(self, name: str, events: int = 0) -> Trainer:
        """A new run, known on this machine, and mirrored whole."""
        trainer = Trainer(self.folder / name, events)
        run = trainer.run.run
        directory = paths.make_mirror_dir(name, "local")
        host = Host.model_validate({"name": "local", "kind": "local", "workspace": str(self.folder)})
        RunPlace(
            host=host, run_id=name, run_dir=str(trainer.directory), payload_dir=str(ROOT), digest="0" * 64,
            python=sys.executable, created=run["created"], job_name="bench",
        ).write(directory)  # fmt: skip
        subprocess.run(command("status", name), cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return trainer

    def open(self, trainer: Trainer, columns: int, rows: int) -> tuple[Terminal, float]:
        """The view, and when the step's number was on its screen."""
        terminal = Terminal(trainer.directory.name, columns, rows)
        return terminal, terminal.wait_for(f"{trainer.step:,}".encode()) - terminal.began

    def idle(self) -> float:
        trainer = self.trainer("bench-idle")
        trainer.tick(ended=True)
        terminal, _ = self.open(trainer, 80, 24)
        try:
            terminal.wait_for(b"FINISHED")
            time.sleep(3.0)
            before, began = terminal.cpu_s(), time.monotonic()
            time.sleep(self.seconds)
            used = terminal.cpu_s() - before
            share = used / (time.monotonic() - began)
            self.quits.append(terminal.quit())
            return 100 * share
        finally:
            terminal.kill()

    def hz1(self, columns: int, rows: int) -> tuple[float, float]:
        """Per cent of a core, and KiB a second to the terminal."""
        trainer = self.trainer(f"bench-{columns}")
        terminal, _ = self.open(trainer, columns, rows)
        try:
            for _ in range(3):
                time.sleep(1.0)
                trainer.tick()
            before, received, began = terminal.cpu_s(), terminal.received, time.monotonic()
            for number in range(int(self.seconds)):
                time.sleep(max(0.0, began + number + 1 - time.monotonic()))
                trainer.tick()
            spent = time.monotonic() - began
            used, bytes_ = terminal.cpu_s() - before, terminal.received - received
            self.quits.append(terminal.quit())
            return 100 * used / spent, bytes_ / 1024 / spent
        finally:
            terminal.kill()

    def keys(self) -> list[float]:
        """Milliseconds from a key to its tab, while the log is flooded."""
        trainer = self.trainer("bench-keys")
        terminal, _ = self.open(trainer, 80, 24)
        stop = threading.Event()
        flood = threading.Thread(target=trainer.flood, args=(stop,), daemon=True)
        found = []
        try:
            flood.start()
            time.sleep(3.0)
            for number in range(KEYS):
                key, text = ((b"3", b"waited"), (b"1", b"follow"))[number % 2]
                terminal.forget()
                began = time.monotonic()
                terminal.press(key)
                found.append(1000 * (terminal.wait_for(text, 20) - began))
                time.sleep(0.17)
            self.quits.append(terminal.quit())
        finally:
            stop.set()
            flood.join(5)
            terminal.kill()
        return found

    def first_screen(self) -> float:
        trainer = self.trainer("bench-history", self.events)
        found = []
        for _ in range(3):
            terminal, seconds = self.open(trainer, 80, 24)
            found.append(seconds)
            time.sleep(0.5)
            self.quits.append(terminal.quit())
            terminal.kill()
        return statistics.median(found)


def main() -> None:
    """Measure and print."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement of CPU")
    parser.add_argument("--events", type=int, default=400_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dflashctl-bench-") as folder:
        os.environ["XDG_STATE_HOME"] = f"{folder}/state"
        bench = Bench(Path(folder) / "runs", arguments.seconds, arguments.events)
        found: dict[str, float] = {"first_screen_s": bench.first_screen(), "idle_core_pct": bench.idle()}
        found["hz1_80x24_core_pct"], _ = bench.hz1(80, 24)
        found["hz1_160x48_core_pct"], found["kib_s"] = bench.hz1(160, 48)
        keys = sorted(bench.keys())
        found["key_ms_p95"] = keys[int(0.95 * (len(keys) - 1))]
        found["quit_s"] = max(bench.quits)
    print(json.dumps({name: round(found[name], 3) for name in AIMS}))
    print(f"{'':24}{'measured':>10}{'aim':>10}", file=sys.stderr)
    for name, aim in AIMS.items():
        mark = "" if found[name] <= aim else "  above"
        print(f"{name:24}{found[name]:>10.2f}{aim:>10.2f}{mark}", file=sys.stderr)


if __name__ == "__main__":
    main()
