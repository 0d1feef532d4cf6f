"""What only a GPU can show: the block mask in FlexAttention, compiled replicas in threads, two devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.nn.attention.flex_attention import flex_attention

from remote_payload import rundir
from remote_payload.job import Job
from remote_payload.train import execution
from remote_payload.train.devices import on_device
from remote_payload.train.mask import block_mask, dense_mask, mask_mod
from remote_payload.train.objective import slots_in_use
from tests.payload.small_replica import SHAPE, WIDE, make_replica, rows, run_rows
from tests.payload.tiny import job_values, write_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # what torch warns of while it compiles is no failed compilation
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(500),
]


def test_flex_attention_with_the_block_mask_equals_dense_attention_forward_and_backward(
    tmp_path: Path,
) -> None:
    device = torch.device("cuda:0")
    context, queries = SHAPE.token_budget, SHAPE.anchors * SHAPE.block_size
    attention: Any = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    for row, _ in rows(tmp_path, 4):
        starts, anchors = row.starts.to(device), row.anchors.to(device)
        q = torch.randn(1, 4, queries, 64, device=device, requires_grad=True)
        k, v = (torch.randn(1, 2, context + queries, 64, device=device, requires_grad=True) for _ in "kv")
        sees = mask_mod(starts, anchors, context, SHAPE.block_size)
        tiles = block_mask(starts, anchors, context, SHAPE.block_size, sees)
        dense = dense_mask(starts, anchors, context, SHAPE.block_size)
        slope = torch.randn(1, 4, queries, 64, device=device)
        flexed = attention(q, k, v, block_mask=tiles, enable_gqa=True)
        exact = F.scaled_dot_product_attention(q, k, v, attn_mask=dense, enable_gqa=True)
        results = [(out, *torch.autograd.grad(out, (q, k, v), slope)) for out in (flexed, exact)]
        for flex, oracle in zip(*results, strict=True):
            # TF32 inside Triton's dot: relative 1e-3 of the largest value.
            assert (flex - oracle).abs().max() <= 4e-3 * oracle.abs().max()


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 5e-3), ("bfloat16", 4e-2)])
def test_a_compiled_replica_equals_an_eager_one_and_never_recompiles(
    tmp_path: Path, dtype: str, bound: float
) -> None:
    device = torch.device("cuda:0")
    given = rows(tmp_path, 200)
    with on_device(device):
        eager, compiled = (make_replica(tmp_path, device, dtype) for _ in range(2))
        assert eager.warm_up("eager").execution == execution.EAGER
        result = compiled.warm_up("compiled")
        assert result.execution == execution.COMPILED, result.reason
        graphs = execution.compiled_graphs()
        pairs = zip(run_rows(eager, given), run_rows(compiled, given), strict=True)
        for (row, _), ((loss, slope), (other_loss, other_slope)) in zip(given, pairs, strict=True):
            assert other_loss == pytest.approx(loss, rel=bound), slots_in_use(row.weights)
            assert (slope - other_slope).norm() <= bound * slope.norm()
    assert execution.compiled_graphs() == graphs


@pytest.mark.parametrize("rung", [execution.COMPILED, execution.GRAPH])
def test_two_replicas_warm_up_in_turn_and_then_run_in_two_threads_at_once(tmp_path: Path, rung: str) -> None:
    devices = [torch.device(f"cuda:{i % torch.cuda.device_count()}") for i in range(2)]
    given = rows(tmp_path, 10)
    write_model(tmp_path / "wide", **WIDE)
    losses: dict[int, list[float]] = {}
    errors: list[BaseException] = []
    all_ready = threading.Barrier(2)

    def work(number: int) -> None:
        try:
            with on_device(devices[number]):
                with execution.WARM_UP_LOCK:  # transformers cannot load two models at once
                    replica = make_replica(tmp_path, devices[number], "bfloat16")
                    result = replica.warm_up(rung)
                assert result.execution == rung, result.reason
                # Until torch 2.14 a compiled function refuses to run while another thread compiles:
                # "Detected that you are using FX to symbolically trace a dynamo-optimized function".
                all_ready.wait(300)
                losses[number] = [loss for loss, _ in run_rows(replica, given)]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


def train(folder: Path, name: str, **changes: Any) -> tuple[Path, dict[str, Any]]:
    """Run the trainer in a process of its own; returns its run directory and exit record."""
    run_dir = folder / "runs" / name
    run_dir.mkdir(parents=True)
    if not (folder / "wide").exists():
        write_model(folder / "wide", **WIDE)
    values = job_values(
        folder,
        target=str(folder / "wide"),
        target_dtype="float32",
        compute_dtype="float32",
        token_budget=256,
        anchors=32,
        steps=40,
        rows_per_step=2,
        execution="auto",
        block_size=8,
        **changes,
    )
    (run_dir / rundir.JOB).write_text(Job.from_mapping(values, "test").to_toml())
    command = [sys.executable, str(Path(rundir.__file__).parent), "train", str(run_dir), "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=450, env=os.environ, check=False)
    sys.stdout.write(done.stdout[-4000:] + done.stderr[-4000:])
    record = json.loads((run_dir / rundir.EXIT).read_text())
    assert done.returncode == 0, record
    return run_dir, record


def test_a_run_with_two_targets_and_two_drafters_equals_one_and_one(tmp_path: Path) -> None:
    second = f"cuda:{1 % torch.cuda.device_count()}"
    one, record = train(tmp_path, "one", targets=["cuda:0"], drafters=["cuda:0"])
    two, other = train(tmp_path, "two", targets=["cuda:0", second], drafters=["cuda:0", second])
    assert record["execution"] == other["execution"] == "graph"
    events = [json.loads(line) for line in (two / rundir.EVENTS).read_text().splitlines()]
    (summed,) = [event for event in events if event["kind"] == "reduction"]
    assert summed["way"] == ("peer" if second == "cuda:0" else "nccl"), summed["reason"]
    mine, theirs = (load_file(r / record["checkpoint"] / "model.safetensors") for r in (one, two))
    for name, weight in mine.items():
        # 40 AdamW steps at 1e-2 over gradients that are summed in another order.
        share = float((weight - theirs[name]).norm() / weight.norm())
        assert share <= 2e-2, f"{name} is {share:.1%} apart"
