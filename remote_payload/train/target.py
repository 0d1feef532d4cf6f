"""A frozen target model: its tapped hidden states, its embedding, its head.

Taps are forward hooks on decoder layers, so that any causal model of transformers works; the head is not
computed when only features are wanted. Embedding and head come from the model's own accessors, which
resolve tied weights and wrapped models; key names do not (SpecForge #455, #560).

Shapes: B rows, L tokens, D width, W = taps * D.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import threading
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig

from remote_payload.crash import one_line
from remote_payload.job import JobError
from remote_payload.train.fused_norms import fuse_norms
from remote_payload.train.output_head import OutputHead
from remote_payload.train.target_config import required_size


class Target:
    """One copy of the target on one device; its weights may be used by several threads at once."""

    def __init__(self, model: Any, tap_layers: tuple[int, ...]) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tap_layers = tap_layers
        self.layers = decoder_layers(model)
        self.output = OutputHead.of(model, text_config(model.config))
        self._taps = _Taps()
        self._tapped_part = up_to_layer(model.get_decoder(), self.layers, max(tap_layers))
        # Between transformers 5.17 and 5.24 the argument was renamed; the old name warns there.
        named = inspect.signature(type(model).forward).parameters
        self._cache_argument = "cache" if "cache" in named else "past_key_values"
        self._keeps_logits = "logits_to_keep" in named
        for layer in tap_layers:
            self.layers[layer].register_forward_hook(self._keep(layer))

    @classmethod
    def load(
        cls,
        source: str | Path,
        tap_layers: tuple[int, ...],
        *,
        device: torch.device,
        dtype: torch.dtype,
        attention: str = "auto",
        trust_remote_code: bool = False,
    ) -> Target:
        """Load safetensors weights onto `device`; raises JobError naming `source` when that fails.

        Args:
            source: a folder or a Hugging Face id.
            tap_layers: 0-based layers whose output `features` returns.
            device: where all of it goes.
            dtype: the number type of its weights.
            attention: as the job's `target_attention`; "auto" leaves it to transformers.
            trust_remote_code: whether Python files that come with the model may run.

        A model is refused too whose layers or head do not work as this class believes, by one short pass.
        """
        model = load_model(source, dtype, attention=attention, trust_remote_code=trust_remote_code)
        target = cls(model.to(device), tap_layers)
        if device.type == "cuda":
            fuse_norms(target.model)
        target.check()
        return target

    @property
    def model_type(self) -> str:
        """The family's name in transformers, for error texts."""
        return str(getattr(self.model.config, "model_type", type(self.model).__name__))

    @property
    def attention(self) -> str:
        """How it attends: sdpa, eager, ..."""
        return str(getattr(text_config(self.model.config), "_attn_implementation", None) or "eager")

    @property
    def device(self) -> torch.device:
        """Where the embedding lies."""
        return self.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The number type of its weights."""
        return self.embedding.weight.dtype

    @property
    def embedding(self) -> nn.Embedding:
        """The input embedding, with whatever scaling the model gives it."""
        embedding: nn.Embedding = self.model.get_input_embeddings()
        return embedding

    @property
    def head(self) -> Tensor:
        """The output head's weight [vocabulary, D]; `output` has what follows it too."""
        return self.output.weight

    def part(self, last_hidden: bool = False) -> nn.Module:
        """What of the decoder `features` runs: the layers up to the last tap, or with `last_hidden` all."""
        part: nn.Module = self.model.get_decoder() if last_hidden else self._tapped_part
        return part

    @torch.no_grad()
    def features(
        self,
        ids: Tensor,
        last_hidden: bool = False,
        *,
        part: nn.Module | None = None,
        out: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Outputs of the tapped layers side by side, [B, L, W], for right-padded `ids` [B, L].

        `last_hidden`: with what the head is given in D more columns, for objectives that read the target's
        distribution; all layers run then. No attention mask is passed: a causal model's real tokens see no
        pad that comes after them. `part` runs in place of `self.part(last_hidden)`, with `options`; `out` is
        filled where given.
        """
        output = (part or self.part(last_hidden))(input_ids=ids, use_cache=False, **options)
        columns = [self._taps.of.pop(layer) for layer in self.tap_layers]
        if last_hidden:
            columns.append(output[0] if isinstance(output, tuple) else output.last_hidden_state)
        return torch.cat(columns, -1, out=out)

    @torch.no_grad()
    def logits(self, ids: Tensor, cache: Any, last: int = 0) -> Tensor:
        """Logits [B, L, vocabulary] of `ids` [B, L] after what `cache` holds; the cache grows by L.

        `last`: only of that many tokens at the end, so that a long prompt costs no head.
        """
        options: dict[str, Any] = {self._cache_argument: cache}
        if last and self._keeps_logits:
            options["logits_to_keep"] = last
        logits: Tensor = self.model(input_ids=ids, use_cache=True, **options).logits
        return logits[:, -last:]

    def tapped(self) -> Tensor:
        """The taps of the last forward pass side by side, [B, L, W]; each is given out once."""
        return torch.cat([self._taps.of.pop(layer) for layer in self.tap_layers], -1)

    def forget_taps(self) -> None:
        """Let go of taps that nobody wants."""
        self._taps.of.clear()

    def check(self) -> None:
        """Short passes: taps give one vector a token, of what stands before it, and the head is as believed.

        Raises JobError naming the model_type. Gemma 3n, for one, hands four streams from layer to layer; a
        BERT loads as a causal model and reads both ways.
        """
        ids = torch.arange(1, 5, device=self.device)[None] % self.embedding.num_embeddings
        other_end = ids.clone()
        other_end[0, -1] = 0
        try:
            features, changed = self.features(ids), self.features(other_end)
            shape = tuple(features.shape)
        except torch.OutOfMemoryError:
            raise
        except (KeyError, RuntimeError, TypeError, ValueError, AttributeError) as error:
            raise JobError(
                f"target of model_type {self.model_type!r}: its layers {list(self.tap_layers)} cannot be"
                f" tapped ({one_line(error)}); no drafter can be trained for this family"
            ) from error
        width = text_config(self.model.config).hidden_size
        if shape != (1, 4, len(self.tap_layers) * width):
            raise JobError(
                f"target of model_type {self.model_type!r}: its layers give outputs of shape {shape} for 4"
                f" tokens, expected {len(self.tap_layers)} x {width} numbers a token; no drafter can be"
                f" trained for this family"
            )
        before, after = features[0, :-1].float(), changed[0, :-1].float()
        parted = float(((before - after).norm(dim=-1) / before.norm(dim=-1).clamp(min=1e-9)).median())
        if parted > (1e-3 if self.dtype == torch.float32 else 0.05):
            raise JobError(
                f"target of model_type {self.model_type!r} is not causal: what its layers say of a token"
                f" depends on the tokens after it, which a drafter cannot know"
            )
        self.output.check(self.model, ids)
        self.forget_taps()

    @torch.no_grad()
    def check_last_hidden(self) -> None:
        """One short pass: `features` with `last_hidden` gives what the head is given.

        Raises JobError naming the model_type; MiniCPM, for one, scales its states before the head.
        """
        ids = torch.arange(1, 5, device=self.device)[None] % self.embedding.num_embeddings
        hidden = self.features(ids, last_hidden=True)[..., -self.output.weight.shape[1] :]
        own = self.model(input_ids=ids, use_cache=False).logits.float()
        apart = float((self.output.logits(hidden).float() - own).norm() / own.norm().clamp(min=1e-9))
        self._taps.of.clear()
        if not apart < 0.02:
            raise JobError(
                f"target of model_type {self.model_type!r}: its decoder's output is not what its head is"
                f" given, so objectives that need its distribution cannot have it; use objective = 'ce',"
                f" 'dpace', 'focal' or 'chain'"
            )

    def _keep(self, layer: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._taps.of[layer] = output[0] if isinstance(output, tuple) else output

        return hook


class _Taps(threading.local):
    """Outputs of tapped layers, of the thread that ran the model: evaluation runs beside training."""

    def __init__(self) -> None:
        self.of: dict[int, Tensor] = {}


def load_model(
    source: str | Path, dtype: torch.dtype, *, attention: str = "auto", trust_remote_code: bool = False
) -> Any:
    """The model in `source` with all its weights, on the CPU. Raises JobError naming `source`.

    A weight that the files lack is refused: transformers fills it in at random, and a random head trains a
    drafter that drafts nothing (SpecForge #455).
    """
    config = load_config(source, trust_remote_code)
    options: dict[str, Any] = {} if attention == "auto" else {"attn_implementation": attention}
    try:
        loaded: Any = _loader(config).from_pretrained(
            source,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            trust_remote_code=trust_remote_code,
            **options,
        )
    except (OSError, ValueError, ImportError, RuntimeError, AttributeError, SafetensorError) as error:
        with_attention = "" if attention == "auto" else f" with target_attention = {attention!r}"
        raise JobError(
            f"target {str(source)!r} cannot be loaded{with_attention}: {one_line(error)}"
        ) from error
    model, found = loaded
    if missing := sorted(found["missing_keys"]):
        raise JobError(
            f"target {str(source)!r} has no {', '.join(missing[:3])}"
            f"{f' and {len(missing) - 3} more weights' if len(missing) > 3 else ''}; expected a model as"
            f" save_pretrained writes it"
        )
    return model


def decoder_layers(model: Any) -> nn.ModuleList:
    """The decoder's list of layers, wherever the model keeps it. Raises JobError when there is none."""
    decoder = model.get_decoder()
    wanted = getattr(text_config(model.config), "num_hidden_layers", None)
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == wanted:
            return module
    raise JobError(f"target of type {type(model).__name__}: no list of its {wanted} decoder layers found")


def up_to_layer(decoder: nn.Module, layers: nn.ModuleList, last: int) -> nn.Module:
    """The same decoder without the layers after `last`, sharing all weights: features need no more.

    A decoder that keeps its layers deeper down is returned whole.
    """
    name = next((name for name, child in decoder.named_children() if child is layers), None)
    if name is None:
        return decoder
    shorter = copy.copy(decoder)
    shorter._modules = {**decoder._modules, name: nn.ModuleList(list(layers)[: last + 1])}
    return shorter


def text_config(config: Any) -> Any:
    """The part of a Hugging Face config that describes the text decoder."""
    return config.get_text_config(decoder=True)


def read_config(source: str | Path, trust_remote_code: bool = False) -> Any:
    """The target's text config, without its weights. Raises JobError naming `source`."""
    config = text_config(load_config(source, trust_remote_code))
    for name in ("num_hidden_layers", "hidden_size", "vocab_size"):
        required_size(config, name)
    return config


def load_config(source: str | Path, trust_remote_code: bool = False) -> Any:
    """The target's whole config. Raises JobError naming `source`, also when it would need its own code."""
    try:
        # Never None: transformers would then ask on the terminal, and wait.
        return AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError, KeyError, TypeError, StrictDataclassError) as error:
        reason = one_line(error)
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise JobError(
                f"target {str(source)!r} comes with Python code of its own, which would run with all your"
                f" rights; read it, and set trust_remote_code = true if you trust it"
            ) from error
        raise JobError(f"target {str(source)!r} has no usable config: {reason}") from error


def _loader(config: Any) -> Any:
    """The class that loads a model of `config`: a causal model, or else one wrapped around a text model."""
    causal = type(config) in AutoModelForCausalLM._model_mapping
    wrapped = type(config) in AutoModelForImageTextToText._model_mapping
    return AutoModelForImageTextToText if wrapped and not causal else AutoModelForCausalLM


def special_ids(source: str | Path, config: Any) -> dict[str, set[int]]:
    """Ids that end or pad a text, by name: what a mask token must never be. Raises JobError."""
    found: dict[str, set[int]] = {}
    extra: dict[str, Any] = {}
    generation = Path(source) / "generation_config.json"
    try:
        if generation.is_file():
            extra = json.loads(generation.read_text())
    except (OSError, ValueError) as error:
        raise JobError(f"{generation}: cannot be read: {one_line(error)}") from error
    if not Path(source).is_dir():
        with contextlib.suppress(OSError):  # many models of the hub have none
            extra = GenerationConfig.from_pretrained(str(source)).to_dict()
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
