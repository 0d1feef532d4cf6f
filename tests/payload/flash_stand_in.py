"""What FlashAttention-4's functions do, by its documentation, in plain torch: for tests without a GPU.

It takes lists of tiles and a rule just as the package does, and computes with the dense mask that they say.
A pair that two lists name, or one list twice, fails. So a wrong list, a wrong rule or a wrong order of
arguments shows on a CPU; whether the package's kernels are right does not.
"""

from __future__ import annotations

import types
from typing import Any, NamedTuple

import torch
from torch import Tensor

TILE = 128


class BlockSparseTensorsTorch(NamedTuple):
    """The package's fields that we fill."""

    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor
    full_block_idx: Tensor
    block_size: tuple[int, int]


def module(name: str) -> Any:
    """The part of that name."""
    parts = {
        "cutlass": types.SimpleNamespace(Int32=lambda number: number, Boolean=bool),
        "flash_attn.cute.utils": types.SimpleNamespace(scalar_to_ssa=lambda number, kind: number),
        "flash_attn.cute.block_sparsity": types.SimpleNamespace(
            BlockSparseTensorsTorch=BlockSparseTensorsTorch
        ),
        "flash_attn.cute.interface": types.SimpleNamespace(_flash_attn_fwd=forward, _flash_attn_bwd=backward),
    }
    return parts[name]


def _mask(
    lists: BlockSparseTensorsTorch, rule: Any, buffers: list[Tensor], queries: int, keys: int, by_key: bool
) -> Tensor:
    rows, columns = (keys, queries) if by_key else (queries, keys)
    assert lists.block_size == (TILE, TILE)
    tiles = torch.zeros(rows // TILE, columns // TILE, dtype=torch.int8)
    for kind, count, index in ((1, *lists[:2]), (2, *lists[2:4])):
        assert count.shape == (1, 1, rows // TILE) and index.shape[:3] == count.shape
        assert count.dtype == index.dtype == torch.int32 and index.shape[3] <= columns // TILE
        for row, number in enumerate(count[0, 0].tolist()):
            for column in index[0, 0, row, :number].tolist():
                assert not tiles[row, column], f"tile {row}, {column} is listed twice"
                tiles[row, column] = kind
    tiles = tiles.T if by_key else tiles
    listed = tiles.repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)
    query, key = torch.meshgrid(torch.arange(queries), torch.arange(keys), indexing="ij")
    sees: Tensor = rule((0,), (0,), (query,), (key,), None, buffers)
    return (listed == 2) | ((listed == 1) & sees)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool,
    pack_gqa: bool,
    mask_mod: Any,
    block_sparse_tensors: BlockSparseTensorsTorch,
    aux_tensors: list[Tensor],
) -> tuple[Tensor, Tensor, None]:
    """Output [1, N, 1, d] and logarithms of sums [1, 1, N]."""
    assert return_lse and not pack_gqa and q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
    mask = _mask(block_sparse_tensors, mask_mod, aux_tensors, q.shape[1], k.shape[1], by_key=False)
    scores = (q[0, :, 0] @ k[0, :, 0].T / q.shape[3] ** 0.5).masked_fill(~mask, -torch.inf)
    out = scores.softmax(1) @ v[0, :, 0]
    return out[None, :, None], scores.logsumexp(1)[None, None], None


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    *,
    mask_mod: Any,
    block_sparse_tensors: BlockSparseTensorsTorch,
    aux_tensors: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v."""
    mask = _mask(block_sparse_tensors, mask_mod, aux_tensors, q.shape[1], k.shape[1], by_key=True)
    query, key, value, o, do = (t[0, :, 0] for t in (q, k, v, out, dout))
    scale = q.shape[3] ** -0.5
    p = (query @ key.T * scale - lse[0, 0, :, None]).exp() * mask
    ds = p * (do @ value.T - (do * o).sum(1, keepdim=True)) * scale
    return tuple(t[None, :, None].contiguous() for t in (ds @ key, ds.T @ query, p.T @ do))
