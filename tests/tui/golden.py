"""Golden run directories, as a mirror would leave them at `NOW`: one function a situation.

Written by code and not kept as files, so that one can read what is special in each. All figures are fixed:
snapshots are compared to the letter. `python -m tests.tui.golden NAME DIRECTORY` writes one, to look at with
`dflashctl tui`.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

NOW = 1_796_000_000.0
"""The laptop's clock: 2026-11-30 00:53:20 UTC."""

AHEAD = 7.5
"""Seconds the container's clock is ahead of the laptop's."""

BOOT = "0a51e8d6-0000-4000-8000-00000000b007"
EDGES = (0, 770, 1216, 1728, 2432, 3296, 8193)
PLANNED = (2283, 6120, 11402, 15877, 14010, 10131)

Record = dict[str, Any]


class Run:
    """One run directory under construction; every record can be changed before `write`."""

    def __init__(self, *, targets: int = 6, drafters: int = 2, step: int = 12_345) -> None:
        self.targets, self.drafters, self.step = targets, drafters, step
        self.run: Record = {
            "kind": "run", "id": "1129-a7f3", "created": NOW - 11_000, "payload": "5f" * 32,
            "place": "gpu1/200", "host": "10.1.2.6", "hosts": ["10.1.2.6"], "workspace": "/workspace",
            "python": "/root/venv/bin/python", "job": "qwen3-8b", "env": {}, "by": "ada@laptop",
        }  # fmt: skip
        self.status: Record | None = {
            "kind": "status", "state": "running", "since": NOW - 10_900, "reason": None, "boot_id": BOOT,
            "supervisor": {"pid": 700, "start_ticks": 1}, "trainer": {"pid": 701, "start_ticks": 2},
            "exit_code": None, "signal": None, "last_progress": NOW + AHEAD - 1.0,
        }  # fmt: skip
        self.status_age = 1.2
        self.progress: Record | None = self._progress()
        self.progress_age = 0.9
        self.exit: Record | None = None
        self.mirror: Record | None = {
            "kind": "mirror", "state": "connected", "since": NOW - 900, "tries": 0, "next_try": None,
            "error": None, "hint": None, "last_heard": NOW - 1.2, "clock_difference_s": AHEAD,
            "beat": {"t": NOW + AHEAD - 1.2, "mono": 9.0, "boot_id": BOOT, "supervisor": "alive",
                     "trainer": "alive", "files": {}},
            "files": {}, "pid": 4711,
        }  # fmt: skip
        self.mirror_age = 1.0
        self.events: list[Record] = self._events()
        self.gpu: list[Record] = self._gpu()
        if self.progress is not None:  # what the curves end with is what the first lines show
            steps = [record for record in self.events if record["kind"] == "step"]
            average = sum(record["loss"] for record in steps[-20:]) / len(steps[-20:])
            self.progress |= {
                "loss": steps[-1]["loss"], "loss_ema": average,
                "tau_estimate": steps[-1]["tau_estimate"], "tokens_per_s": steps[-1]["tokens_per_s"],
                "gradient_norm": steps[-1]["gradient_norm"],
                "learning_rate": steps[-1]["learning_rate"],
                "tau": next((r["tau"] for r in reversed(self.events) if r["kind"] == "eval"), None),
            }  # fmt: skip
        self.supervisor: list[Record] = [{"kind": "trainer_started", "pid": 701, "t": NOW + AHEAD - 10_900}]
        self.crashes: list[Record] = []
        self.raw: dict[str, bytes] = {}
        """Bytes appended to a file as they are."""
        self.log: list[str] = self._log()

    def _progress(self) -> Record:
        t = NOW + AHEAD
        threads: list[Record] = [_thread("reader", "reader", "cpu", "waiting for batches", 12_349, 3)]
        threads += [
            _thread(f"target-{i}", "target", f"cuda:{i}", "forward", self.step + 1 + i, i % 6)
            for i in range(self.targets)
        ]
        threads += [
            _thread(f"drafter-{i}", "drafter", f"cuda:{self.targets + i}", "backward", self.step, 4)
            for i in range(self.drafters)
        ]
        threads.append(_thread("progress", "progress", "cpu", "waiting for 1 s", None, None))
        for number, thread in enumerate(threads):
            thread["last_sign"] = t - 0.3 - 0.1 * number
        buckets = []
        total = sum(PLANNED)
        for i, planned in enumerate(PLANNED):
            done = int(planned * 0.206)
            buckets.append({
                "bucket": i, "low": EDGES[i], "high": EDGES[i + 1], "planned": planned,
                "planned_share": planned / total, "batches": done, "tokens": done * 30_100,
                "padding_share": (0.061, 0.042, 0.037, 0.031, 0.028, 0.094)[i],
                "tokens_per_s": (141e3, 133e3, 127e3, 122e3, 118e3, 109e3)[i],
                "loss": (2.213, 2.264, 2.301, 2.342, 2.388, 2.451)[i],
                "peak_gib": (48.2, 51.0, 55.7, 61.3, 66.9, 70.4)[i],
            })  # fmt: skip
        devices = [
            {"device": f"cuda:{i}", "uuid": _uuid(i), "roles": ["target" if i < self.targets else "drafter"],
             "allocated_gib": 61.0, "reserved_gib": 66.0, "peak_gib": 70.4, "total_gib": 139.8}
            for i in range(self.targets + self.drafters)
        ]  # fmt: skip
        return {
            "kind": "progress", "phase": "training", "step": self.step, "steps": 50_000, "epoch": 0.206,
            "eta_s": 11_530.0, "loss": 2.345, "loss_ema": 2.401, "tau_estimate": 3.41, "tau": 3.2,
            "tau_step": 12_000, "gradient_norm": 0.82, "learning_rate": 3.0e-4, "tokens": 371_584_500,
            "anchors": 6_321_152, "anchor_coverage_share": 0.71, "tokens_per_s": 123_400.0, "step_s": 0.812,
            "mfu_share": 0.38, "execution": "compiled", "recompiles": 0, "nonfinite_steps": 0,
            "wait": {"targets_share": 0.02, "drafters_share": 0.14},
            "queues": {"batches": {"depth": 4, "capacity": 4}, "features": {"depth": 1, "capacity": 4}},
            "buckets": buckets, "threads": threads, "devices": devices, "skipped": {"too_long": 14},
            "checkpoint": {"step": 12_000, "t": t - 370}, "best": {"step": 11_000, "tau": 3.24},
        }  # fmt: skip

    def _events(self) -> list[Record]:
        t = NOW + AHEAD
        start = t - 90 - 0.86 * self.step - 1.0
        records: list[Record] = [
            {"kind": "dataset", "t": start, "path": "/data/train.arrow", "samples": 1_095_082,
             "usable": 1_095_068, "tokens": 1_800_000_000, "skipped": {"too_long": 14}, "batches": 59_823,
             "batch_min": 4, "batch_max": 64, "batch_mean": 18.3},
        ]  # fmt: skip
        records += [
            {"kind": "target", "t": start + 5 + i, "target": i, "device": f"cuda:{i}", "model": "Qwen3-8B",
             "layers": 36, "width": 4096, "vocabulary": 151_936, "taps": [1, 9, 17, 25, 33], "load_s": 11.2}
            for i in range(self.targets)
        ]  # fmt: skip
        records += [
            {"kind": "compile", "t": start + 30 + i, "replica": i, "execution": "compiled",
             "reason": "inductor, dynamic=False", "warmup_s": 24.1, "eager_step_s": 1.31,
             "compiled_step_s": 0.812}
            for i in range(self.drafters)
        ]  # fmt: skip
        records += [
            {"kind": "ready", "t": start + 60 + i, "replica": i, "device": f"cuda:{self.targets + i}",
             "parameters": 1_048_000_000, "warmup_s": 24.1}
            for i in range(self.drafters)
        ]  # fmt: skip
        records.append({"kind": "start", "t": start + 90, "steps": 50_000, "steps_per_epoch": 59_823,
                        "rows_per_step": self.drafters})  # fmt: skip
        dice = random.Random(7)
        for step in range(1, self.step + 1, max(1, self.step // 1500)):
            share = step / 50_000
            loss = 2.2 + 8.4 * math.exp(-step / 700) + dice.gauss(0, 0.06) + 0.6 * math.exp(-step / 5000)
            rate = 123e3 + dice.gauss(0, 3e3)
            records.append({
                "kind": "step", "t": start + 90 + 0.86 * step, "step": step, "epoch": share, "loss": loss,
                "tau_estimate": 1 + 2.45 * (1 - math.exp(-step / 3000)) + dice.gauss(0, 0.03),
                "accuracy": [0.7, 0.6, 0.5], "gradient_norm": 0.8 + math.exp(-step / 400) * 6,
                "learning_rate": 6e-4 * min(1, step / 2000), "tokens_per_s": rate, "step_s": 0.812,
                "bucket": step % 6, "queues": {"batches": 4 - step % 2, "features": 1 + step // 8 % 2},
                "conditional_accuracy": [0.78 - 0.02 * k for k in range(15)],
            })  # fmt: skip
            if step > 2 and (step // 8) % 250 == 0:
                tau = 1 + 2.25 * (1 - math.exp(-step / 3300))
                records.append({"kind": "eval", "t": start + 90 + 0.86 * step, "step": step, "tau": tau,
                                "prompts": 64, "eval_s": 31.0, "text_equal": 60, "diverged": 4,
                                "diverged_allowed": 4, "by_kind": {},
                                "acceptance": [0.74 * 0.72**k for k in range(15)]})  # fmt: skip
        records.append({"kind": "checkpoint", "t": t - 370, "step": 12_000, "path": "step-12000",
                        "bytes": 14_680_064_000, "seconds": 9.4})  # fmt: skip
        return sorted(records, key=lambda record: float(record["t"]))

    def _gpu(self) -> list[Record]:
        count = self.targets + self.drafters
        constants = [
            {"uuid": _uuid(i), "index": i, "name": "NVIDIA H200", "driver": "580.159.04",
             "memory_total_gib": 140.4, "power_limit_w": 700.0, "mig": False}
            for i in range(count)
        ]  # fmt: skip
        records: list[Record] = [{"kind": "gpu_constants", "t": NOW + AHEAD - 10_900, "gpus": constants}]
        for tick in range(12):
            gpus = {}
            for i in range(count):
                busy = 0.97 - 0.01 * ((i + tick) % 4)
                gpus[_uuid(i)] = {
                    "index": i, "memory_used_gib": 70.6 + 0.3 * i, "utilization_share": busy,
                    "power_w": 598.0 + 7 * i, "temperature_c": 59 + i, "sm_clock_mhz": 1605.0,
                    "throttle": "0x0000000000000004",
                }  # fmt: skip
            records.append({"kind": "gpu", "t": NOW + AHEAD - 2.1 - 5 * (11 - tick), "gpus": gpus})
        return records

    def _log(self) -> list[str]:
        lines = [
            "1095082 samples loaded (Arrow-backed, lazy access)",
            "Batches per epoch: 59823 (min=4 max=64 avg=18.3)",
        ]
        lines += [
            f"Bucket {i} [{EDGES[i]:4}, {EDGES[i + 1]:4}): {p:6} batches ({p / sum(PLANNED):6.1%})"
            for i, p in enumerate(PLANNED)
        ]
        lines += [f"Loading {self.targets} target models..."]
        lines += [f"Target {i} on cuda:{i}... 11.2s" for i in range(self.targets)]
        lines += [
            f"replica {i} ready on cuda:{self.targets + i}: compiled, warm-up 24.1s"
            for i in range(self.drafters)
        ]
        first = max(1, self.step - 60)
        lines += [
            f"step {s:>6}  loss {2.35 + 0.04 * math.sin(s):.3f}  tau~ 3.41  lr 3.0e-04  123k tok/s"
            for s in range(first, self.step + 1)
        ]
        return lines

    def write(self, directory: Path) -> Path:
        """Write the run directory and return it."""
        directory.mkdir(parents=True, exist_ok=True)
        container = NOW + AHEAD
        log = "".join(f"{text}\n" for text in self.log).encode() + self.raw.get("train.log", b"")
        if self.mirror is not None:
            entry = {"generation": 1, "size": len(log), "extents": [[0, len(log)]]}
            self.mirror["files"]["train.log"] = entry
        whole = {
            "run.json": (self.run, container - 11_000),
            "status.json": (self.status, container - self.status_age),
            "progress.json": (self.progress, container - self.progress_age),
            "exit.json": (self.exit, container - self.status_age),
            "mirror.json": (self.mirror, NOW - self.mirror_age),
        }
        for name, (record, t) in whole.items():
            if record is not None:
                (directory / name).write_bytes(_line({"t": t, **record}))
        appended = {
            "events.jsonl": self.events,
            "gpu.jsonl": self.gpu,
            "supervisor.jsonl": self.supervisor,
        }
        for name, records in appended.items():
            body = b"".join(map(_line, records)) + self.raw.get(name, b"")
            (directory / name).write_bytes(body)
        (directory / "train.log").write_bytes(log)
        for crash in self.crashes:
            (directory / "crash").mkdir(exist_ok=True)
            name = f"thread-{crash['thread']}.json"
            (directory / "crash" / name).write_bytes(_line({"kind": "crash", **crash}))
        return directory

    # changes that several situations share

    def end(self, state: str, *, code: int | None, signal: str | None = None, reason: str = "") -> None:
        """The supervisor saw the trainer end."""
        assert self.status is not None and self.mirror is not None
        self.status |= {"state": state, "exit_code": code, "signal": signal, "reason": reason or None,
                        "trainer": None}  # fmt: skip
        self.supervisor.append({"kind": "trainer_exited", "exit_code": code, "signal": signal,
                                "runtime_s": 10_800, "t": NOW + AHEAD - 95})  # fmt: skip
        self.supervisor.append({"kind": "end", "state": state, "reason": reason or None,
                                "t": NOW + AHEAD - 95})  # fmt: skip
        self.status_age = 95.0
        self.progress_age = 96.0
        self._signs_earlier(96.0)
        self.mirror["state"] = "ended"
        self.mirror["beat"] |= {"supervisor": "gone", "trainer": "gone"}

    def away(self, seconds: float) -> None:
        """Nothing was heard for `seconds`."""
        assert self.mirror is not None
        self.mirror["last_heard"] = NOW - seconds
        self.mirror["beat"]["t"] = NOW + AHEAD - seconds
        self.status_age = self.progress_age = seconds + 0.8
        self._signs_earlier(seconds)
        for record in self.gpu:
            record["t"] -= seconds

    def _signs_earlier(self, seconds: float) -> None:
        for thread in self.progress["threads"] if self.progress else ():
            thread["last_sign"] -= seconds


def _line(record: Record) -> bytes:
    return json.dumps({"v": 1, "attempt": 1, **record}, separators=(",", ":")).encode() + b"\n"


def _uuid(i: int) -> str:
    return f"GPU-00000000-0000-0000-0000-0000000000{0xA0 + i:02x}"


def _thread(name: str, role: str, device: str, state: str, step: int | None, bucket: int | None) -> Record:
    return {"name": name, "role": role, "device": device, "state": state, "step": step,
            "bucket": bucket, "busy_s": 9_800.0, "waited_s": 420.0}  # fmt: skip


def healthy() -> Run:
    """Eight GPUs at work, one of them idle."""
    run = Run()
    for record in run.gpu[-6:]:
        record["gpus"][_uuid(5)] |= {"utilization_share": 0.21, "power_w": 210.0, "temperature_c": 48}
    return run


def first_minute() -> Run:
    """Launched: targets load, nothing was trained yet."""
    run = Run(step=1)
    assert run.progress is not None
    run.progress |= {
        "phase": "loading", "step": 0, "eta_s": None, "loss": None, "loss_ema": None, "tau": None,
        "tau_estimate": None, "tau_step": None, "gradient_norm": None, "tokens_per_s": None,
        "step_s": None, "mfu_share": None, "execution": "", "checkpoint": None, "buckets": [],
        "best": None, "anchor_coverage_share": None,
        "wait": {"targets_share": None, "drafters_share": None}, "queues": {},
    }  # fmt: skip
    for thread in run.progress["threads"]:
        thread |= {"state": "loading" if thread["role"] == "target" else "waiting for a target", "step": None,
                   "bucket": None, "busy_s": 9.0, "waited_s": 0.0}  # fmt: skip
    run.events = [record for record in run.events[:3] if record["kind"] != "step"]
    run.log = run.log[:11]
    return run


def nan_loss() -> Run:
    """The loss became NaN at step 12,300 and stayed it."""
    run = healthy()
    assert run.progress is not None
    run.progress |= {"loss": None, "nonfinite": ["loss"], "nonfinite_steps": 6}
    for record in run.events:
        if record["kind"] == "step" and record["step"] > 12_000:
            record["loss"] = None
    run.events.append({"kind": "nonfinite", "t": NOW + AHEAD - 30, "step": 12_300, "bucket": 5,
                       "samples": [10_442, 91_007], "gradient_norm": None})  # fmt: skip
    return run


TRACEBACK = """Traceback (most recent call last):
  File "/workspace/payloads/5f5f5f5f5f5f5f5f/remote_payload/train/pipeline.py", line 188, in _run
    self._step(batch)
  File "/workspace/payloads/5f5f5f5f5f5f5f5f/remote_payload/train/execution.py", line 131, in step
    loss = self._compiled(self._static)
  File "/root/venv/lib/python3.12/site-packages/torch/_dynamo/eval_frame.py", line 655, in _fn
    return fn(*args, **kwargs)
  File "/root/venv/lib/python3.12/site-packages/torch/_inductor/cudagraph_trees.py", line 371, in get_obj
    assert torch._C._is_key_in_tls(attr_name)
AssertionError
"""


def dead_thread() -> Run:
    """A drafter thread failed, another followed, and the run ended with code 1."""
    run = healthy()
    common = {"t": NOW + AHEAD - 100, "step": 12_345, "bucket": 4, "samples": [118, 7_002]}
    run.crashes = [
        {**common, "thread": "drafter-1", "role": "drafter", "device": "cuda:7",
         "error": "AssertionError", "traceback": TRACEBACK, "first": True, "memory": None},
        {**common, "thread": "drafter-0", "role": "drafter", "device": "cuda:6", "t": NOW + AHEAD - 99,
         "error": "BrokenBarrierError", "traceback": "Traceback ...\nBrokenBarrierError\n", "first": False,
         "memory": None},
    ]  # fmt: skip
    run.events.append({"kind": "crash", "t": NOW + AHEAD - 100, "thread": "drafter-1", "role": "drafter",
                       "device": "cuda:7", "step": 12_345, "bucket": 4, "error": "AssertionError",
                       "file": "thread-drafter-1.json", "first": True})  # fmt: skip
    run.end("failed", code=1, reason="the trainer ended with exit code 1")
    return run


def killed() -> Run:
    """SIGKILL: no last word of the trainer."""
    run = healthy()
    run.end("killed", code=137, signal="SIGKILL", reason="the trainer was killed by SIGKILL")
    return run


def lost() -> Run:
    """The container says that nobody is there, and nobody wrote an end."""
    run = healthy()
    assert run.mirror is not None
    run.mirror["beat"] |= {"supervisor": "gone", "trainer": "gone"}
    run.status_age = run.progress_age = 60.0
    return run


def no_news() -> Run:
    """Nothing was heard for 40 s, and no process on this machine is connected."""
    run = healthy()
    run.away(40.0)
    run.mirror_age = 40.0
    return run


def reconnecting() -> Run:
    """The connection broke; the third try is in 8 s."""
    run = healthy()
    run.away(31.0)
    assert run.mirror is not None
    run.mirror |= {"state": "reconnecting", "tries": 3, "next_try": NOW + 8,
                   "error": "10.1.2.6: no route to host"}  # fmt: skip
    return run


def stalled() -> Run:
    """The trainer lives and writes no progress."""
    run = healthy()
    assert run.status is not None
    run.status |= {"state": "stalled", "reason": "no progress for 75 s"}
    run.progress_age = 75.0
    return run


def no_gpu() -> Run:
    """The demo on a laptop: a CPU alone."""
    run = Run(targets=1, drafters=1, step=412)
    run.run |= {"place": "local", "host": "local", "id": "1130-demo-4e1c", "job": "demo"}
    run.gpu = [{"kind": "gpu_none", "t": NOW + AHEAD - 395, "reason": "nvidia-smi is not installed"}]
    assert run.progress is not None
    run.progress |= {
        "steps": 900, "epoch": 11.4, "eta_s": 176.0, "loss": 2.611, "loss_ema": 2.702,
        "tau_estimate": 1.52, "tau": 1.18, "tau_step": 300, "learning_rate": 2.1e-3,
        "gradient_norm": 1.41, "tokens_per_s": 1_430.0, "step_s": 0.36, "mfu_share": None,
        "checkpoint": None,
    }  # fmt: skip
    for thread in run.progress["threads"]:
        thread["device"] = "cpu"
        if thread["step"] is not None:
            thread["step"] = 412
    run.progress["devices"] = [{"device": "cpu", "uuid": None, "roles": ["target", "drafter"]}]
    run.progress["buckets"] = run.progress["buckets"][:1]
    run.progress["buckets"][0] |= {"planned": 36, "planned_share": 1.0, "batches": 14, "peak_gib": None}
    return run


def gpu_lost() -> Run:
    """GPU 3 fell off the bus, GPU 6 is hot, GPU 7 is full."""
    run = Run()
    sample = run.gpu[-1]["gpus"]
    sample[_uuid(3)] = {"index": 3, "memory_used_gib": None, "utilization_share": None, "power_w": None,
                        "temperature_c": None, "sm_clock_mhz": None, "throttle": None,
                        "why": {"all": "GPU is lost.  Reboot the system to recover this GPU"}}  # fmt: skip
    sample[_uuid(6)] |= {"temperature_c": 91, "throttle": "0x0000000000000040"}
    sample[_uuid(7)] |= {"memory_used_gib": 139.2}
    return run


def sixteen_gpus() -> Run:
    """Sixteen GPUs of one host."""
    return Run(targets=12, drafters=4)


def mig() -> Run:
    """A GPU cut into slices: nvidia-smi has no utilisation for it, and the trainer sees a slice's uuid."""
    run = Run(targets=1, drafters=1)
    for row in run.gpu[0]["gpus"]:
        row["mig"] = "Enabled"
    for record in run.gpu[1:]:
        for sample in record["gpus"].values():
            sample |= {"utilization_share": None, "why": {"utilization_share": "[N/A]"}}
    assert run.progress is not None
    for number, device in enumerate(run.progress["devices"]):
        device["uuid"] = f"MIG-00000000-0000-0000-0000-00000000000{number}"
    return run


def stale_heartbeat() -> Run:
    """The container answers, the trainer works, but the supervisor has written nothing for 45 s."""
    run = healthy()
    run.status_age = 45.0
    return run


def two_hosts() -> Run:
    """The second host of a run of two."""
    run = healthy()
    run.run |= {"id": "1129-wide", "host": "10.1.2.7", "hosts": ["10.1.2.6", "10.1.2.7"],
                "place": "gpu2/200", "rank": 1}  # fmt: skip
    return run


def wide_text() -> Run:
    """Characters two columns wide, combining ones and emoji where names stand."""
    run = healthy()
    run.run |= {"place": "機械/二百", "id": "1129-a7f3"}
    assert run.progress is not None
    run.progress["threads"][1] |= {"name": "目標スレッド零号機", "state": "前進 🙂 e\u0301"}
    run.log += ["訓練 " * 40, "e\u0301" * 30]
    return run


def finished() -> Run:
    """All steps were made."""
    run = healthy()
    run.end("finished", code=0)
    run.exit = {"kind": "exit", "outcome": "finished", "exit_code": 0, "step": 50_000, "steps": 50_000,
                "loss_first": 10.9, "loss_last": 2.21, "tau_before": 1.02, "tau_after": 3.31,
                "seconds": 40_600.0, "checkpoint": "checkpoints/step-50000"}  # fmt: skip
    return run


def stopped() -> Run:
    """Stopped on request."""
    run = healthy()
    run.end("finished", code=3, reason="stopped on request by ada@laptop")
    return run


def hostile_text() -> Run:
    """Brackets, escape codes, progress bars, wide characters, half lines and a line of 1 MB."""
    run = healthy()
    assert run.progress is not None
    run.progress["threads"][0] |= {"name": "[/red]", "state": "\x1b[31m[bold]waiting"}
    run.run["place"] = "[/home/u]"
    run.events.append({"kind": "[blink]", "t": NOW + AHEAD - 4})
    run.events.append({"kind": "recompile", "t": NOW + AHEAD - 3, "replica": 0,
                       "reason": "\x1b]0;owned\x07L['x'] [/bold] changed"})  # fmt: skip
    run.raw["events.jsonl"] = b'{"kind": "step", "t": 17960\nnot json\n{"kind": "st'
    bar = "\r".join(f"{n:3}%|{'#' * (n // 5):20}| {n}/100 [00:01<00:00]" for n in range(101))
    run.log += [
        "[rank0]: boom [/home/u] [bold]not bold[/bold]",
        "\x1b[1;31mred\x1b[0m and \x1b]0;title\x07plain",
        bar,
        "宽字符 and emoji 🙂 and combining e\u0301",
        "x" * 1_000_000,
    ]
    run.raw["train.log"] = b"the last line is only ha"
    return run


SITUATIONS: dict[str, Callable[[], Run]] = {
    f.__name__: f
    for f in (
        healthy, first_minute, nan_loss, dead_thread, killed, lost, no_news, reconnecting, stalled, no_gpu,
        gpu_lost, sixteen_gpus, mig, stale_heartbeat, two_hosts, wide_text, finished, stopped, hostile_text,
    )
}  # fmt: skip


if __name__ == "__main__":
    SITUATIONS[sys.argv[1]]().write(Path(sys.argv[2]))
