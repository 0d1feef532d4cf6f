"""How a target turns batches into packed features: by CUDA graphs of a few shapes, or eagerly.

An eager pass launches some 35 kernels a layer, which took 50 to 80 ms of a slow host for a small model whose
kernels take a fifth of that. A graph launches them at once, and nothing here waits for the device.

Memory: all graphs of a target share one pool, since they run one after the other on one stream and leave
nothing in it: each fills one buffer of features, and what a drafter gets is copied out of that into memory of
its own, so no replay touches what is still read. So graphs cost what the largest pass needs (eager passes
need as much), and once the features of the largest shape.

Warm-up proves each shape: a replay over ids that were not captured must give the features that the model's
own pass gives for the same documents. Whatever fails, memory too, is a step down for all shapes with one
reason: from packed rows to padded ones (`target_layout.py`), from compiled layers to plain ones, to eager.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from remote_payload import crash
from remote_payload.train import execution
from remote_payload.train.features import fetched, pack
from remote_payload.train.target import Target
from remote_payload.train.target_attention import compile_layers
from remote_payload.train.target_layout import Layout
from remote_payload.train.warm_up import StepDown, WarmUp

CLEARLY_SLOWER = 1.1
"""Replays that take this much longer than the model's own passes are given up."""

SAME_KERNELS = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-2}
OTHER_KERNELS = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 2e-2}
"""How far, as a share of a token's features and in the mean over tokens, a replay may be from the model's own
pass: of padded rows by the same kernels, and of packed rows or compiled layers, which round elsewhere."""

WORST = 10
"""How many times that one token may be off; the first of a document that sees another's end is much more."""


class TargetPass:
    """The forward passes of one target; used by that target's thread alone."""

    def __init__(self, target: Target, last_hidden: bool, number: int = 0) -> None:
        """`last_hidden` as in `Target.features`; `number` tells targets apart in compiler messages."""
        self.target = target
        self.rung = execution.EAGER
        self.layout: Layout[Any] | None = None
        """How batches lie in the graphs; None without any."""
        self.gib: float | None = None
        """Memory that the graphs and their buffers hold; None without any."""
        self.apart: float | None = None
        """How far the worst of the replays was from the model's own pass; None without any."""
        self._last_hidden = last_hidden
        self._number = number
        self._graphs: dict[Any, execution.Graph] = {}
        self._staged = self._out = torch.empty(0)

    def warm_up(
        self, wanted: str, layouts: Sequence[Layout[Any]], check: Callable[[], None] = lambda: None
    ) -> WarmUp:
        """Capture a graph for each shape of the first layout for which all are right and fast.

        Called in turn, under `execution.WARM_UP_LOCK`, before anything trains. `check` is called between
        graphs and may raise, to end it. `step_s` of the result has seconds of a pass of the first shape.
        """
        start = time.perf_counter()
        result = WarmUp(*execution.decide_target(wanted, self.target.device))
        rungs = {
            execution.COMPILED: (execution.COMPILED, execution.GRAPH),
            execution.GRAPH: (execution.GRAPH,),
            execution.EAGER: (),
        }[result.execution]
        ways = [(rung, layout) for layout in layouts if layout.shapes for rung in rungs]
        if rungs and not ways:
            result.down(execution.EAGER, "no batch is common enough for a graph")
        for number, (rung, layout) in enumerate(ways):
            check()
            before = self._reserved_gib()
            try:
                self._capture(result, rung, layout, check)
            except Exception as error:  # whatever a model, inductor or a capture raises, eager still works
                self._forget()
                result.step_s = {}
                check()
                below = ways[number + 1] if number + 1 < len(ways) else None
                lower = f"{below[0]}, {below[1].name}" if below else execution.EAGER
                reason = f"capturing failed: {crash.one_line(error)}"
                result.steps_down.append(StepDown(f"{rung}, {layout.name}", lower, reason))
                result.execution, result.reason = below[0] if below else execution.EAGER, reason
                continue
            self.layout, self.gib = layout, round(self._reserved_gib() - before, 2)
            break
        self.rung = result.execution
        result.seconds = time.perf_counter() - start
        return result

    def packed(self, ids: Tensor, lengths: list[int]) -> Tensor:
        """Features of the real tokens of right-padded `ids` [B, L] on the CPU, of its own memory: [n, W]."""
        layout = self.layout
        shape = None if layout is None else layout.fitting(lengths)
        if layout is None or shape is None:
            given = fetched(ids, self.target.device)
            return pack(self.target.features(given, self._last_hidden), lengths)
        self._stage(layout, shape, ids, lengths)
        self._graphs[shape].replay()
        return self._collect(layout, shape, lengths)

    def _capture(self, result: WarmUp, rung: str, layout: Layout[Any], check: Callable[[], None]) -> None:
        """Graphs for all shapes of a layout, each proved; the first is timed."""
        target = self.target
        part = layout.view(target, target.part(self._last_hidden))
        if rung == execution.COMPILED:
            if target.attention != "sdpa":
                raise RuntimeError(
                    f"layers are compiled for sdpa, and this model attends by {target.attention}"
                )
            execution.configure()
            compile_layers(part, target.layers, f"target{self._number}")
        plain = rung == execution.GRAPH and layout.name == "padded"
        bound = (SAME_KERNELS if plain else OTHER_KERNELS)[target.dtype]
        most = max(shape.tokens for shape in layout.shapes)
        size = max(layout.size(shape) for shape in layout.shapes)
        self._staged = torch.zeros(size, dtype=torch.int64, device=target.device)
        self.apart = 0.0
        for shape in layout.shapes:
            check()
            lengths = layout.trial(shape)
            ids = self._random_ids(lengths, seed=0)
            own = functools.partial(self._own, ids, lengths, most)
            wanted = own()
            if not self._graphs:
                self._out = wanted.new_empty(most, wanted.shape[-1])
            self._stage(layout, shape, self._random_ids(lengths, seed=1), lengths)
            graph = self._captured(layout, shape, part)
            self._stage(layout, shape, ids, lengths)
            self._out.fill_(torch.nan)
            graph.replay()
            parted, worst = apart(self._collect(layout, shape, lengths), wanted)
            del wanted
            if not (parted <= bound and worst <= WORST * bound):
                raise RuntimeError(
                    f"the replay of {shape} differs from the model's own pass by {parted:.1%},"
                    f" at one token by {worst:.0%}"
                )
            self.apart = max(self.apart, parted)
            if not self._graphs:
                self._compare_times(result, rung, graph, own)
            self._graphs[shape] = graph

    @torch.no_grad()
    def _captured(self, layout: Layout[Any], shape: Any, part: nn.Module) -> execution.Graph:
        """The graph of one shape, in the pool of those before it."""

        def work() -> None:
            out = self._out[: shape.tokens]
            layout.run(shape, self._staged, self.target, self._last_hidden, part, out)

        work()
        return execution.Graph(work, self.target.device, next(iter(self._graphs.values()), None))

    def _stage(self, layout: Layout[Any], shape: Any, ids: Tensor, lengths: list[int]) -> None:
        """Put a batch where the graph of a shape reads it."""
        staged = layout.stage(shape, ids, lengths, pinned=self._staged.is_cuda)
        # The allocator of page-locked memory keeps `staged` until the copy is done.
        self._staged[: len(staged)].copy_(staged, non_blocking=True)

    def _collect(self, layout: Layout[Any], shape: Any, lengths: list[int]) -> Tensor:
        """What the replay has left of a batch, copied out: [n, W]."""
        return layout.collect(shape, self._staged, self._out[: shape.tokens], sum(lengths))

    def _own(self, ids: Tensor, lengths: list[int], most: int) -> Tensor:
        """What the model's own passes say of right-padded rows, at most `most` tokens a pass: [n, W]."""
        rows, given = max(1, most // ids.shape[1]), fetched(ids, self.target.device)
        return torch.cat(
            [
                pack(
                    self.target.features(given[first : first + rows], self._last_hidden),
                    lengths[first : first + rows],
                )
                for first in range(0, len(lengths), rows)
            ]
        )

    def _compare_times(
        self, result: WarmUp, rung: str, graph: execution.Graph, own: Callable[[], object]
    ) -> None:
        eager = self._seconds(own)
        replay = self._seconds(graph.replay)
        result.step_s = {execution.EAGER: eager, rung: replay}
        if replay > CLEARLY_SLOWER * eager:
            raise RuntimeError(f"the model's own pass is faster: {eager:.3f} s against {replay:.3f} s")

    def _seconds(self, work: Callable[[], object]) -> float:
        """Seconds of one call, host and device, the better of two."""
        best = float("inf")
        for _ in range(2):
            self._synchronise()
            start = time.perf_counter()
            work()
            self._synchronise()
            best = min(best, time.perf_counter() - start)
        return best

    def _reserved_gib(self) -> float:
        """Memory that torch holds on the device, without what it only keeps for later."""
        if self.target.device.type != "cuda":
            return 0.0
        gc.collect()
        torch.cuda.empty_cache()  # allowed before anything trains
        return torch.cuda.memory_reserved(self.target.device) / 2**30

    def _synchronise(self) -> None:
        if self.target.device.type == "cuda":
            torch.cuda.current_stream(self.target.device).synchronize()

    def _random_ids(self, lengths: list[int], seed: int) -> Tensor:
        """Ids for rows of documents, on the CPU; never by a device's own generator: others may capture."""
        generator = torch.Generator().manual_seed(seed)
        vocabulary = self.target.embedding.num_embeddings
        return torch.randint(vocabulary, (len(lengths), max(lengths)), generator=generator)

    def _forget(self) -> None:
        """Let go of all graphs and buffers; their memory returns with the next capture, or when needed."""
        self._graphs = {}
        self._staged = self._out = torch.empty(0)
        self.apart = None
        self.target.forget_taps()
        gc.collect()


def apart(found: Tensor, wanted: Tensor) -> tuple[float, float]:
    """How far features are from others [n, W], as a share of each token's: in the mean, and at the worst."""
    shares = [
        (mine.float() - other.float()).norm(dim=-1) / other.float().norm(dim=-1).clamp(min=1e-9)
        for mine, other in zip(found.split(1024), wanted.split(1024), strict=True)
    ]
    each = torch.cat(shares).nan_to_num(torch.inf)
    return float(each.mean()), float(each.max())
