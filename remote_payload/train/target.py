"""A frozen target model: its tapped hidden states, its embedding, its head.

Taps are forward hooks on decoder layers, so that any causal model of transformers works; the head is not
computed when only features are wanted. Embedding and head come from the model's own accessors, which
resolve tied weights and wrapped models; key names do not (SpecForge #455, #560).

Shapes: B rows, L tokens, D width, W = taps * D.
"""

from __future__ import annotations

import copy
import inspect
import json
import threading
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from remote_payload.crash import one_line
from remote_payload.job import JobError


class Target:
    """One copy of the target on one device; its weights may be used by several threads at once."""

    def __init__(self, model: Any, tap_layers: tuple[int, ...]) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tap_layers = tap_layers
        self.layers = decoder_layers(model)
        self._taps = _Taps()
        self._tapped_part = up_to_layer(model.get_decoder(), self.layers, max(tap_layers))
        # transformers 5.24 renames the argument and warns at the old name.
        named = inspect.signature(type(model).forward).parameters
        self._cache_argument = "cache" if "cache" in named else "past_key_values"
        for layer in tap_layers:
            self.layers[layer].register_forward_hook(self._keep(layer))

    @classmethod
    def load(
        cls, source: str | Path, tap_layers: tuple[int, ...], *, device: torch.device, dtype: torch.dtype
    ) -> Target:
        """Load safetensors weights onto `device`; raises JobError naming `source` when that fails.

        A weight that the files lack is refused too: transformers fills it in at random, and a random head
        trains a drafter that drafts nothing (SpecForge #455).
        """
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source, dtype=dtype, use_safetensors=True, output_loading_info=True
            )
        except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
            raise JobError(f"target {str(source)!r} cannot be loaded: {one_line(error)}") from error
        model, found = loaded
        if missing := sorted(found["missing_keys"]):
            raise JobError(
                f"target {str(source)!r} has no {', '.join(missing[:3])}"
                f"{f' and {len(missing) - 3} more weights' if len(missing) > 3 else ''}; expected a model as"
                f" save_pretrained writes it"
            )
        return cls(model.to(device), tap_layers)

    @property
    def device(self) -> torch.device:
        """Where the embedding lies."""
        return self.embedding.weight.device

    @property
    def embedding(self) -> nn.Embedding:
        """The input embedding, with whatever scaling the model gives it."""
        embedding: nn.Embedding = self.model.get_input_embeddings()
        return embedding

    @property
    def head(self) -> Tensor:
        """The output head [vocabulary, D]; the embedding itself in a tied model."""
        output = self.model.get_output_embeddings()
        return (output if output is not None else self.embedding).weight.detach()

    @torch.no_grad()
    def features(self, ids: Tensor) -> Tensor:
        """Outputs of the tapped layers side by side, [B, L, W], for right-padded `ids` [B, L].

        No attention mask is passed: a causal model's real tokens see no pad that comes after them.
        """
        self._tapped_part(input_ids=ids, use_cache=False)
        return self.tapped()

    @torch.no_grad()
    def logits(self, ids: Tensor, cache: Any) -> Tensor:
        """Logits [B, L, vocabulary] of `ids` [B, L] after what `cache` holds; the cache grows by L."""
        logits: Tensor = self.model(input_ids=ids, use_cache=True, **{self._cache_argument: cache}).logits
        return logits

    def tapped(self) -> Tensor:
        """The taps of the last forward pass side by side, [B, L, W]; each is given out once."""
        return torch.cat([self._taps.of.pop(layer) for layer in self.tap_layers], -1)

    def _keep(self, layer: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._taps.of[layer] = output[0] if isinstance(output, tuple) else output

        return hook


class _Taps(threading.local):
    """Outputs of tapped layers, of the thread that ran the model: evaluation runs beside training."""

    def __init__(self) -> None:
        self.of: dict[int, Tensor] = {}


def decoder_layers(model: Any) -> nn.ModuleList:
    """The decoder's list of layers, wherever the model keeps it. Raises JobError when there is none."""
    decoder = model.get_decoder()
    wanted = text_config(model.config).num_hidden_layers
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == wanted:
            return module
    raise JobError(f"target of type {type(model).__name__}: no list of its {wanted} decoder layers found")


def up_to_layer(decoder: nn.Module, layers: nn.ModuleList, last: int) -> nn.Module:
    """The same decoder without the layers after `last`, sharing all weights: features need no more.

    A decoder that does not keep its layers as `layers` is returned whole.
    """
    if getattr(decoder, "layers", None) is not layers:
        return decoder
    shorter = copy.copy(decoder)
    shorter._modules = {**decoder._modules, "layers": nn.ModuleList(list(layers)[: last + 1])}
    return shorter


def text_config(config: Any) -> Any:
    """The part of a Hugging Face config that describes the text decoder."""
    return config.get_text_config(decoder=True)


def read_config(source: str | Path) -> Any:
    """The target's text config, without its weights. Raises JobError naming `source`."""
    try:
        return text_config(AutoConfig.from_pretrained(source))
    except (OSError, ValueError) as error:
        raise JobError(f"target {str(source)!r} has no usable config: {one_line(error)}") from error


def special_ids(source: str | Path, config: Any) -> dict[str, set[int]]:
    """Ids that end or pad a text, by name: what a mask token must never be. Raises JobError."""
    found: dict[str, set[int]] = {}
    generation = Path(source) / "generation_config.json"
    try:
        extra = json.loads(generation.read_text()) if generation.is_file() else {}
    except (OSError, ValueError) as error:
        raise JobError(f"{generation}: cannot be read: {one_line(error)}") from error
    for name in ("eos_token_id", "pad_token_id", "bos_token_id"):
        for value in (getattr(config, name, None), extra.get(name)):
            ids = value if isinstance(value, list) else [] if value is None else [value]
            found.setdefault(name, set()).update(ids)
    return found


def check_mask_token(mask_token_id: int, config: Any, special: dict[str, set[int]]) -> None:
    """Refuse a mask token that the target has no row for, or that means something (NeMo #2461)."""
    if mask_token_id >= config.vocab_size:
        raise JobError(
            f"mask_token_id = {mask_token_id}: the target's embedding has {config.vocab_size} rows;"
            f" expected an id below that"
        )
    for name in ("eos_token_id", "pad_token_id"):
        taken = sorted(special.get(name, ()))
        if mask_token_id in taken:
            raise JobError(
                f"mask_token_id = {mask_token_id} is the target's {name} ({', '.join(map(str, taken))});"
                f" expected a row of the embedding that means nothing else"
            )
