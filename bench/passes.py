"""The passes over logits and of SwiGLU alone: our kernels beside what the compiler makes, and their errors.

    python -m bench.passes [--shape 8b|4b] [--seconds S] [--json FILE]

Milliseconds are of a whole step: all chunks of logits, all layers. Each runs for S seconds without a pause.
Needs a GPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.fp8_products import seconds_of
from bench.shapes import SHAPES, Shape
from remote_payload.train import execution, fp8, logit_passes, objective, swiglu
from remote_payload.train.objective import Objective, chunk_blocks, most_rows
from remote_payload.train.output_head import OutputHead

DEVICE = torch.device("cuda:0")
CHECKED = 64
"""Rows that are compared with float64."""


class Given(OutputHead):
    """A head whose logits are there already, and that hands their slope back."""

    def drafted(self, hidden: Tensor) -> Tensor:
        return hidden

    def by_hidden(self, slope: Tensor, bound: Tensor) -> Tensor:
        return slope.to(self.weight.dtype)

    def by_written(self, write: Callable[[Any, torch.dtype], Tensor], bound: Tensor) -> Tensor:
        return write(1.0, self.weight.dtype)


def of_logits(shape: Shape, seconds: float) -> dict[str, Any]:
    """All chunks of a step."""
    places = shape.block_size - 1
    head = Given(
        torch.empty(shape.vocabulary, shape.width, dtype=torch.bfloat16, device=DEVICE), None, 1.0, None
    )
    blocks = chunk_blocks(shape.anchors, places, most_rows(head.weight))
    chunks = -(-shape.anchors // blocks)
    logits = torch.randn(blocks, places, shape.vocabulary, dtype=torch.bfloat16, device=DEVICE) * 3
    labels = torch.randint(0, shape.vocabulary, (blocks, places), device=DEVICE)
    labels[::2] = logits[::2].argmax(-1)
    weights = torch.exp(-torch.arange(places, device=DEVICE) / 7.0).repeat(blocks, 1)
    kind = Objective()
    arguments = (logits, head, labels, weights, None, kind)
    ways: dict[str, Any] = {"kernels": execution.build(objective.chunk_scores, execution.COMPILED, "kernels")}
    found: dict[str, Any] = {"chunks": chunks, "rows": blocks * places}
    by_kernels = ways["kernels"](*arguments)
    fits = execution.runs_kernels
    vars(objective)["runs_kernels"] = lambda _logits: False
    try:
        ways["compiler"] = execution.build(objective.chunk_scores, execution.COMPILED, "compiler")
        by_compiler = ways["compiler"](*arguments)
        found["compiler_ms"] = 1e3 * chunks * seconds_of(lambda: ways["compiler"](*arguments), seconds)
    finally:
        vars(objective)["runs_kernels"] = fits
    found["kernels_ms"] = 1e3 * chunks * seconds_of(lambda: ways["kernels"](*arguments), seconds)
    flat, flat_labels = logits.flatten(0, 1), labels.flatten()
    scores = logit_passes.score_labels(flat, flat_labels)
    each = weights.flatten()
    passes = {
        "scan": lambda: logit_passes.score_labels(flat, flat_labels),
        "slopes": lambda: logit_passes.slopes(flat, flat_labels, scores, each, torch.bfloat16),
        "slopes in 8 bits": lambda: logit_passes.slopes(flat, flat_labels, scores, each, fp8.SLOPE),
    }
    moved = {"scan": 2, "slopes": 4, "slopes in 8 bits": 3}
    for name, work in passes.items():
        took = seconds_of(work, seconds)
        found[name] = {"ms": 1e3 * chunks * took, "gb_per_s": moved[name] * logits.numel() / took / 1e9}
    wide = flat[:CHECKED].double()
    exact = (wide.softmax(-1) - F.one_hot(flat_labels[:CHECKED], shape.vocabulary)) * each[:CHECKED, None]
    for name, result in (("kernels", by_kernels), ("compiler", by_compiler)):
        slope = result.gradient.flatten(0, 1)[:CHECKED].double()
        found[f"{name}_error"] = float((slope - exact).norm() / exact.norm())
    found["loss_apart"] = float((by_kernels.loss - by_compiler.loss).abs() / by_compiler.loss.abs())
    found["hits_apart"] = int((by_kernels.hits != by_compiler.hits).sum())
    return found


def of_swiglu(shape: Shape, seconds: float) -> dict[str, Any]:
    """All layers of a step."""
    n, f = shape.queries, shape.ffn
    between = torch.randn(n, 2 * f, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    slope = torch.randn(n, f, device=DEVICE, dtype=torch.bfloat16)

    def plain(between: Tensor) -> Tensor:
        gate, up = between.chunk(2, -1)
        return F.silu(gate) * up

    ways = {
        "compiler": execution.build(plain, execution.COMPILED, "bench"),
        "kernels": execution.build(swiglu.swiglu, execution.COMPILED, "bench"),
    }
    found: dict[str, Any] = {}
    exact = swiglu.slopes(between.detach()[:CHECKED], slope[:CHECKED])
    for name, way in ways.items():
        made = way(between)
        (slopes,) = torch.autograd.grad(made, between, slope, retain_graph=True)
        forward = seconds_of(lambda way=way: way(between), seconds)  # type: ignore[misc]
        backward = seconds_of(
            lambda made=made: torch.autograd.grad(made, between, slope, retain_graph=True),  # type: ignore[misc]
            seconds,
        )
        times = {"forward_ms": forward, "backward_ms": backward}
        found[name] = {what: 1e3 * shape.layers * took for what, took in times.items()}
        found[name]["error"] = float((slopes[:CHECKED].float() - exact).norm() / exact.norm())
        del made, slopes
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=[s for s in SHAPES if s != "tiny"], default="8b")
    parser.add_argument("--seconds", type=float, default=0.3, help="for each number (0.3)")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    shape = SHAPES[given.shape]
    logits = of_logits(shape, given.seconds)
    print(f"logits, {logits['chunks']} chunks of {logits['rows']} rows; ms a step:")
    for name in ("compiler", "kernels"):
        print(f"  {name:<18}{logits[name + '_ms']:7.3f} ms   error of slopes {logits[name + '_error']:.1e}")
    for name in ("scan", "slopes", "slopes in 8 bits"):
        print(f"  {name:<18}{logits[name]['ms']:7.3f} ms{logits[name]['gb_per_s']:7.0f} GB/s")
    print(f"  losses differ by {logits['loss_apart']:.1e}, hits at {logits['hits_apart']} places")
    mlps = of_swiglu(shape, given.seconds)
    print(f"SwiGLU, {shape.layers} layers; ms a step:")
    for name, one in mlps.items():
        forward, backward, error = one["forward_ms"], one["backward_ms"], one["error"]
        print(f"  {name:<18}forward {forward:.3f}  backward {backward:.3f}  error {error:.1e}")
    if given.json:
        given.json.write_text(json.dumps({"logits": logits, "swiglu": mlps}, indent=1) + "\n")


if __name__ == "__main__":
    main()
