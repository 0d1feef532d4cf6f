"""The data set maker: prompts file, greedy answers, what is kept, what is written."""

import gc
import itertools
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from remote_payload.tools import prepare
from remote_payload.tools.generation import generate_greedy
from remote_payload.tools.prompts import Prompt, read_prompts
from remote_payload.tools.repetition import (
    MAX_PERIOD,
    MAX_REPEATED_SHARE,
    MIN_ANSWER,
    MIN_REPEATS,
    MIN_SPAN,
    find_loop,
    judge,
    repeated_share,
)

TEMPLATE = (
    "{% for m in messages %}<user> {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<bot> {% endif %}"
)
WORDS = ["<eos>", "<user>", "<bot>", "<unk>", *(f"w{i}" for i in range(60))]
PROMPTS = """
held_out = ["tides"]
[prompts.explain]
tides = ["w1 w2"]
moon = ["w3 w4 w5", "w6"]
[prompts.list]
fruit = ["w7 w8 w9 w10 w11 w12"]
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama whose tokenizer knows sixty words."""
    folder = tmp_path_factory.mktemp("target")
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=inner, eos_token="<eos>", unk_token="<unk>", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(target: Path) -> Any:
    loaded: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    return loaded.eval()


def write(folder: Path, text: str) -> Path:
    file = folder / "prompts.toml"
    file.write_text(text, encoding="utf-8")
    return file


def read(path: Path) -> pa.Table:
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()


def run(target: Path, prompts: Path, out: Path, *more: str) -> int:
    arguments = ["--prompts", str(prompts), "--target", str(target), "--out", str(out)]
    return prepare.main([*arguments, "--max-new-tokens", "20", *more])


# The prompts file


def test_prompts_keep_their_order_and_a_held_out_topic_is_held_out_in_every_kind(
    tmp_path: Path,
) -> None:
    text = PROMPTS + 'tides = ["w13"]\n'
    assert read_prompts(write(tmp_path, text)) == [
        Prompt("explain", "tides", "w1 w2", True),
        Prompt("explain", "moon", "w3 w4 w5", False),
        Prompt("explain", "moon", "w6", False),
        Prompt("list", "fruit", "w7 w8 w9 w10 w11 w12", False),
        Prompt("list", "tides", "w13", True),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("held_out = [1", "is not TOML: "),
        ("prompt = 1", "unknown key 'prompt'; expected held_out and"),
        ("held_out = 'tides'", "held_out: expected a list of strings"),
        ("held_out = []", r"prompts: expected \[prompts.KIND\] tables"),
        ("[prompts]\nexplain = ['a']", 'prompts.explain: expected topic = \\["prompt", ...\\]'),
        ("[prompts.explain]\nmoon = 'a'", "prompts.explain.moon: expected a list of strings"),
        ("[prompts.explain]\nmoon = ['a', ' ']", "prompts.explain.moon: holds an empty string"),
        ("[prompts.a]\nx = ['b']\n[prompts.c]\ny = ['b']", r"c\.y: the same .* under prompts\.a\.x"),
        ("held_out = ['sun']\n[prompts.a]\nx = ['b']", "held_out: no prompt has the topic 'sun'"),
        ("held_out = ['x']\n[prompts.a]\nx = ['b']", "nothing is left to train on"),
    ],
)
def test_a_wrong_prompts_file_is_refused_naming_file_and_key(text: str, message: str, tmp_path: Path) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ValueError, match=re.escape(str(file)) + ": .*" + message):
        read_prompts(file)


def test_a_missing_prompts_file_and_one_that_is_not_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.toml: cannot be read"):
        read_prompts(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"binary\.toml: is not UTF-8"):
        read_prompts(tmp_path / "binary.toml")


# Repetition


def test_plain_text_has_no_loop_and_is_kept_whole() -> None:
    assert find_loop(range(100)) is None
    assert judge(range(100)).keep == 100
    assert judge(range(100)).reason is None


def test_a_loop_is_cut_after_its_first_unit() -> None:
    answer = [*range(100, 120), *[1, 2, 3, 4, 5] * 6]
    assert find_loop(answer) == (20, 5)
    verdict = judge(answer)
    assert (verdict.keep, verdict.reason) == (25, "loop")


def test_a_loop_before_a_different_ending_is_found_too() -> None:
    answer = [*range(100, 120), *[7, 8, 9, 10] * 4, *range(200, 220)]
    assert judge(answer).keep == 24


def test_an_answer_that_loops_from_the_start_is_dropped() -> None:
    assert judge([1, 2, 3] * 20).keep == 0
    assert judge([1, 2, 3] * 20).reason == "loop"


def test_a_short_refrain_is_no_loop() -> None:
    assert find_loop([*range(50), 7, 7, 7, *range(60, 90)]) is None


def test_a_numbered_list_of_one_sentence_is_cut_where_it_begins_or_dropped() -> None:
    items = [token for i in range(8) for token in (900 + i, 1, 2, 3, 4, 5, 6, 7)]
    answer = [*range(100, 130), *items]
    assert find_loop(answer) is None
    assert repeated_share(answer) > MAX_REPEATED_SHARE
    verdict = judge(answer)
    # The first copy is the second item's "1 2 3 4", whose first three tokens are not yet one.
    assert (verdict.keep, verdict.reason) == (30 + 8 + 1 + 3, "repetition")
    assert (judge(answer, cut=False).keep, judge(answer, cut=False).reason) == (0, "repetition")


def test_an_answer_with_too_little_before_its_repetition_is_dropped() -> None:
    answer = [token for i in range(12) for token in (900 + i, 1, 2, 3, 4, 5)]
    assert find_loop(answer) is None
    assert (judge(answer).keep, judge(answer).reason) == (0, "repetition")


@given(st.lists(st.integers(0, 5), max_size=120), st.lists(st.integers(0, 50), max_size=80))
def test_what_is_kept_is_a_prefix_without_loop_or_repetition(some: list[int], more: list[int]) -> None:
    answer = more + some
    verdict = judge(answer)
    kept = answer[: verdict.keep]
    assert repeated_share(kept) <= MAX_REPEATED_SHARE
    assert verdict.keep == 0 or verdict.keep >= MIN_ANSWER or verdict.reason is None
    assert (verdict.reason is None) == (verdict.keep == len(answer) > 0)


@given(st.lists(st.integers(0, 4), max_size=60))
def test_the_loop_that_is_found_is_the_one_that_a_plain_search_finds(tokens: list[int]) -> None:
    loops = []
    for period in range(1, MAX_PERIOD + 1):
        least = max(MIN_REPEATS * period, MIN_SPAN)
        for start in range(len(tokens) - least + 1):
            span = tokens[start : start + least]
            if all(one == other for one, other in zip(span, span[period:], strict=False)):
                loops.append((start, period))
    assert find_loop(tokens) == min(loops, default=None)


def test_an_empty_answer_is_dropped_as_empty() -> None:
    assert (judge([]).keep, judge([]).reason) == (0, "empty")


# Answers


def test_answers_of_a_padded_batch_equal_those_of_prompts_asked_alone(model: Any) -> None:
    prompts = [[1, 9, 2], [1, 10, 11, 12, 13, 14, 15, 16, 17, 2], [1, 20, 21, 2], [5]]
    together = generate_greedy(model, prompts, 24, pad_token_id=0)
    alone = [generate_greedy(model, [p], 24, pad_token_id=0)[0] for p in prompts]
    assert together == alone
    assert len({tuple(answer) for answer in together}) == len(prompts)


def test_every_answer_is_the_argmax_of_its_own_prefix(model: Any) -> None:
    prompt = [1, 30, 31, 2]
    answer = generate_greedy(model, [prompt, [1] * 9], 16, pad_token_id=0)[0]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0]
    assert logits.argmax(-1)[len(prompt) - 1 : -1].tolist() == answer


@pytest.mark.parametrize(
    ("said", "answer", "truncated", "reason"),
    [
        ([*range(40, 60), 0], [*range(40, 60), 0], False, None),
        ([*range(40, 60)], [*range(40, 60)], True, "token limit"),
        ([*range(40, 60), *[5, 6] * 9, 0], [*range(40, 60), 5, 6], True, "loop"),
        ([0], [], False, "empty"),
        ([40, 41, 2, 42, 0], [], False, "special token"),
    ],
)
def test_an_answer_ends_or_is_marked_as_cut_or_is_dropped_with_a_reason(
    said: list[int], answer: list[int], truncated: bool, reason: str | None
) -> None:
    prompt = Prompt("explain", "moon", "w1", False)
    result = prepare.assess(prompt, [1, 2], said, ends={0}, special={1, 2})
    assert (result.answer_ids, result.truncated, result.reason) == (answer, truncated, reason)
    assert result.kept == bool(answer)


def test_held_out_prompts_are_asked_first_and_those_after_the_time_limit_say_so(
    target: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(0, 10)  # every look at the clock finds ten seconds gone
    monkeypatch.setattr(prepare, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    prompts = [Prompt("explain", f"topic {n}", f"w{n}", n in (2, 5)) for n in range(1, 8)]
    tokenizer = AutoTokenizer.from_pretrained(target)
    answers = prepare.answer_all(model, tokenizer, prompts, 4, 2, lambda _: None, seconds=15)
    assert [a.prompt for a in answers] == prompts
    assert [a.reason == "time limit" for a in answers] == [n not in (2, 5) for n in range(1, 8)]


def test_answers_are_the_same_in_every_batch_size(target: Path, model: Any) -> None:
    prompts = [
        Prompt("explain", f"topic {n}", " ".join(["w1"] * (n % 4) + [f"w{n}"]), False) for n in range(9)
    ]
    tokenizer = AutoTokenizer.from_pretrained(target)
    one, four = (prepare.answer_all(model, tokenizer, prompts, 20, size, lambda _: None) for size in (1, 4))
    assert one == four


# The files


def test_the_files_hold_rendered_prompts_with_the_targets_answers_split_by_topic(
    target: Path, model: Any, tmp_path: Path
) -> None:
    out = tmp_path / "data"
    assert run(target, write(tmp_path, PROMPTS), out, "--batch-size", "2") == 0
    train, held = read(out / "train.arrow"), read(out / "held_out.arrow")
    assert train.schema.remove_metadata() == prepare.SCHEMA
    assert set(held["topic"].to_pylist()) <= {"tides"}
    assert set(train["topic"].to_pylist()) <= {"moon", "fruit"}
    rows = train.to_pylist()
    assert rows, "the random target's answers were all dropped: choose another seed"
    for row in rows:
        prompt = row["input_ids"][: row["prompt_length"]]
        answer = row["input_ids"][row["prompt_length"] :]
        assert (prompt[0], prompt[-1]) == (1, 2)
        assert generate_greedy(model, [prompt], 20, 0)[0][: len(answer)] == answer
        assert row["truncated"] == (answer[-1] != 0)
        assert len(answer) >= MIN_ANSWER or not row["truncated"]


def test_the_schema_names_target_tokenizer_template_and_command(target: Path, tmp_path: Path) -> None:
    assert run(target, write(tmp_path, PROMPTS), tmp_path) == 0
    metadata = read(tmp_path / "train.arrow").schema.metadata
    tokenizer = AutoTokenizer.from_pretrained(target)
    assert metadata[b"target"].decode() == str(target)
    assert metadata[b"tokenizer_sha256"].decode() == prepare.tokenizer_digest(tokenizer)
    assert metadata[b"chat_template_sha256"].decode() == prepare.chat_template_digest(tokenizer)
    assert metadata[b"command"].decode().startswith("python -m remote_payload.tools.prepare --prom")
    tokenizer.chat_template = TEMPLATE + " "
    assert metadata[b"chat_template_sha256"].decode() != prepare.chat_template_digest(tokenizer)


def test_columns_are_read_from_a_memory_map_without_a_copy(target: Path, tmp_path: Path) -> None:
    assert run(target, write(tmp_path, PROMPTS), tmp_path) == 0
    gc.collect()  # what is left of another test may go at any time
    before = pa.total_allocated_bytes()
    table = read(tmp_path / "train.arrow")
    assert table.nbytes > 0
    assert pa.total_allocated_bytes() <= before


def test_the_summary_counts_each_kind_and_every_reason(
    capsys: pytest.CaptureFixture[str], target: Path, tmp_path: Path
) -> None:
    assert run(target, write(tmp_path, PROMPTS), tmp_path) == 0
    output = capsys.readouterr().out
    assert "Answered 4/4 prompts" in output
    rows = {line.split()[0]: line.split() for line in output.splitlines() if line[:1].isalpha()}
    assert rows["explain"][1] == "3"
    assert rows["list"][1] == "1"
    assert rows["all"][1] == "4"
    made = read(tmp_path / "train.arrow").num_rows + read(tmp_path / "held_out.arrow").num_rows
    assert rows["all"][2] == str(made)


def test_shares_of_the_prompts_merge_into_what_one_process_makes(target: Path, tmp_path: Path) -> None:
    prompts = write(tmp_path, PROMPTS)
    assert run(target, prompts, tmp_path / "whole") == 0
    parts = [tmp_path / "0", tmp_path / "1"]
    for number, part in enumerate(parts):
        assert run(target, prompts, part, "--shard", f"{number}/2") == 0
    assert prepare.main(["--merge", *map(str, parts), "--out", str(tmp_path / "both")]) == 0
    for name in ("train.arrow", "held_out.arrow"):
        whole, both = read(tmp_path / "whole" / name), read(tmp_path / "both" / name)
        assert sorted(both.to_pylist(), key=str) == sorted(whole.to_pylist(), key=str)
        assert both.schema.remove_metadata() == prepare.SCHEMA
        assert b"--shard 0/2" in both.schema.metadata[b"command"]
        assert b"shard" not in both.schema.metadata


def test_shares_that_are_missing_there_twice_or_of_other_data_are_refused(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write(tmp_path, PROMPTS)
    for name, more in (("a", ["--shard", "0/2"]), ("b", ["--shard", "1/2", "--max-new-tokens", "19"])):
        assert run(target, prompts, tmp_path / name, *more) == 0

    def refused(*names: str) -> str:
        folders = [str(tmp_path / name) for name in names]
        assert prepare.main(["--merge", *folders, "--out", str(tmp_path / "out")]) == 2
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err

    assert "the shares are 0/2; expected each of 0/2, 1/2 once" in refused("a")
    assert "the shares are 0/2, 0/2" in refused("a", "a")
    assert "its max_new_tokens is '19'" in refused("a", "b")
    assert "cannot be read as an Arrow file" in refused("a", "nowhere")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--prompts", "/no/such/file"], "/no/such/file: cannot be read"),
        (["--target", "/no/such/model"], "there is no such folder"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1"),
        (["--batch-size", "0"], "--batch-size must be at least 1"),
        (["--shard", "4/5"], "has 4 prompts, none for it"),
        (["--out", "/dev/null/data"], "--out /dev/null/data: Not a directory"),
        (["--device", "cuda:99"], "device 'cuda:99' is not there"),
        (["--out", "{tmp}/taken"], "taken/train.arrow: cannot be written (Is a directory)"),
    ],
)
def test_bad_input_ends_with_code_2_and_one_sentence(
    change: list[str],
    message: str,
    target: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "taken" / "train.arrow").mkdir(parents=True)
    change = [word.format(tmp=tmp_path) for word in change]
    assert run(target, write(tmp_path, PROMPTS), tmp_path / "out", *change) == 2
    error = capsys.readouterr().err
    assert message in error
    said = [line for line in error.splitlines() if line and "Loading weights" not in line]
    assert len(said) == 1


def test_a_target_that_knows_no_end_of_text_answers_up_to_the_limit(target: Path, tmp_path: Path) -> None:
    endless = shutil.copytree(target, tmp_path / "endless")
    (endless / "generation_config.json").write_text("{}")
    config = json.loads((endless / "config.json").read_text())
    (endless / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    out = tmp_path / "out"
    assert run(endless, write(tmp_path, PROMPTS), out) == 0
    with pa.memory_map(str(out / "held_out.arrow")) as source:
        assert pa.ipc.open_file(source).read_all()["truncated"].to_pylist() == [True]


def test_a_target_that_lacks_its_head_is_refused_and_not_asked_with_a_random_one(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it says would be nobody's words (SpecForge #455)."""
    headless = shutil.copytree(target, tmp_path / "headless")
    weights = load_file(headless / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, headless / "model.safetensors", metadata={"format": "pt"})
    assert run(headless, write(tmp_path, PROMPTS), tmp_path / "out") == 2
    assert "has no lm_head.weight" in capsys.readouterr().err and not list((tmp_path / "out").iterdir())


def test_a_target_without_a_chat_template_is_refused(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare"
    AutoModelForCausalLM.from_pretrained(target).save_pretrained(bare)
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(bare)
    assert run(bare, write(tmp_path, PROMPTS), tmp_path / "out") == 2
    assert "has no chat template" in capsys.readouterr().err
