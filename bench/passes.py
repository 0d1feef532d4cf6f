"""The passes over logits and of SwiGLU alone: our kernels beside what the compiler makes, and their errors.

    python -m bench.passes [--shape 8b|4b|smollm2] [--objectives NAMES] [--seconds S] [--json FILE]

Milliseconds are of a whole step: all chunks of logits, all layers; the product that makes the target's logits
is not among them. Each runs for S seconds without a pause. Needs a GPU.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.fp8_products import check_machine, seconds_of
from bench.shapes import SHAPES, Shape
from remote_payload.train import execution, fp8, logit_passes, swiglu
from remote_payload.train.logit_choice import BareHead
from remote_payload.train.objective import (
    FROM_DISTRIBUTIONS,
    FROM_LABELS,
    Objective,
    by_kernels,
    by_operations,
    chunk_blocks,
    most_rows,
)

DEVICE = torch.device("cuda:0")
CHECKED = 64
"""Rows that are compared with float64."""


def of_logits(shape: Shape, kind: Objective, seconds: float) -> dict[str, Any]:
    """All chunks of a step."""
    places = shape.block_size - 1
    weight = torch.empty(shape.vocabulary, shape.width, dtype=torch.bfloat16, device=DEVICE)
    head = BareHead(weight, None, 1.0, None)
    blocks = chunk_blocks(shape.anchors, places, most_rows(weight))
    chunks = -(-shape.anchors // blocks)
    logits = torch.randn(blocks, places, shape.vocabulary, dtype=torch.bfloat16, device=DEVICE) * 3
    taught = logits + torch.randn_like(logits) if kind.needs_teacher else None
    labels = torch.randint(0, shape.vocabulary, (blocks, places), device=DEVICE)
    labels[::2] = logits[::2].argmax(-1)
    weights = torch.exp(-torch.arange(places, device=DEVICE) / 7.0).repeat(blocks, 1)
    arguments = (logits, taught, head, labels, weights, kind)
    found: dict[str, Any] = {"chunks": chunks, "rows": blocks * places}
    made = {}
    for name, way in (("compiler", by_operations), ("kernels", by_kernels)):
        run = execution.build(way, execution.COMPILED, f"{name}_{kind.name}")
        made[name] = run(*arguments)
        took = seconds_of(lambda run=run: run(*arguments), seconds)  # type: ignore[misc]
        found[f"{name}_ms"] = 1e3 * chunks * took
    found["passes"] = _passes(logits, taught, labels, weights, kind, chunks, seconds)
    exact = exact_slopes(logits, taught, labels, weights, kind)
    for name, scores in made.items():
        slope = scores.gradient.flatten(0, 1)[:CHECKED].double()
        found[f"{name}_error"] = float((slope - exact).norm() / exact.norm())
    one, other = made["kernels"], made["compiler"]
    found["loss_apart"] = float((one.loss - other.loss).abs() / other.loss.abs())
    found["hits_apart"] = int((one.hits != other.hits).sum())
    return found


def _passes(
    logits: Tensor,
    taught: Tensor | None,
    labels: Tensor,
    weights: Tensor,
    kind: Objective,
    chunks: int,
    seconds: float,
) -> dict[str, dict[str, float]]:
    """Milliseconds and bytes a second of each pass of our own."""
    flat, places, each = logits.flatten(0, 1), labels.flatten(), weights.flatten()
    target = None if taught is None else taught.flatten(0, 1)
    scores = logit_passes.scan(flat, places, target)
    parts = 2 + (target is not None) + kind.reads_overlap
    factors = logit_passes.Factors(*[each] * parts)
    read = 2 if target is None else 4
    passes: dict[str, tuple[int, Any]] = {"scan": (read, lambda: logit_passes.scan(flat, places, target))}
    if kind.reads_overlap:
        assert target is not None
        passes["overlap"] = (read, lambda: logit_passes.overlap(flat, target, scores))
    for name, dtype in (("slopes", logits.dtype), ("slopes in 8 bits", fp8.SLOPE)):
        work = lambda dtype=dtype: logit_passes.slopes(flat, places, target, scores, factors, dtype)  # noqa: E731
        passes[name] = (read + dtype.itemsize, work)
    found = {}
    for name, (moved, work) in passes.items():
        took = seconds_of(work, seconds)
        found[name] = {"ms": 1e3 * chunks * took, "gb_per_s": moved * logits.numel() / took / 1e9}
    return found


def exact_slopes(
    logits: Tensor, taught: Tensor | None, labels: Tensor, weights: Tensor, kind: Objective
) -> Tensor:
    """Those of the first rows in float64, by autograd."""
    wide, places = logits.flatten(0, 1)[:CHECKED].double().requires_grad_(), labels.flatten()[:CHECKED]
    log_q = wide.log_softmax(-1)
    loss = -log_q.gather(-1, places[:, None])[:, 0]
    if taught is not None:
        log_p = taught.flatten(0, 1)[:CHECKED].double().log_softmax(-1)
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)
        loss = kind.kl_share * kl + (1 - kind.kl_share) * loss
        if kind.reads_overlap:
            accepted = torch.minimum(log_p.exp(), log_q.exp()).sum(-1)
            mixed = torch.exp(-kind.lk_eta * accepted.detach())
            loss = mixed * kl + (1 - mixed) * (1 - accepted)
    (slopes,) = torch.autograd.grad((loss * weights.flatten()[:CHECKED]).sum(), wide)
    return slopes


def of_swiglu(shape: Shape, seconds: float) -> dict[str, Any]:
    """All layers of a step."""
    n, f = shape.queries, shape.ffn
    between = torch.randn(n, 2 * f, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    slope = torch.randn(n, f, device=DEVICE, dtype=torch.bfloat16)

    def plain(between: Tensor) -> Tensor:
        gate, up = between.chunk(2, -1)
        return F.silu(gate) * up

    def ours(between: Tensor) -> Tensor:
        return swiglu.swiglu(between, kernels=True)

    ways = {
        "compiler": execution.build(plain, execution.COMPILED, "bench"),
        "kernels": execution.build(ours, execution.COMPILED, "bench"),
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
    parser.add_argument(
        "--objectives",
        default="ce,forward_kl,lk",
        help=f"some of {','.join((FROM_LABELS[0], *FROM_DISTRIBUTIONS))} (all)",
    )
    parser.add_argument("--seconds", type=float, default=0.3, help="for each number (0.3)")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    check_machine()
    shape = SHAPES[given.shape]
    losses = {}
    for name in given.objectives.split(","):
        kind = Objective(name=name, kl_share=0.9 if name == "forward_kl" else 1.0)
        one = losses[name] = of_logits(shape, kind, given.seconds)
        print(f"{name}: logits, {one['chunks']} chunks of {one['rows']} rows; ms a step:")
        for way in ("compiler", "kernels"):
            print(f"  {way:<18}{one[way + '_ms']:7.3f} ms   error of slopes {one[way + '_error']:.1e}")
        for part, each in one["passes"].items():
            print(f"  {part:<18}{each['ms']:7.3f} ms{each['gb_per_s']:7.0f} GB/s")
        print(f"  losses differ by {one['loss_apart']:.1e}, hits at {one['hits_apart']} places")
    mlps = of_swiglu(shape, given.seconds)
    print(f"SwiGLU, {shape.layers} layers; ms a step:")
    for name, each in mlps.items():
        forward, backward, error = each["forward_ms"], each["backward_ms"], each["error"]
        print(f"  {name:<18}forward {forward:.3f}  backward {backward:.3f}  error {error:.1e}")
    if given.json:
        given.json.write_text(json.dumps({"logits": losses, "swiglu": mlps}, indent=1) + "\n")


if __name__ == "__main__":
    main()
