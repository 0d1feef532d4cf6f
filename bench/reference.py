"""A plain training step of the same drafter, to measure ours against in the same run; it trains nothing.

What anyone would write with torch 2.11: one compiled forward pass over separate weights, the head's loss in
four chunks, gradients by autograd, one compiled AdamW; no graph, no static buffers, no statistics. It stands
here and not in the payload so that a change there cannot make it faster. On a CPU it runs eagerly.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from bench.alone import alone
from bench.shapes import Shape

TILE = 128
CHUNKS = 4


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


def _chunk(hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    made = F.linear(hidden, head)
    logits = made.float()
    top = logits.amax(-1, keepdim=True)
    total = top + (logits - top).exp().sum(-1, keepdim=True).log()
    chosen = logits.gather(-1, labels[:, None])
    onehot = torch.arange(logits.shape[-1], device=labels.device)[None] == labels[:, None]
    slope = ((logits - total).exp() - onehot.float()) * weights[:, None]
    return ((total - chosen)[:, 0] * weights).sum(), slope.to(made.dtype) @ head


def _adamw(
    weights: list[Tensor],
    gradients: list[Tensor],
    masters: list[Tensor],
    firsts: list[Tensor],
    seconds: list[Tensor],
    numbers: Tensor,
) -> None:
    scale, rate, bias1, bias2 = numbers.unbind()
    for value, gradient, master, first, second in zip(
        weights, gradients, masters, firsts, seconds, strict=True
    ):
        slope = gradient.float() * scale
        first.copy_(first * 0.9 + slope * 0.1)
        second.copy_(second * 0.95 + slope * slope * 0.05)
        master.copy_(master - rate * (first / bias1) / ((second / bias2).sqrt() + 1e-8))
        value.copy_(master)


class Reference:
    """One drafter with its optimizer, on one GPU in bfloat16."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        d, hd = shape.width, shape.head_dim

        def matrix(rows: int, columns: int) -> Tensor:
            return (torch.randn(rows, columns, device=device) * 0.02).bfloat16().requires_grad_()

        def ones(size: int) -> Tensor:
            return torch.ones(size, device=device, dtype=torch.bfloat16).requires_grad_()

        self.layers = [
            {
                "q": matrix(shape.heads * hd, d),
                "kv": matrix(2 * shape.kv_heads * hd, d),
                "o": matrix(d, shape.heads * hd),
                "gate_up": matrix(2 * shape.ffn, d),
                "down": matrix(d, shape.ffn),
                "norm1": ones(d),
                "norm2": ones(d),
                "q_norm": ones(hd),
                "k_norm": ones(hd),
            }
            for _ in range(shape.layers)
        ]
        self.ends = {"fc": matrix(d, shape.taps * d), "context": ones(d), "last": ones(d)}
        self.weights = [t for layer in (*self.layers, self.ends) for t in layer.values()]
        self.masters = [t.detach().float() for t in self.weights]
        self.firsts, self.seconds = ([torch.zeros_like(m) for m in self.masters] for _ in range(2))
        self.embedding, self.head = (matrix(shape.vocabulary, d).detach() for _ in range(2))
        self.features = torch.randn(shape.context, shape.taps * d, device=device).bfloat16()
        self.ids = torch.randint(0, shape.vocabulary, (shape.context,), device=device)
        self.anchors = torch.zeros(shape.anchors, dtype=torch.int64, device=device)
        decay = torch.exp(-torch.arange(shape.block_size - 1, device=device) / 7.0)
        self.decay = decay.repeat(shape.anchors) / (decay.sum() * shape.anchors)
        self.taken = 0
        compiled = device.type == "cuda"
        self._forward: Any = torch.compile(self._run, dynamic=False) if compiled else self._run
        self._chunk: Any = torch.compile(_chunk, dynamic=False) if compiled else _chunk
        self._update: Any = torch.compile(_adamw, dynamic=False) if compiled else _adamw
        anchors, context, size = self.anchors, shape.context, shape.block_size

        def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            block = query // size
            own = (key >= context) & ((key - context) // size == block)
            return ((key < context) & (key < anchors[block])) | own

        self._sees = sees

    def _mask(self) -> BlockMask | Tensor:
        shape = self.shape
        if self.device.type != "cuda":
            query, key = (torch.arange(n) for n in (shape.queries, shape.context + shape.queries))
            return self._sees(query, query, query[:, None], key[None])
        by_tile = self.anchors.view(-1, TILE // shape.block_size)
        least, last = by_tile.amin(1)[:, None], by_tile.amax(1)[:, None]
        start = torch.arange((shape.context + shape.queries) // TILE, device=self.device)[None] * TILE
        row = torch.arange(len(by_tile), device=self.device)[:, None]
        context = start < shape.context
        full = context & (start + TILE <= least)
        own = ~context & ((start - shape.context) // TILE == row)
        part = (context & ~full & (start < last)) | own

        def listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
            order = tiles.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
            return tiles.sum(-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]

        return BlockMask.from_kv_blocks(
            *listed(part),
            *listed(full),
            BLOCK_SIZE=TILE,
            mask_mod=self._sees,
            seq_lengths=(shape.queries, shape.context + shape.queries),
        )

    def _run(self, features: Tensor, x: Tensor, anchors: Tensor, mask: BlockMask | Tensor) -> Tensor:
        shape, hd = self.shape, self.shape.head_dim
        block = torch.arange(shape.block_size, device=x.device)
        positions = torch.cat(
            [torch.arange(shape.context, device=x.device), (anchors[:, None] + block).flatten()]
        )
        angle = positions[:, None] / 1e6 ** (torch.arange(0, hd, 2, device=x.device) / hd)
        cos, sin = (torch.cat([f(angle)] * 2, -1).to(x.dtype)[:, None] for f in (torch.cos, torch.sin))
        context = _norm(F.linear(features, self.ends["fc"]), self.ends["context"])
        for w in self.layers:
            h = _norm(x, w["norm1"])
            q = F.linear(h, w["q"]).view(-1, shape.heads, hd)
            k, v = F.linear(torch.cat([context, h]), w["kv"]).view(-1, 2 * shape.kv_heads, hd).chunk(2, 1)
            q = _rotate(_norm(q, w["q_norm"]), cos[shape.context :], sin[shape.context :])
            k = _rotate(_norm(k, w["k_norm"]), cos, sin)
            q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
            if isinstance(mask, BlockMask):
                out = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
                assert isinstance(out, Tensor)
            else:
                out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
            x = x + F.linear(out[0].transpose(0, 1).flatten(1), w["o"])
            gate, up = F.linear(_norm(x, w["norm2"]), w["gate_up"]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, w["down"])
        return _norm(x.view(shape.anchors, shape.block_size, -1)[:, 1:], self.ends["last"]).flatten(0, 1)

    def step(self) -> None:
        """One step on a fresh draw of anchors; nothing is read back."""
        shape, device = self.shape, self.device
        self.taken += 1
        drawn = torch.rand(shape.context - shape.block_size, device=device).argsort()[: shape.anchors]
        self.anchors.copy_(drawn.sort().values)
        tokens = torch.full((shape.anchors, shape.block_size), shape.vocabulary - 1, device=device)
        tokens[:, 0] = self.ids[self.anchors]
        later = torch.arange(1, shape.block_size, device=device)
        labels = self.ids[(self.anchors[:, None] + later).flatten()]
        x = F.embedding(tokens.flatten(), self.embedding)
        hidden = self._forward(self.features, x, self.anchors, self._mask())
        parts = [
            self._chunk(h, self.head, label, weight)
            for h, label, weight in zip(
                hidden.detach().chunk(CHUNKS), labels.chunk(CHUNKS), self.decay.chunk(CHUNKS), strict=True
            )
        ]
        gradients = torch.autograd.grad(hidden, self.weights, torch.cat([slope for _, slope in parts]))
        with torch.no_grad():
            norm = torch.stack(torch._foreach_norm(gradients, 2, torch.float32)).norm()
            numbers = [
                torch.full((), n, device=device) for n in (6e-4, 1 - 0.9**self.taken, 1 - 0.95**self.taken)
            ]
            self._update(
                self.weights,
                list(gradients),
                self.masters,
                self.firsts,
                self.seconds,
                torch.stack([(1.0 / (norm + 1e-6)).clamp(max=1.0), *numbers]),
            )


def measure(
    shape: Shape, device: torch.device, warm: int = 5, steps: int = 20, lock: Path | None = None
) -> float:
    """Seconds of a step, over `steps` of them without a wait in between; alone, if `lock` says so."""
    torch.manual_seed(0)
    reference = Reference(shape, device)
    for _ in range(warm):
        reference.step()
    _wait(device)
    with alone(lock):
        start = time.perf_counter()
        for _ in range(steps):
            reference.step()
        _wait(device)
        return (time.perf_counter() - start) / steps


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
