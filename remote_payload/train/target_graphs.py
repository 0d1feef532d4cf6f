"""The CUDA graphs of a target: one for each shape of a layout, each proved before it is used.

Memory: all graphs of a target share one pool, since they run one after the other on one stream and leave
nothing in it: each fills one buffer of features, and what a drafter gets is copied out of that into memory of
its own, so no replay touches what is still read. So graphs cost what the largest pass needs (eager passes
need as much), and once the features of the largest shape.

The proof has two halves, over ids that were not captured. Features must be near those that the model's own
pass gives for the same documents: that finds wrong positions, windows, weights. How near is a matter of
rounding, which grows like the square root of the layers, as sums of independent errors do. And what is said
of a token must not change when other documents do, nor when the last token of its own does: its numbers come
from the same operations over the same places then, so this is exact whatever the depth, and finds a mask that
lets one foreign token in. A reference in float32 would tell a little more and costs an 8B target 32 GiB.

Shapes: T tokens of a graph, n real tokens, W features of a token.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from remote_payload.train import execution
from remote_payload.train.features import fetched, pack
from remote_payload.train.target import Target
from remote_payload.train.target_attention import compile_layers
from remote_payload.train.target_layout import Layout

SAME_KERNELS = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-2}
"""How far, as a share of a token's features and in the mean over tokens, replays of padded rows may be from
the model's own pass, whose kernels they are."""

OTHER_KERNELS = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 2e-2}
"""The same of packed rows and of compiled layers, which round elsewhere; for more than `SHALLOW` layers times
the square root of their share. Measured in bfloat16: 0.012 and (compiled) 0.017 for toys of 4 layers, 0.010
and 0.012 for SmolLM2's shape of 30, 0.032 and 0.039 for a Qwen3 of 33."""

SHALLOW = 25
"""Layers up to which rounding has one bound."""

UNTOUCHED = {torch.float32: 1e-6, torch.bfloat16: 1e-3, torch.float16: 1e-3}
"""The same between two replays that differ only in what a token must not see: all but equal to the bit."""

WORST = 10
"""How many times that one token may be off; the first of a document that sees another's end is much more."""


class TargetGraphs:
    """Graphs of one layout; used by the thread that made them."""

    def __init__(
        self, target: Target, last_hidden: bool, rung: str, layout: Layout[Any], name: str = ""
    ) -> None:
        """Ready to capture; raises whatever keeps the target from being run so.

        `rung`: `graph`, or `compiled` for layers that inductor runs; `name` is for its messages.
        """
        self.rung = rung
        self.layout = layout
        self.apart = 0.0
        """How far the worst of the replays was from the model's own pass, in the mean over tokens."""
        self._target = target
        self._last_hidden = last_hidden
        self._graphs: dict[Any, execution.Graph] = {}
        self._part = layout.view(target, target.part(last_hidden))
        if rung == execution.COMPILED:
            if target.attention != "sdpa":
                raise RuntimeError(
                    f"layers are compiled for sdpa, and this model attends by {target.attention}"
                )
            execution.configure()
            compile_layers(self._part, target.layers, name)
        if rung == execution.GRAPH and layout.name == "padded":
            self._bound = SAME_KERNELS[target.dtype]
        else:
            deeper = max(1.0, layers_run(target, last_hidden) / SHALLOW)
            self._bound = OTHER_KERNELS[target.dtype] * deeper**0.5
        self._most = max(shape.tokens for shape in layout.shapes)
        size = max(layout.size(shape) for shape in layout.shapes)
        self._staged = torch.zeros(size, dtype=torch.int64, device=target.device)
        self._out = torch.empty(0)

    def __contains__(self, shape: Any) -> bool:
        return shape in self._graphs

    def capture(self, shape: Any) -> None:
        """Make the graph of a shape and prove it; the one with most tokens first, whose memory others use.

        Raises RuntimeError for a graph that is wrong, and whatever a capture raises, also for lack of memory.
        """
        lengths = self.layout.trial(shape)
        ids = self._random_ids(lengths, seed=0)
        wanted = self._own(ids, lengths)
        if not self._graphs:
            self._out = wanted.new_empty(self._most, wanted.shape[-1])
        self._stage(shape, self._random_ids(lengths, seed=1), lengths)
        graph = self._captured(shape)
        self._out.fill_(torch.nan)
        found = self._replayed(graph, shape, ids, lengths)
        mean, worst = apart(found, wanted)
        del wanted
        if not (mean <= self._bound and worst <= WORST * self._bound):
            raise RuntimeError(
                f"the replay of {shape} differs from the model's own pass by {mean:.1%}, at one token by"
                f" {worst:.0%}; rounding explains {self._bound:.1%} and {WORST * self._bound:.0%}"
            )
        self._prove_alone(graph, shape, ids, lengths, found)
        self.apart = max(self.apart, mean)
        self._graphs[shape] = graph

    def packed(self, shape: Any, ids: Tensor, lengths: list[int]) -> Tensor:
        """Features of real tokens of right-padded `ids` [B, L] on the CPU, in their own memory: [n, W]."""
        return self._replayed(self._graphs[shape], shape, ids, lengths)

    def replay(self, shape: Any) -> None:
        """Run the graph of a shape over what was staged last, and collect nothing: for those who time it."""
        self._graphs[shape].replay()

    def seconds(self, shape: Any, repeats: int = 2) -> float:
        """Seconds of a replay over documents of usual length, the best of `repeats`."""
        lengths = self.layout.usual(shape)
        self._stage(shape, self._random_ids(lengths, seed=2), lengths)
        return self._best(self._graphs[shape].replay, repeats)

    def own_seconds(self, shape: Any) -> float:
        """Seconds of the model's own pass over the same documents, the better of two."""
        lengths = self.layout.usual(shape)
        return self._best(functools.partial(self._own, self._random_ids(lengths, seed=2), lengths), 2)

    @torch.no_grad()
    def _captured(self, shape: Any) -> execution.Graph:
        """The graph of one shape, in the pool of those before it."""

        def work() -> None:
            out = self._out[: shape.tokens]
            self.layout.run(shape, self._staged, self._target, self._last_hidden, self._part, out)

        work()
        return execution.Graph(work, self._target.device, next(iter(self._graphs.values()), None))

    def _replayed(self, graph: execution.Graph, shape: Any, ids: Tensor, lengths: list[int]) -> Tensor:
        self._stage(shape, ids, lengths)
        graph.replay()
        return self.layout.collect(shape, self._staged, self._out[: shape.tokens], sum(lengths))

    def _stage(self, shape: Any, ids: Tensor, lengths: list[int]) -> None:
        """Put a batch where the graph of a shape reads it."""
        staged = self.layout.stage(shape, ids, lengths, pinned=self._staged.is_cuda)
        # The allocator of page-locked memory keeps `staged` until the copy is done.
        self._staged[: len(staged)].copy_(staged, non_blocking=True)

    def _prove_alone(
        self, graph: execution.Graph, shape: Any, ids: Tensor, lengths: list[int], found: Tensor
    ) -> None:
        """Change every second document and the others' last tokens: nothing else may change."""
        others = ids.clone()
        new = self._random_ids(lengths, seed=3)
        others[1::2] = new[1::2]
        kept: list[Tensor] = []
        for number, length in enumerate(lengths):
            same = torch.zeros(length, dtype=torch.bool)
            if number % 2 == 0:
                others[number, length - 1] = new[number, length - 1]
                same[: length - 1] = True
            kept.append(same)
        places = fetched(torch.cat(kept).nonzero()[:, 0], self._target.device)
        if not len(places):
            return
        mean, worst = apart(self._replayed(graph, shape, others, lengths)[places], found[places])
        bound = UNTOUCHED[self._target.dtype]
        if not (mean <= bound and worst <= WORST * bound):
            raise RuntimeError(
                f"in the replay of {shape} what stands after a token or in another document changes its"
                f" features, by {mean:.1%} in the mean and {worst:.0%} at the worst"
            )

    def _own(self, ids: Tensor, lengths: list[int]) -> Tensor:
        """What the model's own passes say of right-padded rows, as many tokens a pass as here: [n, W]."""
        rows, given = max(1, self._most // ids.shape[1]), fetched(ids, self._target.device)
        return torch.cat(
            [
                pack(
                    self._target.features(given[first : first + rows], self._last_hidden),
                    lengths[first : first + rows],
                )
                for first in range(0, len(lengths), rows)
            ]
        )

    def _best(self, work: Callable[[], object], repeats: int) -> float:
        """Seconds of one call, host and device."""
        best = float("inf")
        for _ in range(repeats):
            self._synchronise()
            start = time.perf_counter()
            work()
            self._synchronise()
            best = min(best, time.perf_counter() - start)
        return best

    def _synchronise(self) -> None:
        if self._target.device.type == "cuda":
            torch.cuda.current_stream(self._target.device).synchronize()

    def _random_ids(self, lengths: list[int], seed: int) -> Tensor:
        """Ids for rows of documents, on the CPU; never by a device's own generator: others may capture."""
        generator = torch.Generator().manual_seed(seed)
        vocabulary = self._target.embedding.num_embeddings
        return torch.randint(vocabulary, (len(lengths), max(lengths)), generator=generator)


def layers_run(target: Target, last_hidden: bool) -> int:
    """Layers that a pass for features runs: up to the last tap, or with `last_hidden` all."""
    return len(target.layers) if last_hidden else max(target.tap_layers) + 1


def apart(found: Tensor, wanted: Tensor) -> tuple[float, float]:
    """How far features are from others [n, W], as a share of each token's: in the mean, and at the worst."""
    shares = [
        (mine.float() - other.float()).norm(dim=-1) / other.float().norm(dim=-1).clamp(min=1e-9)
        for mine, other in zip(found.split(1024), wanted.split(1024), strict=True)
    ]
    each = torch.cat(shares).nan_to_num(torch.inf)
    return float(each.mean()), float(each.max())


def reserved_gib(device: torch.device) -> float:
    """Memory that torch holds on the device, without what it only keeps for later."""
    if device.type != "cuda":
        return 0.0
    gc.collect()
    torch.cuda.empty_cache()  # allowed before anything trains
    return torch.cuda.memory_reserved(device) / 2**30
