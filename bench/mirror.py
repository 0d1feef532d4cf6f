"""The mirror measured beside what a person would type: how late, how fast, and at what cost.

    python -m bench.mirror [--lines N] [--mib N] [--idle S]

In the rig: a real sshd, pct and container on this machine, so both ends share one clock. Latency is from
just before a line's write() in the container to its arrival on the reader's pipe: `dflashctl logs --follow`
and `ssh ... pct exec ... tail -F` are both connected all the time, and get lines in turns of 25.
Throughput is the log's size over the time of a whole command less the time of the same command on an empty
log: `dflashctl logs --all` (which also writes, syncs and checks a copy) and `dflashctl pull` (which also
hashes at both ends) beside `ssh ... pct exec ... cat`.
Idle is a run that writes its status and progress and no log. CPU is that of the feed and of the `logs`
process, by the scheduler's own count. JSON on stdout, a table on stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.dflashctl import command
from tests.rig.mirrored_run import MirroredRun, until
from tests.rig.rig import Rig, unavailable

TURN = 25
TALKER = """
import random, sys, time
lines, turn, *paths = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
logs = [open(path, "ab", buffering=0) for path in paths]
dice = random.Random(1)
for log in logs * (lines // turn):
    for number in range(turn):
        time.sleep(dice.uniform(0.03, 0.07))
        log.write(b"line %d %d\\n" % (number, time.monotonic_ns()))
for log in logs:
    log.write(b"end\\n")
"""


class Reader:
    """A process whose stdout is read line by line; how late each line is, in milliseconds."""

    def __init__(self, argv: list[str], env: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
        self.delays: list[float] = []
        self.begun = threading.Event()
        self.ended = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        rest = b""
        while data := os.read(descriptor, 1 << 16):
            now = time.monotonic_ns()
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line == b"begin":
                    self.begun.set()
                elif line == b"end":
                    self.ended.set()
                elif line.startswith(b"line "):
                    self.delays.append((now - int(line.split()[2])) / 1e6)

    def close(self) -> None:
        """End it, if it has not ended."""
        self.process.kill()
        self.process.wait()
        self._thread.join(5)
        assert self.process.stdout is not None
        self.process.stdout.close()


def core_seconds(pids: list[int]) -> float:
    """Time on a processor of all threads of these processes, in seconds, by the scheduler."""
    total = 0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


@contextmanager
def on_a_core(container: list[int], laptop: list[int], into: dict[str, float], suffix: str) -> Iterator[None]:
    """Add the share of a core that both sides used meanwhile, in percent."""
    began = time.monotonic(), core_seconds(container), core_seconds(laptop)
    yield
    seconds = time.monotonic() - began[0]
    into[f"container_{suffix}"] = 100 * (core_seconds(container) - began[1]) / seconds
    into[f"laptop_{suffix}"] = 100 * (core_seconds(laptop) - began[2]) / seconds


def ssh(rig: Rig, *argv: str) -> list[str]:
    """What a person types to run `argv` in the rig's container."""
    pct = shlex.join(["pct", "exec", str(rig.vmid), "--keep-env", "0", "--", *argv])
    return ["ssh", "-F", str(rig.ssh_config), rig.alias, pct]


def latency(rig: Rig, env: Mapping[str, str], lines: int, idle_s: float) -> dict[str, float]:
    """Both followers, connected at once; and what waiting and working cost."""
    found: dict[str, float] = {}
    with ExitStack() as stack:
        run = MirroredRun(rig, rate=0)
        stack.callback(run.close)
        plain = "/dev/shm/plain.log"  # on an overlay, tail does not trust inotify and looks once a second
        for path in (run.remote / "train.log", rig.container_path(plain)):
            path.write_bytes(b"begin\n")
        ours = Reader(command("logs", "--follow", run.id), env)
        stack.callback(ours.close)
        tail = Reader(ssh(rig, "tail", "-n", "+1", "-F", plain), env)
        stack.callback(tail.close)
        for reader in (ours, tail):
            assert reader.begun.wait(30), "a follower printed nothing within 30 s"
        until(run.feeds, "the feed")
        feeds, laptop = run.feeds(), [ours.process.pid]
        time.sleep(2.5)  # past the first beat
        with on_a_core(feeds, laptop, found, "core_pct"):
            time.sleep(idle_s)
        turn = min(TURN, lines)
        talker = rig.container_path(f"{rig.workspace}/talker.py")
        talker.write_text(TALKER)
        argv = [
            rig.python,
            f"{rig.workspace}/talker.py",
            str(lines),
            str(turn),
            f"{run.there}/train.log",
            plain,
        ]
        with on_a_core(feeds, laptop, found, "busy_core_pct"):
            subprocess.run(rig.container_argv(argv), check=True, cwd="/", timeout=60 + lines)
            for reader in (ours, tail):
                assert reader.ended.wait(30), "the last line did not arrive within 30 s"
        counts = len(ours.delays), len(tail.delays)
        assert counts == (lines // turn * turn,) * 2, counts
        run.stop_writing()
        assert ours.process.wait(30) == 0
    for name, delays in (("latency_ms", ours.delays), ("tail_latency_ms", tail.delays)):
        cut = statistics.quantiles(delays, n=20, method="inclusive")
        found |= {f"{name}_p50": statistics.median(delays), f"{name}_p95": cut[18]}
    return found


def throughput(rig: Rig, env: Mapping[str, str], mib: int) -> dict[str, float]:
    """One large log by each way, less the way's own start-up; the best of three rounds in turn."""
    line = b"step 1234  loss 2.345  tau~ 3.41  lr 3.0e-04  123k tok/s, a line as a trainer writes them\n"
    content = line * ((mib << 20) // len(line))
    walls: dict[tuple[str, str], float] = {}
    for what, data in (("empty", b"begin\n"), ("large", content)) * 3:
        run = MirroredRun(rig, rate=0)
        try:
            (run.remote / "train.log").write_bytes(data)
            pulled = run.local / "pulled"
            for who, argv in (
                ("mib_s", command("logs", "--all", run.id)),
                ("cat_mib_s", ssh(rig, "cat", f"{run.there}/train.log")),
                ("pull_mib_s", command("-q", "pull", run.id, "log", "--to", str(pulled))),
            ):
                wall, size = timed(argv, env)
                for copy in (run.local / "train.log", pulled / "train.log"):
                    if copy.exists():
                        assert copy.stat().st_size == len(data), copy
                        copy.unlink()  # or the next one pays for memory that the machine never used before
                assert who == "pull_mib_s" or size == len(data), (who, size, len(data))
                walls[who, what] = min(wall, walls.get((who, what), wall))
        finally:
            run.close()
    return {
        who: len(content) / 2**20 / (walls[who, "large"] - walls[who, "empty"])
        for who in ("mib_s", "cat_mib_s", "pull_mib_s")
    }


def timed(argv: list[str], env: Mapping[str, str]) -> tuple[float, int]:
    """Seconds to the end of a command, and bytes of its stdout."""
    began = time.monotonic()
    process = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    assert process.stdout is not None
    size = 0
    while piece := os.read(process.stdout.fileno(), 1 << 20):
        size += len(piece)
    process.stdout.close()
    assert process.wait(60) == 0
    return time.monotonic() - began, size


def measure(rig: Rig, *, lines: int, mib: int, idle_s: float) -> dict[str, float]:
    """All of it, rounded; `lines` for each follower. The caller's environment becomes the rig's laptop."""
    os.environ.pop("SSH_AUTH_SOCK", None)
    os.environ.update(rig.laptop_env())
    env = os.environ | {"DFLASHCTL_TIME_SCALE": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    found = latency(rig, env, lines, idle_s) | throughput(rig, env, mib)
    return {key: round(value, 3) for key, value in found.items()}


def table(found: Mapping[str, Any]) -> str:
    """What was found beside its aim."""
    rows = (
        ("latency p50", "latency_ms_p50", "ms", f"tail {found['tail_latency_ms_p50']:.2f}, aim: +10"),
        ("latency p95", "latency_ms_p95", "ms", f"tail {found['tail_latency_ms_p95']:.2f}"),
        ("throughput", "mib_s", "MiB/s", f"cat {found['cat_mib_s']:.0f}, aim: 0.9 of it"),
        ("throughput, pull", "pull_mib_s", "MiB/s", "aim: the same"),
        ("container, idle", "container_core_pct", "% of a core", "aim: 0.5"),
        ("laptop, idle", "laptop_core_pct", "% of a core", ""),
        ("container, 10 lines/s", "container_busy_core_pct", "% of a core", ""),
        ("laptop, 10 lines/s", "laptop_busy_core_pct", "% of a core", ""),
    )
    return "\n".join(f"{name:<22} {found[key]:>9.2f} {unit:<12} {beside}" for name, key, unit, beside in rows)


def main() -> int:
    """Exit code 0, or 1 where there can be no rig."""
    parser = argparse.ArgumentParser(prog="python -m bench.mirror", description=__doc__.splitlines()[0])
    parser.add_argument("--lines", type=int, default=200, help="lines for each follower [200]")
    parser.add_argument("--mib", type=int, default=512, help="size of the large log [512]")
    parser.add_argument("--idle", type=float, default=20.0, help="seconds of idle measured [20]")
    given = parser.parse_args()
    if reason := unavailable():
        print(f"No bench: {reason}.", file=sys.stderr)
        return 1
    with Rig() as rig:
        found = measure(rig, lines=given.lines, mib=given.mib, idle_s=given.idle)
    print(table(found), file=sys.stderr)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
