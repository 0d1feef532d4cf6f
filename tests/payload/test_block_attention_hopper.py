"""The kernels for Hopper, step by step on a CPU, against dense attention: places, phases, order and masks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor

import remote_payload.train
from remote_payload.train.mask import dense_mask
from tests.payload.gluon_on_cpu import EARLY, LATE, Descriptor, Pointer, launch, load_kernels
from tests.payload.test_mask import Packed, packed_rows

FOLDER = Path(remote_payload.train.__file__).parent
FORWARD = load_kernels(FOLDER / "block_attention_hopper_forward.py")
BACKWARD = load_kernels(FOLDER / "block_attention_hopper_backward.py")

CONTEXT, SLOTS, BLOCK, SIZE = 128, 8, 16, 16
KV_HEADS, GROUP = 2, 2
QUERIES, HEADS = SLOTS * BLOCK, KV_HEADS * GROUP
SHAPE = {"G_KV": KV_HEADS, "G": GROUP, "D": SIZE, "B": BLOCK}
BITS = SIZE**-0.5 * math.log2(math.e)
KEYS = 32


def packed(tensor: Tensor) -> Tensor:
    """[Q, h, ...] to [g, Q G, ...]."""
    turned: Tensor = tensor.unflatten(1, (KV_HEADS, GROUP)).transpose(0, 1)
    return turned.flatten(1, 2).contiguous()


def unpacked(tensor: Tensor) -> Tensor:
    turned: Tensor = tensor.unflatten(1, (QUERIES, GROUP)).transpose(0, 1)
    return turned.flatten(1, 2)


class Case:
    """A row's tensors, and what dense attention makes of them."""

    def __init__(self, row: Packed) -> None:
        generator = torch.Generator().manual_seed(0)
        self.starts, self.anchors = row.tensors()
        counts = ((QUERIES, HEADS), (CONTEXT + QUERIES, KV_HEADS), (CONTEXT + QUERIES, KV_HEADS))
        self.qkv = [torch.randn(*c, SIZE, generator=generator).requires_grad_() for c in counts]
        self.slope = torch.randn(QUERIES, HEADS, SIZE, generator=generator)
        mask = dense_mask(self.starts, self.anchors, CONTEXT, BLOCK)
        q, k, v = (t.transpose(0, 1)[None] for t in self.qkv)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        self.out = out[0].transpose(0, 1)
        self.slopes = torch.autograd.grad(self.out, self.qkv, self.slope)
        with torch.no_grad():
            scores = q[0] @ k[0].repeat_interleave(GROUP, 0).transpose(1, 2) * BITS
            scores = scores.masked_fill(~mask, -torch.inf)
            self.sums = packed((scores * math.log(2)).logsumexp(-1).T / math.log(2))
            self.delta = packed((self.out * self.slope).sum(-1))

    def flat(self, number: int) -> Tensor:
        return self.qkv[number].detach().flatten(1)

    def common(self, rows: int) -> dict[str, Any]:
        return {
            "starts": Pointer(self.starts),
            "anchors": Pointer(self.anchors),
            "context": CONTEXT,
            "tiles": QUERIES * GROUP // rows,
            "bits": BITS,
            **SHAPE,
        }

    def ranges(self, rows: int) -> Tensor:
        """For every tile of keys the tiles of `rows` packed rows that see some of it, and all of it."""
        mask = dense_mask(self.starts, self.anchors, CONTEXT, BLOCK)
        tiled = mask.view(-1, rows // GROUP, mask.shape[1] // KEYS, KEYS)
        found = []
        for number in range(tiled.shape[2]):
            some = tiled[:, :, number].any(2).any(1).nonzero().flatten().tolist() or [0, -1]
            every = tiled[:, :, number].all(2).all(1).nonzero().flatten().tolist() or [some[0], some[0] - 1]
            found.append([some[0], some[-1] + 1, every[0], every[-1] + 1])
        return torch.tensor(found)


@pytest.mark.parametrize(("copies", "products"), [(EARLY, LATE), (LATE, EARLY)])
@pytest.mark.parametrize(("rows", "stages"), [(64, 2), (32, 3)])
@settings(deadline=None, max_examples=12)
@given(row=packed_rows(CONTEXT, SLOTS, BLOCK))
def test_the_forward_kernel_is_dense_attention_whenever_copies_and_products_end(
    rows: int, stages: int, copies: str, products: str, row: Packed
) -> None:
    case = Case(row)
    out, sums = (
        torch.full((QUERIES, HEADS, SIZE), torch.nan),
        torch.full((KV_HEADS, QUERIES * GROUP), torch.nan),
    )
    tokens = rows // GROUP
    own = max(tokens, BLOCK, 16)
    launch(
        FORWARD.forward_kernel,
        QUERIES * GROUP // rows * KV_HEADS,
        copies,
        products,
        queries=Descriptor(case.qkv[0].detach(), [tokens, GROUP, SIZE]),
        own_keys=Descriptor(case.flat(1), [own, SIZE]),
        own_values=Descriptor(case.flat(2), [own, SIZE]),
        keys=Descriptor(case.flat(1), [KEYS, SIZE]),
        values=Descriptor(case.flat(2), [KEYS, SIZE]),
        out=Pointer(out),
        sums=Pointer(sums),
        M=rows,
        N=KEYS,
        OWN=own,
        STAGES=stages,
        **case.common(rows),
    )
    torch.testing.assert_close(out, case.out.detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sums, case.sums, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("copies", "products"), [(EARLY, LATE), (LATE, EARLY)])
@pytest.mark.parametrize(("rows", "stages"), [(32, 2), (16, 3)])
@settings(deadline=None, max_examples=12)
@given(row=packed_rows(CONTEXT, SLOTS, BLOCK))
def test_the_backward_kernel_gives_dense_attentions_gradients_whenever_copies_and_products_end(
    rows: int, stages: int, copies: str, products: str, row: Packed
) -> None:
    case = Case(row)
    by_key, by_value = (torch.full((CONTEXT + QUERIES, KV_HEADS, SIZE), torch.nan) for _ in range(2))
    summed = torch.zeros(KV_HEADS * QUERIES * GROUP, SIZE)
    launch(
        BACKWARD.keys_kernel,
        (CONTEXT + QUERIES) // KEYS * KV_HEADS,
        copies,
        products,
        queries=Descriptor(case.qkv[0].detach(), [rows // GROUP, GROUP, SIZE]),
        slope=Descriptor(case.slope, [rows // GROUP, GROUP, SIZE]),
        keys=Descriptor(case.flat(1), [KEYS, SIZE]),
        values=Descriptor(case.flat(2), [KEYS, SIZE]),
        by_key=Pointer(by_key),
        by_value=Pointer(by_value),
        summed=Descriptor(summed, [rows, SIZE]),
        sums=Descriptor(case.sums.view(-1, rows), [1, rows], item=4),
        delta=Descriptor(case.delta.detach().reshape(-1, rows), [1, rows], item=4),
        ranges=Pointer(case.ranges(rows)),
        scale=SIZE**-0.5,
        M=rows,
        N=KEYS,
        STAGES=stages,
        **case.common(rows),
    )
    by_query = unpacked(summed.view(KV_HEADS, -1, SIZE)) * SIZE**-0.5
    for mine, exact in zip((by_query, by_key, by_value), case.slopes, strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-4, atol=1e-4)
