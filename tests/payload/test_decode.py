"""Speculative decoding: the target's own text whatever the drafter says, and an honest count of rounds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from remote_payload.train.decode import Decoded, Decoder, Difference, allowed_gap, first_difference
from remote_payload.train.drafter import Drafter, DrafterConfig, initialise
from remote_payload.train.target import Target, read_config
from tests.payload.test_target import write_target

CPU = torch.device("cpu")
MASK = 66
BLOCK = 5


OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("Llama", "Gemma3Text")]


@pytest.fixture(scope="module", params=["Qwen3", *OTHERS])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """Targets whose texts wander: rather large weights, untied, and sliding windows in one of them."""
    changes: dict[str, Any] = {"sliding_window": 8} if request.param == "Gemma3Text" else {}
    folder = tmp_path_factory.mktemp("target")
    write_target(folder, request.param, tie_word_embeddings=False, **changes)
    target = Target.load(folder, (1, 3), device=CPU, dtype=torch.float32)
    with torch.no_grad():
        for parameter in target.model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
    yield target


def drafter_for(target: Target, seed: int = 0, block: int = BLOCK) -> Drafter:
    config = DrafterConfig.for_target(
        target.model.config, layers=2, tap_layers=(1, 3), block_size=block, mask_token_id=MASK
    )
    drafter = Drafter(config)
    initialise(drafter, torch.Generator().manual_seed(seed))
    for parameter in drafter.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(20)
    return drafter.eval().requires_grad_(False)


class Oracle(Drafter):
    """Drafts the text it is told, whatever it sees: the first `right` guesses of a block are right."""

    def __init__(self, config: DrafterConfig, head: Tensor, text: list[int], prompt: int, right: int) -> None:
        super().__init__(config)
        self.text, self.prompt, self.right = text, prompt, right
        # head @ inverse is the identity where the vocabulary is no larger than the width.
        self.inverse = torch.linalg.pinv(head)
        self.seen_positions: list[list[int]] = []

    def blocks(self, x: Tensor, positions: Tensor, context: Any, mask: Any) -> Tensor:
        self.seen_positions.append(positions.tolist())
        first = int(positions[0]) - self.prompt  # place of the block's first token in the new text
        hidden = torch.zeros(len(x), len(self.inverse))
        for k in range(1, len(x)):
            token = self.text[first + k] if first + k < len(self.text) else 3
            token = token if k <= self.right else (token + 1) % self.inverse.shape[1]
            hidden[k] = self.inverse[:, token]
        return hidden


def prompts(count: int = 3) -> list[Tensor]:
    g = torch.Generator().manual_seed(4)
    return [torch.randint(3, 60, (int(n),), generator=g) for n in torch.randint(1, 20, (count,), generator=g)]


@pytest.mark.parametrize("block", [2, 5, 9])
def test_speculative_text_is_the_plain_text_token_for_token_whatever_the_drafter(
    target: Target, block: int
) -> None:
    decoder = Decoder(target, {1}, 24)
    for seed, prompt in enumerate(prompts()):
        plain = decoder.plain(prompt)
        found = decoder.speculative(prompt, drafter_for(target, seed, block))
        assert found.tokens == plain.tokens
        assert sum(found.rounds) + 1 >= len(found.tokens)
        assert all(1 <= given <= block for given in found.rounds)


def test_plain_text_is_that_of_transformers_own_greedy_generation(target: Target) -> None:
    decoder = Decoder(target, {1}, 24)
    for prompt in prompts():
        plain = decoder.plain(prompt)
        theirs = target.model.generate(
            prompt[None],
            attention_mask=torch.ones_like(prompt[None]),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=1,
            pad_token_id=0,
        )
        assert plain.tokens == theirs[0, len(prompt) :].tolist()
        assert len(plain.gaps) == len(plain.best) == len(plain.tokens) and not plain.rounds


def test_texts_are_worth_testing_with(target: Target) -> None:
    """Neither constant nor undecided: else the tests above would prove nothing."""
    decoder = Decoder(target, set(), 24)
    for prompt in prompts():
        plain = decoder.plain(prompt)
        assert len(set(plain.tokens)) > 4 and min(plain.gaps) > 1e-3


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A target whose vocabulary is no larger than its width, so that a hidden state can name any token."""
    folder = write_target(tmp_path_factory.mktemp("told"), tie_word_embeddings=False, hidden_size=72)
    return Target.load(folder, (1, 3), device=CPU, dtype=torch.float32)


def oracle_for(target: Target, text: list[int], prompt: int, right: int) -> Oracle:
    config = DrafterConfig.for_target(
        target.model.config, layers=1, tap_layers=(1, 3), block_size=BLOCK, mask_token_id=MASK
    )
    return Oracle(config, target.head, text, prompt, right).eval().requires_grad_(False)


def test_of_equal_logits_both_ways_to_decode_take_the_first(
    told: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 16 bits the two best are equal at some tokens of a hundred: texts must not part for that."""
    logits = told.logits

    def tied(ids: Tensor, cache: Any, last: int = 0) -> Tensor:
        found = torch.zeros_like(logits(ids, cache, last))
        found[..., [3, 5]] = 4.0
        return found

    monkeypatch.setattr(told, "logits", tied)
    decoder, prompt = Decoder(told, set(), 9), prompts()[0]
    plain = decoder.plain(prompt)
    assert plain.tokens == [3] * 9 and plain.gaps == [0.0] * 9 and plain.best == [4.0] * 9
    assert decoder.speculative(prompt, drafter_for(told)).tokens == plain.tokens


@pytest.mark.parametrize("right", range(BLOCK))
def test_a_drafter_that_is_right_k_times_a_block_gives_k_plus_one_tokens_a_round(
    told: Target, right: int
) -> None:
    """Right always: tau is the block size. Never: tau is 1, and the text is still the target's."""
    decoder = Decoder(told, set(), 61)
    prompt = prompts()[0]
    plain = decoder.plain(prompt)
    drafter = oracle_for(told, [*plain.tokens, *[3] * BLOCK], len(prompt), right)
    found = decoder.speculative(prompt, drafter)
    assert found.tokens == plain.tokens
    full, rest = divmod(60, right + 1)
    assert found.rounds[:full] == [right + 1] * full and len(found.rounds) == full + bool(rest)
    begins = [len(prompt) + n * (right + 1) for n in range(len(found.rounds))]
    assert drafter.seen_positions == [list(range(begin, begin + BLOCK)) for begin in begins]


@pytest.mark.slow
@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(right=st.integers(0, BLOCK - 1), at=st.integers(0, 20), most=st.integers(2, 26))
def test_a_text_ends_with_its_first_end_token_or_at_the_most_tokens_also_inside_a_block(
    told: Target, right: int, at: int, most: int
) -> None:
    prompt = prompts()[1]
    whole = Decoder(told, set(), 26).plain(prompt).tokens
    ends = {whole[at]}
    expected = whole[: min(whole.index(whole[at]) + 1, most)]
    decoder = Decoder(told, ends, most)
    assert decoder.plain(prompt).tokens == expected
    found = decoder.speculative(prompt, oracle_for(told, [*whole, *[3] * BLOCK], len(prompt), right))
    assert found.tokens == expected


def slow_rounds(plain: list[int], drafts: list[list[int]], ends: set[int]) -> list[int]:
    """Tokens of each round, counted from what was drafted in it and the text alone."""
    place, rounds = 1, []
    for draft in drafts:
        given = 0
        for guess in [*draft, None]:
            given += 1
            if guess != plain[place + given - 1] or plain[place + given - 1] in ends:
                break
        rounds.append(given)
        place += given
    return rounds


def test_rounds_are_what_a_slow_count_of_drafts_against_the_text_says(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = Decoder(target, {1}, 30)
    drafts: list[list[int]] = []
    accept = Decoder._accept

    def watched(self: Decoder, drafted: list[int], own: list[int]) -> list[int]:
        drafts.append(drafted)
        return accept(self, drafted, own)

    monkeypatch.setattr(Decoder, "_accept", watched)
    counted = []
    for seed, prompt in enumerate(prompts(4)):
        drafts.clear()
        long = Decoder(target, {1}, 30 + BLOCK).plain(prompt)  # a last round may run over the most tokens
        found = decoder.speculative(prompt, drafter_for(target, seed))
        assert found.rounds == slow_rounds(long.tokens, drafts, {1})
        counted += found.rounds
    assert counted


def test_the_first_difference_is_found_with_the_targets_gap_there() -> None:
    plain = Decoded(tokens=[5, 6, 7], seconds=0.0, gaps=[2.0, 0.05, 3.0], best=[20.0, 21.0, 22.0])
    assert first_difference(plain, Decoded(tokens=[5, 6, 7], seconds=0.0)) is None
    assert first_difference(plain, Decoded(tokens=[5, 9, 9], seconds=0.0)) == Difference(1, 0.05, 21.0)
    assert first_difference(plain, Decoded(tokens=[5, 6, 9], seconds=0.0)) == Difference(2, 3.0, 22.0)
    for other in ([5, 6], [5, 6, 7, 8]):
        found = first_difference(plain, Decoded(tokens=other, seconds=0.0))
        assert found is not None and found.gap == math.inf


@pytest.mark.parametrize(
    ("best", "dtype", "expected"),
    [
        (5.0, torch.bfloat16, 0.25),
        (-3.0, torch.bfloat16, 0.25),
        (16.0, torch.bfloat16, 0.25),
        (31.9, torch.float16, 0.25),
        (32.0, torch.bfloat16, 0.5),
        (63.5, torch.bfloat16, 0.5),
        (130.0, torch.bfloat16, 2.0),
        (130.0, torch.float32, 1e-3),
    ],
)
def test_the_gap_that_rounding_explains_grows_with_the_steps_between_numbers_of_16_bits(
    best: float, dtype: torch.dtype, expected: float
) -> None:
    """Two steps of bfloat16 at `best`, by the type's own numbers, but never less than from 16 to 32."""
    assert allowed_gap(best, dtype, 0.25) == expected
    if best >= 16 and dtype == torch.bfloat16:
        here = torch.tensor(best, dtype=dtype)
        step = torch.nextafter(here, torch.tensor(math.inf, dtype=dtype)) - here
        assert expected == 2 * float(step)


def test_the_drafter_sees_the_features_of_every_token_before_the_block_and_of_no_other(
    told: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its context, grown round by round, is the features of the text so far read in one pass."""
    drafter = drafter_for(told)
    seen: list[tuple[int, Tensor]] = []
    blocks = Drafter.blocks

    def watched(self: Drafter, x: Tensor, positions: Tensor, context: Any, mask: Any) -> Tensor:
        seen.append((int(positions[0]), context[1][1]))
        return blocks(self, x, positions, context, mask)

    monkeypatch.setattr(Drafter, "blocks", watched)
    prompt = prompts()[2]
    text = Decoder(told, set(), 20).speculative(prompt, drafter).tokens
    whole = torch.cat([prompt, torch.tensor(text)])
    for begin, values in seen:
        features = told.features(whole[None, :begin])[0]
        expected = drafter.context(features, torch.arange(begin))[1][1]
        assert values.shape == expected.shape
        torch.testing.assert_close(values, expected, atol=1e-4, rtol=1e-4)


def test_decoding_leaves_no_taps_behind(told: Target) -> None:
    Decoder(told, set(), 4).plain(prompts()[0])
    with pytest.raises(KeyError):
        told.tapped()


def test_the_config_of_a_target_is_read_without_its_weights(tmp_path: Path) -> None:
    folder = write_target(tmp_path)
    (folder / "model.safetensors").unlink()
    assert read_config(folder).num_hidden_layers == 5
