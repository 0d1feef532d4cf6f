"""Held-out prompts, and what an evaluation reports of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from remote_payload.train import evaluation
from remote_payload.train.dataset import Dataset
from remote_payload.train.decode import Decoded, Decoder
from remote_payload.train.drafter import Drafter, DrafterConfig, initialise
from remote_payload.train.evaluation import Evaluation, HeldOutPrompt, LossyDecoding, held_out_prompts
from remote_payload.train.target import Target, read_config
from tests.payload.test_target import write_target

CPU = torch.device("cpu")


def write_table(path: Path, **columns: Any) -> Dataset:
    table = pa.table({name: pa.array(values) for name, values in columns.items()})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return Dataset.open(path)


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
    rounds = {5: [4, 1, 1], 6: [2, 2], 7: []}
    tokens = {5: [9] * 7, 6: [9] * 5, 7: [1]}

    def told(self: Decoder, prompt: torch.Tensor, drafter: object = None) -> Decoded:
        first = int(prompt[0])
        given = rounds[first] if drafter else []
        return Decoded(tokens=tokens[first], seconds=0.5, rounds=given, gaps=[1.0] * 7)

    monkeypatch.setattr(Decoder, "plain", told)
    monkeypatch.setattr(Decoder, "speculative", told)
    prompts = [HeldOutPrompt([5], "x"), HeldOutPrompt([6], "y"), HeldOutPrompt([7], "y")]
    shown: list[tuple[int, int]] = []

    def note(done: int, of: int) -> bool:
        shown.append((done, of))
        return True

    result = Evaluation(prompts, {1}, 8).run(target, drafter_for(target), 12, note)
    assert result is not None
    assert result.tau == pytest.approx(10 / 5)
    record = result.record
    assert record["step"] == 12 and record["tau"] == 2.0 and record["tau_macro"] == 2.0
    assert record["acceptance"] == [0.6, 0.2, 0.2]
    assert record["by_kind"] == {"x": {"tau": 2.0, "prompts": 1}, "y": {"tau": 2.0, "prompts": 2}}
    assert (record["prompts"], record["tokens"], record["mismatches"]) == (3, 13, 0)
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
    assert again.record["tau"] == first.record["tau"] and first.record["mismatches"] == 0


def test_a_text_that_is_not_the_targets_own_ends_a_float32_run_and_is_counted_in_other_types(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Decoder, "speculative", lambda *_: Decoded(tokens=[64, 64], seconds=0.1, rounds=[1, 1])
    )
    monkeypatch.setattr(Decoder, "plain", lambda *_: Decoded(tokens=[5, 6], seconds=0.1, gaps=[1.0, 1.0]))
    lossy = Evaluation([HeldOutPrompt([5], "x")], {1}, 6)
    with pytest.raises(LossyDecoding, match=r"held-out prompt 0 \(x\)"):
        lossy.run(target, drafter_for(target), 0, go_on)
    monkeypatch.setattr(evaluation, "differs", lambda *_: True)
    halved = Target(target.model.to(torch.bfloat16), (1, 3))
    try:
        counted = lossy.run(halved, drafter_for(target), 0, go_on)
        assert counted is not None and counted.record["mismatches"] == 1
    finally:
        target.model.to(torch.float32)


def test_an_evaluation_that_is_told_to_end_reports_nothing(target: Target) -> None:
    asked: list[int] = []

    def once(done: int, _of: int) -> bool:
        asked.append(done)
        return done < 2

    prompts = [HeldOutPrompt([n], "x") for n in (5, 6, 7)]
    assert Evaluation(prompts, {1}, 3).run(target, drafter_for(target), 0, once) is None
    assert asked == [1, 2]
