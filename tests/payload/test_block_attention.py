"""Our attention kernels against dense attention in float32, forward and all gradients.

Under Triton's interpreter (`TRITON_INTERPRET=1 pytest tests/payload/test_block_attention.py`, a CPU and the
package triton) at small shapes; on a GPU as they are run.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor

from remote_payload.train.mask import dense_mask
from tests.payload.test_mask import Packed, packed_rows

pytest.importorskip("triton")
module = pytest.importorskip("remote_payload.train.block_attention")

pytestmark = pytest.mark.filterwarnings(
    "default"
)  # the interpreter's own of numpy, torch's while it compiles

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
on_gpu = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

CONTEXT, SLOTS, BLOCK = 128, 8, 8
KV_HEADS, GROUP, SIZE = 2, 2, 16


def plan(slopes: str, **changes: Any) -> Any:
    small = module.Tiling(rows=32, keys=32, stages=1, warps=4)
    return module.Plan(
        forward=dataclasses.replace(small, **changes),
        by_keys=dataclasses.replace(small, **changes),
        by_queries=dataclasses.replace(small, **changes),
        slopes=slopes,
    )


def inputs(
    queries: int, context: int, heads: int, kv_heads: int, size: int, device: str = "cpu", dtype: Any = None
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [
        (queries, heads),
        (context + queries, kv_heads),
        (context + queries, kv_heads),
        (queries, heads),
    ]
    made = [torch.randn(*shape, size, generator=generator) for shape in shapes]
    return [t.to(device, dtype or torch.float32).requires_grad_() for t in made]


def dense(given: list[Tensor], mask: Tensor) -> Tensor:
    q, k, v = (t.transpose(0, 1)[None] for t in given)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)


def both(
    given: list[Tensor], starts: Tensor, anchors: Tensor, context: int, block: int
) -> list[tuple[Tensor, Tensor]]:
    """Output and gradients by our kernels, and by dense attention in float32."""
    *qkv, slope = given
    out = module.block_attention(*qkv, starts, anchors, context, block)
    mine = [out, *torch.autograd.grad(out, qkv, slope)]
    exact_qkv = [t.detach().float().requires_grad_() for t in qkv]
    exact = dense(exact_qkv, dense_mask(starts, anchors, context, block))
    theirs = [exact, *torch.autograd.grad(exact, exact_qkv, slope.float())]
    return list(zip(mine, theirs, strict=True))


@interpreted
@pytest.mark.parametrize("slopes", [module.DETERMINISTIC, module.BY_REGISTERS])
@pytest.mark.parametrize(("rows", "keys"), [(32, 32), (64, 32), (16, 64)])
@settings(deadline=None, max_examples=6)
@given(row=packed_rows(CONTEXT, SLOTS, BLOCK))
def test_output_and_all_gradients_are_those_of_dense_attention(
    slopes: str, rows: int, keys: int, row: Packed
) -> None:
    check(row, plan(slopes, rows=rows, keys=keys))


@interpreted
@settings(deadline=None, max_examples=6)
@given(row=packed_rows(CONTEXT, SLOTS, BLOCK))
def test_loads_by_descriptor_read_the_same(row: Packed) -> None:
    check(row, plan(module.DETERMINISTIC, tma=True))


def check(row: Packed, how: Any) -> None:
    before, module.PLAN = module.PLAN, how
    try:
        starts, anchors = row.tensors()
        given = inputs(SLOTS * BLOCK, CONTEXT, KV_HEADS * GROUP, KV_HEADS, SIZE)
        for mine, exact in both(given, starts, anchors, CONTEXT, BLOCK):
            torch.testing.assert_close(mine, exact, rtol=1e-4, atol=1e-4)
    finally:
        module.PLAN = before


@interpreted
def test_the_operator_says_its_shapes_and_gradients_as_torch_checks_them(monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "PLAN", plan(module.DETERMINISTIC))
    starts, anchors = Packed([100, 90], [3, 99, 120, 150], 8, CONTEXT, BLOCK).tensors()
    q, k, v, _ = inputs(8 * BLOCK, CONTEXT, KV_HEADS * GROUP, KV_HEADS, SIZE)
    arguments = (q, k, v, starts, anchors, CONTEXT, BLOCK)
    torch.library.opcheck(module._forward, arguments, test_utils=("test_schema", "test_faketensor"))


def compared(
    starts: Tensor, anchors: Tensor, context: int, heads: int, kv_heads: int, block: int, size: int = 128
) -> list[float]:
    """Relative errors of output, dq, dk and dv in bfloat16 on the GPU, against float32."""
    starts, anchors = starts.cuda(), anchors.cuda()
    given = inputs(len(anchors) * block, context, heads, kv_heads, size, "cuda", torch.bfloat16)
    pairs = both(given, starts, anchors, context, block)
    return [float((mine.float() - exact).norm() / exact.norm()) for mine, exact in pairs]


ROWS = {
    "one document": Packed([1024], list(range(5, 1000, 31))[:32], 32, 1024, 16),
    "many documents": Packed(
        [1, 127, 129, 3, 300, 464],
        sorted({0, 1, 100, 128, 200, 256, 257, 258, 259, *range(300, 1000, 40)}),
        32,
        1024,
        16,
    ),
    "no anchors": Packed([], [], 32, 1024, 16),
    "anchors side by side": Packed([1024], list(range(500, 532)), 32, 1024, 16),
    "few anchors": Packed([600, 424], [599, 700, 1022], 32, 1024, 16),
}

PLANS = {
    "triton": module.Plan(slopes=module.DETERMINISTIC),
    "triton, registers": module.Plan(slopes=module.BY_REGISTERS),
    "triton, descriptors": module.Plan(slopes=module.BY_DESCRIPTOR),
    "hopper": module.HOPPER,
}


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("how", PLANS)
@pytest.mark.parametrize("row", ROWS)
def test_on_a_gpu_output_and_gradients_are_as_near_to_float32_as_bfloat16_is(
    how: str, row: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(module, "PLAN", PLANS[how])
    for heads, kv_heads in ((8, 2), (8, 8), (16, 2)):
        if how == "hopper" and not module.hopper_fits(heads, kv_heads, 128, 16):
            continue
        errors = compared(*ROWS[row].tensors(), 1024, heads, kv_heads, 16)
        assert max(errors) < 0.012, errors


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("how", ["triton", "hopper"])
def test_a_graph_replays_other_rows_without_compiling_again(how: str, monkeypatch: Any) -> None:
    """Compiled whole, captured in a worker's stream, and then run on the anchors of other rows."""
    monkeypatch.setattr(module, "PLAN", PLANS[how])
    starts, anchors = (t.cuda() for t in ROWS["one document"].tensors())
    q, k, v, slope = inputs(512, 1024, 8, 2, 128, "cuda", torch.bfloat16)

    def step(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        out = module.block_attention(q * 1.0, k, v, starts, anchors, 1024, 16)
        return (out, *torch.autograd.grad(out, (q, k, v), slope))

    compiled = torch.compile(
        lambda q, k, v: module.block_attention(q * 1.0, k, v, starts, anchors, 1024, 16), fullgraph=True
    )
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            torch.autograd.grad(compiled(q, k, v), (q, k, v), slope)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            out = compiled(q, k, v)
            captured = (out, *torch.autograd.grad(out, (q, k, v), slope))
    for row in ROWS.values():
        for buffer, value in zip((starts, anchors), row.tensors(), strict=True):
            buffer.copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        for mine, again in zip(captured, step(q, k, v), strict=True):
            torch.testing.assert_close(mine, again, rtol=2e-2, atol=2e-2)
