"""The draft model against a slow reading of the paper and against transformers' own Qwen3 layer."""

from __future__ import annotations

import dataclasses
import math
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.utils import _device
from transformers import Gemma3TextConfig, LlamaConfig, Qwen2Config, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

from remote_payload.job import JobError
from remote_payload.train.drafter import (
    Drafter,
    DrafterConfig,
    Joined,
    choose_taps,
    initialise,
    rope_theta,
)

CONFIG = DrafterConfig(
    layers=2,
    width=24,
    heads=4,
    kv_heads=2,
    head_dim=10,
    ffn=36,
    norm_eps=1e-5,
    rope_theta=5000.0,
    vocabulary=50,
    tap_layers=(1, 2, 4),
    target_layers=6,
    block_size=4,
    mask_token_id=49,
    max_positions=512,
)


def random_drafter(config: DrafterConfig = CONFIG, seed: int = 0) -> Drafter:
    """In float64, with weights large enough that every part of it matters."""
    drafter = Drafter(config).double()
    generator = torch.Generator().manual_seed(seed)
    for parameter in drafter.parameters():
        spread = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data = spread * 0.3 + (1.0 if parameter.ndim == 1 else 0.0)
    return drafter


def test_a_blank_drafter_draws_no_weights_and_is_like_others_once_it_has_some() -> None:
    """Drawing a billion that are then overwritten takes a core ten seconds."""
    state = torch.get_rng_state()
    blank, small = Drafter.blank(CONFIG), Drafter.blank(CONFIG, dtype=torch.bfloat16)
    assert torch.get_rng_state().equal(state)
    assert {p.dtype for p in small.parameters()} == {torch.bfloat16}
    drawn = Drafter(CONFIG)
    for drafter in (blank, drawn):
        initialise(drafter, torch.Generator().manual_seed(5))
    mine, theirs = dict(blank.named_parameters()), dict(drawn.named_parameters())
    assert mine.keys() == theirs.keys() and all(mine[name].equal(theirs[name]) for name in theirs)
    assert all(p.requires_grad and p.device.type == "cpu" for p in mine.values())


def test_a_device_for_the_tensors_of_one_thread_is_none_for_the_others() -> None:
    """Else every blank drafter would have all threads compile anew, which guard by the default device."""
    with ThreadPoolExecutor(1) as other, torch.device("meta"):
        mine, default = torch.empty(1), _device.CURRENT_DEVICE
        theirs = other.submit(torch.empty, 1).result()
    assert (mine.device.type, theirs.device.type, default) == ("meta", "cpu", None)


def random_inputs(context: int, queries: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Features, embedded block tokens, and a random mask in which every query sees something."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(context, 3 * CONFIG.width, generator=generator, dtype=torch.float64)
    x = torch.randn(queries, CONFIG.width, generator=generator, dtype=torch.float64)
    mask = torch.rand(queries, context + queries, generator=generator) < 0.5
    mask[:, context:] |= torch.eye(queries, dtype=torch.bool)
    return features, x, mask


class SlowDrafter:
    """Head by head and token by token, with lists instead of tensor operations over them."""

    def __init__(self, weights: dict[str, Tensor], c: DrafterConfig) -> None:
        self.w, self.c = weights, c

    def norm(self, vector: Tensor, name: str) -> Tensor:
        return vector / torch.sqrt((vector**2).mean() + self.c.norm_eps) * self.w[f"{name}.weight"]

    def rotate(self, vector: Tensor, position: int) -> Tensor:
        half, out = self.c.head_dim // 2, vector.clone()
        for i in range(half):
            angle = position * self.c.rope_theta ** (-2 * i / self.c.head_dim)
            a, b = vector[i], vector[i + half]
            out[i] = a * math.cos(angle) - b * math.sin(angle)
            out[i + half] = b * math.cos(angle) + a * math.sin(angle)
        return out

    def heads(self, vector: Tensor, layer: str, kind: str, position: int | None) -> list[Tensor]:
        """The heads of a projection; a position also means the norm of each head."""
        flat = self.w[f"{layer}.self_attn.{kind}_proj.weight"] @ vector
        parts = list(flat.split(self.c.head_dim))
        if position is None:
            return parts
        return [self.rotate(self.norm(part, f"{layer}.self_attn.{kind}_norm"), position) for part in parts]

    def run(
        self, features: Tensor, positions: list[int], x: Tensor, block_positions: list[int], mask: Tensor
    ) -> Tensor:
        h = [self.norm(self.w["fc.weight"] @ feature, "hidden_norm") for feature in features]
        stream = list(x)
        places = positions + block_positions
        for number in range(self.c.layers):
            layer = f"layers.{number}"
            normed = [self.norm(vector, f"{layer}.input_layernorm") for vector in stream]
            sources = h + normed
            keys = [self.heads(s, layer, "k", p) for s, p in zip(sources, places, strict=True)]
            values = [self.heads(s, layer, "v", None) for s in sources]
            added = []
            for query, vector in enumerate(normed):
                heads = self.heads(vector, layer, "q", block_positions[query])
                seen = [k for k in range(len(sources)) if mask[query, k]]
                out = []
                for head, q in enumerate(heads):
                    shared = head // (self.c.heads // self.c.kv_heads)
                    scores = torch.stack([q @ keys[k][shared] for k in seen]) / math.sqrt(self.c.head_dim)
                    share = torch.softmax(scores, 0)
                    out.append(sum(share[i] * values[k][shared] for i, k in enumerate(seen)))
                added.append(self.w[f"{layer}.self_attn.o_proj.weight"] @ torch.cat(out))  # type: ignore[arg-type]
            stream = [a + b for a, b in zip(stream, added, strict=True)]
            for place, vector in enumerate(stream):
                y = self.norm(vector, f"{layer}.post_attention_layernorm")
                gate, up = (self.w[f"{layer}.mlp.{n}_proj.weight"] @ y for n in ("gate", "up"))
                stream[place] = vector + self.w[f"{layer}.mlp.down_proj.weight"] @ (
                    gate / (1 + torch.exp(-gate)) * up
                )
        return torch.stack([self.norm(vector, "norm") for vector in stream])


def test_the_module_is_the_slow_reading_of_the_paper() -> None:
    drafter = random_drafter()
    features, x, mask = random_inputs(7, 5)
    positions, block_positions = [0, 1, 2, 0, 1, 2, 3], [3, 4, 5, 9, 10]
    with torch.no_grad():
        slow = SlowDrafter(dict(drafter.named_parameters()), CONFIG)
        expected = slow.run(features, positions, x, block_positions, mask)
        found = drafter(features, torch.tensor(positions), x, torch.tensor(block_positions), mask)
    # Rotary tables are float32 whatever the compute type, as the target's are.
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


def test_a_layer_without_context_is_transformers_qwen3_layer() -> None:
    config = Qwen3Config(
        hidden_size=24,
        intermediate_size=36,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=10,
        num_hidden_layers=6,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    )
    config._attn_implementation = "eager"
    drafter = random_drafter(dataclasses.replace(CONFIG, layers=1))
    theirs = Qwen3DecoderLayer(config, 0).double()
    missing, unexpected = theirs.load_state_dict(drafter.layers[0].state_dict())
    assert not missing and not unexpected  # the same names, every one of them
    _, x, mask = random_inputs(0, 6)
    positions = torch.tensor([3, 4, 5, 9, 10, 200])
    cos_sin = Qwen3RotaryEmbedding(config)(x[None], positions[None])
    bias = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    with torch.no_grad():
        given = theirs(x[None], attention_mask=bias[None, None], position_embeddings=cos_sin)
        expected = (given[0] if isinstance(given, tuple) else given).reshape(6, 24)
        nothing = drafter.context(torch.zeros(0, 72, dtype=torch.float64), torch.zeros(0, dtype=torch.long))
        keys, values = nothing[0]
        rotary = drafter.rotary(positions, torch.float64)
        found = drafter.layers[0](x, rotary, keys, values, mask)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


def test_context_keys_and_values_made_piece_by_piece_are_those_of_the_packed_pass() -> None:
    drafter = random_drafter()
    features, x, _ = random_inputs(9, 4)
    with torch.no_grad():
        whole = drafter.context(features, torch.arange(9))
        pieces = [drafter.context(features[a:b], torch.arange(a, b)) for a, b in ((0, 5), (5, 6), (6, 9))]
        joined = [
            tuple(torch.cat([piece[layer][which] for piece in pieces]) for which in (0, 1))
            for layer in range(2)
        ]
        for (keys, values), (k, v) in zip(whole, joined, strict=True):
            torch.testing.assert_close(k, keys)
            torch.testing.assert_close(v, values)
        positions = torch.arange(9, 13)
        packed = drafter(features, torch.arange(9), x, positions, torch.ones(4, 13, dtype=torch.bool))
        served = drafter.blocks(x, positions, [(k, v) for k, v in joined], None)
    torch.testing.assert_close(served, packed)


@pytest.mark.parametrize("layers", [1, 5])
def test_tensors_are_those_of_the_released_checkpoints(layers: int) -> None:
    state = Drafter(dataclasses.replace(CONFIG, layers=layers)).state_dict()
    assert len(state) == 11 * layers + 3
    wanted = {"fc.weight": (24, 72), "hidden_norm.weight": (24,), "norm.weight": (24,)}
    for i in range(layers):
        wanted |= {
            f"layers.{i}.input_layernorm.weight": (24,),
            f"layers.{i}.post_attention_layernorm.weight": (24,),
            f"layers.{i}.self_attn.q_proj.weight": (40, 24),
            f"layers.{i}.self_attn.k_proj.weight": (20, 24),
            f"layers.{i}.self_attn.v_proj.weight": (20, 24),
            f"layers.{i}.self_attn.o_proj.weight": (24, 40),
            f"layers.{i}.self_attn.q_norm.weight": (10,),
            f"layers.{i}.self_attn.k_norm.weight": (10,),
            f"layers.{i}.mlp.gate_proj.weight": (36, 24),
            f"layers.{i}.mlp.up_proj.weight": (36, 24),
            f"layers.{i}.mlp.down_proj.weight": (24, 36),
        }
    assert {name: tuple(value.shape) for name, value in state.items()} == wanted


@pytest.mark.parametrize(
    ("layers", "taps", "expected"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (30, 5, (1, 8, 14, 20, 27)),
        (28, 5, (1, 7, 13, 19, 25)),
        (24, 5, (1, 6, 11, 16, 21)),
        (36, 1, (18,)),
        (6, 3, (1, 2, 3)),
    ],
)
def test_taps_are_those_of_the_released_checkpoints(
    layers: int, taps: int, expected: tuple[int, ...]
) -> None:
    assert choose_taps(layers, taps) == expected


@pytest.mark.parametrize(("layers", "taps"), [(3, 2), (6, 5), (8, 9)])
def test_a_target_with_too_few_layers_for_the_taps_is_refused(layers: int, taps: int) -> None:
    with pytest.raises(JobError, match=rf"taps = {taps}: a target of {layers} layers"):
        choose_taps(layers, taps)


def test_initial_weights_depend_on_the_seed_alone_and_norms_begin_at_one() -> None:
    one, same, other = Drafter(CONFIG), Drafter(CONFIG), Drafter(CONFIG)
    for drafter, seed in ((one, 1), (same, 1), (other, 2)):
        torch.rand(seed)  # the global generator plays no part
        initialise(drafter, torch.Generator().manual_seed(seed))
    for (name, a), b, c in zip(one.named_parameters(), same.parameters(), other.parameters(), strict=True):
        assert a.equal(b)
        if "norm" in name:
            assert bool((a == 1).all())
        else:
            assert not a.equal(c) and float(a.detach().std()) == pytest.approx(0.02, rel=0.2)


def test_the_rope_base_is_found_wherever_transformers_keeps_it() -> None:
    default = {"rope_type": "default", "rope_theta": 123456.0}
    for kind in (Qwen3Config, Qwen2Config, LlamaConfig):
        assert rope_theta(kind(rope_parameters=default)) == 123456.0
    layered = Gemma3TextConfig(
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    )
    assert rope_theta(layered) == 1e6
    assert rope_theta(SimpleNamespace(rope_theta=777.0)) == 777.0
    assert rope_theta(SimpleNamespace()) == 10000.0


def test_sizes_are_the_targets_and_a_head_size_it_does_not_name_is_derived() -> None:
    llama = LlamaConfig(
        hidden_size=64, num_attention_heads=4, num_hidden_layers=8, intermediate_size=96, vocab_size=33
    )
    c = DrafterConfig.for_target(llama, layers=2, tap_layers=(1, 3), block_size=8, mask_token_id=4)
    assert (c.width, c.heads, c.kv_heads, c.head_dim, c.ffn, c.vocabulary) == (64, 4, 4, 16, 96, 33)
    assert (c.layers, c.target_layers, c.tap_layers, c.block_size) == (2, 8, (1, 3), 8)


def test_a_training_row_has_the_states_and_gradients_of_the_plain_forward_pass() -> None:
    """Joined matrices, tables made before, and the last states of the anchors left out."""
    plain, drafter = random_drafter(), random_drafter()
    named = dict(drafter.named_parameters())
    groups = [torch.cat([named[name].detach() for name in names]) for names in drafter.adjacent()]
    kv, *gate_up = (group.requires_grad_() for group in groups)
    features, x, mask = random_inputs(7, 8)
    tables = [drafter.rotary(torch.arange(n), torch.float64) for n in (7, 8)]
    found = drafter.train_row(features, tables[0], x, tables[1], mask, Joined(kv, gate_up))
    whole = plain(features, torch.arange(7), x, torch.arange(8), mask)
    expected = whole.view(2, CONFIG.block_size, -1)[:, 1:].reshape(6, -1)
    torch.testing.assert_close(found, expected)
    for states in (found, expected):
        states.pow(2).sum().backward()
    theirs = dict(plain.named_parameters())
    for names, group in zip(drafter.adjacent(), (kv, *gate_up), strict=True):
        assert all(named[name].grad is None for name in names)
        torch.testing.assert_close(group.grad, torch.cat([theirs[name].grad for name in names]))
    joined = {name for names in drafter.adjacent() for name in names}
    for name in named.keys() - joined:
        torch.testing.assert_close(named[name].grad, theirs[name].grad, msg=name)
