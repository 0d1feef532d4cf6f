"""`python -m bench.launch`: a relaunch with an unchanged payload beside two bare `ssh ... pct exec ... true`.

In the rig: a real sshd, a pct in front of a real container. One JSON object on stdout; seconds are medians of
alternating tries. The run is ended after each, so that no trainer takes the processor from the next.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from tests.dflashctl import command, environment
from tests.rig.rig import Rig, unavailable

JOB = 'target = "/nonexistent/model"\ndataset = "none.arrow"\nmask_token_id = 1\n'
"""The trainer refuses it at once: what is measured ends before the trainer begins."""
IDLE_S = 60.0


def timed(argv: list[str], env: dict[str, str] | None = None) -> float:
    begun = time.monotonic()
    done = subprocess.run(argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=120)
    seconds = time.monotonic() - begun
    if done.returncode:
        sys.exit(f"{argv[-6:]} failed: {done.stderr.decode(errors='replace')}")
    return seconds


def end_runs(rig: Rig) -> None:
    """End what the launch started in the container, which is all that lives there."""
    deadline = time.monotonic() + IDLE_S
    while pids := rig.container_processes():
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            sys.exit(f"the container was not idle within {IDLE_S:g} s")
        time.sleep(0.05)


def measure(rig: Rig, tries: int) -> dict[str, float | int]:
    bare_call = ["ssh", "-F", str(rig.ssh_config), rig.alias, f"pct exec {rig.vmid} --keep-env 0 -- true"]
    env = environment(rig.laptop_env()) | {"DFLASHCTL_TIME_SCALE": "1"}
    relaunches, bares, calls = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "bench.toml"
        job.write_text(JOB)
        launch = command("launch", "--host", "rig", "--job", str(job))
        first = timed(launch, env)
        for _ in range(tries):
            end_runs(rig)
            bares.append(timed(bare_call) + timed(bare_call))
            before = len(rig.pct_calls())
            relaunches.append(timed(launch, env))
            calls.append(len(rig.pct_calls()) - before)
    relaunch, bare = statistics.median(relaunches), statistics.median(bares)
    return {
        "relaunch_s": round(relaunch, 3),
        "bare_s": round(bare, 3),
        "ratio": round(relaunch / bare, 2),
        "first_s": round(first, 3),
        "pct_calls": max(calls),
        "tries": tries,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tries", type=int, default=7, help="of each, alternating (default 7)")
    tries = parser.parse_args().tries
    if reason := unavailable():
        print(f"no rig: {reason}", file=sys.stderr)
        return 1
    with Rig() as rig:
        print(json.dumps(measure(rig, tries)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
