"""Greedy continuations of many prompts at once: what a target answers.

Two ways to the same text. transformers' `generate` works for every model, and is bound by the host: on an
H200 a token of a 135M model took 94 ms for 160 texts and 110 ms for 4,096. `FixedSteps` has a cache of fixed
size, reads a token of every text in work that is the same at each step, and on a GPU replays that work as a
CUDA graph. It is for models whose layers all attend to everything before them, by sdpa.

Shapes: N texts, P tokens of the longest prompt, L tokens that the cache holds.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, StaticCache
from transformers.cache_utils import StaticLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from remote_payload.crash import one_line
from remote_payload.train.execution import Graph
from remote_payload.train.target import text_config

Log = Callable[[str], None]

GROUPED = "sdpa_by_group"
"""The name of `attend_by_group` in transformers."""
_LOOK_EVERY = 16
"""Steps between two looks whether all texts have ended: each waits for the device."""
_PLAIN_STEPS = 2
"""Steps before the capture, so that nothing in it is new."""
_PROOF_STEPS = 2
"""Steps that a replay must take as plain ones did before it is trusted."""
_ALIGNED = 16
"""The cache's length is a multiple of it: the memory-efficient kernel copies other masks first."""


def end_tokens(model: Any) -> set[int]:
    """The ids at which the target stops by itself; none where it knows no end."""
    ids = model.generation_config.eos_token_id
    return set(ids if isinstance(ids, list) else [] if ids is None else [ids])


def generate_greedy(
    model: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int, pad_token_id: int
) -> list[list[int]]:
    """The target's greedy continuations of `prompts` as one batch, by transformers' own `generate`.

    Prompts are padded on the **left**, so that every row's next token follows its own last token;
    the attention mask, from which positions are counted, hides the padding. Each continuation ends
    with the end-of-text token that stopped it, or has `max_new_tokens` tokens.
    """
    ids, real = _padded(prompts, pad_token_id)
    with torch.inference_mode():
        output = model.generate(
            input_ids=ids.to(model.device),
            attention_mask=real.long().to(model.device),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=pad_token_id,
        )
    return _up_to_end(output[:, ids.shape[1] :], end_tokens(model))


def _padded(prompts: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Ids [N, P], padded on the left, and which of them are real [N, P] bool."""
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), pad, dtype=torch.long)
    real = torch.zeros_like(ids, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        real[row, width - len(prompt) :] = True
    return ids, real


def _up_to_end(said: Tensor, ends: set[int]) -> list[list[int]]:
    answers = []
    for row in said.tolist():
        end = next((i for i, token in enumerate(row) if token in ends), len(row) - 1)
        answers.append(row[: end + 1])
    return answers


def greedy(model: Any, pad: int, log: Log) -> Callable[[Sequence[Sequence[int]], int], list[list[int]]]:
    """The way to continue batches of prompts by so many tokens that suits the model and its device."""
    fixed: FixedSteps | None = None
    if on_gpu(model):
        if (refusal := refuse_fixed(model)) is None:
            fixed = FixedSteps(model, pad, log)
        else:
            log(f"Decoding by transformers' generate: {refusal}")

    def answer(prompts: Sequence[Sequence[int]], most: int) -> list[list[int]]:
        nonlocal fixed
        if fixed is not None:
            try:
                return fixed.answer(prompts, most)
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, TypeError, ValueError) as error:
                log(f"Decoding by transformers' generate from now on: {one_line(error)}")
                fixed = None
        return generate_greedy(model, prompts, most, pad)

    return answer


def on_gpu(model: Any) -> bool:
    """Whether the model lies where a graph can be captured."""
    return bool(model.device.type == "cuda")


def refuse_fixed(model: Any) -> str | None:
    """Why `FixedSteps` cannot decode a model; None where it can."""
    config = text_config(model.config)
    if getattr(config, "_attn_implementation", None) not in ("sdpa", GROUPED):
        return f"its attention is {getattr(config, '_attn_implementation', None)!r} and not sdpa"
    if "logits_to_keep" not in inspect.signature(type(model).forward).parameters:
        return "it makes the logits of whole prompts"
    try:
        layers = StaticCache(config=config, max_cache_len=_ALIGNED).layers
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        return f"it has no cache of fixed size ({one_line(error)})"
    if any(type(layer) is not StaticLayer for layer in layers):
        return "not all of its layers attend to everything before them"
    return None


def attend_by_group(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """transformers' sdpa attention, and for one query a text without a copy of keys and values.

    The heads that share a key are queries of it then: [N, H, 1, D] becomes [N, H_kv, H / H_kv, D]. As it is,
    transformers would write every key and value once for each of them, at every token.
    """
    alone = query.shape[2] == 1 and attention_mask is not None and options.get("position_bias") is None
    if not alone or key.shape[1] == query.shape[1]:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    folded = query.reshape(len(query), key.shape[1], -1, query.shape[-1])
    output = torch.nn.functional.scaled_dot_product_attention(
        folded, key, value, attn_mask=attention_mask, scale=options.get("scaling")
    )
    return output.reshape(len(query), 1, query.shape[1], value.shape[-1]), None


class FixedSteps:
    """Decodes batches with a cache of fixed size, on a GPU by a graph that is captured for each batch."""

    def __init__(self, model: Any, pad: int, log: Log) -> None:
        """`pad` stands before shorter prompts and behind ended texts; the model passes `refuse_fixed`."""
        self._model = model
        self._pad = pad
        self._log = log
        self._ends = end_tokens(model)
        self._by_graph = on_gpu(model)
        self._proved = False
        self._most = sys.maxsize
        self._stream = torch.cuda.Stream(model.device) if self._by_graph else None
        named = inspect.signature(type(model).forward).parameters
        self._cache_argument = "cache" if "cache" in named else "past_key_values"
        AttentionInterface.register(GROUPED, attend_by_group)

    def answer(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """Continuations as of `generate_greedy`; in smaller batches where the memory does not hold all."""
        answers: list[list[int]] = []
        while len(answers) < len(prompts):
            part = prompts[len(answers) : len(answers) + self._most]
            try:
                answers += self._answered(part, max_new_tokens)
                continue
            except torch.OutOfMemoryError:
                if len(part) == 1:
                    raise
            self._most = len(part) // 2  # out here, where the error's frames hold no tensors any more
            self._log(f"{len(part)} texts at once do not fit into the memory: {self._most} from now on")
        return answers

    @torch.inference_mode()
    def _answered(self, prompts: Sequence[Sequence[int]], most: int) -> list[list[int]]:
        with self._kernels():
            texts = _Texts(self, prompts, most)
            self._decode(texts, most - 1)
            said = texts.said.cpu()
        return _up_to_end(said, self._ends)

    @contextlib.contextmanager
    def _kernels(self) -> Iterator[None]:
        """The grouped attention, kernels that take a mask without planning for each shape, a stream."""
        config = text_config(self._model.config)
        before = config._attn_implementation
        with contextlib.ExitStack() as stack:
            if self._stream is not None:
                torch.cuda.empty_cache()  # the next batch has other shapes
                self._stream.wait_stream(torch.cuda.current_stream(self._model.device))
                stack.enter_context(torch.cuda.stream(self._stream))
                stack.enter_context(sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]))
            config._attn_implementation = GROUPED
            try:
                yield
            finally:
                config._attn_implementation = before

    def _decode(self, texts: _Texts, steps: int) -> None:
        graph = None
        for number in range(steps):
            if number % _LOOK_EVERY == 0 and bool(texts.ended.all()):
                return
            if number == _PLAIN_STEPS and self._by_graph and steps > number + _PROOF_STEPS:
                graph = self._captured(texts)
            if graph is None:
                texts.step()
            else:
                graph.replay()

    def _captured(self, texts: _Texts) -> Graph | None:
        """A graph of the next step; None, once and for all, where there is none to trust."""
        try:
            graph = Graph(texts.step, self._model.device)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._give_up(f"a step cannot be captured ({one_line(error)})")
            return None
        if not self._proved and not _same(texts, graph):
            self._give_up("the graph of a step says something else than the step")
            return None
        self._proved = True
        return graph

    def _give_up(self, reason: str) -> None:
        self._log(f"Decoding kernel by kernel: {reason}")
        self._by_graph = False

    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor, cache: StaticCache) -> Tensor:
        """The best next token [N] of every text, after its last one in `ids` [N, T].

        `mask` is added to the scores: [N, 1, T, L] in the model's number type.
        """
        output = self._model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_argument: cache},
        )
        best: Tensor = output.logits[:, -1].argmax(-1)
        return best

    @property
    def pad(self) -> int:
        """What stands where a text has nothing."""
        return self._pad

    @property
    def ends(self) -> Tensor:
        """The ids at which a text ends, on the device."""
        return torch.tensor(sorted(self._ends), device=self._model.device)

    def cache(self, length: int) -> StaticCache:
        """An empty cache for so many tokens."""
        return StaticCache(config=text_config(self._model.config), max_cache_len=length)

    @property
    def dtype(self) -> torch.dtype:
        """The number type of the model."""
        dtype: torch.dtype = self._model.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        """Where the model lies."""
        device: torch.device = self._model.device
        return device


class _Texts:
    """A batch under way: everything that a step reads and writes, at addresses that stay."""

    def __init__(self, owner: FixedSteps, prompts: Sequence[Sequence[int]], most: int) -> None:
        """Read the prompts, and say the first token of each."""
        ids, real = _padded(prompts, owner.pad)
        texts, width = ids.shape
        length = -(-(width + most) // _ALIGNED) * _ALIGNED
        device = owner.device
        self._owner = owner
        self._ends = owner.ends
        self._cache = owner.cache(length)
        real = real.to(device)
        self.mask = torch.full((texts, 1, 1, length), -torch.inf, dtype=owner.dtype, device=device)
        self.mask[:, 0, 0, :width].masked_fill_(real, 0)
        positions = (real.long().cumsum(-1) - 1).clamp(min=0)
        later = torch.ones(width, length, dtype=torch.bool, device=device).triu(1)
        mask = self.mask.masked_fill(later, -torch.inf)
        # A query that sees nothing would be no number, and stay none in every layer: padding sees itself.
        mask.masked_fill_(torch.eye(width, length, dtype=torch.bool, device=device), 0)
        first = owner.forward(ids.to(device), positions, mask, self._cache)
        del mask
        self.ended = torch.isin(first, self._ends)
        self.said = torch.full((texts, most), owner.pad, dtype=torch.long, device=device)
        self.said[:, 0] = first
        self.token = first[:, None].clone()
        self.position = positions[:, -1:] + 1
        self.column = torch.tensor([width], device=device)
        self.number = torch.tensor([1], device=device)

    def step(self) -> None:
        """Read the last token of every text, and say the next; the same work at every step."""
        self.mask.index_fill_(3, self.column, 0)
        best = self._owner.forward(self.token, self.position, self.mask, self._cache)
        best = best.masked_fill(self.ended, self._owner.pad)
        self.said.index_copy_(1, self.number, best[:, None])
        self.ended |= (best[:, None] == self._ends).any(-1)
        self.token.copy_(best[:, None])
        for place in (self.position, self.column, self.number):
            place.add_(1)

    def changing(self) -> list[Tensor]:
        """What a step changes, but for keys and values, which the same step writes anew."""
        layers: list[Any] = self._cache.layers
        lengths: list[Tensor] = [layer.cumulative_length for layer in layers]
        own = [self.mask, self.token, self.position, self.column, self.number, self.said, self.ended]
        return [*own, *lengths]


def _same(texts: _Texts, graph: Graph) -> bool:
    """Whether replays say what plain steps say; the texts are then where the plain steps began."""
    before = [tensor.clone() for tensor in texts.changing()]
    results = []
    for advance in (texts.step, graph.replay):
        for _ in range(_PROOF_STEPS):
            advance()
        results.append([tensor.clone() for tensor in texts.changing()])
        for tensor, value in zip(texts.changing(), before, strict=True):
            tensor.copy_(value)
    return all(torch.equal(one, other) for one, other in zip(*results, strict=True))
