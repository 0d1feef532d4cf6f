"""Targets of many families: taps, heads, padding, and text decoded through every cache that they have."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache

from remote_payload.job import JobError
from remote_payload.train import target_cache
from remote_payload.train.decode import Decoder, first_difference
from remote_payload.train.drafter import Drafter, DrafterConfig, RotaryTable, initialise
from remote_payload.train.features import pack
from remote_payload.train.target import Target, read_config, text_config
from remote_payload.train.target_config import rope_differences
from tests.payload.families import FAMILIES, LAYERS, SIZES, VOCABULARY, WIDTH, WINDOW, write_family
from tests.payload.scripted import Scripted

CPU = torch.device("cpu")
TAPS = (0, 2, 3)
BLOCK = 5
MOST = 6 * WINDOW
"""Tokens: decoding goes on far beyond the windows."""


IN_EVERY_CHECK = ("llama", "gpt-oss, sinks and windows")
"""The others take the suite's time only in `make test`."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[] if name in IN_EVERY_CHECK else [pytest.mark.slow]) for name in FAMILIES
    ],
)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = write_family(tmp_path_factory.mktemp("family"), request.param)
    return Target.load(folder, TAPS, device=CPU, dtype=torch.float32)


def ids_of(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 60, shape, generator=torch.Generator().manual_seed(seed))


def test_taps_are_the_hidden_states_after_their_layers(target: Target) -> None:
    ids = ids_of(2, 3 * WINDOW)
    with torch.no_grad():
        whole = target.model(input_ids=ids, output_hidden_states=True, use_cache=False)
    target.tapped()
    assert len(target.layers) == LAYERS and len(whole.hidden_states) == LAYERS + 1
    expected = torch.cat([whole.hidden_states[k + 1] for k in TAPS], -1)
    found = target.features(ids)
    assert found.shape == (2, 3 * WINDOW, 3 * WIDTH)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    states = [whole.hidden_states[k + 1] for k in range(LAYERS - 1)]
    assert not any(a.allclose(b, atol=1e-3) for a, b in itertools.pairwise(states))


def test_no_head_and_no_layer_after_the_last_tap_is_computed_for_features(target: Target) -> None:
    seen: list[str] = []
    watched = [(target.layers[-1], "last layer"), (target.model.get_output_embeddings(), "head")]
    hooks = [m.register_forward_hook(lambda *_, name=name: seen.append(name)) for m, name in watched]
    target.features(ids_of(1, 6))
    assert seen == []
    target.model(input_ids=ids_of(1, 6))
    assert seen == ["last layer", "head"]
    for hook in hooks:
        hook.remove()
    target.tapped()


def test_the_output_head_makes_of_the_last_hidden_state_what_the_model_makes_of_it(target: Target) -> None:
    ids = ids_of(2, 7)
    with torch.no_grad():
        hidden = target.model.get_decoder()(input_ids=ids).last_hidden_state
        own = target.model(input_ids=ids).logits
    target.tapped()
    torch.testing.assert_close(target.output.logits(hidden), own, atol=1e-5, rtol=1e-5)
    assert target.output.choice(hidden).equal(own.argmax(-1))


def test_the_embedding_is_what_the_first_layer_sees(target: Target) -> None:
    ids = ids_of(1, 5)
    seen: list[Tensor] = []
    hook = target.layers[0].register_forward_pre_hook(
        lambda _m, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    target.features(ids)
    hook.remove()
    scale = getattr(
        text_config(target.model.config), "embedding_multiplier", 1.0
    )  # Granite's, after the table
    torch.testing.assert_close(target.embedding(ids) * scale, seen[0])


def test_a_row_among_longer_ones_has_the_features_of_the_same_row_alone(target: Target) -> None:
    """hidden[t] belongs to token[t] under right padding (SpecForge #471, #455, #473)."""
    lengths = [3 * WINDOW, 2, WINDOW + 1]
    rows = [ids_of(n, seed=n) for n in lengths]
    ids = torch.zeros(len(rows), max(lengths), dtype=torch.long)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = row
    packed = pack(target.features(ids), lengths)
    alone = torch.cat([target.features(row[None])[0] for row in rows])
    torch.testing.assert_close(packed, alone, atol=2e-5, rtol=2e-5)
    shifted = torch.cat([target.features(row[None])[0].roll(1, 0) for row in rows])
    assert not packed.allclose(shifted, atol=0.1)


def generated(target: Target, prompt: Tensor, most: int) -> list[int]:
    ids: Tensor = target.model.generate(
        prompt[None],
        attention_mask=torch.ones_like(prompt[None]),
        max_new_tokens=most,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    target.tapped()
    return ids[0, len(prompt) :].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("prompt_length", [3, WINDOW + 3])
def test_text_drafted_partly_right_is_that_of_the_models_own_greedy_generation(
    target: Target, prompt_length: int
) -> None:
    """Rounds take back 0, 1, ... B - 1 tokens, before, at and far beyond the window's length."""
    prompt = ids_of(prompt_length, seed=3)
    own = generated(target, prompt, MOST)
    decoder = Decoder(target, set(), MOST)
    plain = decoder.plain(prompt)
    assert plain.tokens == own
    assert len(set(own)) > 3 and min(plain.gaps) > 5e-5  # neither constant nor undecided
    drafter = Scripted(target, BLOCK, prompt_length, [*own, *[3] * BLOCK], [0, 4, 1, 3, 2])
    found = decoder.speculative(prompt, drafter)
    assert first_difference(plain, found) is None
    assert {BLOCK - given for given in found.rounds} == set(range(BLOCK))  # every length was taken back
    if (drafter.told == torch.arange(VOCABULARY))[own].all():
        done = len(found.rounds) - 1  # the last may be cut by the most tokens
        assert [given - 1 for given in found.rounds[:done]] == drafter.asked[:done]


def test_text_with_an_untrained_drafter_is_the_targets_own_too(target: Target) -> None:
    config = DrafterConfig.for_target(
        text_config(target.model.config), layers=2, tap_layers=TAPS, block_size=BLOCK, mask_token_id=66
    )
    drafter = Drafter(config)
    initialise(drafter, torch.Generator().manual_seed(0))
    prompt = ids_of(6, seed=4)
    decoder = Decoder(target, set(), MOST)
    assert decoder.speculative(prompt, drafter.eval()).tokens == decoder.plain(prompt).tokens


def test_a_target_that_takes_back_rightly_passes_the_check_made_before_training(target: Target) -> None:
    target_cache.check(target)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_rounding_in_16_bits_is_not_taken_for_a_fault_by_any_check(
    tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    target_cache.check(Target.load(write_family(tmp_path, family), TAPS, device=CPU, dtype=dtype))


@pytest.mark.parametrize("family", ["qwen3-next, linear attention", "mistral, windows"])
def test_a_cache_that_takes_back_wrongly_is_refused_before_training_naming_the_model_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Cropping leaves a state of linear attention as it is; a window that does not record loses tokens."""
    target = Target.load(write_family(tmp_path, family), TAPS, device=CPU, dtype=torch.float32)
    monkeypatch.setattr(DynamicCache, "is_croppable", True)
    if family.startswith("mistral"):
        monkeypatch.setattr(DynamicCache, "activate_past_recording", lambda _self: None)
    with pytest.raises(JobError, match=f"model_type '{target.model_type}' cannot take back") as refused:
        target_cache.check(target)
    assert "held_out" in str(refused.value) and target.model_type in ("qwen3_next", "mistral")


def test_the_family_without_croppable_cache_reads_the_accepted_part_again(tmp_path: Path) -> None:
    folder = write_family(tmp_path, "qwen3-next, linear attention")
    target = Target.load(folder, TAPS, device=CPU, dtype=torch.float32)
    cache = target_cache.TargetCache(target)
    cache.read(ids_of(4), last=1)
    cache.read_block(ids_of(BLOCK))
    reads: list[int] = []
    target.layers[0].register_forward_hook(lambda _m, _i, out: reads.append(out.shape[1]))
    cache.keep(2)
    cache.read_block(ids_of(BLOCK))
    cache.keep(BLOCK)
    assert reads == [2, BLOCK]


@pytest.mark.parametrize("family", ["glm, partial rotary", "phi, partial rotary and biases"])
def test_the_draft_rotates_whole_heads_although_the_target_rotates_a_part_of_each(
    tmp_path: Path, family: str
) -> None:
    """NeMo #3605: `partial_rotary_factor` does not leak into the drafter."""
    text = read_config(write_family(tmp_path, family))
    config = DrafterConfig.for_target(text, layers=1, tap_layers=(1,), block_size=4, mask_token_id=66)
    assert config.head_dim == 8
    table = RotaryTable.of(torch.arange(5), config.head_dim, config.rope_theta, torch.float32)
    assert table.cos.shape[-1] == config.head_dim
    assert (table.cos[1:] != 1).all()  # no number of a head stays where it is


def test_rope_scaling_of_the_target_is_not_taken_over(tmp_path: Path) -> None:
    plain = read_config(write_family(tmp_path / "plain", "llama"))
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
    scaled = read_config(write_family(tmp_path / "scaled", "llama", rope_parameters=yarn))
    options = {"layers": 1, "tap_layers": (1,), "block_size": 4, "mask_token_id": 66}
    assert DrafterConfig.for_target(scaled, **options) == DrafterConfig.for_target(plain, **options)


def test_the_log_says_what_of_the_targets_rope_is_not_taken_over(tmp_path: Path) -> None:
    assert rope_differences(read_config(write_family(tmp_path / "plain", "llama"))) == []
    (line,) = rope_differences(read_config(write_family(tmp_path / "glm", "glm, partial rotary")))
    assert "rotates 50% of each head" in line
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
    (line,) = rope_differences(read_config(write_family(tmp_path / "yarn", "llama", rope_parameters=yarn)))
    assert "scaled by 4 (yarn)" in line


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (transformers.GPT2Config(n_embd=24, n_head=4, n_layer=5, n_positions=99), (24, 4, 4, 6, 96, 99)),
        (transformers.BloomConfig(hidden_size=24, n_head=4, n_layer=5), (24, 4, 4, 6, 96, 32768)),
        (transformers.Gemma4TextConfig(**SIZES), (24, 4, 2, 8, 40, 256)),
    ],
    ids=["gpt2", "bloom", "gemma4"],
)
def test_a_config_that_names_its_sizes_otherwise_or_by_layer_gives_a_drafter_too(
    config: Any, sizes: tuple[int, ...]
) -> None:
    c = DrafterConfig.for_target(config, layers=1, tap_layers=(1,), block_size=4, mask_token_id=9)
    assert (c.width, c.heads, c.kv_heads, c.head_dim, c.ffn, c.max_positions) == sizes


def test_a_target_without_attention_heads_is_refused_naming_its_model_type() -> None:
    with pytest.raises(JobError, match="model_type 'mamba' has no num_attention_heads"):
        DrafterConfig.for_target(
            transformers.MambaConfig(), layers=1, tap_layers=(1,), block_size=4, mask_token_id=9
        )
