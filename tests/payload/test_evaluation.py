"""Held-out prompts, and what an evaluation reports of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from remote_payload.train.dataset import Dataset
from remote_payload.train.decode import Decoded, Decoder
from remote_payload.train.drafter import Drafter, DrafterConfig, initialise
from remote_payload.train.evaluation import Evaluation, HeldOutPrompt, drafter_with, held_out_prompts
from remote_payload.train.target import Target, read_config
from tests.payload.test_target import write_target

CPU = torch.device("cpu")


def write_table(path: Path, **columns: Any) -> Dataset:
    table = pa.table({name: pa.array(values) for name, values in columns.items()})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return Dataset.open(path)


def test_a_sample_whose_mask_cannot_be_read_is_no_prompt_and_no_more_are_looked_at_than_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [[5, 6, 7, 8]] * 9
    masks = [[0, 1], None, [0, 0, 2, 1], [0, None, 1, 1], *[[0, 0, 1, 1]] * 5]
    table = pa.table({"input_ids": pa.array(ids), "loss_mask": pa.array(masks)})
    path = tmp_path / "masks.arrow"
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    touched: list[int] = []
    look = Dataset.look

    def watched(dataset: Dataset, sample: int, vocabulary: int) -> str | None:
        touched.append(sample)
        return look(dataset, sample, vocabulary)

    monkeypatch.setattr(Dataset, "look", watched)
    prompts = held_out_prompts(Dataset.open(path), 2, 97)
    assert [prompt.ids for prompt in prompts] == [[5, 6], [5, 6]]
    assert touched == list(range(6))


def test_prompts_are_taken_from_all_kinds_in_turn_and_end_where_the_answer_begins(tmp_path: Path) -> None:
    dataset = write_table(
        tmp_path / "a.arrow",
        input_ids=[[10 + n, 20 + n, 30 + n] for n in range(6)],
        prompt_length=[2] * 6,
        kind=["b", "b", "b", "a", "a", "c"],
    )
    found = held_out_prompts(dataset, 4, 60)
    assert [(p.kind, p.ids) for p in found] == [
        ("a", [13, 23]),
        ("b", [10, 20]),
        ("c", [15, 25]),
        ("a", [14, 24]),
    ]
    assert len(held_out_prompts(dataset, 99, 60)) == 6


def test_a_conversation_of_several_turns_is_prompted_with_its_first_turn_alone(tmp_path: Path) -> None:
    dataset = write_table(
        tmp_path / "a.arrow",
        input_ids=[[5, 6, 7, 8, 9, 10]],
        loss_mask=[[0, 0, 1, 0, 0, 1]],
    )
    assert held_out_prompts(dataset, 4, 60) == [HeldOutPrompt([5, 6], "all")]


def test_samples_that_cannot_prompt_are_left_out(tmp_path: Path) -> None:
    dataset = write_table(
        tmp_path / "a.arrow",
        input_ids=[[], [5, 6], [5, 99], [7, 8]],
        prompt_length=[0, 0, 2, 2],
    )
    assert [prompt.ids for prompt in held_out_prompts(dataset, 9, 60)] == [[7, 8]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = write_target(tmp_path_factory.mktemp("target"), tie_word_embeddings=False)
    return Target.load(folder, (1, 3), device=CPU, dtype=torch.float32)


def go_on(_done: int, _of: int) -> bool:
    return True


def drafter_for(target: Target) -> Drafter:
    config = DrafterConfig.for_target(
        read_config(target.model.config.name_or_path),
        layers=1,
        tap_layers=(1, 3),
        block_size=4,
        mask_token_id=66,
    )
    drafter = Drafter(config)
    initialise(drafter, torch.Generator().manual_seed(0))
    return drafter.requires_grad_(False)


def test_a_report_counts_rounds_and_prompts_as_a_slow_count_does(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = {5: [4, 1, 1], 6: [2, 3], 7: []}
    tokens = {5: [9] * 7, 6: [9] * 5, 7: [1]}

    def told(self: Decoder, prompt: torch.Tensor, drafter: object = None) -> Decoded:
        first = int(prompt[0])
        given = rounds[first] if drafter else []
        return Decoded(tokens=tokens[first], seconds=0.5, rounds=given, gaps=[1.0] * 7, best=[9.0] * 7)

    monkeypatch.setattr(Decoder, "plain", told)
    monkeypatch.setattr(Decoder, "speculative", told)
    prompts = [HeldOutPrompt([5], "x"), HeldOutPrompt([6], "y"), HeldOutPrompt([7], "y")]
    shown: list[tuple[int, int]] = []

    def note(done: int, of: int) -> bool:
        shown.append((done, of))
        return True

    result = Evaluation(prompts, {1}, 8).run(target, drafter_for(target), 12, note)
    assert result is not None
    assert result.tau == pytest.approx(11 / 5)
    record = result.record
    assert record["step"] == 12 and record["tau"] == 2.2 and record["tau_macro"] == (2.0 + 2.5) / 2
    assert record["acceptance"] == [0.6, 0.4, 0.2]
    assert record["conditional_acceptance"] == [0.6, round(2 / 3, 4), 0.5]
    assert record["by_kind"] == {
        "x": {"tau": 2.0, "tau_macro": 2.0, "prompts": 1},
        "y": {"tau": 2.5, "tau_macro": 2.5, "prompts": 2},
    }
    assert (record["prompts"], record["tokens"], record["text_equal"]) == (3, 13, 3)
    assert (record["diverged"], record["diverged_allowed"], record["largest_gap"]) == (0, 0, None)
    assert result.not_lossless == ()
    assert record["tokens_per_s"] == record["plain_tokens_per_s"] == pytest.approx(13 / 1.5, abs=0.01)
    assert shown == [(1, 3), (2, 3), (3, 3)]


def test_the_targets_own_texts_are_decoded_once_and_kept(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluation_ = Evaluation([HeldOutPrompt([5, 6], "x"), HeldOutPrompt([7], "x")], {1}, 6)
    drafter = drafter_for(target)
    first = evaluation_.run(target, drafter, 0, go_on)
    monkeypatch.setattr(Decoder, "plain", None)
    again = evaluation_.run(target, drafter, 1, go_on)
    assert again is not None and first is not None
    assert again.record["tau"] == first.record["tau"] and first.record["text_equal"] == 2


@pytest.mark.parametrize(
    ("dtype", "gaps", "allowed"),
    [
        (torch.float32, [1.0, 5e-4], [False, True]),
        (torch.float32, [1e-2, 0.1], [False, False]),
        (torch.bfloat16, [0.25, 0.3], [True, False]),
    ],
)
def test_a_text_that_is_not_the_targets_own_is_a_tie_or_a_fault_by_the_gap_of_its_logits(
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    gaps: list[float],
    allowed: list[bool],
) -> None:
    """Two texts part from the target's own at their second token, a third one is equal."""

    def plain(_self: Decoder, prompt: torch.Tensor) -> Decoded:
        gap = [*gaps, 1.0][int(prompt[0])]
        return Decoded(tokens=[5, 6], seconds=0.1, gaps=[9.0, gap], best=[20.0, 20.0])

    def speculative(_self: Decoder, prompt: torch.Tensor, _drafter: Drafter) -> Decoded:
        return Decoded(tokens=[5, 6 if int(prompt[0]) == 2 else 7], seconds=0.1, rounds=[1])

    monkeypatch.setattr(Decoder, "plain", plain)
    monkeypatch.setattr(Decoder, "speculative", speculative)
    monkeypatch.setattr(Target, "dtype", dtype)
    result = Evaluation([HeldOutPrompt([n], "x") for n in range(3)], {1}, 6).run(target, drafter_for(target))
    assert result is not None
    record = result.record
    assert (record["text_equal"], record["diverged"], record["diverged_allowed"]) == (1, 2, sum(allowed))
    assert record["largest_gap"] == max(gaps)
    assert len(result.not_lossless) == 2 - sum(allowed)
    for number, fine in enumerate(allowed):
        told = any(f"held-out prompt {number} (x): token 1" in line for line in result.not_lossless)
        assert told == (not fine)


def test_a_job_may_state_another_gap(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Decoded(tokens=[5], seconds=0.1, gaps=[0.4], best=[20.0])
    monkeypatch.setattr(Decoder, "plain", lambda *_: own)
    monkeypatch.setattr(Decoder, "speculative", lambda *_: Decoded(tokens=[6], seconds=0.1))
    monkeypatch.setattr(Target, "dtype", torch.bfloat16)
    for gap, faults in ((0.25, 1), (0.5, 0)):
        result = Evaluation([HeldOutPrompt([5], "x")], {1}, 1, gap).run(target, drafter_for(target))
        assert result is not None and len(result.not_lossless) == faults


def test_an_evaluation_that_is_told_to_end_reports_nothing(target: Target) -> None:
    asked: list[int] = []

    def once(done: int, _of: int) -> bool:
        asked.append(done)
        return done < 2

    prompts = [HeldOutPrompt([n], "x") for n in (5, 6, 7)]
    assert Evaluation(prompts, {1}, 3).run(target, drafter_for(target), 0, once) is None
    assert asked == [1, 2]


def test_a_drafter_for_decoding_has_copies_of_its_weights_and_draws_none_at_random(target: Target) -> None:
    """Drawing them costs a core ten seconds for a billion numbers, at each evaluation."""
    config = DrafterConfig.for_target(
        target.model.config, layers=2, tap_layers=(1, 3), block_size=4, mask_token_id=66
    )
    given = Drafter(config)
    initialise(given, torch.Generator().manual_seed(0))
    weights, state = given.state_dict(), torch.get_rng_state()
    for dtype in (torch.float32, torch.bfloat16):
        drafter = drafter_with(config, weights, CPU, dtype)
        assert torch.get_rng_state().equal(state)
        for name, parameter in drafter.named_parameters():
            assert parameter.equal(weights[name].to(dtype)) and parameter.dtype == dtype
            assert parameter.data_ptr() != weights[name].data_ptr() and not parameter.requires_grad
