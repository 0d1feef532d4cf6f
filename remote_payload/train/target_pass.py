"""How a target turns batches into packed features: by CUDA graphs of a few shapes, or eagerly.

An eager pass launches some 35 kernels a layer, which took 50 to 80 ms of a slow host for a small model whose
kernels take a fifth of that. A graph launches them at once, and nothing here waits for the device: ids and
the places of real tokens travel in one piece from page-locked memory.

Memory: all graphs of a target share one pool, since they run one after the other on one stream and leave
nothing in it: each fills one buffer of features, and what a drafter gets is gathered out of that into memory
of its own, so no replay touches what is still read. So graphs cost what the largest pass needs (eager passes
need as much), and once the features of the largest shape.

Warm-up proves each shape: a replay over ids that were not captured must be what the model itself says of
them. Whatever fails, memory too, is a step down for all shapes with one reason.

Shapes: B rows, L tokens of the longest, n real tokens, W = taps * width (and one width more for last hidden
states).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch
from torch import Tensor

from remote_payload import crash
from remote_payload.train import execution
from remote_payload.train.features import fetched, pack
from remote_payload.train.target import Target
from remote_payload.train.target_causal import causal_view, compile_layers
from remote_payload.train.target_shapes import PassShape, fitting
from remote_payload.train.warm_up import WarmUp

CLEARLY_SLOWER = 1.1
"""Replays that take this much longer than the model's own passes are given up."""

APART = {
    execution.GRAPH: {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-2},
    execution.COMPILED: {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 2e-2},
}
"""How far, as a share of a token's features and in the mean over tokens, a replay may be from the model's
own pass. A graph runs the same kernels, and is equal but where a library picks another; inductor rounds less
often."""


class TargetPass:
    """The forward passes of one target; used by that target's thread alone."""

    def __init__(self, target: Target, last_hidden: bool, number: int = 0) -> None:
        """`last_hidden` as in `Target.features`; `number` tells targets apart in compiler messages."""
        self.target = target
        self.rung = execution.EAGER
        self._last_hidden = last_hidden
        self._number = number
        self._graphs: dict[PassShape, execution.Graph] = {}
        self._staged = self._out = torch.empty(0)
        self.gib: float | None = None
        """Memory that the graphs and their buffers hold; None without any."""

    @property
    def shapes(self) -> list[PassShape]:
        """Those that have a graph."""
        return list(self._graphs)

    def warm_up(
        self, wanted: str, shapes: list[PassShape], check: Callable[[], None] = lambda: None
    ) -> WarmUp:
        """Capture a graph for each of `shapes`, most tokens first; keep them when they are right and fast.

        Called in turn, under `execution.WARM_UP_LOCK`, before anything trains. `check` is called between
        graphs and may raise, to end it. `step_s` of the result has seconds of a pass of the first shape.
        """
        start = time.perf_counter()
        result = WarmUp(*execution.decide_target(wanted, self.target.device))
        if not shapes and result.execution != execution.EAGER:
            result.down(execution.EAGER, "no batch is common enough for a graph")
        while result.execution != execution.EAGER:
            check()
            before = self._reserved_gib()
            try:
                self._capture(result, shapes, check)
                self.gib = round(self._reserved_gib() - before, 2)
                break
            except Exception as error:  # whatever a model, inductor or a capture raises, eager still works
                self._forget()
                check()
                lower = execution.GRAPH if result.execution == execution.COMPILED else execution.EAGER
                result.down(lower, f"capturing failed: {crash.one_line(error)}")
        self.rung = result.execution
        result.seconds = time.perf_counter() - start
        return result

    def packed(self, ids: Tensor, lengths: list[int]) -> Tensor:
        """Features of the real tokens of `ids` [B, L] on the CPU, in memory of their own: [n, W]."""
        rows, longest = ids.shape
        shape = fitting(self.shapes, rows, longest)
        if shape is None:
            given = fetched(ids, self.target.device)
            return pack(self.target.features(given, self._last_hidden), lengths)
        places = real_places(lengths, shape.longest)
        staged = torch.zeros(shape.tokens + len(places), dtype=torch.int64, pin_memory=self._staged.is_cuda)
        staged[: shape.tokens].view(shape.rows, shape.longest)[:rows, :longest] = ids
        staged[shape.tokens :] = places
        # The allocator of page-locked memory keeps `staged` until the copy is done.
        self._staged[: len(staged)].copy_(staged, non_blocking=True)
        self._graphs[shape].replay()
        return self._out[: shape.tokens].index_select(0, self._staged[shape.tokens : len(staged)])

    def _capture(self, result: WarmUp, shapes: list[PassShape], check: Callable[[], None]) -> None:
        """Graphs for all shapes on the rung of `result`, each proved; the first is timed."""
        target, rung = self.target, result.execution
        part = target.part(self._last_hidden)
        if target.attention == "sdpa":
            part = causal_view(part)
            if rung == execution.COMPILED:
                execution.configure()
                compile_layers(part, target.layers, f"target{self._number}")
        elif rung == execution.COMPILED:
            raise RuntimeError(
                f"layers are compiled for sdpa alone, and this model attends by {target.attention}"
            )
        first: execution.Graph | None = None
        for shape in shapes:
            check()
            ids = _random_ids(target, shape, 0)
            own = target.features(ids, self._last_hidden)
            if first is None:
                tokens = max(each.tokens for each in shapes)
                self._staged = torch.zeros(2 * tokens, dtype=torch.int64, device=target.device)
                self._out = own.new_empty(tokens, own.shape[-1])

            def work(shape: PassShape = shape) -> None:
                into = self._out[: shape.tokens].view(shape.rows, shape.longest, -1)
                given = self._staged[: shape.tokens].view(shape.rows, shape.longest)
                target.features(given, self._last_hidden, part=part, out=into)

            self._staged[: shape.tokens].copy_(_random_ids(target, shape, 1).flatten())
            work()
            graph = execution.Graph(work, target.device, first)
            self._staged[: shape.tokens].copy_(ids.flatten())
            self._out.fill_(torch.nan)
            graph.replay()
            parted = apart(self._out[: shape.tokens].view_as(own), own)
            del own
            if not parted <= APART[rung][target.dtype]:
                raise RuntimeError(
                    f"of {shape.rows} x {shape.longest} tokens a replay differs from the model's own pass by"
                    f" {parted:.1%}"
                )
            if first is None:
                first = graph
                self._compare_times(result, graph, ids)
            self._graphs[shape] = graph

    def _compare_times(self, result: WarmUp, graph: execution.Graph, ids: Tensor) -> None:
        eager = self._seconds(lambda: self.target.features(ids, self._last_hidden))
        replay = self._seconds(graph.replay)
        result.step_s |= {execution.EAGER: eager, result.execution: replay}
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

    def _forget(self) -> None:
        """Let go of all graphs and buffers; their memory returns with the next capture, or when needed."""
        self._graphs = {}
        self._staged = self._out = torch.empty(0)
        self.target.forget_taps()
        gc.collect()


def real_places(lengths: list[int], longest: int) -> Tensor:
    """Where the real tokens of right-padded rows of `longest` tokens stand in one line of all, [n] int64."""
    of_row = torch.tensor(lengths)
    pads_before = torch.arange(len(lengths)) * longest - (of_row.cumsum(0) - of_row)
    return torch.arange(int(of_row.sum())) + pads_before.repeat_interleave(of_row)


def apart(found: Tensor, wanted: Tensor) -> float:
    """How far features are from others [B, L, W], as a share of each token's, in the mean; row by row."""
    shares = [
        (mine.float() - other.float()).norm(dim=-1) / other.float().norm(dim=-1).clamp(min=1e-9)
        for mine, other in zip(found, wanted, strict=True)
    ]
    return float(torch.stack(shares).nan_to_num(torch.inf).mean())


def _random_ids(target: Target, shape: PassShape, seed: int) -> Tensor:
    """Ids for every place; never by the device's own generator, since others may capture."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = target.embedding.num_embeddings
    return torch.randint(vocabulary, (shape.rows, shape.longest), generator=generator).to(target.device)
