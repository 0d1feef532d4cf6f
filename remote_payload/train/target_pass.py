"""How a target turns batches into packed features: by CUDA graphs of a few shapes, or eagerly.

An eager pass launches some 35 kernels a layer, which took 50 to 80 ms of a slow host for a small model whose
kernels take a fifth of that. A graph launches them at once, and nothing here waits for the device.

Whatever fails in warm-up, memory too, is a step down for all shapes with one reason: from packed rows to
padded ones (`target_layout.py`), from compiled layers to plain ones, to eager. `auto` begins with plain
layers and tries compiled ones on the largest shape, in the layout that works: by measurement they save a
Qwen3 of 4 billion numbers a fifth and a small Llama nothing, and compiling takes some ten seconds.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from remote_payload import crash
from remote_payload.train import execution
from remote_payload.train.features import fetched, pack
from remote_payload.train.target import Target
from remote_payload.train.target_graphs import TargetGraphs, reserved_gib
from remote_payload.train.target_layout import Layout
from remote_payload.train.warm_up import StepDown, WarmUp

CLEARLY_SLOWER = 1.1
"""Replays that take this much longer than the model's own passes are given up."""

WORTH_COMPILING = 0.95
"""What share of the plain layers' time compiled ones may take at most to be taken by `auto`."""

REPEATS = 5
"""Replays of which the best is compared, where a few percent count."""


class TargetPass:
    """The forward passes of one target; used by that target's thread alone."""

    def __init__(self, target: Target, last_hidden: bool, number: int = 0) -> None:
        """`last_hidden` as in `Target.features`; `number` tells targets apart in compiler messages."""
        self.target = target
        self.rung = execution.EAGER
        self.graphs: TargetGraphs | None = None
        self.gib: float | None = None
        """Memory that the graphs and their buffers hold; None without any."""
        self._last_hidden = last_hidden
        self._number = number

    @property
    def layout(self) -> Layout[Any] | None:
        """How batches lie in the graphs; None without any."""
        return None if self.graphs is None else self.graphs.layout

    @property
    def apart(self) -> float | None:
        """How far the worst of the replays was from the model's own pass; None without any."""
        return None if self.graphs is None else self.graphs.apart

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
            before = reserved_gib(self.target.device)
            graphs: TargetGraphs | None = None
            try:
                graphs = self._begin(result, rung, layout)
                if wanted == execution.AUTO and self.target.attention == "sdpa":
                    graphs = self._faster(result, graphs, check)
                self._finish(graphs, check)
            except Exception as error:  # whatever a model, inductor or a capture raises, eager still works
                reason = f"capturing failed: {crash.one_line(error)}"
            else:
                self.graphs, self.gib = graphs, round(reserved_gib(self.target.device) - before, 2)
                break
            graphs = None
            self._forget()
            result.step_s = {}
            check()
            below = ways[number + 1] if number + 1 < len(ways) else None
            lower = named(*below) if below else execution.EAGER
            result.steps_down.append(StepDown(named(rung, layout), lower, reason))
            result.execution, result.reason = below[0] if below else execution.EAGER, reason
        self.rung = result.execution
        result.seconds = time.perf_counter() - start
        return result

    def packed(self, ids: Tensor, lengths: list[int]) -> Tensor:
        """Features of the real tokens of right-padded `ids` [B, L] on the CPU, of its own memory: [n, W]."""
        graphs = self.graphs
        shape = None if graphs is None else graphs.layout.fitting(lengths)
        if graphs is None or shape is None:
            given = fetched(ids, self.target.device)
            return pack(self.target.features(given, self._last_hidden), lengths)
        return graphs.packed(shape, ids, lengths)

    def _begin(self, result: WarmUp, rung: str, layout: Layout[Any]) -> TargetGraphs:
        """The graph of the first shape, proved, and no slower than the model's own pass."""
        graphs = TargetGraphs(self.target, self._last_hidden, rung, layout, f"target{self._number}")
        first = layout.shapes[0]
        graphs.capture(first)
        eager, replay = graphs.own_seconds(first), graphs.seconds(first)
        result.step_s = {execution.EAGER: eager, rung: replay}
        if replay > CLEARLY_SLOWER * eager:
            raise RuntimeError(f"the model's own pass is faster: {eager:.3f} s against {replay:.3f} s")
        return graphs

    def _finish(self, graphs: TargetGraphs, check: Callable[[], None]) -> None:
        """Graphs of the other shapes."""
        for shape in graphs.layout.shapes:
            if shape not in graphs:
                check()
                graphs.capture(shape)

    def _faster(self, result: WarmUp, plain: TargetGraphs, check: Callable[[], None]) -> TargetGraphs:
        """All graphs of compiled layers where they are clearly faster at the first shape, else `plain`."""
        layout, first = plain.layout, plain.layout.shapes[0]
        check()
        try:
            compiled = TargetGraphs(
                self.target, self._last_hidden, execution.COMPILED, layout, f"target{self._number}"
            )
            compiled.capture(first)
            mine, others = plain.seconds(first, REPEATS), compiled.seconds(first, REPEATS)
            times = f"compiled layers take {1e3 * others:.1f} ms, plain ones {1e3 * mine:.1f} ms"
            if others > WORTH_COMPILING * mine:
                result.reason = times
                return plain
            self._finish(compiled, check)
        except Exception as error:
            reason = f"capturing failed: {crash.one_line(error)}"
        else:
            result.step_s[execution.COMPILED] = others
            result.execution, result.reason = execution.COMPILED, times
            return compiled
        self.target.forget_taps()
        check()
        old, new = named(execution.COMPILED, layout), named(execution.GRAPH, layout)
        result.steps_down.append(StepDown(old, new, reason))
        result.reason = reason
        return plain

    def _forget(self) -> None:
        """Let go of what a failure left; its memory returns with the next capture, or when needed."""
        self.target.forget_taps()
        gc.collect()


def named(rung: str, layout: Layout[Any]) -> str:
    """A rung of the ladder by its name in records."""
    return f"{rung}, {layout.name}"
