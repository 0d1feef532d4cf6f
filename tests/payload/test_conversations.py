"""Answered conversations: which tokens the target wrote, and which conversations no mask fits."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from remote_payload.tools import prepare
from remote_payload.tools.conversations import Misaligned, read_conversations, supervise
from remote_payload.train.dataset import Dataset
from tests.payload.test_target import write_target

WORDS = ["<eos>", "<user>", "<bot>", "<end>", "<think>", "</think>", *(f"w{i}" for i in range(40))]
EOS, USER, BOT, END = range(4)

PLAIN = (
    "{% for m in messages %}{% if m.role == 'user' %}<user> {{ m.content }} <end> "
    "{% else %}<bot> {{ m.content }} <end> w39 {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<bot> {% endif %}"
)
"""w39 stands for what templates write behind an answer's end, a newline mostly."""

FORGETFUL = PLAIN.replace(
    "<bot> {{ m.content }}", "<bot> {{ m.content if loop.last else m.content.split('</think> ')[-1] }}"
)
"""Drops the reasoning of all answers but the last, as the templates of reasoning models do."""

BOASTFUL = PLAIN.replace("<user> {{ m.content }}", "<user> {{ '' if loop.last else 'w38 ' }}{{ m.content }}")
"""Renders a user's turn otherwise once something follows it."""

SILENT = PLAIN.replace("<bot> {{ m.content }}", "<bot> <think> </think> {{ m.content }}").replace(
    "{% if add_generation_prompt %}<bot> ", "{% if add_generation_prompt %}<bot> <think> w1 "
)
"""Its generation prompt is not how its answers begin."""

STRICT = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + PLAIN


def tokenizer(template: str) -> Any:
    inner = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<eos>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=inner, eos_token="<end>", unk_token="<eos>", chat_template=template
    )


def talk(*contents: str) -> list[dict[str, str]]:
    return [{"role": "assistant" if n % 2 else "user", "content": text} for n, text in enumerate(contents)]


def test_every_answer_of_a_conversation_is_supervised_from_its_prompt_to_its_end_token() -> None:
    ids, mask = supervise(tokenizer(PLAIN), talk("w1 w2", "w3 w4 w5", "w6", "w7"), {END})
    w = WORDS.index
    assert ids == [USER, w("w1"), w("w2"), END, BOT, w("w3"), w("w4"), w("w5"), END, w("w39"),
                   USER, w("w6"), END, BOT, w("w7"), END, w("w39")]  # fmt: skip
    assert mask == [0] * 5 + [1] * 4 + [0] * 5 + [1] * 2 + [0]


def test_reasoning_in_the_only_answer_is_supervised_too() -> None:
    ids, mask = supervise(tokenizer(FORGETFUL), talk("w1", "<think> w2 </think> w3"), {END})
    supervised = [WORDS[token] for token, wanted in zip(ids, mask, strict=True) if wanted]
    assert supervised == ["<think>", "w2", "</think>", "w3", "<end>"]


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (FORGETFUL, talk("w1", "<think> w2 </think> w3", "w4", "w5"), "rewrites an answer when later turns"),
        (BOASTFUL, talk("w1", "w2"), "does not continue its own generation prompt"),
        (SILENT, talk("w1", "w2"), "does not continue its own generation prompt"),
        (STRICT, [{"role": "system", "content": "w1"}, *talk("w1", "w2")], "refuses it .no system role."),
        (PLAIN, talk("w1"), "no answer in it"),
    ],
)
def test_a_conversation_whose_answers_are_not_where_they_were_generated_has_a_reason(
    template: str, messages: list[dict[str, str]], reason: str
) -> None:
    """NeMo #3605: a mask made from such a rendering would supervise other tokens."""
    with pytest.raises(Misaligned, match=reason):
        supervise(tokenizer(template), messages, {END})


def test_no_mask_is_given_where_a_prompt_as_asked_is_not_a_prefix_of_the_whole() -> None:
    """The middle turn is rewritten by the one after the next; each prefix alone looks right."""
    late = PLAIN.replace(
        "<user> {{ m.content }}", "<user> {{ 'w38 ' if messages | length > 3 else '' }}{{ m.content }}"
    )
    with pytest.raises(Misaligned, match="rewrites earlier turns"):
        supervise(tokenizer(late), talk("w1", "w2", "w3", "w4"), {END})


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = write_target(tmp_path / "target", eos_token_id=END)
    tokenizer(FORGETFUL).save_pretrained(folder)
    return folder


def lines(path: Path, *records: Any) -> Path:
    path.write_text("\n".join(json.dumps(record, ensure_ascii=False) for record in records) + "\n", "utf-8")
    return path


def test_prepare_names_and_counts_the_conversations_that_it_leaves_out(
    tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewritten = {"messages": talk("w1", "<think> w2 </think> w3", "w4", "w5")}
    file = lines(
        tmp_path / "said.jsonl",
        {"messages": talk("w1", "w2 w3"), "kind": "code"},
        *[rewritten] * 12,
        {"messages": talk("w1 \u2028 w2", "w3", "w4", "w5")},
        {"messages": talk("w7", "w8 w9"), "held_out": True},
        {"messages": talk("w7")},
    )
    out = tmp_path / "data"
    arguments = ["--conversations", str(file), "--target", str(target), "--out", str(out)]
    assert prepare.main(arguments) == 0
    said = capsys.readouterr().out
    assert "3 conversations kept, 1 of them held out" in said
    named = r"2, 3, 4, 5, 6, 7, 8, 9, 10, 11, \.\.\."
    assert re.search(rf"left out 12: .* rewrites an answer when later turns follow \(lines {named}\)", said)
    assert re.search(r"left out 1: no answer in it \(line 16\)", said)
    train, held_out = (Dataset.open(out / f"{name}.arrow") for name in ("train", "held_out"))
    assert len(train) == 2 and len(held_out) == 1
    assert train.texts("kind") == ["code", "all"]
    assert [int(train.supervised(n).sum()) for n in range(2)] == [3, 4]
    with pa.memory_map(str(out / "train.arrow")) as source:
        metadata = pa.ipc.open_file(source).schema.metadata
    assert metadata[b"target"].decode() == str(target) and b"chat_template_sha256" in metadata


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no conversations"),
        ("{", "line 1 is no JSON"),
        ('\n{"messages": "x"}', "line 2: expected"),
        ('{"messages": [{"role": "user"}]}', "line 1: expected"),
        ('{"messages": [], "held_out": 1}', "line 1: kind must be"),
        ("[1]", "line 1: expected"),
    ],
)
def test_a_file_of_something_else_is_refused_naming_the_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "said.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=re.escape(str(file)) + f": .*{message}"):
        read_conversations(file)


def test_a_file_of_which_nothing_is_left_ends_with_code_2_and_one_sentence(
    tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = lines(tmp_path / "said.jsonl", {"messages": talk("w1")})
    arguments = ["--conversations", str(file), "--target", str(target), "--out", str(tmp_path / "data")]
    assert prepare.main(arguments) == 2
    error = capsys.readouterr().err
    assert "nothing is left to train on" in error and "no answer in it" in error
    assert not (tmp_path / "data" / "train.arrow").exists()
