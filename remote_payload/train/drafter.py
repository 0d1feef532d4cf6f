"""The DFlash draft model: a few Qwen3-style layers that read the target's features as context.

Features of the tapped target layers are projected once, H = hidden_norm(fc(features)), and shared by all
layers; each layer takes keys and values from H for the context and from its own input for the block, with
the same projections. Context never gets a query, an output projection or an MLP. The embedding and the head
are the target's, frozen. Names of modules are those of the released checkpoints (`fc`, `hidden_norm`,
`norm`, `layers.i.self_attn.q_proj`, ...), so that a state dict is an export.

Method: DFlash, arXiv 2602.06036. Shapes: N context tokens, Q block tokens, D width, W = taps * D features,
h heads, g key/value heads, d head size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from remote_payload.job import JobError
from remote_payload.train import fp8
from remote_payload.train.flash_attention import FlashMask, flash_attend
from remote_payload.train.folded import fold_keys, fold_queries, unfold
from remote_payload.train.swiglu import swiglu
from remote_payload.train.target_config import required_size, rope_theta, size_of


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DrafterConfig:
    """Sizes of a drafter; widths are the target's."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    norm_eps: float
    rope_theta: float
    vocabulary: int
    tap_layers: tuple[int, ...]
    target_layers: int
    block_size: int
    mask_token_id: int
    max_positions: int

    @classmethod
    def for_target(
        cls, config: Any, *, layers: int, tap_layers: tuple[int, ...], block_size: int, mask_token_id: int
    ) -> DrafterConfig:
        """A drafter as wide as the target whose Hugging Face text config is `config`.

        Its RoPE has the target's base, is full width, and is not scaled (`target_config`). Raises JobError
        for a target without attention heads.
        """
        width, heads = required_size(config, "hidden_size"), required_size(config, "num_attention_heads")
        return cls(
            layers=layers,
            width=width,
            heads=heads,
            kv_heads=size_of(config, "num_key_value_heads") or heads,
            head_dim=size_of(config, "head_dim") or width // heads,
            ffn=size_of(config, "intermediate_size") or 4 * width,
            norm_eps=getattr(config, "rms_norm_eps", 1e-6),
            rope_theta=rope_theta(config),
            vocabulary=config.vocab_size,
            tap_layers=tap_layers,
            target_layers=config.num_hidden_layers,
            block_size=block_size,
            mask_token_id=mask_token_id,
            max_positions=size_of(config, "max_position_embeddings") or 32768,
        )


def fp8_sizes(c: DrafterConfig) -> dict[str, dict[str, int]]:
    """Sides of the products of each part that training may make of 8-bit numbers, by their names."""
    width = {"the target's width": c.width}
    heads = {"heads x head size": c.heads * c.head_dim, "kv heads x head size": c.kv_heads * c.head_dim}
    return {
        fp8.HEAD: width | {"the target's vocabulary": c.vocabulary},
        fp8.MLP: width | {"the MLP's width": c.ffn},
        fp8.PROJECTIONS: width | heads,
    }


def choose_taps(target_layers: int, taps: int) -> tuple[int, ...]:
    """The 0-based target layers to tap: the middle one, or `taps` from layer 1 to the third last.

    round(1 + i * (L - 4) / (taps - 1)) as in the released checkpoints; 36 layers: 1, 9, 17, 25, 33.
    Raises JobError when the target has too few layers.
    """
    if taps == 1:
        return (target_layers // 2,)
    layers = tuple(round(1 + i * (target_layers - 4) / (taps - 1)) for i in range(taps))
    if target_layers < 4 or len(set(layers)) < taps:
        raise JobError(
            f"taps = {taps}: a target of {target_layers} layers has too few; lower taps or set tap_layers"
        )
    return layers


class RotaryTable(NamedTuple):
    """Cosines and sines of the positions in one pass, [N, 1, d], to be applied to [N, heads, d]."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> RotaryTable:
        """For `positions` [N]."""
        exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
        angle = positions.to(torch.float32)[:, None] / theta**exponent
        angle = torch.cat([angle, angle], -1)[:, None]
        return cls(angle.cos().to(dtype), angle.sin().to(dtype))

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate `x` [N, heads, d] by halves, as Llama and Qwen do."""
        low, high = x.chunk(2, -1)
        return x * self.cos + torch.cat([-high, low], -1) * self.sin


def project(x: Tensor, matrix: Tensor, eight_bits: bool) -> Tensor:
    """`x @ matrix.T`, of 8-bit numbers where training wants that."""
    return fp8.linear(x, matrix) if eight_bits else F.linear(x, matrix)


class Attention(nn.Module):
    """Projections and per-head norms; keys and values of context and block come from the same ones."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.c = c
        self.fp8 = False
        """Whether training projects by products of 8-bit numbers."""
        self.q_proj = nn.Linear(c.width, c.heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.width, c.kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.width, c.kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.heads * c.head_dim, c.width, bias=False)
        self.q_norm = nn.RMSNorm(c.head_dim, eps=c.norm_eps)
        self.k_norm = nn.RMSNorm(c.head_dim, eps=c.norm_eps)

    def keys_values(
        self, hidden: Tensor, rotary: RotaryTable, matrix: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [N, g, d] of `hidden` [N, D].

        `matrix` is that of `k_proj` with that of `v_proj` below it, [2gd, D], where they lie so.
        """
        if matrix is None:
            return self.normed(self.k_proj(hidden), self.v_proj(hidden), rotary)
        keys, values = project(hidden, matrix, self.fp8).chunk(2, -1)
        return self.normed(keys, values, rotary)

    def normed(self, keys: Tensor, values: Tensor, rotary: RotaryTable) -> tuple[Tensor, Tensor]:
        """Projected keys and values [N, gd] as attention takes them, [N, g, d]."""
        shape = (len(keys), self.c.kv_heads, self.c.head_dim)
        return rotary.rotate(self.k_norm(keys.view(shape))), values.view(shape)

    def forward(
        self,
        x: Tensor,
        rotary: RotaryTable,
        keys: Tensor,
        values: Tensor,
        mask: Mask,
        matrix: Tensor | None = None,
    ) -> Tensor:
        """What the block `x` [Q, D] attends to in context `keys`, `values` [N, g, d] and itself, [Q, hd]."""
        projected = project(x, self.q_proj.weight, self.fp8)
        queries = rotary.rotate(self.q_norm(projected.view(len(x), self.c.heads, self.c.head_dim)))
        own_keys, own_values = self.keys_values(x, rotary, matrix)
        attended = attend(queries, torch.cat([keys, own_keys]), torch.cat([values, own_values]), mask)
        return attended.flatten(1)


FLEX_OPTIONS: dict[str, Any] = {}
"""FlexAttention's `kernel_options`; empty: torch's own choice."""

Mask = Tensor | BlockMask | FlashMask | None
"""Dense [Q, N + Q], block-sparse with folded heads (see `folded`), or None when every key is seen."""


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Mask) -> Tensor:
    """Grouped-query attention of `queries` [Q, h, d] to `keys`, `values` [K, g, d]: [Q, h, d]."""
    if isinstance(mask, FlashMask):
        return flash_attend(queries, keys, values, mask)
    if isinstance(mask, BlockMask):
        q, k, v = fold_queries(queries), fold_keys(keys), fold_keys(values)
        options: Any = FLEX_OPTIONS or None
        folded = flex_attention(q, k, v, block_mask=mask, kernel_options=options)
        assert isinstance(folded, Tensor)
        return unfold(folded, queries.shape[1])
    q, k, v = (t.transpose(0, 1)[None] for t in (queries, keys, values))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.fp8 = False
        """Whether training multiplies 8-bit numbers."""
        self.kernels = False
        """Whether training runs SwiGLU by our own kernels."""
        self.gate_proj = nn.Linear(c.width, c.ffn, bias=False)
        self.up_proj = nn.Linear(c.width, c.ffn, bias=False)
        self.down_proj = nn.Linear(c.ffn, c.width, bias=False)

    def forward(self, x: Tensor, matrix: Tensor | None = None) -> Tensor:
        """[Q, D] to [Q, D]; `matrix` is `gate_proj` with `up_proj` below it, where they lie so."""
        if matrix is None:
            hidden = F.silu(self.gate_proj(x)) * self.up_proj(x)
        elif self.fp8:
            return fp8.mlp(x, matrix, self.down_proj.weight, self.kernels)
        else:
            hidden = swiglu(F.linear(x, matrix), self.kernels)
        return self.down_proj(hidden)  # type: ignore[no-any-return]


class DrafterLayer(nn.Module):
    """One pre-norm decoder layer; `input_layernorm` is for block tokens, never for the context."""

    def __init__(self, c: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = Attention(c)
        self.mlp = MLP(c)
        self.input_layernorm = nn.RMSNorm(c.width, eps=c.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(c.width, eps=c.norm_eps)

    def forward(
        self,
        x: Tensor,
        rotary: RotaryTable,
        keys: Tensor,
        values: Tensor,
        mask: Mask,
        joined: tuple[Tensor, Tensor] | None = None,
        predicted: int | None = None,
    ) -> Tensor:
        """Block tokens `x` [Q, D] through the layer.

        Args:
            joined: this layer's part of `Joined`.
            predicted: B, when only the B-1 predicted tokens of each block are wanted, [A * (B-1), D]: what
                follows attention looks at each token alone, and nobody reads the anchor's last state.
        """
        kv, gate_up = joined or (None, None)
        attended = self.self_attn(self.input_layernorm(x), rotary, keys, values, mask, kv)
        if predicted is not None:
            x, attended = (t.unflatten(0, (-1, predicted))[:, 1:].flatten(0, 1) for t in (x, attended))
        x = x + project(attended, self.self_attn.o_proj.weight, self.self_attn.fp8)
        return x + self.mlp(self.post_attention_layernorm(x), gate_up)  # type: ignore[no-any-return]


class Joined(NamedTuple):
    """Matrices that read the same input, as one: a product with each of them would fill a GPU less well."""

    keys_values: Tensor
    """`k_proj` and `v_proj` of all layers, one below the other, [L * 2gd, D]: all read the context."""
    gate_up: list[Tensor]
    """`gate_proj` and `up_proj` of each layer, [2 * ffn, D]."""


class Drafter(nn.Module):
    """The trained part: layers, `fc`, `hidden_norm` and `norm`."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.tap_layers) * config.width, config.width, bias=False)
        self.hidden_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.fp8_projections = False

    @classmethod
    def blank(
        cls, config: DrafterConfig, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> Drafter:
        """One on `device` whose weights are still to be written.

        torch would draw them all at random first, which takes a core ten seconds for a billion.
        """
        with torch.device("meta"):  # in this thread alone
            drafter = cls(config)
        return drafter.to(dtype).to_empty(device=device)

    def train_in_fp8(self, parts: Collection[str]) -> None:
        """Let training multiply 8-bit numbers in these parts (see `fp8.PARTS`); nothing else ever does."""
        self.fp8_projections = fp8.PROJECTIONS in parts
        for layer in self._layers():
            layer.mlp.fp8, layer.self_attn.fp8 = fp8.MLP in parts, self.fp8_projections

    def run_swiglu(self, kernels: bool) -> None:
        """Let training run SwiGLU by our own kernels, or not; nothing else ever does."""
        for layer in self._layers():
            layer.mlp.kernels = kernels

    def rotary(self, positions: Tensor, dtype: torch.dtype) -> RotaryTable:
        """The rotary table of `positions` [N]."""
        return RotaryTable.of(positions, self.config.head_dim, self.config.rope_theta, dtype)

    def adjacent(self) -> list[list[str]]:
        """Names of the matrices that `Joined` wants side by side, in the order of its fields."""
        layers = range(self.config.layers)
        attention = [f"layers.{i}.self_attn.{name}_proj.weight" for i in layers for name in "kv"]
        return [attention] + [
            [f"layers.{i}.mlp.{name}_proj.weight" for name in ("gate", "up")] for i in layers
        ]

    def context(self, features: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [N, g, d] of the context for every layer.

        Args:
            features: outputs of the tapped layers side by side, [N, W].
            positions: the tokens' positions in their document, [N].
        """
        hidden = self.hidden_norm(self.fc(features))
        rotary = self.rotary(positions, hidden.dtype)
        return [layer.self_attn.keys_values(hidden, rotary) for layer in self._layers()]

    def blocks(
        self, x: Tensor, positions: Tensor, context: list[tuple[Tensor, Tensor]], mask: Mask
    ) -> Tensor:
        """Final hidden states [Q, D] of block tokens `x` [Q, D] (embedded) at `positions` [Q]."""
        rotary = self.rotary(positions, x.dtype)
        for layer, (keys, values) in zip(self._layers(), context, strict=True):
            x = layer(x, rotary, keys, values, mask)
        return self.norm(x)  # type: ignore[no-any-return]

    def forward(
        self, features: Tensor, positions: Tensor, x: Tensor, block_positions: Tensor, mask: Mask
    ) -> Tensor:
        """A whole packed row: features [C, W], x [Q, D], mask over [Q, C + Q]; hidden states [Q, D]."""
        return self.blocks(x, block_positions, self.context(features, positions), mask)

    def train_row(
        self,
        features: Tensor,
        rotary: RotaryTable,
        x: Tensor,
        block_rotary: RotaryTable,
        mask: Mask,
        joined: Joined,
    ) -> Tensor:
        """`forward` as training runs it: products joined, and no more computed than the loss reads.

        The tables are made before, since a compiler would make them anew in every pass that reads them.

        Args:
            features: [C, W]. x: embedded block tokens, [Q, D]. mask: over [Q, C + Q].
            joined: views of this drafter's own matrices; gradients are taken by them.

        Returns:
            Final hidden states of the predicted tokens, [A * (B-1), D]; those of the anchors predict nothing.
        """
        layers = self._layers()
        hidden = self.hidden_norm(project(features, self.fc.weight, self.fp8_projections))
        projected = project(hidden, joined.keys_values, self.fp8_projections).chunk(2 * len(layers), -1)
        matrices = joined.keys_values.chunk(len(layers))
        for i, layer in enumerate(layers):
            keys, values = layer.self_attn.normed(projected[2 * i], projected[2 * i + 1], rotary)
            only = self.config.block_size if i == len(layers) - 1 else None
            x = layer(x, block_rotary, keys, values, mask, (matrices[i], joined.gate_up[i]), only)
        return self.norm(x)  # type: ignore[no-any-return]

    def _layers(self) -> list[DrafterLayer]:
        return [layer for layer in self.layers if isinstance(layer, DrafterLayer)]


def initialise(drafter: Drafter, generator: torch.Generator) -> None:
    """Random weights: normal with deviation 0.02 for matrices, ones for norms; `generator` on the CPU."""
    for parameter in drafter.parameters():
        if parameter.ndim > 1:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
        else:
            parameter.data.fill_(1.0)
