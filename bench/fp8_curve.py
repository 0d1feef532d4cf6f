"""The loss curve of a drafter trained with 8-bit products, beside the same one in 16 bits.

    python -m bench.fp8_curve [--fp8 head+mlp] [--steps N] [--device cuda|cpu] [--tiny] [--json FILE]
    python -m bench.fp8_curve --runs RUN_DIR RUN_DIR [--json FILE]

The first trains one small drafter twice, with the same seed, rows and features. Its text is a chain in which
a token has four likely successors; its target's features are the embeddings of the next tokens under noise
that grows with the distance, so there is something to learn at every position and something that cannot be
learned. The second reads the `step` events of two finished runs of the same steps (a job, and the same with
`--set fp8=...`): the better evidence. Both print about 20 points and the greatest relative difference.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import threading
import time
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.shapes import Shape
from bench.step import config_of
from remote_payload.job import Job
from remote_payload.tools.synthetic import random_ends
from remote_payload.train import execution
from remote_payload.train.batch import Batch, Row, RowShape, empty_row
from remote_payload.train.devices import on_device
from remote_payload.train.features import Features
from remote_payload.train.fp8 import PARTS
from remote_payload.train.replica import Replica
from remote_payload.train.schedule import learning_rate
from remote_payload.train.statistics import Statistics

SMALL = Shape(
    width=1024,
    heads=16,
    kv_heads=4,
    head_dim=64,
    ffn=3072,
    vocabulary=8192,
    target_layers=12,
    layers=3,
    taps=3,
    context=2048,
    anchors=128,
)
TINY = dataclasses.replace(
    SMALL,
    width=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    ffn=128,
    vocabulary=256,
    context=128,
    anchors=16,
    layers=2,
)
POINTS = 20
ROWS = 64
"""Different rows; every one comes again after so many steps."""
SUCCESSORS = (0.6, 0.2, 0.1, 0.1)
NOISE = 0.5
"""Of a feature, for each token of distance, as a share of the embedding's own size."""


CERTAIN = 16.0
"""Logit of a token whose row the normed state lies along."""


def chain(shape: Shape, generator: torch.Generator) -> Tensor:
    """A text of `context` tokens of the lower half of the vocabulary, [C]."""
    used, share = shape.vocabulary // 2, torch.tensor(SUCCESSORS)
    choices = torch.multinomial(share, shape.context, replacement=True, generator=generator).tolist()
    token, tokens = int(torch.randint(0, used, (), generator=generator)), []
    for choice in choices:
        tokens.append(token)
        token = (token * 5 + 1 + 97 * choice) % used
    return torch.tensor(tokens)


def row_of(ids: Tensor, shape: RowShape, generator: torch.Generator) -> Row:
    """A row of one document with anchors anywhere."""
    places = torch.randperm(len(ids) - shape.block_size - 1, generator=generator) + 1
    drawn = places[: shape.anchors].sort().values
    row = empty_row(shape)
    row.positions.copy_(torch.arange(len(ids)))
    row.starts.zero_()
    row.anchors.copy_(drawn)
    row.block_tokens[:, 0] = ids[drawn]
    row.block_positions += drawn[:, None]
    row.labels.copy_(ids[drawn[:, None] + torch.arange(1, shape.block_size)])
    row.weights += torch.from_numpy(shape.block_weights)
    return row


def features_of(ids: Tensor, embedding: Tensor, taps: int, seed: int) -> Tensor:
    """What a target might know at each token: of the tokens 1 to `taps` after it, [C, taps * D]."""
    generator = torch.Generator(embedding.device).manual_seed(seed)
    ids = F.pad(ids, (0, taps)).to(embedding.device)
    size = embedding.float().std()
    parts = []
    for ahead in range(1, taps + 1):
        known = embedding[ids[ahead : len(ids) - taps + ahead]].float()
        noise = torch.randn(known.shape, generator=generator, device=embedding.device)
        parts.append((known + noise * size * NOISE * ahead) / size)
    return torch.cat(parts, -1).to(embedding.dtype)


def train(fp8: str, shape: Shape, device: torch.device, steps: int) -> dict[str, Any]:
    """Losses of one training run at `POINTS` places, each the mean since the one before."""
    config = config_of(shape)
    mask = config.mask_token_id
    job = Job.from_mapping(
        {
            "target": "random",
            "dataset": "random",
            "mask_token_id": mask,
            "drafters": [str(device)],
            "compute_dtype": "bfloat16",
            "fp8": fp8,
            "learning_rate": 1e-3,
            "warmup": 0.05,
        },
        "bench",
    )
    rows = RowShape(
        token_budget=shape.context,
        anchors=shape.anchors,
        block_size=shape.block_size,
        mask_token_id=mask,
        gamma=7.0,
    )
    torch.manual_seed(0)  # the embedding; rows and features have generators of their own
    target = random_ends(config, device, torch.bfloat16)
    embedding = target.embedding.weight.detach()
    # Tied, and of a size that a state along a token's row can make it nearly certain.
    weight = embedding * (CERTAIN / shape.width / embedding.float().std()).to(embedding.dtype)
    target.output = dataclasses.replace(target.output, weight=weight)
    layout = Statistics(shape.block_size, 1)
    replica = Replica(0, device, job, config, rows, layout, target)
    replica.warm_up(execution.EAGER)
    generator = torch.Generator().manual_seed(1)
    texts = [chain(shape, generator) for _ in range(ROWS)]
    taps, start, points = len(config.tap_layers), time.perf_counter(), []
    marks = {round(steps * (point + 1) / POINTS) for point in range(POINTS)}
    for step in range(steps):
        ids = texts[step % ROWS]
        row = row_of(ids, rows, generator)
        replica.load(Features(cast(Batch, None), features_of(ids, embedding, taps, step % ROWS), None), row)
        replica.run_row(row, 0, first=True)
        replica.step(replica.objective.whole_block * shape.anchors, learning_rate(step, steps, job))
        if step + 1 in marks:
            points.append((step + 1, layout.read(replica.statistics).loss))
            replica.statistics.zero_()
    taken = replica.optimizer.read()
    return {"fp8": fp8, "points": points, "skipped": taken.skipped, "seconds": time.perf_counter() - start}


def of_run(run_dir: Path) -> dict[str, Any]:
    """Losses of a finished run, means over 1/`POINTS` of its steps; its reports come once a second."""
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["kind"] == "step"]
    fp8 = next((r.get("fp8", "none") for r in map(json.loads, lines) if r["kind"] == "compile"), "none")
    if not records:
        raise SystemExit(f"{run_dir}: no step is in its events.jsonl")
    last = records[-1]["step"]
    points = []
    for point in range(POINTS):
        low, high = last * point / POINTS, last * (point + 1) / POINTS
        losses = [r["loss"] for r in records if low < r["step"] <= high and r["loss"] is not None]
        if losses:
            points.append((round(high), sum(losses) / len(losses)))
    return {"fp8": fp8, "points": points, "skipped": None, "seconds": None}


def compared(plain: dict[str, Any], small: dict[str, Any]) -> dict[str, Any]:
    """Both curves where both have a point, and the differences as shares of the first."""
    other = dict(small["points"])
    both = [(step, loss, other[step]) for step, loss in plain["points"] if step in other]
    shares = [(mine - loss) / loss for _, loss, mine in both]
    return {
        "what": [plain["fp8"], small["fp8"]],
        "points": [
            {"step": step, "loss": loss, "fp8_loss": mine, "difference": share}
            for (step, loss, mine), share in zip(both, shares, strict=True)
        ],
        "greatest_difference": max(map(abs, shares), default=None),
        "mean_difference": sum(shares) / len(shares) if shares else None,
        "skipped": [plain["skipped"], small["skipped"]],
        "seconds": [plain["seconds"], small["seconds"]],
    }


def table(result: dict[str, Any]) -> str:
    """For people."""
    names = [f"fp8 = {name}" for name in result["what"]]
    lines = [f"{'step':>7}{names[0]:>18}{names[1]:>18}{'difference':>12}"]
    for point in result["points"]:
        lines.append(
            f"{point['step']:>7}{point['loss']:>18.4f}{point['fp8_loss']:>18.4f}{point['difference']:>+12.2%}"
        )
    if result["points"]:
        lines.append(
            f"greatest relative difference {result['greatest_difference']:.2%},"
            f" mean {result['mean_difference']:+.2%}; steps left out {result['skipped']}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fp8", choices=[name for name in PARTS if name != "none"], default="head+mlp")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="so small that a CPU can")
    parser.add_argument("--runs", type=Path, nargs=2, metavar="RUN_DIR", help="two finished runs instead")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    curves: list[dict[str, Any]] = []

    def work() -> None:
        device = torch.device(given.device)
        with on_device(device):
            curves.extend(
                train(fp8, TINY if given.tiny else SMALL, device, given.steps) for fp8 in ("none", given.fp8)
            )

    if given.runs:
        curves.extend(map(of_run, given.runs))
    else:
        worker = threading.Thread(target=work)
        worker.start()
        worker.join()
    if len(curves) < 2:
        raise SystemExit("the worker failed; its traceback stands above")
    ends = [max((step for step, _ in curve["points"]), default=0) for curve in curves]
    if ends[0] != ends[1]:
        raise SystemExit(
            f"one run ends at step {ends[0]} and the other at {ends[1]}: give both the same steps"
        )
    result = compared(*curves)
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + os.linesep)
    print(table(result))


if __name__ == "__main__":
    main()
