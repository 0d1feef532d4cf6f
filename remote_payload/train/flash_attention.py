"""The training mask's attention by FlashAttention-4 (package `flash-attn-4`), where a GPU proves it right.

FlashAttention-4's kernels for Hopper overlap exponentials and products, and their backward pass needs five
products where FlexAttention's takes seven. They read the same lists of tiles as FlexAttention's, so heads are
folded into the sequence here as well (`folded`): as one head, longest programs first. No two query heads then
share a program's keys, so gradients of keys and values need no sum in memory: they are the same to the bit
from run to run. Those of queries are not: programs add them up in memory in whatever order they end.

The package is imported where it is first used. Its own `_flash_attn_fwd` and `_flash_attn_bwd` are called,
since its public function takes one set of lists where both directions need their own. Both are operators of
torch, so that a compiler keeps them whole. Kernels are compiled at the first launch of a shape, in warm-up;
launches go to the current stream, wait for nothing, and may be captured.

Block-sparse gradients on Hopper were silently wrong before (flash-attention #2623, and #2756: in one launch
of 100 to 1000), so `attention_gate` proves them for every shape before a run relies on them.

Shapes: Q queries, K keys, C context tokens, B block size, h heads, g key/value heads, d head size.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from remote_payload.train.folded import fold_keys, fold_queries, unfold
from remote_payload.train.mask import TILE

PACKAGE = "flash-attn-4"

Sizes = tuple[int, int, int, int]
"""C, B, h, g."""

HEAD_SIZES = (64, 96, 128)
"""Those for which the kernels' tiles fit into ours in both directions."""


class Lists(NamedTuple):
    """Tiles of 128 x 128 by row: how many [1, 1, rows], and which [1, 1, rows, at most columns], int32."""

    partial_count: Tensor
    partial: Tensor
    full_count: Tensor
    full: Tensor


class FlashMask(NamedTuple):
    """The mask of one row, heads folded; the tensors are refilled for every row, the numbers stay."""

    by_query: Lists
    by_key: Lists
    starts: Tensor
    """First context index of each anchor's document, [A]; C in an empty slot."""
    anchors: Tensor
    """Context index of each anchor, [A]; 0 in an empty slot."""
    sizes: Sizes

    @classmethod
    def of(cls, folded: BlockMask, starts: Tensor, anchors: Tensor, sizes: Sizes) -> FlashMask:
        """From the folded mask that FlexAttention would take."""
        lists = [
            cast(Tensor, getattr(folded, f"{kind}{name}"))
            for kind in ("kv_", "full_kv_", "q_", "full_q_")
            for name in ("num_blocks", "indices")
        ]
        return cls(Lists(*lists[:4]), Lists(*lists[4:]), starts, anchors, sizes)


def unavailable(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why FlashAttention-4 cannot run here, without importing it; None where it may."""
    if device.type != "cuda":
        return "it needs an NVIDIA GPU"
    if not _installed():
        return f"the package {PACKAGE} is not installed"
    if (capability := torch.cuda.get_device_capability(device))[0] != 9:
        major, minor = capability
        return f"its tile lists are those of a Hopper GPU (sm90), and {device} is sm{major}{minor}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in 16 bits, not in {str(dtype).removeprefix('torch.')}"
    if head_dim not in HEAD_SIZES:
        return f"heads of {head_dim} are not among {', '.join(map(str, HEAD_SIZES))}"
    return None


def _installed() -> bool:
    """Whether the package's folder is there. Older releases share its name, and may fail to be imported."""
    found = importlib.util.find_spec("flash_attn")
    folders = None if found is None else found.submodule_search_locations
    return any((Path(folder) / "cute").is_dir() for folder in folders or ())


def flash_attend(queries: Tensor, keys: Tensor, values: Tensor, mask: FlashMask) -> Tensor:
    """Grouped-query attention of `queries` [Q, h, d] to `keys`, `values` [K, g, d]: [Q, h, d]."""
    q, k, v = (
        t.view(1, -1, 1, t.shape[-1]) for t in (fold_queries(queries), fold_keys(keys), fold_keys(values))
    )
    out, _ = torch.ops.dflash.flash_forward(
        q, k, v, *mask.by_query, *mask.by_key, mask.starts, mask.anchors, mask.sizes
    )
    return unfold(out, queries.shape[1])


def seen(query: Any, key: Any, bounds: Callable[[Any], tuple[Any, Any]], queries: int, sizes: Sizes) -> Any:
    """Whether a query sees a key of its own head, both by folded places, whatever numbers they are.

    `bounds` gives the start and the anchor of a block. Kernels ask it in partial tiles alone; the lists pair
    no query with another head's keys, so that is not asked.
    """
    context, block_size, heads, kv_heads = sizes
    tile, block = TILE.bit_length() - 1, block_size.bit_length() - 1
    assert 1 << tile == TILE and 1 << block == block_size and context % block_size == 0
    last, inside = queries // TILE - 1, TILE - 1
    plain_key = (((key >> tile) // kv_heads) << tile) + (key & inside)
    of = (((last - (query >> tile) // heads) << tile) + (query & inside)) >> block
    start, anchor = bounds(of)
    in_block = (plain_key >> block) - context // block_size == of
    return ((plain_key >= start) & (plain_key < anchor)) | in_block


@functools.cache
def _rule(queries: int, *sizes: int) -> Callable[..., Any]:
    """`seen` as kernels call it; the same function for the same sizes, since a new one is a new kernel."""
    cutlass, utils = _module("cutlass"), _module("flash_attn.cute.utils")

    def rule(batch, head, query, key, lengths, buffers):  # type: ignore[no-untyped-def]
        def bounds(of: Any) -> tuple[Any, Any]:
            return cutlass.Int32(buffers[0][of]), cutlass.Int32(buffers[1][of])

        sees = seen(query[0], key[0], bounds, queries, cast(Sizes, sizes))
        return utils.scalar_to_ssa(sees, cutlass.Boolean)

    # The package tells compiled kernels apart by this; by itself it would not see into `seen`.
    rule.__cute_hash__ = f"dflash {queries} {sizes}"  # type: ignore[attr-defined]
    return rule


def _module(name: str) -> Any:
    """Part of the package, or of what it builds on; neither is there on every machine."""
    return importlib.import_module(name)


def _sparse(lists: tuple[Tensor, ...]) -> Any:
    partial_count, partial, full_count, full = lists
    return _module("flash_attn.cute.block_sparsity").BlockSparseTensorsTorch(
        mask_block_cnt=partial_count,
        mask_block_idx=partial,
        full_block_cnt=full_count,
        full_block_idx=full,
        block_size=(TILE, TILE),
    )


_LISTS = "Tensor {0}_partial_count, Tensor {0}_partial, Tensor {0}_full_count, Tensor {0}_full, "


@torch.library.custom_op(
    "dflash::flash_forward",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, "
    + _LISTS.format("query")
    + _LISTS.format("key")
    + "Tensor starts, Tensor anchors, int[] sizes) -> (Tensor, Tensor)",
)
def _forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Output [1, N, 1, d] and the logarithms of the sums of exponentials, [1, 1, N] float32."""
    lists, (starts, anchors, sizes) = rest[:4], rest[8:]
    out, lse, *_ = _module("flash_attn.cute.interface")._flash_attn_fwd(
        q,
        k,
        v,
        return_lse=True,
        pack_gqa=False,
        mask_mod=_rule(q.shape[1] // sizes[2], *sizes),
        block_sparse_tensors=_sparse(lists),
        aux_tensors=[starts, anchors],
    )
    return out, lse


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty((1, 1, q.shape[1]), dtype=torch.float32)


@torch.library.custom_op(
    "dflash::flash_backward",
    mutates_args=(),
    schema="(Tensor slope, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    + _LISTS.format("key")
    + "Tensor starts, Tensor anchors, int[] sizes) -> (Tensor, Tensor, Tensor)",
)
def _backward(
    slope: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values by that of the output, in their shapes."""
    lists, (starts, anchors, sizes) = rest[:4], rest[4:]
    by_q, by_k, by_v = _module("flash_attn.cute.interface")._flash_attn_bwd(
        q,
        k,
        v,
        out,
        slope,
        lse,
        mask_mod=_rule(q.shape[1] // sizes[2], *sizes),
        block_sparse_tensors=_sparse(lists),
        aux_tensors=[starts, anchors],
    )
    return by_q, by_k, by_v


@_backward.register_fake
def _(slope: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *rest = inputs
    ctx.save_for_backward(q, k, v, *output, *rest[4:10])
    ctx.sizes = rest[10]


def _slopes(ctx: Any, slope: Tensor, _lse: Tensor) -> tuple[Tensor | None, ...]:
    by = torch.ops.dflash.flash_backward(slope.contiguous(), *ctx.saved_tensors, ctx.sizes)
    return (*by, *[None] * 11)


_forward.register_autograd(_slopes, setup_context=_keep)
